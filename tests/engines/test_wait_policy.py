"""How OpenMP's threads wait: the decision, and in real processes with real neighbours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.native.wait_policy import loaded_runtimes, waited_s, waits_passively
from tests.worlds import ROOT

pytestmark = pytest.mark.skipif(
    not loaded_runtimes() or waited_s() is None or len(os.sched_getaffinity(0)) < 2,
    reason="another OpenMP, a system that keeps no such times, or one core",
)

IDLE_THREADS = """
import pathlib, time, torch
from engines.native.wait_policy import PassiveWaits

def tasks():
    return set(pathlib.Path("/proc/self/task").iterdir())

def state(task):
    return (task / "stat").read_text().rpartition(")")[2].split()[0]

torch.set_num_threads(2)
x, weight = torch.randn(64, 512), torch.randn(512, 512)
before = tasks()
active = x @ weight
workers = tasks() - before
assert workers
for worker in workers:
    assert {state(worker) for _ in range(1000)} == {"R"}, "a thread of an active team never sleeps"
waits = PassiveWaits()
passive = x @ weight
deadline = time.monotonic() + 60
while {state(worker) for worker in workers} != {"S"}:
    assert time.monotonic() < deadline, "a thread of a passive team sleeps"
    time.sleep(0.01)
waits.end()
while True:  # the system takes a moment to end the threads of its team
    again = x @ weight
    if all({state(worker) for _ in range(1000)} == {"R"} for worker in workers):
        break
    assert time.monotonic() < deadline, "the team is active again"
assert torch.equal(active, passive) and torch.equal(active, again)
"""

BESIDE_OTHERS = """
import os, threading, time, torch
from engines.native.wait_policy import watch_cores

def passive():
    return any(thread.name == "passive-waits" for thread in threading.enumerate())

torch.set_num_threads(2)
watch_cores()
watch_cores()
assert sum(thread.name == "watch-cores" for thread in threading.enumerate()) == 1
core = min(os.sched_getaffinity(0))
pid = os.getpid()
neighbour = os.fork()
if neighbour == 0:
    os.sched_setaffinity(0, {core})
    while os.getppid() == pid:
        pass
    os._exit(0)
os.sched_setaffinity(0, {core})
try:
    deadline = time.monotonic() + 60
    while not passive():
        assert time.monotonic() < deadline, "the neighbour was not noticed"
        torch.ones(64, 512) @ torch.ones(512, 512)
finally:
    os.kill(neighbour, 9)
"""

FEW_THREADS = """
import os, resource, torch
from engines.native.wait_policy import PassiveWaits, can_start

torch.set_num_threads(2)
weight = torch.randn(512, 512)
expected = weight @ weight
os.setuid(10_000 + os.getpid() % 50_000)  # no limit is root's, and this user has no other process
most = len(os.listdir("/proc/self/task")) + 1
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
assert can_start(1) and not can_start(2)
while len(os.listdir("/proc/self/task")) >= most:  # a thread that has been joined is there for a moment more
    pass
waits = PassiveWaits()
assert torch.equal(weight @ weight, expected)
waits.end()
"""

ENDING_THREADS = """
import threading, time
from engines.native.wait_policy import waited_s

def start_others():
    while not over:
        threading.Thread(target=bool).start()

over = False
starters = [threading.Thread(target=start_others) for _ in range(3)]
for starter in starters:
    starter.start()
try:
    for _ in range(3000):
        assert waited_s() is not None
finally:
    over = True
"""


def test_passive_once_threads_wait_for_a_core_and_active_once_they_hardly_do() -> None:
    policies, passive = [], False
    for waited in (0.0, 0.01, 0.09, 0.11, 0.5, 0.09, 0.04, 0.02, 0.09, 0.2):
        passive = waits_passively(passive, waited)
        policies.append(passive)
    assert policies == [False, False, False, True, True, True, True, False, False, True]


@pytest.mark.parametrize(
    "program",
    [
        IDLE_THREADS,
        BESIDE_OTHERS,
        pytest.param(FEW_THREADS, marks=pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")),
        ENDING_THREADS,
    ],
    ids=["idle threads", "beside others", "few threads", "ending threads"],
)
def test_in_a_process_of_its_own(program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "infinite"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_path_with_spaces(tmp_path: Path) -> None:
    """A virtual environment may lie anywhere."""
    (path,) = {runtime._name for runtime in loaded_runtimes()}
    copy = shutil.copy(path, tmp_path / "libgomp of mine.so.1")
    program = f"""
import ctypes
from engines.native.wait_policy import loaded_runtimes
ctypes.CDLL({str(copy)!r})
assert [one for one in loaded_runtimes() if one._name == {str(copy)!r}]
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=200)
