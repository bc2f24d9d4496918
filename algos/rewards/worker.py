"""The process that runs a reward function: `python -m algos.rewards.worker`, which process.py starts.

It runs arbitrary user code on a model's output, so it must be safe to kill: all processes that it starts die with it,
and it dies as soon as the runner does (`guard.py`). Output of user code goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

from algos.own_code import load
from algos.rewards.protocol import Batch, Part, Ready, Result
from algos.workers.messages import receive, send
from algos.workers.user_code import describe_error, end_forks, finite, keyword_arguments, start_worker

RewardFunction = Callable[..., Any]


def describe_function(function: RewardFunction) -> Ready:
    """The function's arguments. Raises `ValueError` when it cannot be called with keyword arguments alone."""
    accepted, required = keyword_arguments(function)
    # An object with an `async def __call__` is as good as a coroutine function.
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Ready(is_async=is_async, accepted=accepted, required=required)


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
    values = [finite(item) for item in items]
    bad = [repr(item)[:100] for item, value in zip(items, values, strict=True) if value is None]
    error = f"returned {bad[0]}: must be a number from -1e30 to 1e30" if bad else ""
    return Result(part=number, kind="ok", values=values, error=error)


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
    sock, (spec,) = start_worker()
    worker = os.getpid()
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
