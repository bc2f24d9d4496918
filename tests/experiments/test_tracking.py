"""wandb, the real one: whose run it is, and what of the user's settings holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from experiments.config import parse
from tests.wandb_files import logged, read_back
from tests.worlds import ROOT, refused_by, run_python

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KEY = "0123456789" * 4
START = """
import json, sys
from pathlib import Path

from engines.parallel.collectives import SingleRank
from experiments.config import parse
from tests.worlds import refused_by
from experiments.run_folder import RunFolder
from experiments.tracking import Tracker

told = []
for folder in json.loads(sys.argv[1]):
    tracker = Tracker(RunFolder(Path(folder), SingleRank()), parse(sys.argv[2:]))
    tracker.log(0, {"x": 1.0})
    tracker.log(1, {"x": 2.0}, [{"prompt": "1+1=", "reward": 0.5, "own": [1]}, {"prompt": "2+2=", "reward": None}])
    run = tracker._run
    told.append({"id": run.id, "project": run.project, "name": run.name, "offline": run.offline})
    tracker.close([str(picture) for picture in Path(folder).glob("*.png")])
print(json.dumps(told))
"""
SEVERAL = """
import json
from experiments.tracking import start_run

names = []
for variant in ("static", "seer"):
    with start_run(variant, {}, several=True) as run:
        names.append(run.name)
print(json.dumps(names))
"""


def start(tmp_path: Path, *names: str, options: Sequence[str] = (), **given: str) -> tuple[list[Any], str]:
    """What wandb says of a tracker in each of the folders, for a user of whom it knows what is given alone; stderr."""
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return run_alone(tmp_path, START, json.dumps([*map(str, folders)]), *options, **given)


def run_alone(tmp_path: Path, script: str, *arguments: str, **given: str) -> tuple[list[Any], str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **given}
    done = run_python(["-c", script, *arguments], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return told, done.stderr


def test_a_name_in_two_blocks_of_a_file_is_found(tmp_path: Path) -> None:
    name, count = b"tail_seconds", 10_000
    options = f"mode='offline', dir={str(tmp_path)!r}, config={{'a': {name.decode()!r} * {count}}}"
    run_python(["-c", f"import wandb; wandb.init({options}).finish()"]).check_returncode()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.read_bytes().count(name) < count <= logged(file).count(name)


def test_an_offline_run_is_read_back(tmp_path: Path) -> None:
    """Its options, history, samples, figures and the user's own files, from the files alone."""
    (tmp_path / "grpo/code").mkdir(parents=True)
    (tmp_path / "grpo/code/reward-mine.py").write_text("def score(): ...")
    plt.imsave(tmp_path / "grpo/reward.png", [[0.0, 1.0]])
    options = ["--wandb-project", "maths", "--wandb-entity", "us", "--wandb-group", "kl", "--wandb-tags", "a", "b"]
    (told,), errors = start(tmp_path, "grpo", options=[*options, "--learning-rate", "0.125"])
    (file,) = (tmp_path / "grpo/wandb").glob("offline-run-*/run-*.wandb")
    assert f"wandb sync {file.parent}" in errors
    records = list(read_back(file))
    (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name) == (told["id"], "grpo")
    assert (run.project, run.entity, run.run_group, [*run.tags]) == ("maths", "us", "kl", ["a", "b"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["trainer"]["learning_rate"] == 0.125 and config["wandb_group"] == "kl"
    rows: dict[int, dict[str, Any]] = {}
    for one in records:
        if one.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
            rows.setdefault(one.history.step.num, {}).update(items)
    assert [rows[step]["x"] for step in (0, 1)] == [1.0, 2.0]
    files = file.parent / "files"
    table = json.loads((files / rows[1]["samples.path"]).read_text())
    assert table["columns"] == ["prompt", "reward", "own"]
    assert table["data"] == [["1+1=", 0.5, [1]], ["2+2=", None, None]]
    (picture,) = [row["figures/reward.path"] for row in rows.values() if "figures/reward.path" in row]
    assert (files / picture).read_bytes()[:4] == b"\x89PNG"
    assert (files / "code/reward-mine.py").read_text() == "def score(): ..."
    assert not (files / "code/reward-mine.py").is_symlink(), "the folder may be synced from elsewhere"
    saved = [item.path for one in records if one.WhichOneof("record_type") == "files" for item in one.files.files]
    assert "code/reward-mine.py" in saved


def test_the_name_of_the_environment_is_a_prefix_of_several_runs(tmp_path: Path) -> None:
    names, _ = run_alone(tmp_path, SEVERAL, WANDB_NAME="mine", WANDB_MODE="offline")
    assert names == ["mine-static", "mine-seer"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--wandb-group", "g" * 129], "wandb_group='ggg.*must be text of 1 to 128"),
        (["--wandb-group", ""], "wandb_group='': must be text of 1 to 128"),
        (["--wandb-project", "a/b"], "wandb_project='a/b': must be a name of 1 to 128"),
        (["--wandb-tags", "good", "t" * 65], "wandb_tags=.*must be a list of: text of 1 to 64"),
        (["--wandb", "off", "--wandb-group", "g"], "wandb_group='g': has no effect with wandb='off'"),
    ],
)
def test_what_wandb_would_refuse(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(options)
    assert re.search(told, " ".join(capsys.readouterr().err.replace("│", " ").split()))


@pytest.mark.parametrize(
    ("variables", "told"),
    [({"WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"), ({"WANDB_TAGS": "t" * 65}, "65 characters")],
)
def test_a_variable_that_wandb_refuses(
    variables: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is made."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(f"error: a variable WANDB_.*{told}", refused_by("train", ["--runs", str(tmp_path / "runs")]))
    assert not [*tmp_path.iterdir()]


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
