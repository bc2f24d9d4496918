"""The reward runner against reward functions that misbehave in every way, each in a real process."""

from __future__ import annotations

import fcntl
import gc
import logging
import math
import os
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from algos.rewards.pool import Item, RewardPool
from algos.rewards.runner import FailureKind, RewardConfig, RewardRunner
from algos.workers.process import environment
from tests.algos.conftest import FUNCTIONS


class Scores(NamedTuple):
    rewards: list[float]
    failed: Counter[FailureKind]


def item(index: int, completion: str, **columns: Any) -> Item:
    return Item(key=(index, 0), prompt="prompt", completion=completion, columns=columns)


def score(runner: RewardRunner, completions: list[str], **columns: list[Any]) -> Scores:
    rest = [item(i, one, **{name: column[i] for name, column in columns.items()}) for i, one in enumerate(completions)]
    with RewardPool(runner) as pool:
        rewards, failed = pool.finish(rest)
    return Scores([rewards[i, 0] for i in range(len(completions))], failed)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


# -- what the function gets and gives


def test_rewards_come_in_order_over_many_chunks(make: Callable[..., RewardRunner]) -> None:
    texts = ["x" * (index % 7) for index in range(100)]
    result = score(make("length", chunk_size=16), texts)
    assert result.rewards == [float(len(text)) for text in texts]
    assert not result.failed


@pytest.mark.parametrize("function", ["length_async", "runs_a_loop", "runs_its_loop", "returns_an_awaitable"])
def test_a_function_may_be_async_or_run_a_loop(make: Callable[..., RewardRunner], function: str) -> None:
    result = score(make(function, chunk_size=2), ["a", "bb", "ccc"])
    assert result.rewards == [1.0, 2.0, 3.0] and result.failed["raised"] == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_file_s_function_may_use_a_process_pool(make: Callable[..., RewardRunner], method: str) -> None:
    assert score(make("uses_a_pool", timeout_s=60.0), ["a", "bb"], method=[method] * 2).rewards == [1.0, 2.0]


def test_one_call_per_chunk(make: Callable[..., RewardRunner]) -> None:
    assert score(make("sizes", chunk_size=4), ["x"] * 10).rewards == [4.0] * 8 + [2.0] * 2


def test_no_completions_no_rewards(make: Callable[..., RewardRunner]) -> None:
    assert score(make("length"), []).rewards == []


def test_only_declared_columns_are_passed(make: Callable[..., RewardRunner]) -> None:
    runner = make("declared", chunk_size=2)
    columns: dict[str, list] = {"answer": ["a", "b", "c"], "other": [object()] * 3}
    assert score(runner, ["a", "x", "c"], **columns).rewards == [1.0, 0.0, 1.0]
    assert score(runner, ["a", "x", "c"], scale=[2, 3, 4], **columns).rewards == [2.0, 0.0, 4.0]


def test_modules_by_name_and_files_with_neighbours(tmp_path: Path) -> None:
    with RewardRunner("algos.rewards.arithmetic:exact_answer") as runner:
        assert score(runner, ["1+1#2", "1+1#3"], answer=["2", "2"]).rewards == [1.0, 0.0]
    (tmp_path / "mine.py").write_text("import json, neighbour\ndef f(completions): return [neighbour.VALUE]")
    (tmp_path / "neighbour.py").write_text("VALUE = 5.0")
    (tmp_path / "json.py").write_text("raise ImportError('shadows the standard library')")
    with RewardRunner(f"{tmp_path}/mine.py:f") as runner:
        assert score(runner, ["x"]).rewards == [5.0]


def test_worker_is_kept_between_calls(make: Callable[..., RewardRunner]) -> None:
    runner = make("process", chunk_size=1)
    (pid,) = set(score(runner, ["x"] * 5).rewards + score(runner, ["x"] * 5).rewards)
    assert pid != os.getpid()


def test_user_output_goes_to_stderr(make: Callable[..., RewardRunner], capfd: pytest.CaptureFixture[str]) -> None:
    assert score(make("prints", chunk_size=1), ["x"] * 3).rewards == [1.0] * 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("noise on stdout") == 3


