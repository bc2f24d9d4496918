"""Records what a live coordinator's core was given and what it returned, and plays it to a fresh core. Torch-free.

A live rollout's decisions are a function of its events, so that any decision can be looked at again, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec

from engines.control import messages
from engines.coordination import requests
from engines.coordination.core import RolloutCore
from engines.decoding import from_msgpack

Log = list[tuple[float, bytes, bytes, list[bytes]]]
"""Of each event: its time, kind (a request's name, or "event" or "command"), content, and what the core returned."""


class RecordingCore(RolloutCore):
    """A core with the log of all that it was given since it was made."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log: Log = []

    def on_event(self, event: Any, now: float) -> Any:
        kind, content = _encode(event)  # before the core keeps it: states grow
        outputs = super().on_event(event, now)
        self.log.append((now, kind, content, [b":".join(_encode(one)) for one in outputs]))
        return outputs


@contextmanager
def recording(module: ModuleType) -> Iterator[None]:
    """The cores that this module makes meanwhile (`engines.rollout.world`, `engines.fleet.fleet`) keep a log."""
    plain = module.RolloutCore
    module.RolloutCore = RecordingCore  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.RolloutCore = plain  # type: ignore[attr-defined]


def play(log: Log, make_core: Callable[[], RolloutCore]) -> int:
    """Gives a fresh core the same events at the same times. Returns the number of outputs, which must be the same."""
    core, count = make_core(), 0
    for now, kind, content, expected in log:
        outputs = [b":".join(_encode(one)) for one in core.on_event(_decode(kind, content), now)]
        assert outputs == expected, f"after {kind!r} at {now}"
        count += len(outputs)
    return count


def _encode(item: Any) -> tuple[bytes, bytes]:
    if isinstance(item, msgspec.Struct):
        return b"message", messages.encode(item)  # type: ignore[arg-type]
    return type(item).__name__.encode(), msgspec.msgpack.encode(item)


def _decode(kind: bytes, content: bytes) -> Any:
    if kind == b"message":
        return messages.decode_event(content)
    return from_msgpack(content, getattr(requests, kind.decode()))
