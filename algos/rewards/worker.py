"""The process that runs a reward function: `python -m algos.rewards.worker SPEC SOCKET_FD SYS_PATH`.

It runs arbitrary user code on a model's output, so it must be safe to kill: all processes that it starts die with it,
and it dies as soon as the runner does (`guard.py`). Output of user code goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from algos.own_code import load
from algos.rewards.guard import fork_worker, guard
from algos.rewards.protocol import Batch, Part, Ready, Result, receive, send

RewardFunction = Callable[..., Any]


def describe_function(function: RewardFunction) -> Ready:
    """The function's arguments. Raises `ValueError` when it cannot be called with keyword arguments alone."""
    given = inspect.signature(function).parameters.values()
    for one in given:
        if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
            raise ValueError(f"parameter {one.name!r} is positional-only; reward functions get keyword arguments")
    named = [one for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in given)
    # An object with an `async def __call__` is as good as a coroutine function.
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    required = [one.name for one in named if one.default is one.empty]
    return Ready(is_async=is_async, accepted=None if takes_any else [one.name for one in named], required=required)


def score_part(
    function: RewardFunction, number: int, part: Part, worker: int, loop: asyncio.AbstractEventLoop
) -> Result:
    """Calls a sync function, outside any event loop, since it may run one. Only a kill of the worker stops the call."""
    try:
        with end_forks(worker):
            returned = function(**part.arguments)
            if inspect.isawaitable(returned):
                returned = loop.run_until_complete(returned)
            return read_values(number, returned, part.num_items)
    except BaseException as error:  # SystemExit too: sys.exit() in a reward function must not end the worker
        return Result(part=number, kind="raised", error=describe_error(error))


async def score_part_async(function: RewardFunction, number: int, part: Part, worker: int, timeout_s: float) -> Result:
    """Calls an async function, and cancels it after `timeout_s`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with end_forks(worker):
                return read_values(number, await function(**part.arguments), part.num_items)
    except BaseException as error:
        if limit.expired():
            return Result(part=number, kind="timed_out", error=f"not done after {timeout_s:g} s")
        return Result(part=number, kind="raised", error=describe_error(error))


def read_values(number: int, returned: Any, num_items: int) -> Result:
    """Reads the rewards that a call returned. Raises `ValueError` if they are not a list of `num_items`."""
    if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__iter__"):
        what = "None" if returned is None else f"a {type(returned).__name__}"
        raise ValueError(f"returned {what}: must be a list of {num_items} numbers")
    items = list(itertools.islice(returned, num_items + 1))  # never the whole of an endless generator
    if len(items) != num_items:
        got = "more" if len(items) > num_items else str(len(items))
        raise ValueError(f"returned {got} rewards for {num_items} completions: must be one each")
    values = [_finite(item) for item in items]
    bad = [repr(item)[:100] for item, value in zip(items, values, strict=True) if value is None]
    error = f"returned {bad[0]}: must be a finite number" if bad else ""
    return Result(part=number, kind="ok", values=values, error=error)


def _finite(item: Any) -> float | None:
    if isinstance(item, (str, bytes)):
        return None
    try:
        value = float(item)  # NumPy scalars and 0-d tensors are numbers too
    except Exception:
        return None
    return value if math.isfinite(value) else None


def describe_error(error: BaseException) -> str:
    """One line: type, message and where user code raised it; at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    place = (frames[-1].filename, frames[-1].lineno) if frames else None
    if isinstance(error, SyntaxError) and error.filename:  # raised by the importer; the error itself names the line
        place = error.filename, error.lineno
    where = f" ({Path(place[0]).name}:{place[1]})" if place and place[0] != __file__ else ""
    return text[:450] + where[:50]


@contextlib.contextmanager
def end_forks(worker: int) -> Iterator[None]:
    """Surrounds user code in the process `worker`. A process that the code has forked exits at the end of this context,
    as at the end of a program, so that it does not answer in the worker's place."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        if os.getpid() != worker:
            _exit_after(error)


def _exit_after(error: BaseException | None) -> NoReturn:
    status = int(error is not None)
    try:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = (error.code or 0) & 0xFF
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # a normal exit of the interpreter would close the worker's event loop


def serve(function: RewardFunction, is_async: bool, sock: socket.socket, worker: int) -> None:
    """Answers batches until the runner closes the connection."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def answer(number: int, part: Part, timeout_s: float) -> None:
        send(sock, await score_part_async(function, number, part, worker, timeout_s))

    async def answer_all(batch: Batch) -> None:
        await asyncio.gather(*(answer(number, part, batch.timeout_s) for number, part in batch.parts.items()))

    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            batch = receive(sock, Batch)
            if is_async:
                loop.run_until_complete(answer_all(batch))
                continue
            for number, part in batch.parts.items():
                send(sock, score_part(function, number, part, worker, loop))


def main() -> None:
    spec, sock, sys_path = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3])
    if child := fork_worker():
        sock.close()
        guard(child, lifeline=0)
    worker = os.getpid()
    # Processes that user code starts must inherit neither the socket to the runner nor the lifeline.
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    sys.path[:] = sys_path
    sys.argv[1:] = []
    try:
        with end_forks(worker):
            function = load(spec)
            ready = describe_function(function)
    except BaseException as error:
        send(sock, Ready(error=describe_error(error)))
        return
    send(sock, ready)
    serve(function, ready.is_async, sock, worker)


if __name__ == "__main__":
    main()
