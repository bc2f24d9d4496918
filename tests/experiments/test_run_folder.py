"""Resume points are published whole or not at all, and the files of a folder survive a torn write."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from algos import deepspeed_engine
from algos.deepspeed_config import TrainerConfig
from algos.grpo import GRPO
from algos.publish import only_writer
from algos.trainer import Trainer
from engines.parallel.collectives import SingleRank, TorchGroup
from experiments.run_folder import (
    RunFolder,
    check_run_folder,
    last_published,
    lock_folder,
    make_run_folder,
    newest_run,
)
from tests.worlds import error_of, run_world


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
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'\n{"training/global_step": \xff}\n' + b"[" * 100_000 + b'\n{"training/global_step": 1e999}\n')
    folder.truncate(2, ["metrics.jsonl", "absent.jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["x"] for row in rows] == [0, 1, 2]


def test_samples_may_hold_what_json_cannot(tmp_path: Path) -> None:
    """They have the columns of a user's own task; a figure of another type would be a mistake of ours."""
    folder = RunFolder(tmp_path, SingleRank())
    folder.append("samples.jsonl", {"day": datetime.date(2024, 1, 2), "raw": b"x", "words": {"b", "c", "a"}})
    told = json.loads((tmp_path / "samples.jsonl").read_text())
    assert told == {"day": "2024-01-02", "raw": "b'x'", "words": ["a", "b", "c"]}
    with pytest.raises(TypeError):
        folder.append("metrics.jsonl", {"training/global_step": 1, "x": {1}})


def test_a_line_that_finds_no_room(small_disk: Path) -> None:
    folder = RunFolder(small_disk, SingleRank())
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be written .*No space left on device.*make room"):
        for step in range(2000):  # of 40 bytes and more each
            folder.append("metrics.jsonl", {"training/global_step": step, "x": "y"})
    written = (small_disk / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["training/global_step"] for line in written[:-1]] == list(range(len(written) - 1))


def test_only_what_the_run_needs_ends_it_where_there_is_no_room(small_disk: Path) -> None:
    folder = RunFolder(small_disk, SingleRank())
    folder.append("lengths.jsonl", {"training/global_step": 1})
    (small_disk / "full").write_bytes(b"x" * 60_000)
    with pytest.warns(UserWarning, match=r"samples\.jsonl: cannot be written .*No space.*; the run goes on") as told:
        for step in range(3):
            folder.append("samples.jsonl", {"training/global_step": step, "completion": "x" * 10_000})
            folder.replace("timeline.json", "x" * 10_000)
            with folder.writing("figures"), open(small_disk / "figure", "w") as file:
                file.write("x" * 10_000)
    assert len(told) == 1
    with pytest.raises(ValueError, match=r"config\.json: cannot be written .*No space left.*make room"):
        folder.replace("config.json", "x" * 10_000)
    assert {*os.listdir(small_disk)} == {"full", "lengths.jsonl", "samples.jsonl", "figure"}
    (small_disk / "full").unlink()
    folder.truncate(1, ["lengths.jsonl", "samples.jsonl"])
    assert (small_disk / "lengths.jsonl").read_text() == '{"training/global_step": 1}\n'


def test_names_are_not_taken_twice(tmp_path: Path) -> None:
    assert [make_run_folder(tmp_path, None, "task-grpo", resume=False).name for _ in range(3)] == [
        "task-grpo",
        "task-grpo-2",
        "task-grpo-3",
    ]
    with pytest.raises(ValueError, match="another run has just taken it"):
        make_run_folder(tmp_path, "task-grpo", "", resume=False)
    assert make_run_folder(tmp_path, "task-grpo", "", resume=True) == tmp_path / "task-grpo"
    with pytest.raises(ValueError, match=r"exists; give another --name, or delete the folder"):
        check_run_folder(tmp_path, "task-grpo", resume=False)
    with pytest.raises(ValueError, match="no published checkpoint"):
        check_run_folder(tmp_path, "task-grpo", resume=True)
    with pytest.raises(ValueError, match="no published checkpoint"):
        check_run_folder(tmp_path, "nobody", resume=True)


def test_the_newest_run_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"resume: .* has no run task-grpo with a published checkpoint; give the --name"
    ):
        newest_run(tmp_path, "task-grpo")
    (tmp_path / "task-grpo-mine").mkdir()  # a user's own name
    for number in range(1, 12):
        made = make_run_folder(tmp_path, None, "task-grpo", resume=False).name
        if number in (3, 10):  # the others have died before
            publish(RunFolder(tmp_path / made, SingleRank()), 1)
        if number >= 3:
            assert newest_run(tmp_path, "task-grpo") == ("task-grpo-3" if number < 10 else "task-grpo-10")


