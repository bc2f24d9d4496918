"""The Python of README.md and docs/ runs as it stands, but for the model's name. Commands have options that exist, and
can be copied in turn."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

from tests.checkpoints import save_text_checkpoint
from tests.worlds import ROOT, run_python, start_ranks

BLOCKS = {
    f"{path.name}:{block[:60].splitlines()[0]}": block
    for path in (ROOT / "README.md", *(ROOT / "docs" / name for name in ("rollouts.md", "seer.md", "relay.md")))
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    if "import" in block
}

_OWN_CODE = "".join((ROOT / page).read_text() for page in ("docs/training.md", "docs/pat.md", "docs/trajectories.md"))
FILES = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", _OWN_CODE, re.DOTALL))
"""The recipes: a block that begins with a file's name is that file."""


@pytest.mark.parametrize("name", BLOCKS)
def test_runs(name: str, tmp_path: Path) -> None:
    """Under torchrun, a few such lines are in `test_tensor_parallel.py`."""
    save_text_checkpoint(tmp_path / "runs/models/tiny", num_heads=4)
    save_text_checkpoint(tmp_path / "runs/models/chat", is_chat=True)
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[name])
    ranks = re.match(r"#.*torchrun .*--nproc-per-node (\d+)", BLOCKS[name])
    if ranks:
        with start_ranks([str(script)], int(ranks[1]), cwd=tmp_path) as processes:
            codes = [process.wait(240) for process in processes]
            assert not any(codes), "".join(process.stderr[-3000:] for process in processes)
            assert processes[0].stdout.strip()
        return
    done = run_python([str(script)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_commands_can_be_copied_one_after_another() -> None:
    """Each model and profile that a command of pat.md reads has been made by one before it, and no variable is used."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/pat.md").read_text(), re.DOTALL)
    commands = "".join(blocks).replace("\\\n", " ").splitlines()
    assert len(commands) >= 8
    made: set[str] = set()
    for command in commands:
        assert "$" not in command
        options = dict(re.findall(r"--([a-z-]+) ([^-\s]\S*)", command))
        read = {options[name] for name in ("model", "pat-profile") if name in options}
        assert read <= made, command
        if model := re.search(r"make_model.py (\S+)", command):
            made |= {model[1], f"{model[1]}-x{options['widen']}"} if "widen" in options else {model[1]}
        if "output" in options:
            made.add(options["output"])


ROOMS = ("engines", "research", "algos", "experiments")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def commands() -> Iterator[str]:
    """Each command line of `experiments/` in the pages' blocks and sentences, from the file's name on."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for line in (*lines, *re.findall(r"`((?:python|torchrun) [^`]*)`", prose)):
            if found := re.search(r"(?<![#\w/])(experiments/\S+\.py.*)", line, re.DOTALL):
                yield re.sub(r"\s+", " ", found[1])


VLLM = "/path/to/vllm/bin/python"
COMMANDS = sorted(set(commands()))


class Parsed(BaseException):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_options_that_exist(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own parser takes it; nothing runs after that."""
    script, *arguments = shlex.split(re.sub(r"\$\w+", "2", command).replace(VLLM, sys.executable), comments=True)
    parse = tyro.cli

    def parse_only(*args: Any, **options: Any) -> None:
        parse(*args, **options)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse_only)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.chdir(tmp_path)
    for given in arguments:  # what commands before this one, or a reader, have made
        path, _, name = given.partition(":")
        if f" {name}" in FILES.get(path, ""):
            (tmp_path / path).write_text(FILES[path])
        elif name and path.endswith(".py"):
            (tmp_path / path).write_text(f"class {name}:\n    def next(self, view):\n        return None\n")
        elif not (given.startswith(("-", "/")) or " " in given):
            made = tmp_path / given
            (made.parent if made.suffix else made).mkdir(parents=True, exist_ok=True)
            if made.suffix:
                made.touch()
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def test_the_pages_have_commands() -> None:
    scripts = {command.split()[0] for command in COMMANDS}
    assert len(COMMANDS) > 60 and {f"experiments/{name}.py" for name in ("train", "generate", "simulate")} <= scripts


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if not target.startswith("http"):
                name, _, anchor = target.partition("#")
                path = page.parent / name if name else page
                assert path.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_texts_refer_to_what_readers_have() -> None:
    """Papers are public; numbered decisions beside them, as H-D or R-D with a number, are not in the repository."""
    files = [path for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*.py")]
    cited = {path.name for path in (*PAGES, *files) if re.search(r"\bannex, |\b[A-Z]-D\d", path.read_text())}
    assert not cited


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_map_names_every_file() -> None:
    """The tree in architecture.md: folders at its first two levels, files behind their folder's name or below it."""
    tree = re.search(r"## Rooms\n.*?```\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    assert tree is not None
    named: set[str] = set()
    room = folder = ""
    for line in tree[1].splitlines():
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            room = folder = line.split("/")[0]
        elif depth == 2:
            inner = re.match(r"  (\w+)/", line)
            folder = f"{room}/{inner[1]}" if inner else room
        named |= {f"{folder}/{name}" for name in re.findall(r"[\w]+\.(?:py|cpp|h)\b", line)}
    kinds = ("*.py", "*.cpp", "*.h")
    files = {str(path.relative_to(ROOT)) for room in ROOMS for kind in kinds for path in (ROOT / room).rglob(kind)}
    differ = {path for path in files if not path.endswith("__init__.py")} ^ named
    assert not differ, f"the tree under Rooms in docs/architecture.md lacks or has too much: {sorted(differ)}"
