"""Starts and ends an experiment: ranks, this rank's share of the cores, one clear error line, one JSON line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from engines.decoding import from_msgpack
from engines.lifetime import die_with, exempt_from_collection, imports
from engines.parallel.owned_files import remove_all

if TYPE_CHECKING:
    from engines import LLM
    from engines.parallel.collectives import Communicator, TorchGroup

# Errors that a user can fix, printed in one line. Any other error is a bug and keeps its traceback.
USER_ERRORS = (ValueError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
TOKENS_DIFFER = 3
"""Exit code of an experiment that has given its result, in which variants drew different tokens, or in which nothing
happened that could have changed them."""
_PARENT = "CURTAIL_PARENT"
"""The variable that names the process with which this one dies."""
_REMOVAL_S: Final = 5.0
T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Surrounds output that is equal on all ranks (help and errors of the command line): only rank 0 prints it."""
    errors = io.StringIO()
    try:
        help_goes_to = io.StringIO() if rank() > 0 else sys.stdout
        with contextlib.redirect_stdout(help_goes_to), contextlib.redirect_stderr(errors):
            yield
    except SystemExit as ended:
        if ended.code and rank() == 0:
            told = errors.getvalue().rstrip()
            plain = " ".join(line.strip("│ ") for line in told.splitlines())
            if found := re.search(r"Error parsing [\w.-]+: (.*?) ─{5}", plain):  # what a field may not hold, in a box
                told = f"error: {as_typed(found[1])}"
            _tell(told)
        raise


def as_typed(message: str) -> str:
    """Returns a message that begins with a field's name, as `EngineConfig.block_size=0: ...`, with the option of this
    command in its place, as it was typed: `--rollout.block-size=0: ...`."""
    field, _, rest = message.partition("=")
    name = field.rpartition(".")[2].replace("_", "-")
    typed = [argument.partition("=")[0] for argument in sys.argv[1:]] if re.fullmatch(r"[\w.]+", field) else []
    alike = [one for one in typed if one.startswith("--") and one.removeprefix("--").rpartition(".")[2] == name]
    exact = f"--{field.replace('_', '-')}"
    return f"{exact if exact in alike else alike[0]}={rest}" if alike else message


def options(kind: type[T]) -> T:
    """Returns the options of the command line."""
    import tyro

    with told_once():
        # Without the marker it reads the source of each class for comments.
        return tyro.cli(kind, config=(tyro.conf.HelptextFromCommentsOff,))


def share_cores() -> int:
    """Gives torch this rank's fair share of the host's cores, and yields cores that other processes use.

    Returns the number of threads.
    """
    import torch

    from engines.native.wait_policy import watch_cores

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise an import of DeepSpeed warns that it sees no GPU
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    torch.set_num_threads(threads)
    watch_cores()
    return threads


def tell_engine(llm: LLM) -> None:
    """Prints two lines on rank 0's stderr: the engine's kernels and dtype, and its memory."""
    if rank() == 0:
        what = f"attention {llm.attention}, kernels {llm.kernels}, {llm.config.dtype} on {llm.device.type}"
        if llm.product_dtype != llm.config.dtype:
            what += f" (products in {llm.product_dtype}: this CPU has no {llm.config.dtype} instructions)"
        print(f"engine: {what}", llm.memory.summary(), sep="\n", file=sys.stderr, flush=True)


def on_rank_0(group: Communicator, act: Callable[[], Any]) -> Any:
    """Calls `act` on rank 0 and returns its result, which msgpack can hold, or raises ValueError, on every rank."""
    answer, problem = None, ""
    if group.rank == 0:
        try:
            answer = act()
        except (ValueError, OSError) as error:
            problem = str(error)
    answer, problem = from_msgpack(group.broadcast_bytes(msgspec.msgpack.encode((answer, problem))), tuple[Any, str])
    if problem:
        raise ValueError(problem)
    return answer


def gather(group: Communicator, mine: Any, kind: Any = Any) -> list[Any]:
    """Returns what each rank has given, as `kind`, which msgpack can hold."""
    return [from_msgpack(part, kind) for part in group.all_gather_bytes(msgspec.msgpack.encode(mine))]


def start_anew(*arguments: str, **environment: str) -> dict[str, Any]:
    """Runs this command once more, with these as its last arguments and outside of this torchrun world.

    Returns its result, also one with different tokens. Raises ValueError if it fails; its own error is then on stderr.
    """
    return result_of([*sys.argv, *arguments], environment, may_differ=True)


