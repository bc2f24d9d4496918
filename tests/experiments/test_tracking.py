"""wandb, the real one: whose run it is, and what of the user's settings holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEY = "0123456789" * 4
START = """
import json, sys
from pathlib import Path

from engines.parallel.collectives import SingleRank
from experiments.config import parse
from experiments.run_folder import RunFolder
from experiments.tracking import Tracker

told = []
for folder in sys.argv[1:]:
    tracker = Tracker(RunFolder(Path(folder), SingleRank()), parse([]))
    tracker.log(0, {"x": 1.0})
    run = tracker._run
    told.append({"id": run.id, "project": run.project, "name": run.name, "offline": run.offline})
    tracker.close()
print(json.dumps(told))
"""


def start(tmp_path: Path, *names: str, **given: str) -> tuple[list[dict[str, Any]], str]:
    """What wandb says of a tracker in each of the folders, for a user of whom it knows what is given alone; stderr."""
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **given}
    command = [sys.executable, "-c", START, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return told, done.stderr


def test_a_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Also where another project's run lies in a folder of the same name; a resumed one keeps it."""
    (first, other), _ = start(tmp_path, "here/grpo", "there/grpo")
    (resumed,), _ = start(tmp_path, "here/grpo")
    assert first["id"] == resumed["id"] != other["id"]
    assert first == resumed == {"id": first["id"], "project": "curtail", "name": "grpo", "offline": True}


def test_the_users_settings_hold(tmp_path: Path) -> None:
    (one,), _ = start(
        tmp_path, "grpo", WANDB_PROJECT="theirs", WANDB_NAME="best", WANDB_MODE="offline", WANDB_API_KEY=KEY
    )
    assert (one["project"], one["name"], one["offline"]) == ("theirs", "best", True)


def test_a_login_is_enough_to_go_online(tmp_path: Path) -> None:
    """To a server that is not there: the run goes on without it."""
    (tmp_path / "netrc").write_text(f"machine localhost:9\n  login user\n  password {KEY}\n")
    (one,), errors = start(tmp_path, "grpo", WANDB_BASE_URL="http://localhost:9", WANDB_INIT_TIMEOUT="2")
    assert one["offline"] and "connection refused" in errors
