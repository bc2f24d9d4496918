"""Both ends of a control connection inside one process: queues in place of sockets, threads and clocks."""

from __future__ import annotations

import queue
from typing import Any

from engines.control.ends import Received, Woken


class _End:
    def __init__(self, inbox: queue.SimpleQueue[Any], outbox: queue.SimpleQueue[Any]) -> None:
        self.name = "rank-0"
        self._inbox, self._outbox = inbox, outbox

    def receive(self, timeout_s: float) -> Any:
        try:
            return self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def close(self, reason: str = "") -> None:
        """Nothing is there to close."""


class QueueServer(_End):
    """In place of a `Server` that "rank-0" has joined."""

    def send(self, peer: str, payload: bytes) -> None:
        assert peer == self.name
        self._outbox.put(payload)

    def peers(self) -> list[str]:
        return [self.name]

    def wake(self) -> None:
        self._inbox.put(Woken())


class QueueClient(_End):
    """In place of the `Client` of "rank-0"."""

    def send(self, payload: bytes) -> None:
        self._outbox.put(Received(peer=self.name, payload=payload))


def queue_pair() -> tuple[QueueServer, QueueClient]:
    up: queue.SimpleQueue[Any] = queue.SimpleQueue()
    down: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return QueueServer(up, down), QueueClient(down, up)
