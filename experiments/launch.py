"""Starting and ending an experiment: this rank's share of the machine, one clear error, one JSON line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines import LLM

# Errors that a user can mend: told in one line. Anything else is a bug, and keeps its traceback.
USER_ERRORS = (ValueError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Around what every rank says alike, help and errors of the command line: only rank 0 is heard."""
    if rank() == 0:
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield


def share_cores() -> int:
    """Gives this rank's torch its fair share of the host's cores; returns that number of threads."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, wherever imported, warns that it sees no GPU
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    torch.set_num_threads(threads)
    return threads


def tell_engine(llm: LLM) -> None:
    """Two lines on rank 0's stderr: what runs, and what memory it takes."""
    if rank() == 0:
        what = f"attention {llm.attention}, kernels {llm.kernels}, {llm.config.dtype} on {llm.device.type}"
        print(f"engine: {what}", llm.memory.summary(), sep="\n", file=sys.stderr, flush=True)


def start_under_torchrun(num_ranks: int) -> None:
    """Becomes torchrun, which starts this command again on so many ranks; nothing to do where it has."""
    if "RANK" in os.environ:
        return
    sys.stdout.flush()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    os.execv(sys.executable, [*command, "--", *sys.argv])  # without the `--` it takes our options for its own


def _let_rank_0_speak() -> None:
    """Most errors come on all ranks alike. Rank 0 tells it, and torchrun then ends the others while they wait."""
    if rank() > 0:
        time.sleep(3)


def run(main: Callable[[], dict[str, Any] | None]) -> None:
    """Runs an experiment; its result is the last line of rank 0's stdout, as one JSON object.

    A user's error becomes one line on stderr and exit code 2.
    """
    try:
        result = main()
    except SystemExit as ended:  # of the command line's parser, which has told it
        if ended.code:
            _let_rank_0_speak()
        raise
    except USER_ERRORS as error:
        _let_rank_0_speak()
        sys.stdout.flush()
        where = f" (rank {rank()})" if rank() > 0 else ""
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
        # Not sys.exit: a collective that other ranks never enter must not hold this one at its exit.
        os._exit(2)
    if rank() == 0 and result is not None:
        print(json.dumps(result), flush=True)
