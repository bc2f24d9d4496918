"""The pool of environments against classes that misbehave in every way, each in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from algos.environments.forked import ForkedWorker
from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from engines.rollout.environment import Answer, Environments
from tests.algos.test_rewards import is_alive, wait_until

CLASSES = Path(__file__).with_name("environment_classes.py")


class Engine:
    """Calls a pool, and waits for its answers, as the engine must not."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    def start(self, uid: int, text: str) -> Callable[[], Answer]:
        """A step, and what waits for its answer."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.pool.step((0, uid, 0), text, answers.put)
        return lambda: answers.get(timeout=60)

    def begin(self, uid: int, **columns: Any) -> Answer:
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.pool.begin((0, uid, 0), columns, answers.put)
        return answers.get(timeout=60)

    def step(self, uid: int, text: str) -> Answer:
        return self.start(uid, text)()

    def end(self, uid: int) -> float | None:
        rewards: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.pool.end((0, uid, 0), rewards.put)
        return rewards.get(timeout=60)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    pools = []

    def make(name: str, **options: Any) -> Engine:
        pools.append(EnvironmentPool(f"{CLASSES}:{name}", EnvironmentConfig(**{"workers": 2, **options})))
        return Engine(pools[-1])

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file that environments may write, in a folder of its own."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared" / "log"


def seen(log: Path) -> dict[str, list[str]]:
    """What each object got, by its name."""
    texts = defaultdict(list)
    for line in log.read_text().splitlines():
        name, _, text = line.split(maxsplit=2)
        if not text.startswith("child"):
            texts[name].append(text)
    return texts


def pids(log: Path) -> list[int]:
    """The processes in the log, in their order."""
    return list(dict.fromkeys(int(line.split()[1]) for line in log.read_text().splitlines()))


def processes(folder: str) -> list[int]:
    """Those whose environment names the pool's folder: all of its processes have it from the template."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if folder.encode() in (path / "environ").read_bytes() and is_alive(int(path.name)):
                found.append(int(path.name))
        except OSError:
            pass
    return found


# -- what an environment gets and gives


def test_a_trajectory_is_one_object(make: Callable[..., Engine]) -> None:
    engine = make("Adds")
    pool: Environments = engine.pool
    assert engine.pool.tools == [] and pool is not None
    assert engine.begin(1, start=5, answer=object()).text == "start 5"
    first = engine.begin(2, start=0, question="?")
    assert (first.text, first.done, first.failure, first.role) == (None, False, None, "user") and first.seconds > 0
    assert [engine.step(uid, "2").text for uid in (1, 2, 1)] == ["7", "2", "9"]
    tool, over, last = engine.step(1, "tool"), engine.step(2, "done"), engine.step(1, "end")
    assert (tool.text, tool.role, tool.done) == ("of a tool", "tool", False)
    assert (over.text, over.done) == ("over", True) and (last.text, last.done) == (None, True)
    assert [engine.end(uid) for uid in (1, 2)] == [4.5, 1.0]
    assert engine.pool.num_calls == 10 and engine.pool.tool_seconds > 0 and not engine.pool.failures


def test_columns_are_checked(make: Callable[..., Engine]) -> None:
    engine = make("Adds", workers=1)
    with pytest.raises(ValueError, match=r"reset wants \['start'\], the task has only the columns \['question'\]"):
        engine.begin(1, question="?")
    for value in (object(), 2**70, "a\ud800"):
        with pytest.raises(ValueError, match=r"columns of \(0, 1, 0\): .*plain data"):
            engine.begin(1, start=1, question=value)
    engine.pool.close()
    with pytest.raises(ValueError, match="closed"):
        engine.begin(1, start=1)


@pytest.mark.parametrize(
    ("field", "value", "must_be"),
    [
        ("workers", 0, "an integer from 1 to 1024"),
        ("timeout_s", 0.0, "above 0"),
        ("max_chars", 0, "an integer"),
        ("failed_reward", float("nan"), "a finite number"),
        ("writable", ("/no/such/folder",), "a folder that exists"),
    ],
)
def test_options_are_checked(field: str, value: Any, must_be: str) -> None:
    with pytest.raises(ValueError, match=rf"EnvironmentConfig\.{field}=.*must be {must_be}"):
        EnvironmentConfig(**{field: value})