def test_threads_take_turns(make: Callable[..., RewardRunner]) -> None:
    runner, results = make("length", chunk_size=2), {}

    def work(size: int) -> None:
        results[size] = [score(runner, ["x" * size] * 9).rewards for _ in range(10)]

    threads = [threading.Thread(target=work, args=(size,)) for size in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {size: [[float(size)] * 9] * 10 for size in range(4)}


# -- user errors


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import math\n\ndef f(completions) return 1\n")
    with (
        RewardRunner(f"{tmp_path}/mine.py:f") as runner,
        pytest.raises(ValueError, match=r"SyntaxError: .*\(mine\.py:3\)"),
    ):
        runner.check()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", r"cannot be used: ValueError: reward_functions\.py has no function 'missing'; check"),
        ("number", "'number' is a int, not a function"),
        ("positional", "positional-only"),
    ],
)
def test_a_bad_function_is_refused_up_front(make: Callable[..., RewardRunner], function: str, message: str) -> None:
    runner = make(function)
    for attempt in (runner.check, lambda: score(runner, ["x"])):
        with pytest.raises(ValueError, match=message) as caught:
            attempt()
        assert function in str(caught.value) and "package.module:function" in str(caught.value)


@pytest.mark.parametrize("spec", ["", "module", "module:", ":function", "file.py", "module:not a name"])
def test_a_malformed_spec_is_refused_without_a_process(spec: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        RewardRunner(spec)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"cannot be used: ValueError: there is no file '.*/broken\.py'\. Name an"),
        ("import absent_module", r"No module named 'absent_module' \(broken\.py:1\)"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(9)", "exited with status 9"),
        ("import time; time.sleep(1000)", "start_timeout_s=2"),
    ],
)
def test_an_import_that_fails_is_refused(tmp_path: Path, source: str | None, message: str) -> None:
    path = tmp_path / "broken.py"
    limit_s = 2.0 if "start_timeout_s" in message else 60.0
    if source is not None:
        path.write_text(source)
    with (
        RewardRunner(f"{path}:f", RewardConfig(start_timeout_s=limit_s)) as runner,
        pytest.raises(ValueError, match=message),
    ):
        runner.check()


def test_columns_are_checked(make: Callable[..., RewardRunner]) -> None:
    runner = make("declared")
    runner.check(columns=["answer"])
    with pytest.raises(ValueError, match=r"wants \['answer'\].*\['question'\]"):
        runner.check(columns=["question"])
    with pytest.raises(ValueError, match=r"columns\['answer'\].*plain data"):
        score(runner, ["a"], answer=[object()])
    with pytest.raises(ValueError, match=r"columns\['answer'\].*64 bits"):
        score(runner, ["a"], answer=[2**70])
    assert score(runner, ["a"], answer=["a"]).rewards == [1.0]


SECONDS = r"above 0, and at most 1e\+06"


@pytest.mark.parametrize(
    ("field", "value", "must_be"),
    [("chunk_size", 0, "an integer"), ("max_failures", 0, "an integer"), ("failed_reward", math.nan, "a finite number")]
    + [
        (field, value, SECONDS) for field in ("timeout_s", "start_timeout_s") for value in (0, math.inf, math.nan, 1e10)
    ],
)
def test_config_is_checked(field: str, value: float, must_be: str) -> None:
    with pytest.raises(ValueError, match=rf"RewardConfig\.{field}={value!r}: must be {must_be}"):
        RewardConfig(**{field: value})


# -- functions that fail


