"""Calls on all cores, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from experiments import launch
from experiments.processes import call_each
from tests.proc import is_running


def _square(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(f"number={number}: must not be negative")
    return number * number, os.getpid()


def _die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(folder: Path, number: int) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


@pytest.mark.parametrize("processes", [1, 2, None])
def test_results_are_in_order(processes: int | None) -> None:
    results = call_each(_square, range(7), processes=processes, unit="number")
    assert [square for square, _ in results] == [0, 1, 4, 9, 16, 25, 36]
    assert (os.getpid() in {process for _, process in results}) == (processes == 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_that_of_the_call(processes: int) -> None:
    with pytest.raises(ValueError, match="number=-1: must not be negative"):
        call_each(_square, [3, -1, 4], processes=processes, unit="number")


def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="processes=2: one was killed; give fewer if memory ran out"):
        call_each(_die, range(4), processes=2, unit="number")


def to_group_that_is_stopped(process: int, number: signal.Signals) -> None:
    """The kernel then gives the signal to any of the process's threads: in a third of the tries not to the main one."""
    os.kill(process, signal.SIGSTOP)
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WCONTINUED | os.WEXITED | os.WNOWAIT)
    os.killpg(process, number)
    os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGINT, os.kill),
        (signal.SIGINT, os.killpg),
        (signal.SIGINT, to_group_that_is_stopped),
        (signal.SIGTERM, os.kill),
        (signal.SIGKILL, os.kill),
    ],
)
def test_processes_end_with_the_one_that_started_them(
    number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Ctrl-C is sent to the group. No call of those that wait begins, and no line counts one of them."""
    parent = subprocess.Popen(
        [sys.executable, "-m", __name__, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while len(names := os.listdir(tmp_path)) < 2:
        assert time.monotonic() < deadline and parent.poll() is None, "the processes have not begun"
        time.sleep(0.05)
    send(parent.pid, number)
    try:
        _, told = parent.communicate(timeout=60)
    finally:
        parent.kill()
    while any(is_running(int(name)) for name in names):
        assert time.monotonic() < deadline, "a process has outlived the one that started it"
        time.sleep(0.05)
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    if number == signal.SIGINT:
        assert (told.strip(), parent.returncode) == ("interrupted", 130)


if __name__ == "__main__":
    launch.run(lambda: call_each(partial(_sleep, Path(sys.argv[1])), range(4), processes=2, unit="sleep"))  # type: ignore[func-returns-value, arg-type, return-value]
