"""The test worlds themselves: results come back, failures and hangs are reported and leave nothing running."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.proc import is_running
from tests.serving import until
from tests.worlds import Popen, Python, run_python, run_world


def facts(offset: int) -> list[str | int]:
    """The rank's environment, and an argument that came along."""
    return [os.environ["RANK"], os.environ["WORLD_SIZE"], offset + 1]


def leave_something() -> list[str | None]:
    """What it leaves in this process, as it found it."""
    found = [os.environ.get("LEFT"), getattr(torch, "left", None)]
    os.environ["LEFT"] = torch.left = "here"  # type: ignore[attr-defined]
    return found


def end_with(code: int | str | None, folder: str) -> str:
    """Leaves a thread and a function for the end."""
    atexit.register((Path(folder) / "at exit").touch)
    threading.Timer(0.3, (Path(folder) / "thread").touch).start()
    if code is None:
        return "well"
    sys.exit(code)


def fail_or_hang(how: str) -> None:
    print(f"pid={os.getpid()}", flush=True)
    if os.environ["RANK"] == "1" and how == "fail":
        raise OSError("disk on fire")
    time.sleep(600)


def test_results_come_back_in_rank_order() -> None:
    assert run_world(facts, 2, 41) == [["0", "2", 42], ["1", "2", 42]]


def test_a_world_finds_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [run_world(leave_something, 1) for _ in range(2)] == [[[None, None]]] * 2
    monkeypatch.setenv("LEFT", "by the test")
    assert run_world(leave_something, 1) == [["by the test", None]]


def poll_with(process: Any, others: threading.Barrier) -> int | None:
    others.wait()
    code: int | None = process.poll()
    return code


def test_a_module_that_is_forked_is_as_subprocess_starts_it(tmp_path: Path) -> None:
    """However many threads ask how it has ended."""
    (tmp_path / "greets.py").write_text(
        "import os, sys\n"
        "print(os.getppid(), os.getsid(0) == os.getpid(), os.getcwd(), os.environ['NAME'], sys.stdin.readline())\n"
        "sys.exit(3)\n"
    )
    for start in (subprocess.Popen, Popen):
        with open(tmp_path / "log", "w+b") as log:
            process: Any = start(
                [sys.executable, "-m", "greets"],
                cwd=tmp_path,
                env=os.environ | {"NAME": "a"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with process.stdin as stdin:
                stdin.write(b"given\n")
            until(lambda pid=process.pid: not is_running(pid), "it has ended")
        together = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            assert {3} <= {*pool.map(poll_with, [process] * 8, [together] * 8)} <= {3, None}  # as of subprocess's
        assert process.poll() == 3
        assert (tmp_path / "log").read_text() == f"{os.getpid()} True {tmp_path} a given\n\n"


@pytest.mark.parametrize(("code", "told"), [(None, ""), (7, "code 7"), ("no room", "code 1\n(.|\n)*no room")])
def test_a_rank_ends_as_a_process_does(tmp_path: Path, code: int | str | None, told: str) -> None:
    if code is None:
        assert run_world(end_with, 1, code, str(tmp_path)) == ["well"]
    else:
        with pytest.raises(RuntimeError, match=f"rank 0 ended with {told}"):
            run_world(end_with, 1, code, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"at exit", "thread"}


@pytest.mark.parametrize(
    ("how", "timeout", "message"), [("fail", 120.0, "disk on fire"), ("hang", 4.0, r"ranks \[0, 1\] still ran after")]
)
def test_failures_and_hangs_are_reported_and_ended(how: str, timeout: float, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        run_world(fail_or_hang, 2, how, timeout=timeout)
    pids = [int(line[4:]) for line in str(error.value).splitlines() if line.startswith("pid=")]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def hang(folder: str) -> None:
    (Path(folder) / f"rank_{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)


def test_ranks_end_with_a_killed_pytest(tmp_path: Path) -> None:
    code = f"from tests.test_worlds import hang, run_world; run_world(hang, 2, {str(tmp_path)!r})"
    with Python(["-c", code]):
        pids = [int(wait_for(tmp_path / f"rank_{rank}")) for rank in range(2)]
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive the process that has started them"
        time.sleep(0.05)


PROGRAMS = {
    "ends": "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ['SEEN'], file=sys.stderr)",
    "path": "import sys; print(__name__, len(sys.path), sys.path[0])",
    "code": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('no room')",
    "error": "import threading; threading.Timer(0.1, print, ['later']).start(); raise OSError('disk on fire')",
    "class": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    "except KeyboardInterrupt:\n    print('caught')",
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_forked_command_does_what_python_does(tmp_path: Path, program: str, how: str) -> None:
    (tmp_path / "module.py").write_text(PROGRAMS[program])
    arguments = {"-c": ["-c", PROGRAMS[program]], "-m": ["-m", "module"], "script": ["module.py"]}[how]
    given: dict[str, Any] = {"env": os.environ | {"SEEN": "here"}, "cwd": tmp_path}
    mine = run_python([*arguments, "x", "-y"], stdin="given", **given)
    real = subprocess.run(
        [sys.executable, *arguments, "x", "-y"], input="given", capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **given,
    )  # fmt: skip
    assert (mine.returncode, mine.stdout) == (real.returncode, real.stdout)
    assert mine.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_forked_command_is_killed_with_its_session() -> None:
    code = "import os, time; os.fork(); os.write(1, b'%d ' % os.getpid()); time.sleep(600)"
    deadline = time.monotonic() + 60
    with Python(["-c", code]) as process:
        while len(pids := process.stdout.split()) < 2:  # one write each: print() may make two
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 200
    while not (path.is_file() and (text := path.read_text())):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return text
