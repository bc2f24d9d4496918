"""Ends of a process that `launch` has prepared: by a signal, wherever it waits; and how its errors name options."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import launch
from tests.worlds import ROOT, Python, run_python

WAITS_IN_CPP = """
from datetime import timedelta
from torch.distributed import TCPStore
from experiments import launch

launch.end_on_signals(lambda: "of an earlier part")
launch.end_on_signals(lambda: "the last words")
store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=300))
print("waits", flush=True)
store.get("a key that nobody sets")
"""
FORKS = """
import multiprocessing, os, signal
from experiments import launch

launch.end_on_signals(lambda: "the last words")
child = multiprocessing.get_context("fork").Process(target=signal.pause)
child.start()
child.terminate()
child.join(60)
print(child.exitcode, flush=True)
"""
TOKENS_EQUAL = """
import sys
from experiments import launch

equal = sys.argv[1] in ("yes", "idle", "log")
idle = ["nothing was drafted"] if sys.argv[1] == "idle" else []
one = {"tokens_equal": True, "log_equal": sys.argv[1] != "log", "not_exercised": idle}
cases = {"a": one, "b": {"T=1": {"tokens_equal": equal}}}
if sys.argv[1:] == ["anew"]:
    launch.run(lambda: {"found": launch.start_anew("no")["live"]})
else:
    launch.run(lambda: {"live": cases, "tokens_equal": True})
"""
KEEPS_KV = """
import os, signal, sys, time
from pathlib import Path
from engines.parallel.owned_files import at_end
from experiments import launch
from tests.engines.test_kv_store import export, make_store

class Owner:
    pass

store, owner = make_store(Path(sys.argv[1])), Owner()
at_end(owner, store.close)

def main():
    if sys.argv[2] == "job":
        launch.end_on_signals(lambda: "the last words")
    for _ in range(3):
        export(store)
    if sys.argv[2] == "error":
        raise ValueError("of a user")
    print(len(os.listdir(sys.argv[1])), flush=True)
    time.sleep(600)

launch.run(main)
"""
RANKS_WAIT = """
import os, sys, time
from pathlib import Path
from experiments import launch

def main():
    launch.start_under_torchrun(2)
    launch.end_on_signals(lambda: "the last words")
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)

launch.run(main)
"""
RANKS_FAIL = """
import os, sys, time
from experiments import launch

def main():
    launch.start_under_torchrun(2)
    if os.environ["RANK"] in sys.argv[1:]:
        raise ValueError("reward='x': cannot be read")
    time.sleep(600)

