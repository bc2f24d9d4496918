"""The recipes of docs/training.md (own data, task, algorithm), as a reader copies them: each command makes a step."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import FILES
from tests.worlds import ROOT, refused_by, run_python

PAGE = (ROOT / "docs/training.md").read_text()
COMMANDS = re.findall(
    r"^python (experiments/train\.py .*(?:jsonl|\.py:[A-Z]).*)$", PAGE.partition("## Your own reward")[0], re.MULTILINE
)
ROWS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
SHORT = [
    "--steps", "1", "--eval-problems", "2", "--rollout.prompts-per-step", "2", "--rollout.group-size", "2",
    "--rollout.max-tokens", "16", "--rollout.kv-cache-mib", "8", "--wandb", "off", "--no-figures",
]  # fmt: skip


def start(folder: Path, command: str, model: str) -> subprocess.CompletedProcess[str]:
    script, *arguments = shlex.split(command.replace("--ranks 2 ", ""))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "mine.jsonl").write_text(ROWS[0])
    return run_python([str(ROOT / script), *arguments, "--model", model, *SHORT], cwd=folder)


def test_there_are_recipes() -> None:
    assert len(COMMANDS) == 4 and len(ROWS) == 1 and {"mine.py", "reverse.py", "plain.py"} <= FILES.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_makes_a_step(command: str, text_model: str, tmp_path: Path) -> None:
    done = start(tmp_path, command, text_model)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / json.loads(done.stdout.splitlines()[-1])["run_dir"]
    config = json.loads((folder / "config.json").read_text())
    first, step = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert "val-core/reward/mean" in first and step["reward/num_raised"] == 0 and step["actor/skipped_steps"] == 0
    if "--letters" in command:
        assert config["task_options"]["letters"] == "xyz"
        assert set(json.loads((folder / "samples.jsonl").read_text().splitlines()[0])["answer"]) <= set("xyz")
    if "--bonus" in command:
        assert config["algorithm"] == {"bonus": 0.02} and "actor/loss" in step


def test_a_task_without_held_out_problems_says_so(text_model: str, tmp_path: Path) -> None:
    broken = FILES["reverse.py"].replace("range(count)", "range(0)")
    (tmp_path / "reverse.py").write_text(broken)
    options = ["--task", f"{tmp_path}/reverse.py:Reverse", "--model", text_model, "--runs", str(tmp_path), *SHORT]
    told = refused_by("train", options)
    assert "error: held-out problems: none of 0 can run: the task has none; give it some, or --eval-every 0" in told


@pytest.mark.parametrize(
    ("found", "replaced", "option", "message"),
    [
        ("def loss(", "def lose(", "--algo plain.py:Plain", "--algo='plain.py:Plain': has no method 'loss'"),
        ("(Algorithm)", "", "--algo plain.py:Plain", "--algo='plain.py:Plain': has no method 'num_epochs'"),
        ("@dataclass(frozen=True, kw_only=True)", "", "--algo plain.py:Plain", "is no dataclass; put @dataclass"),
        ("    bonus:", "    steps: int = 1\n    bonus:", "--algo plain.py:Plain", "its field 'steps' is an option of"),
        ("held_out_problems", "held_out", "--task reverse.py:Reverse", "has no method 'held_out_problems'"),
        ("import random", "import nowhere", "--task reverse.py:Reverse", "ModuleNotFoundError: No module named"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, found: str, replaced: str, option: str, message: str
) -> None:
    name = option.split()[1].partition(":")[0]
    assert found in FILES[name]
    broken = FILES[name].replace(found, replaced)
    (tmp_path / name).write_text(broken)
    done = run_python([str(ROOT / "experiments/train.py"), *option.split()], cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
