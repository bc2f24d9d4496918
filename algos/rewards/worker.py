"""The process that runs a reward function: `python -m algos.rewards.worker SPEC SOCKET_FD`.

It may run anybody's code on a model's output, so it is built to be killed: all that it starts dies with it, and it dies
as soon as the runner does (`guard.py`). What user code prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from algos.rewards.guard import fork_worker, guard
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


async def score_part(function: RewardFunction, batch: Batch, index: int, worker: int) -> Result:
    """Call the function once. An awaitable is cancelled after `timeout_s`; a sync function can only be killed."""
    result = functools.partial(Result, call=batch.call, part=index)
    part = msgspec.msgpack.decode(batch.parts[index], type=Part)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    is_late = False

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = loop.call_later(batch.timeout_s, cancel)
    try:
        with end_forks(worker):
            returned = function(**part.arguments)
            if inspect.isawaitable(returned):
                returned = await returned
            values, error = read_values(returned, part.num_items)
        return result(kind="ok", values=values, error=error)
    except BaseException as error:  # SystemExit too: a reward function must not end the worker by a mere sys.exit()
        if is_late:
            return result(kind="timed_out", error=f"not done after {batch.timeout_s:g} s")
        return result(kind="raised", error=describe_error(error))
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
    place = (frames[-1].filename, frames[-1].lineno) if frames else None
    if isinstance(error, SyntaxError) and error.filename:  # raised by the importer, of the line that it names
        place = error.filename, error.lineno
    where = f" ({Path(place[0]).name}:{place[1]})" if place else ""
    return text[:450] + where[:50]


@contextlib.contextmanager
def end_forks(worker: int) -> Iterator[None]:
    """Around user code, in the process `worker`. A process that the code forked ends where it leaves, as it would at
    the end of a program: it must not answer in the worker's place."""
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
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = (error.code or 0) & 0xFF
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)  # the interpreter's own end would take the worker's event loop apart


def serve(function: RewardFunction, sock: socket.socket, worker: int) -> None:
    """Answer batches until the runner closes the connection."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def answer(batch: Batch, index: int) -> None:
        send(sock, await score_part(function, batch, index, worker))

    async def answer_all(batch: Batch) -> None:
        await asyncio.gather(*(answer(batch, index) for index in range(len(batch.parts))))

    while True:
        try:
            loop.run_until_complete(answer_all(receive(sock, Batch)))
        except (EOFError, ConnectionError):
            return


def main() -> None:
    spec, sock = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    if child := fork_worker():
        sock.close()
        guard(child, lifeline=0)
    worker = os.getpid()
    # Children that user code starts shall hold neither end of the runner's pipes, nor read from the lifeline.
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    sys.path[:] = receive(sock, Hello).sys_path
    sys.argv[1:] = []
    try:
        with end_forks(worker):
            function = load_function(spec)
            ready = describe_function(function)
    except BaseException as error:
        send(sock, Ready(error=describe_error(error)))
        return
    send(sock, ready)
    serve(function, sock, worker)


if __name__ == "__main__":
    main()
