"""The process that runs a reward function: `python -m algos.rewards.worker SPEC SOCKET_FD`.

It may run anybody's code on a model's output, so it is built to be killed: it leads a process group of its own, and
the whole group dies as soon as the runner does. What user code prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from algos.rewards.protocol import Batch, Hello, Part, Ready, Result, receive, send

RewardFunction = Callable[..., Any]


def load_function(spec: str) -> RewardFunction:
    """The function named by "package.module:function" or "path/to/file.py:function".

    Raises whatever the import raises, and `ValueError` when the name is not a function of the module.
    """
    module_name, _, attribute = spec.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    try:
        function = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{error}; check the name after the colon") from None
    if not callable(function):
        raise ValueError(f"{attribute!r} is a {type(function).__name__}, not a function")
    return function


def _load_file(path: Path) -> ModuleType:
    # The file may import its neighbours. Their folder comes last, so that a neighbour called math.py shadows nothing.
    sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look their module up
    module_spec.loader.exec_module(module)
    return module


def describe_function(function: RewardFunction) -> Ready:
    """What the function takes. Raises `ValueError` when it cannot be called with keyword arguments alone."""
    accepted: list[str] | None = []
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            accepted = None
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"parameter {parameter.name!r} is positional-only; reward functions get keyword arguments")
        elif parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            if accepted is not None:
                accepted.append(parameter.name)
            if parameter.default is inspect.Parameter.empty:
                required.append(parameter.name)
    # An object with an `async def __call__` is as good as a coroutine function.
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Ready(is_async=is_async, accepted=accepted, required=required)


async def score_part(function: RewardFunction, part: Part, index: int, timeout_s: float) -> Result:
    """Call the function once. An awaitable is cancelled after `timeout_s`; a sync function can only be killed."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    is_late = False

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = loop.call_later(timeout_s, cancel)
    try:
        returned = function(**part.arguments)
        if inspect.isawaitable(returned):
            returned = await returned
        values, error = read_values(returned, part.num_items)
        return Result(part=index, kind="ok", values=values, error=error)
    except BaseException as error:  # SystemExit too: a reward function must not end the worker by a mere sys.exit()
        if is_late:
            return Result(part=index, kind="timed_out", error=f"not done after {timeout_s:g} s")
        return Result(part=index, kind="raised", error=describe_error(error))
    finally:
        timer.cancel()


def read_values(returned: Any, num_items: int) -> tuple[list[float | None], str]:
    """The rewards, None where one is not a finite number, and the first of those in words.

    Raises `ValueError` when there are not `num_items` of them.
    """
    if isinstance(returned, (str, bytes, dict)):
        raise ValueError(f"returned a {type(returned).__name__}: must be a list of {num_items} numbers")
    items = list(itertools.islice(returned, num_items + 1))  # never the whole of an endless generator
    if len(items) != num_items:
        got = "more" if len(items) > num_items else str(len(items))
        raise ValueError(f"returned {got} rewards for {num_items} completions: must be one each")
    values = [_finite(item) for item in items]
    bad = next((item for item, value in zip(items, values, strict=True) if value is None), None)
    return values, f"returned {repr(bad)[:100]}: must be a finite number" if None in values else ""


def _finite(item: Any) -> float | None:
    if isinstance(item, (str, bytes)):
        return None
    try:
        value = float(item)  # NumPy scalars and 0-d tensors are numbers too
    except Exception:
        return None
    return value if math.isfinite(value) else None


def describe_error(error: BaseException) -> str:
    """One line: type, message and where it was raised; at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return text[:450] + where[:50]


def die_with_parent(lifeline: int) -> None:
    """Kill this process group when the other end of the pipe `lifeline` closes, whatever user code is doing then.

    On Linux the kernel itself sends the SIGKILL, so that code that never gives the interpreter lock back dies as well
    (and, unlike with PR_SET_PDEATHSIG, the thread that started this process may end). The thread below serves other
    systems, and the case that a forked sibling still holds the pipe.
    """
    poller = select.poll()
    poller.register(lifeline, 0)  # hang-up and error only
    parent = os.getppid()
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)

    def watch() -> None:
        while os.getppid() == parent and not poller.poll(500):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="reward-lifeline", daemon=True).start()


def serve(function: RewardFunction, sock: socket.socket) -> None:
    """Answer batches until the runner closes the connection."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def answer(index: int, raw: msgspec.Raw, timeout_s: float) -> None:
        send(sock, await score_part(function, msgspec.msgpack.decode(raw, type=Part), index, timeout_s))

    async def answer_all(batch: Batch) -> None:
        await asyncio.gather(*(answer(index, raw, batch.timeout_s) for index, raw in enumerate(batch.parts)))

    while True:
        try:
            loop.run_until_complete(answer_all(receive(sock, Batch)))
        except (EOFError, ConnectionError):
            return


def main() -> None:
    spec, sock = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    # Children that user code starts shall hold neither end of the runner's pipes, nor read from the lifeline.
    sock.set_inheritable(False)
    die_with_parent(os.dup(0))
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    sys.path[:] = receive(sock, Hello).sys_path
    sys.argv[1:] = []
    try:
        function = load_function(spec)
        ready = describe_function(function)
    except BaseException as error:
        send(sock, Ready(error=describe_error(error)))
        return
    send(sock, ready)
    serve(function, sock)


if __name__ == "__main__":
    main()