def test_values_that_are_no_numbers(make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture) -> None:
    texts = ["int", "nan", "inf", "none", "text", "list", "huge", "true"]
    result = score(make("values", failed_reward=-1.0), texts)
    assert result.rewards == [2.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    assert result.failed == {"invalid": 6}
    (record,) = caplog.records
    assert "6 of 8 completions invalid" in record.getMessage() and "nan" in record.getMessage()


def test_wrong_number_of_rewards(make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture) -> None:
    result = score(make("miscounts", chunk_size=2), ["a", "bad", "c", "d", "e"])
    assert result.rewards == [0.0, 0.0, 1.0, 1.0, 1.0], "a call that fails fails whole"
    assert result.failed["raised"] == 2
    assert "more rewards for 2 completions" in caplog.text
    assert score(make("endless"), ["a"]).failed["raised"] == 1


@pytest.mark.parametrize(
    ("kind", "what"), [("None", "None"), ("float", "a float"), ("str", "a str"), ("dict", "a dict")]
)
def test_what_is_no_list_is_said_so(
    make: Callable[..., RewardRunner], kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert score(make("returns"), ["a"], kind=[kind]).failed["raised"] == 1
    assert caplog.text.rstrip().endswith(f"returned {what}: must be a list of 1 numbers")


@pytest.mark.parametrize("culprit", ["raise", "sys.exit", "os._exit", "kill", "segfault"])
def test_only_the_culprit_fails(
    make: Callable[..., RewardRunner], culprit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = {
        "raise": "KeyError: 'no such thing' (reward_functions.py:",
        "sys.exit": "SystemExit: 3",
        "os._exit": "exited with status 3",
        "kill": "killed by SIGKILL",
        "segfault": "killed by SIGSEGV",
    }
    texts = ["a"] * 5 + [culprit] + ["b"] * 4
    result = score(make("misbehaves"), texts, log=[str(tmp_path / "log")] * 10)
    assert result.rewards == [1.0] * 5 + [0.0] + [1.0] * 4
    assert result.failed == {"raised": 1}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "1 of 10 completions raised" in record.getMessage() and message[culprit] in record.getMessage()


@pytest.mark.parametrize(
    "culprit",
    ["hang", "hang hard", "close", "fork", "daemon"]
    + [f"daemon, {end}" for end in ("os._exit", "kill guard", "stop guard", "stop guard often")],
)
def test_a_hang_is_killed_and_the_worker_restarted(
    make: Callable[..., RewardRunner], culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if culprit == "daemon, stop guard often":
        monkeypatch.setattr("algos.workers.process._END_S", 0.5)
    log = tmp_path / "log"
    is_hang = culprit not in ("close", "daemon, os._exit", "daemon, kill guard")  # these are found out at once
    runner = make("misbehaves", chunk_size=2, timeout_s=2.0 if is_hang else 60.0)
    texts = ["a", "b", culprit, "c", "d"]
    result = score(runner, texts, log=[str(log)] * 5)
    assert result.rewards == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert result.failed == ({"timed_out": 2} if is_hang else {"raised": 2})
    assert score(runner, ["e"], log=[str(log)]).rewards == [1.0]
    pids = list(dict.fromkeys(int(line.split()[0]) for line in log.read_text().splitlines()))
    assert len(pids) >= 2
    last = int(log.read_text().splitlines()[-1].split()[0])
    wait_until(lambda: not any(is_alive(pid) for pid in pids if pid != last), "the killed workers' processes to go")
    assert is_alive(last)


def test_a_process_that_starts_a_program_is_not_taken_for_one_without_the_mark(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o755)
    with subprocess.Popen([again], env={**os.environ, "CURTAIL_WORKER": "mark"}) as process:
        wait_until(lambda: b"again" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "the script to start")
        wait_until(lambda: environment(Path(f"/proc/{process.pid}")) is None, "a moment in which it starts again")
        read = [environment(Path(f"/proc/{process.pid}")) for _ in range(3000)]
        process.kill()
    assert all(one is None or b"CURTAIL_WORKER=mark" in one for one in read)
    with subprocess.Popen(["sleep", "1000"], env={}) as process:
        wait_until(lambda: environment(Path(f"/proc/{process.pid}")) == b"", "a process without an environment")
        process.kill()
    with pytest.raises(OSError):
        environment(Path("/proc/0"))


@pytest.mark.parametrize("is_sent", [False, True], ids=["between calls", "before it reads the next call"])
def test_a_worker_that_ends_without_a_call_costs_none(make: Callable[..., RewardRunner], is_sent: bool) -> None:
    runner, results = make("process"), []
    pid = int(score(runner, ["a"]).rewards[0])
    assert runner._worker is not None
    sock, thread = runner._worker.sock, threading.Thread(target=lambda: results.append(score(runner, ["a"])))
    if is_sent:
        os.kill(pid, signal.SIGSTOP)
        thread.start()
        wait_until(lambda: any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))), "a message that nobody reads")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "the worker to end")
    if not is_sent:
        thread.start()
    thread.join()
    assert results[0].failed["raised"] == 0 and results[0].rewards not in ([0.0], [float(pid)])


