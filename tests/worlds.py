"""Starts worlds of real processes for tests, with the environment that torchrun gives them, and commands.

They are forked from a process that has imported what they need, which takes a process 2 to 7 seconds of its own. That
process has one thread and makes no tensors, so they are as if just started, with these exceptions: variables that are
read at import are those of the first world, sets of strings have one order in all processes, and what imports have
registered for the end of a process is left to the one that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from engines.lifetime import die_with, imports
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache, all_layouts
from experiments import launch
from tests.proc import open_files

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = (
    *("wandb", "wandb.sdk.launch.inputs.internal"),  # first: it looks through all modules for each of its classes
    *("engines.rollout.world", "experiments.training", "experiments.figures", "pytest"),
    *("deepspeed.ops", "deepspeed.module_inject.auto_ep_layer"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "peft", "typeguard"),
    *("experiments.generation", "experiments.train"),
)
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")]
FORKED = "forked"
"""The name that ps shows of a forked process, whose command line is that of the process that forks."""
_ASKS = threading.Lock()


def run_world(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 240.0, as_torchrun: bool = True
) -> list[Any]:
    """What `function(*args)` returned on each rank of a new world of `num_ranks` processes, one thread each.

    `function` is a module's, and its arguments and results are what `torch.save` can hold without pickled classes:
    tensors, numbers, strings, and lists and dicts of them. Without `as_torchrun` the one process gets no rank.
    Raises RuntimeError with the ends of all outputs when a rank fails, or when they take longer than `timeout` seconds.
    """
    assert as_torchrun or num_ranks == 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(list(args), folder / "args.pt")
        source = str(Path(sys.modules[function.__module__].__file__ or "").resolve())
        ranks = []
        for rank, env in enumerate(_environments(num_ranks) if as_torchrun else [{"OMP_NUM_THREADS": "1"}]):
            with open(folder / f"output_{rank}.txt", "wb") as output:
                call = {"source": source, "function": function.__name__, "folder": name, "rank": rank}
                ranks.append(_Forked(os.devnull, output, output, env=os.environ | env, call=call))
        problem = _wait(ranks, timeout)
        if problem:
            ends = [f"--- rank {rank}\n{_tail(folder / f'output_{rank}.txt')}" for rank in range(num_ranks)]
            raise RuntimeError("\n".join([f"{function.__name__}: {problem}", *ends]))
        return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def run_main(script: str, arguments: list[str], num_ranks: int = 1, stdin: str = "") -> Any:
    """What the command `experiments/<script>.py` returns on its rank 0."""
    return run_world(_main, num_ranks, script, arguments, stdin, as_torchrun=num_ranks > 1)[0]


def refused_by(script: str, arguments: list[str], num_ranks: int = 1, stdin: str = "") -> str:
    """What the command, which must end with code 2 and no traceback, has printed: rank after rank, in one line."""
    with pytest.raises(RuntimeError, match="rank 0 ended with code 2") as error:
        run_main(script, arguments, num_ranks, stdin)
    assert "Traceback" not in str(error.value)
    return " ".join(str(error.value).replace("│", " ").split())  # tyro sets errors in a box


def join(layouts: Iterable[Any] | None = None, *, timeout_s: float = 60.0, **options: Any) -> GroupCache:
    """On a rank: the groups of these layouts, by default of all that there are, in the world that it is part of."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=timeout_s)
    wanted = all_layouts(range(world.size)) if layouts is None else layouts
    return GroupCache(world, wanted, timeout_s=timeout_s, **options)


def error_of(call: Any) -> str:
    """The type and message of what it raises; empty when it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shared_files() -> int:
    """Files of shared memory that this process holds open, by the names that they had."""
    return sum("curtail-" in name for name in open_files().values())


def run_python(
    arguments: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` has printed, and how it ended; see `Python`."""
    with Python(arguments, stdin=stdin, env=env, cwd=cwd) as process:
        code = process.wait(240)
        return subprocess.CompletedProcess([*arguments], code, process.stdout, process.stderr)


