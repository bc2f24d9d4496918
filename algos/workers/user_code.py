"""In a process of user code: how it begins, what the code may be called with, its errors, and the end of its forks."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from algos.advantages import MAX_REWARD
from algos.own_code import load
from algos.workers.guard import fork_worker, guard

T = TypeVar("T")


def start_worker() -> tuple[socket.socket, list[str]]:
    """The main of a worker's module calls this first. Goes on in a child process, which the parent guards; user code
    runs there, with the run's import path and nothing on stdin. Returns the socket to the run, and the module's own
    arguments."""
    fd, sys_path, folder, *arguments = sys.argv[1:]
    sock = socket.socket(fileno=int(fd))
    if child := fork_worker():
        sock.close()
        code = guard(child, lifeline=0)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)
    # Processes that user code starts must inherit neither the socket to the run nor the lifeline.
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    sys.path[:] = json.loads(sys_path)
    sys.argv[1:] = []
    return sock, arguments


def keyword_arguments(function: Callable[..., Any]) -> tuple[list[str] | None, list[str]]:
    """The keyword arguments that a function declares, None when it takes any (`**kwargs`), and those of them without a
    default. Raises `ValueError` when it cannot be called with keyword arguments alone."""
    given = inspect.signature(function).parameters.values()
    for one in given:
        if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
            raise ValueError(f"parameter {one.name!r} is positional-only; it is called with keyword arguments")
    named = [one for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in given)
    required = [one.name for one in named if one.default is one.empty]
    return None if takes_any else [one.name for one in named], required


def finite(item: Any) -> float | None:
    """Returns a number as a float, None for anything else and what is larger than any reward may be."""
    if isinstance(item, (str, bytes)):
        return None
    try:
        value = float(item)  # NumPy scalars and 0-d tensors are numbers too
    except Exception:
        return None
    return value if abs(value) <= MAX_REWARD else None


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that awaits nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the coroutine waits")


def describe_error(error: BaseException) -> str:
    """One line: type, message and where user code raised it; at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    ours = (getattr(sys.modules["__main__"], "__file__", None), load.__code__.co_filename)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = (frames[-1].filename, frames[-1].lineno) if frames else None
    if isinstance(error, SyntaxError) and error.filename:  # raised by the importer; the error itself names the line
        place = error.filename, error.lineno
    where = f" ({Path(place[0]).name}:{place[1]})" if place and place[0] not in ours else ""
    return (text[:450] + where[:50]).encode(errors="replace").decode()  # half a surrogate cannot be sent


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