def result_of(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    may_differ: bool = False,
) -> dict[str, Any]:
    """Runs a command, whose `arguments` are Python's, outside of this torchrun world, and returns its result. Our
    commands die with this process. Raises ValueError if it fails, or, without `may_differ`, if its tokens differ."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env |= {**(environment or {}), _PARENT: str(os.getpid())}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in ((0, TOKENS_DIFFER) if may_differ else (0,)):
        raise ValueError(f"{Path(arguments[0]).name}: its processes ended with code {done.returncode}; see above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def start_under_torchrun(num_ranks: int) -> None:
    """Runs this command on `num_ranks` ranks with torchrun, and exits with their status. On a rank it only returns.

    A rank's error is printed last, without torchrun's own log and traceback.
    """
    if "RANK" in os.environ:
        return
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()
    os.environ[_PARENT] = str(os.getpid())
    # Without the `--`, torchrun would read our options as its own.
    arguments = ["--standalone", "--nproc-per-node", str(num_ranks), "--", *sys.argv]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        told = first.message.get("message") if isinstance(first.message, dict) else str(failed)
        print(told, file=sys.stderr, flush=True)
        sys.exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)
    except SignalException as ended:  # torchrun has sent the signal to the ranks
        sys.exit(128 + ended.sigval)
    sys.exit(0)


def join_world(num_ranks: int, *, on_cuda: bool = False) -> TorchGroup:
    """Runs this command on `num_ranks` ranks, unless torchrun has started it, and returns the group of all of them,
    each with its share of the cores. It lasts as long as the process."""
    start_under_torchrun(num_ranks)
    with imports():
        from engines.parallel.groups import start_world

    share_cores()
    return start_world((), on_cuda=on_cuda).world


def end_on_signals(last_words: Callable[[], str]) -> None:
    """Makes Ctrl-C, SIGTERM and a closed terminal end this process at once; rank 0 prints `last_words`.

    For a job that may end anywhere. A thread handles the signals, because Python runs no signal handler while the main
    thread waits in C++ for another rank. Forked processes are not affected.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    received, written = os.pipe()
    os.set_blocking(written, False)

    def end() -> None:
        while number := os.read(received, 1):
            if number[0] in caught:
                try:
                    if rank() == 0:  # not print, which the signal may have interrupted
                        os.write(2, f"\n{last_words()}\n".encode())
                finally:
                    _leave(128 + number[0])
        os.close(received)

    threading.Thread(target=end, name="end on signals", daemon=True).start()
    replaced = signal.set_wakeup_fd(written)
    # The main thread sleeps meanwhile, so that it does not report a rank that the same signal has ended.
    _set_handlers(caught, lambda *_: time.sleep(10))
    if replaced >= 0:
        os.close(replaced)  # ends the thread of the earlier call
    else:
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, caught),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, caught),
            after_in_child=lambda: _forget_handlers(caught),
        )


def _forget_handlers(caught: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    _set_handlers(caught, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)


def _set_handlers(numbers: Iterable[int], handler: Any) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _leave(code: int) -> NoReturn:
    """Ends this process at once, but for its shared files: waits for no other rank, and not for a disk that hangs."""
    removal = threading.Thread(target=remove_all, daemon=True)
    removal.start()
    removal.join(_REMOVAL_S)
    os._exit(code)


def _let_rank_0_speak() -> None:
    """Makes other ranks wait: most errors occur on all ranks. Rank 0 prints its own, torchrun then ends the rest."""
    if rank() > 0:
        time.sleep(3)


def _tell(error: str) -> None:
    """Prints the error on stderr, or under torchrun writes it to the file that torchrun prints last as the cause."""
    if ERROR_FILE not in os.environ:
        print(error, file=sys.stderr, flush=True)
        return
    # torchrun reports the earliest failure, in whole seconds. One second less puts it before ranks that torchrun ends.
    details = {"py_callstack": f"\n{error}", "timestamp": str(int(time.time()) - 1)}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": {"message": error, "extraInfo": details}}))


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Runs an experiment and prints its result, one JSON object, as the last line of rank 0's stdout.

    A user's error prints one line and exits with code 2, Ctrl-C prints one line and exits with 130. A result with a
    field `tokens_equal` or `log_equal` that is false, or with a list `not_exercised` that is not empty, is printed, and
    the process exits with code 3.
    """
    if parent := os.environ.pop(_PARENT, None):
        die_with(int(parent))
    elif ERROR_FILE in os.environ:  # torchrun's main thread has started it
        die_with(os.getppid())
    exempt_from_collection()
    for name in ("stdout", "stderr"):  # a file opened next would take a closed one's descriptor
        if getattr(sys, name) is None:
            _tell(f"error: {name} is closed; redirect it, if only to /dev/null")
            os._exit(2)
    try:
        result = main()
    except SystemExit as ended:  # from the command line's parser, which has printed the error
        if ended.code:
            _let_rank_0_speak()
        raise
    except USER_ERRORS as error:
        _let_rank_0_speak()
        sys.stdout.flush()
        where = f" (rank {rank()})" if rank() > 0 else ""
        _tell(f"error{where}: {as_typed(str(error))}")
        # Not sys.exit: at exit this rank could wait for ever in a collective that other ranks never enter.
        _leave(2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank() == 0:
            print("\ninterrupted", file=sys.stderr, flush=True)
        _leave(128 + signal.SIGINT)
    if rank() == 0 and result is not None:
        print(json.dumps(result), flush=True)
        if problems := list(_problems(result)):
            _tell(f"error: tokens and logs must be equal, and what is compared must happen: {'; '.join(problems)}")
            sys.exit(TOKENS_DIFFER)


def _problems(result: dict[str, Any], place: str = "") -> Iterator[str]:
    """All fields `tokens_equal` and `log_equal` of the result, at any depth, that are false, and all `not_exercised`
    that name any."""
    for name, value in result.items():
        if isinstance(value, dict):
            yield from _problems(value, f"{place}{name}.")
        elif name in ("tokens_equal", "log_equal") and not value:
            yield f"{place}{name} is false"
        elif name == "not_exercised" and value:
            yield f"{place}{name}: {', '.join(value)}"
