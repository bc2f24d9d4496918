"""Ends of a process that `launch` has prepared: by a signal, wherever it waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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

cases = {"a": {"tokens_equal": True}, "b": {"T=1": {"tokens_equal": sys.argv[1] == "yes"}}}
if sys.argv[1:] == ["anew"]:
    launch.run(lambda: {"found": launch.start_anew("no")["live"]})
else:
    launch.run(lambda: {"live": cases, "tokens_equal": True})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_in_cpp(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_CPP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.send_signal(number)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (told, process.returncode) == ("\nthe last words\n", 128 + number)


def test_a_forked_process_ends_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr, done.returncode) == (f"{-signal.SIGTERM}\n", "", 0)


@pytest.mark.parametrize(
    ("answer", "code", "place"), [("yes", 0, ""), ("no", 3, "live.b.T=1.tokens_equal"), ("anew", 3, "found.b.T=1.")]
)
def test_different_tokens_fail_after_the_result(tmp_path: Path, answer: str, code: int, place: str) -> None:
    """Also where another process found them: then the result is that process's."""
    script = tmp_path / "script.py"
    script.write_text(TOKENS_EQUAL)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), answer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == code and place in done.stderr and "Traceback" not in done.stderr
    cases = next(iter(json.loads(done.stdout).values()))
    assert cases["a"]["tokens_equal"] and cases["b"]["T=1"]["tokens_equal"] is (answer == "yes")