@pytest.mark.parametrize("spec", ["", "module", "module:", ":Class", "file.py", "module:not a name", "module:f,"])
def test_a_malformed_name_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r'"path/to/file\.py:Class"'):
        EnvironmentPool(spec)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no file '[^(]*$"),
        ("class Other: pass", "has no environment or tool 'E'"),
        ("E = 1", "'E' is a int"),
        ("class E(:", r"SyntaxError: .*\(broken\.py:1\)"),
        ("import os; os._exit(9)", "exited with status 9"),
        ("import time; time.sleep(1000)", "start_timeout_s=2"),
        ("class E:\n def step(self, text): pass", "no method reset"),
        ("class E:\n def reset(self): pass", "neither `step` nor another public method"),
        ("class E:\n def __init__(self, size): pass\n def reset(self): pass\n def step(self, text): pass",
         r"__init__ wants \['size'\]; take them in reset"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
         "class E:\n def reset(self): pass\n def step(self, text): pass", "starts a thread.*in reset"),
    ],
)  # fmt: skip
def test_an_import_that_fails_is_refused(tmp_path: Path, source: str | None, message: str) -> None:
    path = tmp_path / "broken.py"
    limit_s = 2.0 if "start_timeout_s" in message else 60.0
    if source is not None:
        path.write_text(source)
    with pytest.raises(ValueError, match=f"(?s)environment='{path}:E': cannot be used: .*{message}"):
        EnvironmentPool(f"{path}:E", EnvironmentConfig(start_timeout_s=limit_s))


# -- environments that fail


@pytest.fixture
def misbehaving(make: Callable[..., Engine], log: Path) -> Callable[..., Engine]:
    return lambda name="Misbehaves", **options: make(
        name, **{"writable": (str(log.parent),), "max_chars": 1000, "memory_mib": 500, **options}
    )


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise", "raised", r"KeyError: 'no such thing' \(environment_classes\.py:\d+\)"),
        ("raise a surrogate", "raised", "KeyError"),
        ("sys.exit", "raised", "SystemExit: 3"),
        ("memory", "raised", "MemoryError"),
        ("return=0", "invalid", "step returned a int: must be text, an Observation, or None"),
        ("return=1", "invalid", "a list: must be text"),
        ("return=2", "invalid", "a bytes: must be text"),
        ("return=3", "invalid", "step returned half a surrogate pair"),
        ("return=4", "invalid", "1001 characters: must be at most max_chars=1000"),
        ("return=5", "invalid", "a function: must be text"),
        ("return=6", "invalid", r"Observation\.text=5: must be text"),
        ("return=7", "invalid", r"Observation\.done=1: must be True or False"),
        ("return=8", "invalid", r"Observation\.role='system': must be one of"),
        ("return=9", "invalid", "step returned half a surrogate pair"),
    ],
)
def test_a_failure_ends_one_trajectory(shared_engine: Engine, log: Path, text: str, kind: Any, message: str) -> None:
    engine, before = shared_engine, shared_engine.pool.failures.copy()
    for uid in (1, 2):
        engine.begin(uid, log=os.devnull)
    answer = engine.step(1, text)
    assert (answer.failure, answer.done, answer.text) == (kind, True, None)
    assert re.search(message, answer.error), answer.error
    assert engine.pool.failures - before == {kind: 1}
    assert engine.step(2, "a").text == "1 a"
    assert [engine.end(uid) for uid in (1, 2)] == [-1.0, 1.0]


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    config = EnvironmentConfig(workers=2, max_chars=1000, memory_mib=500, failed_reward=-1.0)
    with EnvironmentPool(f"{CLASSES}:Misbehaves", config) as pool:
        yield Engine(pool)