@pytest.mark.parametrize("function", ["forks", "forks_async"])
@pytest.mark.parametrize(("how", "status"), [("return", 0.0), ("raise", 1.0), ("exit0", 0.0), ("exit7", 7.0)])
def test_only_the_worker_answers_not_what_it_forks(
    make: Callable[..., RewardRunner], function: str, how: str, status: float
) -> None:
    result = score(make(function, chunk_size=2), ["a"] * 5, how=[how] * 5)
    assert result.rewards == [status] * 5, "a child did not end as its parent can expect"
    assert not result.failed


def test_a_child_that_the_import_forks_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import os\nPID = os.getpid()\nif child := os.fork():\n    os.waitpid(child, 0)\n"
        "def f(completions):\n    return [float(os.getpid() == PID)] * len(completions)\n"
    )
    with RewardRunner(f"{tmp_path}/forks.py:f") as runner:
        assert score(runner, ["a", "b"]).rewards == [1.0, 1.0]


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_another_call_s_answer_is_not_booked(make: Callable[..., RewardRunner], chunk_size: int) -> None:
    result = score(make("forges", chunk_size=chunk_size), ["a"] * 5)
    assert result.rewards == [1.0] * 5 and result.failed["raised"] == 0


def test_one_warning_for_many_failures(make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture) -> None:
    result = score(make("always_raises", chunk_size=8), ["x"] * 100)
    assert result.rewards == [0.0] * 100
    assert result.failed["raised"] == 100
    (record,) = caplog.records
    assert "100 of 100" in record.getMessage() and "no reward today" in record.getMessage()
    caplog.clear()
    score(make("long_message"), ["x"])
    assert len(caplog.text) < 1500


def test_a_function_that_always_ends_its_process_is_given_up(make: Callable[..., RewardRunner]) -> None:
    result = score(make("always_ends", max_failures=3, chunk_size=1), ["x"] * 1000)
    assert result.failed == {"raised": 3, "timed_out": 997}


def test_a_function_that_always_hangs_is_given_up(
    make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture
) -> None:
    result = score(make("always_hangs", timeout_s=0.4, max_failures=3, chunk_size=1), ["x"] * 1000)
    assert result.rewards == [0.0] * 1000
    assert result.failed["timed_out"] == 1000
    assert "gave up on 997 of 1000 completions" in caplog.text
    assert "max_failures=3" in caplog.text