# -- what is damaged


def flip_a_byte(point: Path) -> None:
    data = bytearray((point / "file").read_bytes())
    data[-1] ^= 1
    (point / "file").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, r"step-7/file: is missing, or not as it was published \(1 of 1 files\)"),
        (lambda point: os.truncate(point / "file", 0), "step-7/file: is missing, or not as it was published"),
        (lambda point: (point / "file").unlink(), "step-7/file: is missing, or not as it was published"),
        (lambda point: (point / "digests.json").unlink(), r"step-7: has no digests\.json, which earlier versions did"),
        (lambda point: os.truncate(point / "digests.json", 9), r"digests\.json: not valid JSON"),
        (lambda point: (point / "digests.json").write_text('{"file": 3}'), r"digests\.json: Expected `str`"),
        (lambda point: (point / "digests.json").write_text("{}"), r"step-7/file: has no digest in digests\.json"),
    ],
)
def test_a_point_that_is_not_as_it_was_published_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = RunFolder(tmp_path, SingleRank())
    publish(folder, 7)
    folder.check()
    damage(last_published(tmp_path))
    with pytest.raises(ValueError, match=message):
        folder.check()


@pytest.mark.parametrize(
    "text", [b"", b"step-8", b"../../a/checkpoints/step-7", b"/", b".", b"step-7\0", b"\xff", b"[]"]
)
def test_the_pointer_names_a_point_of_its_own_run(tmp_path: Path, text: bytes) -> None:
    publish(RunFolder(tmp_path / "a", SingleRank()), 7)
    publish(RunFolder(tmp_path / "b", SingleRank()), 7)
    check_run_folder(tmp_path, "b", resume=True)
    (tmp_path / "b/checkpoints/latest").write_bytes(text)
    with pytest.raises(ValueError, match=r"b/checkpoints/latest: .* is no checkpoint beside it; write the name of one"):
        check_run_folder(tmp_path, "b", resume=True)


# -- one run at a time

HOLD = "import sys, pathlib; from experiments.run_folder import lock_folder; \
lock = lock_folder(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"


def test_a_folder_is_one_run_s_until_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=rf"{tmp_path}: another run is writing in it \(process {other.pid} on "):
            lock_folder(tmp_path)
        other.kill()
        other.wait()
        lock_folder(tmp_path).close()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None can be had here: its answer is made up."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match=r"cannot be locked .*No locks available"):
        lock_folder(tmp_path).close()
    with pytest.warns(UserWarning, match=r"model: cannot be locked .*No locks"), only_writer(tmp_path / "model"):
        pass


# -- a full disk


def fill_the_disk(model: str, folder: str, stage: int) -> list[str]:
    """In a world: a point that fits, one that does not on each rank in turn, and one that fits again; the errors."""
    trainer = Trainer(TrainerConfig(zero_stage=stage), GRPO(), model)
    run = RunFolder(Path(folder), TorchGroup())
    writes = [trainer.save_checkpoint, lambda path: trainer.save_pretrained(path / "huggingface")]

    def publish_all(step: int, full_on: int | None) -> str:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.rank == full_on:  # writes then fail as on a full disk; Python ignores the signal
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        error = error_of(lambda: run.publish(step, writes, 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()
        names = sorted(os.listdir(run.path / "checkpoints"))
        dist.barrier()
        return f"{error} {run.latest().name} {names}"

    told = [publish_all(1, None), publish_all(2, 0), publish_all(2, 1), publish_all(2, None)]
    run.check()
    deepspeed_engine.stop_deepspeed()
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_a_point_that_finds_no_room_leaves_the_last_one(qwen3: str, tmp_path: Path, stage: int) -> None:
    """Each rank has the error, and all go on together: the next point is published."""
    ranks = run_world(fill_the_disk, 2, qwen3, str(tmp_path), stage)
    for first, *full, last in ranks:
        assert (first, last) == (" step-1 ['latest', 'step-1']", " step-2 ['latest', 'step-1', 'step-2']")
        # At stage 0 the states are all rank 0's, and the second rank writes nothing.
        for error in full if stage == 3 else full[:1]:
            assert error.startswith("ValueError: ") and error.endswith(" step-1 ['latest', 'step-1']")
            assert "the checkpoint of step 2 could not be written (" in error and "File too large" in error
