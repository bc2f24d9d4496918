"""Calls of one object that must not overlap: the first one runs, one that comes meanwhile is refused at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Turn:
    """Which call an object is in. Each call has a lock of its own, that it holds to its end."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._latest = "", threading.Lock()

    def take(self, name: str, held: threading.Lock) -> None:
        """Raises RuntimeError while another call runs, be it in another thread or further up in this one."""
        with self._guard:
            running, still_held = self._latest
            if still_held.locked():
                raise RuntimeError(
                    f"{name}: {running}() is running; wait until it has returned (on_finished is part of it)"
                )
            self._latest = name, held


class _HasTurn(Protocol):
    _turn: Turn


_T = TypeVar("_T", bound=_HasTurn)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def alone(method: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
    """The method raises RuntimeError while it or another one that is marked so runs on the same object."""

    @functools.wraps(method)
    def checked(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        held = threading.Lock()
        with held:  # which gives it back wherever an interrupt comes
            self._turn.take(f"{type(self).__name__}.{method.__name__}", held)
            return method(self, *args, **kwargs)

    return checked