@contextlib.contextmanager
def start_ranks(arguments: Sequence[str], num_ranks: int, cwd: Path = ROOT) -> Iterator[list[Python]]:
    """`python ARGUMENTS` on so many ranks; those that are left at the end are killed."""
    with contextlib.ExitStack() as stack:
        environments = [os.environ | env for env in _environments(num_ranks)]
        yield [stack.enter_context(Python(arguments, env=env, cwd=cwd)) for env in environments]


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """What torchrun gives the ranks of a new world."""
    world = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    world |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _main(script: str, arguments: list[str], stdin: str) -> Any:
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    sys.argv = [str(ROOT / f"experiments/{script}.py"), *arguments]
    results: list[Any] = []
    launch.run(lambda: results.append(importlib.import_module(f"experiments.{script}").main()))
    return results[0]


class _Forked:
    """A running process: a child of the process that forks, which therefore has to be asked how it ended."""

    def __init__(self, stdin: str, stdout: IO[bytes], stderr: IO[bytes], **start: Any) -> None:
        outputs = [f"/proc/{os.getpid()}/fd/{one.fileno()}" for one in (stdout, stderr)]
        self.pid = _ask({"stdio": [stdin, *outputs], **start})
        self.returncode: int | None = None
        self._polls = threading.Lock()

    def poll(self) -> int | None:
        """Any thread may call it: the answer comes once."""
        with self._polls:
            if self.returncode is None:
                self.returncode = _ask(self.pid)
            return self.returncode

    def kill(self) -> None:
        """With the processes of its session; returns once it has ended."""
        while self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.01)


class Python(_Forked):
    """`python SCRIPT ...`, `python -c CODE ...` or `python -m MODULE ...`, which spares it its imports. In a session of
    its own, with SIGINT as a terminal leaves it: a shell's background jobs ignore it.

    `stdin` is what it reads, or the path of a file or pipe; `terminal` is what it has in the place of stderr.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: str | Path = "",
        terminal: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 - closed at its end
        with tempfile.NamedTemporaryFile("w") as given:
            given.write(stdin if isinstance(stdin, str) else "")
            given.flush()
            super().__init__(
                given.name if isinstance(stdin, str) else str(stdin),
                self._outputs[0],
                terminal or self._outputs[1],
                env=dict(os.environ if env is None else env),
                python=[*arguments],
                cwd=str(cwd),
            )

    @property
    def stdout(self) -> str:
        return self._printed(0)

    @property
    def stderr(self) -> str:
        return self._printed(1)

    def _printed(self, place: int) -> str:
        file = self._outputs[place].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("python", timeout, self.stdout, self.stderr)
            time.sleep(0.01)
        return code

    def __enter__(self) -> Python:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for file in self._outputs:
            file.close()


class Popen(_Forked):
    """As `subprocess.Popen`, for a `python -m MODULE` that the code under test starts. The module sees this process as
    its parent."""

    def __init__(self, command: list[str], *, stdin: int, stdout: IO[bytes], **options: Any) -> None:
        assert stdin == subprocess.PIPE and options.pop("stderr") == subprocess.STDOUT
        assert options.pop("start_new_session")
        ours, theirs = os.pipe()
        with open(ours, "rb") as given:
            options |= {"cwd": str(options["cwd"]), "python": command[1:], "parent": os.getpid()}
            super().__init__(f"/proc/{os.getpid()}/fd/{given.fileno()}", stdout, stdout, **options)
        self.stdin = open(theirs, "wb")  # noqa: SIM115 - closed by the code under test


def _wait(ranks: list[_Forked], timeout: float) -> str | None:
    """None once all have ended well; else what went wrong. None of them runs on return."""
    deadline = time.monotonic() + timeout
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                return "; ".join(f"rank {rank} ended with code {code}" for rank, code in failed)
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > deadline:
                return f"ranks {[rank for rank, code in enumerate(codes) if code is None]} still ran after {timeout} s"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()


def _tail(path: Path, num_characters: int = 4000) -> str:
    return path.read_bytes()[-num_characters:].decode(errors="replace")


def _free_port() -> int:
    """None that the kernel gives to clients: such a port may be taken before rank 0 listens on it."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@functools.cache
