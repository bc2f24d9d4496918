"""Resume points are published whole or not at all, and the files of a folder survive a torn write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engines.parallel.collectives import SingleRank
from experiments.run_folder import RunFolder, check_run_folder, make_run_folder


def publish(folder: RunFolder, step: int, keep: int = 2) -> None:
    folder.publish(step, [lambda path: (path / "file").write_text(str(step)) and None], keep)


def test_the_newest_points_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SingleRank())
    assert folder.latest() is None
    for step in (2, 9, 10):
        publish(folder, step)
        latest = folder.latest()
        assert latest is not None and (latest / "file").read_text() == str(step)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-10", "step-9"]


def test_a_write_that_fails_leaves_the_older_point(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SingleRank())
    publish(folder, 1)

    def torn(path: Path) -> None:
        (path / "file").write_text("half")
        raise OSError("no space left")

    with pytest.raises(ValueError, match=r"checkpoint of step 2 could not be written \(no space left\)"):
        folder.publish(2, [torn], 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]
    latest = folder.latest()
    assert latest is not None and latest.name == "step-1"
    publish(folder, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1", "step-2"]


def test_points_of_a_course_given_up_are_swept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SingleRank())
    for step in (1, 2, 3):
        publish(folder, step, keep=5)
    (tmp_path / "checkpoints/latest").write_text("step-1")
    (tmp_path / "checkpoints/step-3-mine").mkdir()  # a user's copy is neither read nor swept
    publish(folder, 2, keep=5)
    latest = folder.latest()
    assert latest is not None and latest.name == "step-2"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1", "step-2", "step-3-mine"]


def test_later_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SingleRank())
    for step in (0, 1, 2, 3):
        folder.append("metrics.jsonl", {"training/global_step": step, "x": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 2, "x"')
    folder.truncate(2, ["metrics.jsonl", "absent.jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["x"] for row in rows] == [0, 1, 2]


def test_names_are_not_taken_twice(tmp_path: Path) -> None:
    assert [make_run_folder(tmp_path, None, "task-grpo", resume=False).name for _ in range(3)] == [
        "task-grpo",
        "task-grpo-2",
        "task-grpo-3",
    ]
    with pytest.raises(ValueError, match="another run has just taken it"):
        make_run_folder(tmp_path, "task-grpo", "", resume=False)
    assert make_run_folder(tmp_path, "task-grpo", "", resume=True) == tmp_path / "task-grpo"
    with pytest.raises(ValueError, match=r"exists; give another --name$"):
        check_run_folder(tmp_path, "task-grpo", resume=False)
    with pytest.raises(ValueError, match="no published checkpoint"):
        check_run_folder(tmp_path, "task-grpo", resume=True)
    with pytest.raises(ValueError, match="no published checkpoint"):
        check_run_folder(tmp_path, "nobody", resume=True)
