"""How OpenMP's threads wait: the decision, and in real processes with real neighbours."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_passive_once_threads_wait_for_a_core_and_active_once_they_hardly_do() -> None:
    policies, passive = [], False
    for waited in (0.0, 0.01, 0.09, 0.11, 0.5, 0.09, 0.04, 0.02, 0.09, 0.2):
        passive = waits_passively(passive, waited)
        policies.append(passive)
    assert policies == [False, False, False, True, True, True, True, False, False, True]


@pytest.mark.parametrize("program", [IDLE_THREADS, BESIDE_OTHERS], ids=["idle threads", "beside others"])
def test_in_a_process_of_its_own(program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "infinite"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
