"""The Python of README.md and docs/ runs as it stands, but for the model's name; commands can be copied in turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import save_text_checkpoint
from tests.worlds import ROOT

BLOCKS = {
    f"{path.name}:{block[:60].splitlines()[0]}": block
    for path in (ROOT / "README.md", ROOT / "docs/rollouts.md", ROOT / "docs/seer.md")
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    if "import" in block
}


@pytest.mark.parametrize("name", BLOCKS)
def test_runs(name: str, tmp_path: Path) -> None:
    save_text_checkpoint(tmp_path / "runs/models/tiny", num_heads=4)
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[name])
    ranks = re.match(r"#.*torchrun .*--nproc-per-node (\d+)", BLOCKS[name])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
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