@pytest.mark.parametrize(("what", "role"), [("str subclass", "user"), ("Observation of str subclasses", "tool")])
def test_text_of_a_subclass_is_text(shared_engine: Engine, what: str, role: str) -> None:
    shared_engine.begin(1, log=os.devnull)
    answer = shared_engine.step(1, f"{what}=seen")
    assert (answer.text, answer.role, answer.failure) == ("seen", role, None)
    shared_engine.end(1)


@pytest.mark.parametrize("reward", ["nan", "inf", None, "text", [1.0], "raise"])
def test_a_reward_is_a_finite_number(shared_engine: Engine, reward: Any) -> None:
    before = shared_engine.pool.failures.copy()
    shared_engine.begin(1, log=os.devnull, reward=reward)
    assert shared_engine.end(1) == -1.0
    assert shared_engine.pool.failures - before == {"raised" if reward == "raise" else "invalid": 1}


def test_a_class_without_a_reward_has_none(make: Callable[..., Engine]) -> None:
    engine = make("Looks", workers=1)
    engine.begin(1)
    assert engine.end(1) is None


def test_the_first_failure_of_a_kind_is_logged(
    misbehaving: Callable[..., Engine], log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = misbehaving()
    for uid in range(3):
        engine.begin(uid, log=str(log))
        engine.step(uid, "raise")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "KeyError: 'no such thing'" in record.getMessage()
    assert engine.pool.failures == {"raised": 3}


@pytest.mark.parametrize(
    ("culprit", "kind", "message"),
    [
        ("os._exit", "lost", "exited with status 3"),
        ("kill", "lost", "killed by SIGKILL"),
        ("segfault", "lost", "killed by SIGSEGV"),
        ("close", "lost", "killed by SIGKILL"),
        ("garbage", "lost", "killed by SIGKILL"),
        ("hang", "timed_out", "step was not done after 1.5 s"),
        ("hang hard", "timed_out", "not done"),
        ("hang deaf", "timed_out", "not done"),
        ("fork and hang", "timed_out", "not done"),
    ],
)
def test_a_lost_worker_ends_the_culprit_alone(
    misbehaving: Callable[..., Engine], log: Path, culprit: str, kind: str, message: str
) -> None:
    """The other object of the worker is made anew, and gets each text once."""
    engine = misbehaving(workers=1, timeout_s=1.5 if kind == "timed_out" else 60.0)
    for uid in (1, 2):
        engine.begin(uid, log=str(log))
    assert [engine.step(2, text).text for text in "ab"] == ["1 a", "2 b"]
    answer = engine.step(1, culprit)
    assert answer.failure == kind and message in answer.error and answer.done
    assert engine.step(2, "c").text == "3 c", "it does not go on where it was"
    assert [engine.end(uid) for uid in (1, 2)] == [0.0, 1.0] and engine.pool.failures == {kind: 1}
    counts = Counter(tuple(texts) for texts in seen(log).values())
    tries = 1 if kind == "timed_out" else 2
    assert counts == {
        ("reset", culprit): tries,
        ("reset", "a", "b"): 1,
        ("reset", "a", "b", "c", "close"): 1,
    }
    children = [int(line.split()[3]) for line in log.read_text().splitlines() if " child " in line]
    assert len(children) == 2 * (culprit == "fork and hang") and not any(map(is_alive, children))
    assert len(pids(log)) == 1 + tries


@pytest.mark.parametrize("name", ["Misbehaves", "Together"])
def test_a_kill_from_outside_is_no_fault_of_a_call(
    misbehaving: Callable[..., Engine], log: Path, tmp_path: Path, name: str
) -> None:
    """The call in flight is made once more, by an object that has got the earlier texts once; nothing shows outside."""
    engine, gate = misbehaving(name, workers=1), tmp_path / "gate"
    for uid in (1, 2):
        engine.begin(uid, log=str(log))
        engine.step(uid, "a")
    waiting = engine.start(1, f"wait for={gate}")
    wait_until(lambda: "wait for" in log.read_text(), "the call")
    (worker,) = pids(log)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: log.read_text().count("wait for") == 2, "the second try")
    gate.touch()
    assert waiting().text == f"2 wait for={gate}"
    assert engine.step(2, "b").text == "2 b" and engine.step(1, "c").text == "3 c"
    assert not engine.pool.failures and [engine.end(uid) for uid in (1, 2)] == [1.0, 1.0]
    assert all(len(texts) == len(set(texts)) for texts in seen(log).values()), "an object got a text twice"