def _forker() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, also when this one is killed, and its ranks end with it."""
    # The ranks initialise CUDA, so that process must not: it may only ask NVML whether there is a device.
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, "-m", "tests.worlds"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)


def get_ready() -> None:
    """Returns when a process can be forked at once, which the first one waits for, for some seconds."""
    _ask(None)


def _ask(request: Any) -> Any:
    """The answer of the process that forks; see `_serve`. Any thread may ask."""
    with _ASKS:
        forker = _forker()
        assert forker.stdin is not None and forker.stdout is not None
        print(json.dumps(request), file=forker.stdin, flush=True)
        return json.loads(forker.stdout.readline())


def _serve() -> None:
    """Answers a process's start with its id, an id with how the process ended, None while it runs, and None once this
    process has imported all."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what imports print
    with imports():  # whose objects a rank would look through when it ends, for a second
        for name in (*IMPORTS, *MODELS):
            importlib.import_module(name)
        from wandb.sdk.data_types._private import MEDIA_TMP

        _use_once()
    # What is undone at the end is undone once: wandb's folder, and torch's operators, which takes longer than a start.
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.unregister(MEDIA_TMP.cleanup)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing after the fork, with what it has locked"
    parent = os.getpid()
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif request is not None:
            kinds = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)
            stdio = [os.open(path, os.O_NOCTTY | kind) for path, kind in zip(request.pop("stdio"), kinds, strict=True)]
            started, starting = os.pipe()
            if not (answer := os.fork()):
                answers.close()
                die_with(parent)
                for number, descriptor in enumerate(stdio):
                    os.dup2(descriptor, number)
                os.setsid()
                for descriptor in (*stdio, started, starting):
                    os.close(descriptor)
                _end(functools.partial(_run, **request))
            for descriptor in (*stdio, starting):
                os.close(descriptor)
            os.read(started, 1)  # returns when it has closed its end, too: now it has a session, which may be killed
            os.close(started)
        print(json.dumps(answer), file=answers, flush=True)
    MEDIA_TMP.cleanup()


def _use_once() -> None:
    """Fills the caches of libraries whose first use takes a process a few tenths of a second."""
    import matplotlib.pyplot as plt
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from experiments.config import parse

    parse([])
    get_checkpoint_conversion_mapping("llama")
    inspect.stack()
    figure, axes = plt.subplots(layout="constrained")
    axes.set(xscale="log", xlabel="x", title="title")
    axes.plot([1, 100], [0, 1], label="label")
    axes.legend()
    figure.savefig(io.BytesIO(), bbox_inches="tight")
    plt.close(figure)


def _end(run: Callable[[], None]) -> NoReturn:
    """Calls `run` and ends the process, as Python does but for freeing every object: that would take a rank a second or
    two, since memory that it shares with the process that forks is copied for it."""
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _run(
    *,
    env: dict[str, str],
    call: dict[str, Any] | None = None,
    python: list[str] | None = None,
    cwd: str = ".",
    parent: int | None = None,
) -> None:
    """The side of a process that has been forked. `parent`: the process that it sees as its parent."""
    Path("/proc/self/comm").write_text(FORKED)
    if parent is not None:
        os.getppid = lambda: parent
    os.environ.clear()
    os.environ.update(env)
    if call is not None:
        _run_rank(**call)
    if python is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        _run_python(*python)


def _run_python(first: str, *rest: str) -> None:
    """As `python FIRST REST` does."""
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.argv = [first, *rest]
    if first == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(first, run_name="__main__")


def _run_rank(*, source: str, function: str, folder: str, rank: int) -> None:
    """Calls the function of the file `source`, and leaves what it returns."""
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    result = getattr(module, function)(*torch.load(Path(folder) / "args.pt", weights_only=True))
    torch.save(result, Path(folder) / f"result_{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _serve()