launch.run(main)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _hear_signals() -> None:
    """Also where the tests run in the background or under nohup, whose children ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("what", "number", "rank", "words"),
    [
        ("script", signal.SIGINT, 0, "interrupted"),
        ("job", signal.SIGTERM, 1, ""),
        ("job", signal.SIGHUP, 0, "the last words"),
        ("error", None, 0, "error: of a user"),
    ],
)
def test_no_file_outlives_an_end(
    what: str, number: signal.Signals | None, rank: int, words: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPS_KV, str(tmp_path), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RANK": str(rank)},
        preexec_fn=_hear_signals,
    )
    with process:
        assert process.stdout is not None
        if number is not None:
            assert process.stdout.readline() == "3\n"
            process.send_signal(number)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (told.strip(), process.returncode) == (words, 2 if number is None else 128 + number)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("number", "starter"),
    [
        *((number, []) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)),
        *((number, TORCHRUN) for number in (signal.SIGHUP, signal.SIGKILL)),
    ],
)
def test_ranks_end_with_what_has_started_them(number: signal.Signals, starter: list[str], tmp_path: Path) -> None:
    with waiting_ranks(starter, tmp_path) as (process, ranks):
        os.kill(process.pid, number)
        code = process.wait(60)
        assert code == (-number if number == signal.SIGKILL else 128 + number) or (starter and code)
        deadline = time.monotonic() + 120
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, "a rank has outlived what has started it"
            time.sleep(0.05)


def test_a_rank_that_is_killed_under_torchrun_is_named_and_ends_the_other(tmp_path: Path) -> None:
    with waiting_ranks(TORCHRUN, tmp_path) as (process, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(60) != 0
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert f"exitcode  : -9 (pid: {ranks[0]})" in process.stderr


@contextlib.contextmanager
def waiting_ranks(starter: list[str], folder: Path) -> Iterator[tuple[Python, list[int]]]:
    """What has started two ranks, and their process ids once both wait."""
    (script := folder / "waits.py").write_text(RANKS_WAIT)
    (ranks := folder / "ranks").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with Python([*starter, str(script), str(ranks)], env=environment, cwd=folder) as process:
        deadline = time.monotonic() + 120
        while len(names := os.listdir(ranks)) < 2:
            assert time.monotonic() < deadline and process.poll() is None, "the ranks have not begun"
            time.sleep(0.05)
        yield process, [int(name) for name in names]


@pytest.mark.parametrize("starter", [[], TORCHRUN])
@pytest.mark.parametrize("failing", [["0", "1"], ["1"]], ids=["all ranks", "one rank"])
def test_an_error_of_ranks_is_told_last_and_once(starter: list[str], failing: list[str], tmp_path: Path) -> None:
    """A rank that has none waits for ever, unless it is ended."""
    (script := tmp_path / "fails.py").write_text(RANKS_FAIL)
    done = run_python([*starter, str(script), *failing], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == (1 if starter else 2)
    told = [line for line in done.stderr.splitlines() if line.strip()]
    who = "" if "0" in failing else " (rank 1)"
    (place,) = [place for place, line in enumerate(told) if f"error{who}: reward='x': cannot be read" in line]
    assert len(told[place + 1 :]) == bool(starter), "torchrun draws a line"
    assert starter or "Traceback" not in done.stderr


def test_a_command_whose_parent_has_died_before_it_looks_ends(tmp_path: Path) -> None:
    environment = os.environ | {"CURTAIL_PARENT": str(os.getppid()), "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", RANKS_WAIT, str(tmp_path)], env=environment, cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL and not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_in_cpp(number: signal.Signals) -> None:
    deadline = time.monotonic() + 120
    with Python(["-c", WAITS_IN_CPP]) as process:
        while process.stdout != "waits\n":
            assert time.monotonic() < deadline and process.poll() is None, process.stderr
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert (process.wait(60), process.stderr) == (128 + number, "\nthe last words\n")


def test_a_forked_process_ends_alone() -> None:
    done = run_python(["-c", FORKS])
    assert (done.stdout, done.stderr, done.returncode) == (f"{-signal.SIGTERM}\n", "", 0)


@pytest.mark.parametrize(
    ("answer", "code", "place"),
    [
        ("yes", 0, ""),
        ("no", 3, "live.b.T=1.tokens_equal"),
        ("anew", 3, "found.b.T=1."),
        ("idle", 3, "live.a.not_exercised: nothing was drafted"),
        ("log", 3, "live.a.log_equal is false"),
    ],
)
def test_different_tokens_fail_after_the_result(tmp_path: Path, answer: str, code: int, place: str) -> None:
    """Also where another process found them: then the result is that process's."""
    script = tmp_path / "script.py"
    script.write_text(TOKENS_EQUAL)
    done = run_python([str(script), answer], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == code and place in done.stderr and "Traceback" not in done.stderr
    cases = next(iter(json.loads(done.stdout).values()))
    assert cases["a"]["tokens_equal"] and cases["b"]["T=1"]["tokens_equal"] is (answer not in ("no", "anew"))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("data='/nope': cannot be read", "--data='/nope': cannot be read"),
        ("EngineConfig.block_size=0: must be", "--rollout.block-size=0: must be"),
        ("EngineConfig.kv_cache_bytes=0: must be", "EngineConfig.kv_cache_bytes=0: must be"),
        ("resume: trainer.data=3 now, 4 before", "resume: trainer.data=3 now, 4 before"),
        ("a sentence without a field", "a sentence without a field"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(monkeypatch: pytest.MonkeyPatch, message: str, told: str) -> None:
    typed = ["--data", "/nope", "--rollout.block-size=0", "--rollout.kv-cache-mib", "0", "kv-cache-bytes"]
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    assert launch.as_typed(message) == told
