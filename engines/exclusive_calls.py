"""Calls of one object that must not overlap: while one runs, any other is refused at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class ExclusiveCalls:
    """Keeps which call of an object is running. Each call has its own lock, and holds it until it ends."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._latest = "", threading.Lock()

    def begin(self, name: str, held: threading.Lock) -> None:
        """Starts a call. Raises RuntimeError while another call runs, in another thread or further up in this one."""
        with self._guard:
            running, still_held = self._latest
            if still_held.locked():
                raise RuntimeError(
                    f"{name}: {running}() is running; wait until it has returned (on_finished is part of it)"
                )
            self._latest = name, held


class _HasCalls(Protocol):
    _calls: ExclusiveCalls


_T = TypeVar("_T", bound=_HasCalls)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def exclusive(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """A decorator: the method raises RuntimeError while any method with this decorator runs on the same object."""

    @functools.wraps(method)
    def checked(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        held = threading.Lock()
        with held:  # releases the lock also after an interrupt
            self._calls.begin(f"{type(self).__name__}.{method.__name__}", held)
            return method(self, *args, **kwargs)

    return checked