def test_the_first_timeout_is_told_at_once(make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(make("always_hangs", timeout_s=0.4)) as pool:
        pool.add(item(0, "x"))
        wait_until(lambda: caplog.records, "the warning")
        pool.add(item(1, "x"))
        wait_until(lambda: not pool._waiting, "the next call")
        assert len(pool.stop()) == 2
    (record,) = caplog.records
    assert "a call timed out (timeout_s=0.4)" in record.getMessage()


def test_text_that_is_not_unicode_costs_only_itself(make: Callable[..., RewardRunner]) -> None:
    result = score(make("length"), ["a", "\ud800", "c"])
    assert result.rewards == [1.0, 0.0, 1.0]
    assert result.failed["raised"] == 1


# -- async functions


def test_async_chunks_run_at_the_same_time(make: Callable[..., RewardRunner]) -> None:
    result = score(make("meets", chunk_size=2), ["x"] * 10, num_calls=[5] * 10)
    assert result.rewards == [1.0] * 10


def test_async_failures_cost_only_their_chunks(make: Callable[..., RewardRunner]) -> None:
    runner = make("misbehaves_async", chunk_size=2, timeout_s=2.0)
    (pid,) = set(score(runner, ["x"] * 4).rewards)
    result = score(runner, ["a", "raise", "b", "c", "hang", "d"])
    # The limit cancels a coroutine; its process lives on.
    assert result.rewards == [0.0, 0.0, pid, pid, 0.0, 0.0]
    assert result.failed == {"raised": 2, "timed_out": 2}


@pytest.mark.parametrize("culprit", ["block", "exit", "stubborn"])
def test_an_async_function_that_ruins_its_loop(make: Callable[..., RewardRunner], culprit: str) -> None:
    """The calls that ran beside it are made again, each alone."""
    runner = make("misbehaves_async", chunk_size=2, timeout_s=2.0)
    result = score(runner, ["a", "b", "c", culprit, "d", "e"])
    assert [value > 0 for value in result.rewards] == [True, True, False, False, True, True]
    assert result.failed.total() == 2
    assert score(runner, ["f"]).rewards[0] > 0


# -- processes and descriptors


def test_nothing_is_left_behind(make: Callable[..., RewardRunner], tmp_path: Path) -> None:
    def children() -> set[str]:
        return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

    gc.collect()
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        runner = make("misbehaves", timeout_s=0.8)
        score(runner, ["a", "os._exit"], log=[str(tmp_path / "log")] * 2)
        score(runner, ["hang"], log=[str(tmp_path / "log")])
        score(runner, ["a"], log=[str(tmp_path / "log")])
        runner.close()
        runner.close()
        with pytest.raises(ValueError, match="absent"):
            RewardRunner("absent:function").check()
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) == fds
    pids = {int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()}
    assert len(pids) > 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ValueError, match="closed"):
        score(runner, ["a"], log=["x"])


def test_an_orphan_that_ends_is_gone_though_the_worker_lives(make: Callable[..., RewardRunner]) -> None:
    runner = make("brief_daemon", chunk_size=1)
    pids = [int(pid) for pid in score(runner, ["a"] * 3).rewards]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the orphans to be reaped")


def test_close_returns_though_another_process_holds_the_lifeline(make: Callable[..., RewardRunner]) -> None:
    runner = make("process")
    (pid,) = score(runner, ["a"]).rewards
    assert runner._worker is not None and runner._worker.process.stdin is not None
    held = os.dup(runner._worker.process.stdin.fileno())  # as a process has it that the run forked
    runner.close()
    os.close(held)
    assert not is_alive(int(pid))


def test_close_ends_a_call_of_another_thread(make: Callable[..., RewardRunner], tmp_path: Path) -> None:
    runner, results, log = make("misbehaves", timeout_s=1.0, chunk_size=1, max_failures=100), [], tmp_path / "log"
    thread = threading.Thread(target=lambda: results.append(score(runner, ["hang"] * 100, log=[str(log)] * 100)))
    thread.start()
    wait_until(log.exists, "the first call")
    runner.close()
    thread.join()
    assert results[0].failed["timed_out"] == 100
    assert len(log.read_text().splitlines()) < 50


@pytest.mark.parametrize("text", ["ok", "hang", "hang hard", "fork", "daemon"])
def test_the_workers_die_with_the_run(tmp_path: Path, text: str) -> None:
    """A run that is killed with SIGKILL leaves no process behind, whatever its reward function is doing."""
    log = tmp_path / "log"
    program = f"""
        import time
        from algos.rewards.pool import Item, RewardPool
        from algos.rewards.runner import RewardRunner
        pool = RewardPool(RewardRunner({str(FUNCTIONS) + ":misbehaves"!r}))
        pool.finish([Item(key=(0, 0), prompt="p", completion={text!r}, columns={{"log": {str(log)!r}}})])
        time.sleep(1000)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=Path(__file__).parents[2])
    try:
        num_lines = 2 if text in ("fork", "daemon") else 1
        wait_until(
            lambda: log.exists() and log.read_text().count("\n") == num_lines, "the reward function to be called"
        )
        pids = [int(line.split()[0]) for line in log.read_text().splitlines()]
        assert all(map(is_alive, pids))
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(map(is_alive, pids)), "the worker to die")