def test_a_reward_is_asked_of_an_object_made_anew(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving(workers=1)
    engine.begin(1, log=str(log), reward=7)
    engine.step(1, "a")
    (worker,) = pids(log)
    os.kill(worker, signal.SIGKILL)
    assert engine.end(1) == 7.0
    assert [*seen(log).values()] == [["reset", "a"], ["reset", "a", "close"]]


def test_a_reward_that_hangs_fails(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving(timeout_s=1.5, failed_reward=-2.0)
    engine.begin(1, log=str(log), reward="hang")
    assert engine.end(1) == -2.0 and engine.pool.failures == {"timed_out": 1}


def test_async_calls_run_together(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving("Together", workers=1)
    for uid in range(5):
        engine.begin(uid, log=str(log))
    waiting = [engine.start(uid, "meet=5") for uid in range(5)]
    assert [one().text for one in waiting] == ["1 meet=5"] * 5
    assert [engine.end(uid) for uid in range(5)] == [1.0] * 5
    assert len(pids(log)) == 1 and all(texts[-1] == "close" for texts in seen(log).values())


@pytest.mark.parametrize(
    ("culprit", "kind"),
    [("kill", "lost"), ("hang deaf", "timed_out"), ("sleep", "timed_out"), ("stubborn", "timed_out")],
)
def test_of_async_calls_the_culprit_alone_fails(
    misbehaving: Callable[..., Engine], log: Path, tmp_path: Path, culprit: str, kind: str
) -> None:
    """Three calls run when it ruins their worker, or is cancelled; the others are made once more, if they have to."""
    engine, gate = misbehaving("Together", workers=1, timeout_s=2.0 if kind == "timed_out" else 60.0), tmp_path / "gate"
    for uid in range(3):
        engine.begin(uid, log=str(log))
    waiting = [engine.start(uid, f"gate={gate}") for uid in (0, 1)]
    bad = engine.start(2, culprit)
    wait_until(lambda: f" {culprit}\n" in log.read_text(), "the call")
    gate.touch()
    assert [one().text for one in waiting] == [f"1 gate={gate}"] * 2
    answer = bad()
    assert (answer.failure, answer.done) == (kind, True) and engine.pool.failures == {kind: 1}
    assert [engine.end(uid) for uid in range(3)] == [1.0, 1.0, 0.0]
    assert all(len(texts) == len(set(texts)) for texts in seen(log).values()), "an object got a text twice"


def test_a_sync_call_holds_up_its_own_worker_alone(
    misbehaving: Callable[..., Engine], log: Path, tmp_path: Path
) -> None:
    engine, gate = misbehaving(workers=2), tmp_path / "gate"
    for uid in range(4):
        engine.begin(uid, log=str(log))
    assert len(pids(log)) == 2, "new objects go to the worker with the fewest"
    waiting = engine.start(0, f"wait for={gate}")
    behind = engine.start(2, "a")
    assert [engine.step(uid, "a").text for uid in (1, 3)] == ["1 a", "1 a"]
    gate.touch()
    assert waiting().failure is None and behind().text == "1 a"


def test_the_time_in_a_queue_does_not_count(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving(workers=1, timeout_s=1.5)
    for uid in range(3):
        engine.begin(uid, log=str(log))
    hangs = [engine.start(uid, "hang") for uid in (0, 1)]
    behind = engine.start(2, "a")
    answer = behind()
    assert answer.text == "1 a" and answer.seconds < 1.5
    assert [one().failure for one in hangs] == ["timed_out"] * 2
    assert Counter(text for texts in seen(log).values() for text in texts)["hang"] == 2, "each ran alone, once"


def test_a_call_may_wait_behind_many_that_lose_their_worker(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving(workers=1)
    for uid in range(13):
        engine.begin(uid, log=str(log))
    kills = [engine.start(uid, "os._exit") for uid in range(12)]
    behind = engine.start(12, "a")
    assert behind().text == "1 a" and [one().failure for one in kills] == ["lost"] * 12


def test_an_aborted_call_has_no_answer(misbehaving: Callable[..., Engine], log: Path, tmp_path: Path) -> None:
    engine, gate, answers = misbehaving(workers=1), tmp_path / "gate", []
    engine.begin(1, log=str(log))
    engine.pool.step((0, 1, 0), f"wait for={gate}", answers.append)
    wait_until(lambda: "wait for" in log.read_text(), "the call")
    engine.pool.end((0, 1, 0), None)
    gate.touch()
    wait_until(lambda: "close" in log.read_text(), "the end")
    assert answers == [] and not engine.pool.failures
    assert [*seen(log).values()] == [["reset", f"wait for={gate}", "close"]]


def test_a_worker_may_start_before_the_pool_has_its_connection(
    misbehaving: Callable[..., Engine], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ForkedWorker] = []
    connect = asyncio.open_unix_connection

    def make_worker(*args: Any) -> ForkedWorker:
        made.append(ForkedWorker(*args))
        return made[-1]

    async def connect_late(**options: Any) -> Any:
        await asyncio.sleep(0)
        while not all(worker.has_started for worker in made):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return await connect(**options)

    monkeypatch.setattr("algos.environments.pool.ForkedWorker", make_worker)
    monkeypatch.setattr(asyncio, "open_unix_connection", connect_late)
    engine = misbehaving(workers=2)
    assert engine.begin(1, log=str(log)).failure is None


def test_a_turn_with_half_a_surrogate_has_an_answer(shared_engine: Engine) -> None:
    shared_engine.begin(1, log=os.devnull)
    assert shared_engine.step(1, "a\ud800").text == "1 a?"


def test_a_child_does_not_answer(misbehaving: Callable[..., Engine], log: Path) -> None:
    engine = misbehaving()
    engine.begin(1, log=str(log))
    assert engine.step(1, "fork itself").text == "its status is 0" and engine.step(1, "a").text == "2 a"


def test_output_goes_to_stderr(
    misbehaving: Callable[..., Engine], log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = misbehaving()
    engine.begin(1, log=str(log))
    assert engine.step(1, "flood").text == "1 flood"
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("flood") == 200_000


# -- processes and folders


@pytest.mark.parametrize("name", ["Misbehaves", "Together"])
def test_each_of_many_calls_has_an_answer_and_nothing_is_left(
    misbehaving: Callable[..., Engine], log: Path, name: str
) -> None:
    engine = misbehaving(name, workers=4, timeout_s=2.0 if name == "Misbehaves" else 3.0)
    pool, rng, answers = engine.pool, random.Random(0), queue.SimpleQueue()  # type: ignore[var-annotated]
    texts = [rng.choices(["a", "hang", "kill", "fork", "raise"], [80, 5, 5, 5, 5])[0] for _ in range(100)]
    expected = {"a": None, "hang": "timed_out", "kill": "lost", "fork": None, "raise": "raised"}
    assert set(texts) == set(expected)
    for uid, text in enumerate(texts):
        pool.begin(
            (0, uid, 0),
            {"log": str(log)},
            lambda _, uid=uid, text=text: pool.step((0, uid, 0), text, lambda answer: answers.put((uid, answer))),
        )
    got = dict(answers.get(timeout=60) for _ in texts)
    assert [got[uid].failure for uid in range(100)] == [expected[text] for text in texts]
    assert [engine.end(uid) for uid in range(100)] == [0.0 if expected[text] else 1.0 for text in texts]
    assert all(len(seen) == len(set(seen)) for seen in seen(log).values()), "an object got a text twice"
    folder = pool._folder
    wait_until(lambda: len(os.listdir(folder)) == 4, "the folders of lost workers to go")
    children = [int(line.split()[3]) for line in log.read_text().splitlines() if " child " in line]
    assert len(children) >= 2 and processes(folder)
    pool.close()
    assert not processes(folder) and not os.path.exists(folder) and not any(map(is_alive, children))


@pytest.mark.parametrize("text", ["a", "hang", "hang deaf", "fork and hang"])
def test_all_ends_with_the_run(tmp_path: Path, log: Path, text: str) -> None:
    """A run that is killed with SIGKILL leaves neither process nor folder, whatever its environment is doing."""
    program = f"""
        import time
        from algos.environments.pool import EnvironmentPool
        from algos.environments.protocol import EnvironmentConfig
        config = EnvironmentConfig(workers=2, writable={(str(log.parent),)!r})
        pool = EnvironmentPool({f"{CLASSES}:Misbehaves"!r}, config)
        pool.begin((0, 0, 0), {{"log": {str(log)!r}}}, lambda _: pool.step((0, 0, 0), {text!r}, print))
        print(pool._folder, flush=True)
        time.sleep(1000)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        folder = run.stdout.readline().strip()
        lines = 2 + 2 * (text == "fork and hang")
        wait_until(lambda: log.exists() and log.read_text().count("\n") >= lines, "the call")
        children = [int(line.split()[3]) for line in log.read_text().splitlines() if " child " in line]
        assert len(processes(folder)) >= 6 and all(map(is_alive, children)), "a template, two workers, their guards"
    finally:
        run.kill()
        run.communicate()
    wait_until(lambda: not processes(folder) and not any(map(is_alive, children)), "the processes to end")
    wait_until(lambda: not os.path.exists(folder), "the folder to go")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "victim", ["guard", "stopped guard", "guard stopped often", "template", "guard of the template"]
)
def test_others_may_be_killed_too(
    misbehaving: Callable[..., Engine], log: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algos.environments.forked.END_S", 0.5 if victim == "guard stopped often" else 1000.0)
    engine = misbehaving(workers=1, timeout_s=2.0)
    engine.begin(1, log=str(log))
    engine.begin(2, log=str(log))
    assert engine.step(1, "a").text == "1 a"
    (worker,) = pids(log)
    guard = parent(worker)
    pid = {"template": parent(guard), "guard of the template": parent(parent(guard))}.get(victim, guard)
    if "stopped" in victim:
        os.kill(pid, signal.SIGSTOP)
        hang, deadline = engine.start(2, "hang"), time.monotonic() + 20
        while victim == "guard stopped often" and is_alive(worker):
            assert time.monotonic() < deadline, "it cannot be killed"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        assert hang().failure == "timed_out"
    else:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(worker), "the worker to end with it")
    assert engine.step(1, "b").text == "2 b" and engine.end(1) == 1.0
    folder = engine.pool._folder
    engine.pool.close()
    assert not processes(folder) and not os.path.exists(folder)


# -- the sandbox


@pytest.fixture(scope="module")
def looking() -> Iterator[tuple[Engine, dict[str, Any]]]:
    os.environ["CURTAIL_TEST_SECRET"] = "1"
    try:
        with EnvironmentPool(f"{CLASSES}:Looks", EnvironmentConfig(workers=1, file_mib=2)) as pool:
            engine = Engine(pool)
            yield engine, json.loads(engine.begin(1).text or "")
    finally:
        del os.environ["CURTAIL_TEST_SECRET"]


def test_a_worker_has_an_empty_folder_and_environment(looking: tuple[Engine, dict[str, Any]]) -> None:
    engine, found = looking
    folder = found["cwd"]
    assert found["files"] == [] and folder.startswith(engine.pool._folder + "/")
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_CTYPE", "PYTHONPATH")
    assert found["environ"].keys() <= {*kept, *threads, "HOME", "TMPDIR", "CURTAIL_WORKER"}
    assert found["environ"]["HOME"] == found["environ"]["TMPDIR"] == folder
    assert engine.step(1, "read stdin").text == "''"
    assert engine.step(1, f"write={folder}/x").text == "ok" and os.path.exists(f"{folder}/x")
    assert [engine.step(1, f"big file={size}").text for size in (1, 3)] == ["ok", "OSError"]


def test_writes_and_signals_stay_inside(looking: tuple[Engine, dict[str, Any]], tmp_path: Path) -> None:
    engine, found = looking
    if any("Landlock" in note for note in engine.pool.ready.notes):
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "file").touch()
    for text in (f"write={tmp_path}/new", f"write={tmp_path}/file", f"remove={tmp_path}/file", "write=../x"):
        assert engine.step(1, text).text == "PermissionError", text
    assert engine.step(1, f"write={os.devnull}").text == "ok"
    guard = parent(found["pid"])
    assert engine.step(1, f"signal={found['pid']}").text == "ok"
    assert [engine.step(1, f"signal={pid}").text for pid in (guard, os.getpid())] == ["PermissionError"] * 2


def test_there_is_no_network_unless_it_is_asked_for(
    looking: tuple[Engine, dict[str, Any]], make: Callable[..., Engine]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = make("Looks", workers=1, network=True)
        asked.begin(1)
        assert asked.step(1, f"connect={port}").text == "ok"
        if any("network" in note for note in looking[0].pool.ready.notes):
            pytest.skip("this kernel refuses a namespace")
        assert looking[0].step(1, f"connect={port}").text == "OSError"


def test_where_the_kernel_refuses_a_namespace_the_network_stays() -> None:
    """Refused as by an administrator, for the processes of this test: within a namespace of their own."""
    program = f"""
        import queue
        from pathlib import Path
        from algos.environments.sandbox import leave_network
        print(leave_network() or "in a namespace", flush=True)
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        from algos.environments.pool import EnvironmentPool
        with EnvironmentPool({f"{CLASSES}:Looks"!r}) as pool:
            answers = queue.SimpleQueue()
            pool.begin((0, 0, 0), {{}}, answers.put)
            print(pool.ready.notes, answers.get(timeout=60).failure)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100, check=False
    )
    if "in a namespace" not in done.stdout:
        pytest.skip("this kernel refuses a namespace")
    assert (
        "environments have the network, since the kernel refuses a namespace (No space left on device)" in done.stdout
    )
    assert done.stdout.endswith(" None\n") and done.returncode == 0, done.stderr


def test_variables_are_passed_by_name(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURTAIL_TEST_KEY", "key")
    engine = make("Looks", workers=1, environ=("CURTAIL_TEST_KEY", "ABSENT"))
    environ = json.loads(engine.begin(1).text or "")["environ"]
    assert environ["CURTAIL_TEST_KEY"] == "key" and "ABSENT" not in environ


@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_libraries_work_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """NumPy's import may start threads of its matrix library, where there may be several; they bear the forks."""
    (tmp_path / "native.py").write_text(
        "import numpy\nclass E:\n    def reset(self): pass\n"
        "    def step(self, text): return str((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())\n"
    )
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(num_threads))
    environ = ("OPENBLAS_NUM_THREADS",) if num_threads > 1 else ()
    with EnvironmentPool(f"{tmp_path}/native.py:E", EnvironmentConfig(workers=2, environ=environ)) as pool:
        engine = Engine(pool)
        for uid in (1, 2):
            engine.begin(uid)
            assert engine.step(uid, "").text == "27000000.0"


def test_the_page_s_examples_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/trajectories.md").read_text()
    files = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", page, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with EnvironmentPool(f"{tmp_path}/guessing.py:Guess", EnvironmentConfig(workers=1)) as pool:
        engine = Engine(pool)
        assert engine.begin(1, number=3).text == "Guess a number from 1 to 9.\n"
        assert engine.step(1, "4").text == "No. Again:\n" and engine.step(1, " 3\n").done and engine.end(1) == 1.0
    with EnvironmentPool(f"{tmp_path}/my_tools.py:multiply", EnvironmentConfig(workers=1)) as pool:
        assert pool.tools[0]["function"]["name"] == "multiply"
