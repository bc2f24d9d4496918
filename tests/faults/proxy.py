"""Stands between clients and a relay: passes their frames late, twice or not at all, and cuts connections."""

from __future__ import annotations

import contextlib
import threading

import zmq

from tests.faults.channel import Faults, Held

_HELD_MS, _IDLE_MS = 1, 20
_LONG_BYTES = 100
"""Answers without weights are shorter, but for lists of buckets."""


class _Link:
    """A client's connection, and the one to the relay that stands for it."""

    def __init__(self, faults: Faults) -> None:
        self.up, self.down = Held(faults), Held(faults)
        self.back: zmq.Socket[bytes] | None = None
        self.is_mute = False


class Proxy:
    """Frames are the transport's, which must notice each that is lost. Which are late or doubled is by `faults`, and
    those to be lost or cut off are asked for from another thread."""

    def __init__(self, relay: str, faults: Faults) -> None:
        """`relay` is its address; clients take `address`."""
        self._relay, self._faults = relay, faults
        self._num_to_lose = self._num_answers_to_lose = self._num_to_cut = self._num_to_mute = 0
        self._links: dict[bytes, _Link] = {}
        self._poller = zmq.Poller()
        self._front = self._socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._thread.start()

    def lose(self, count: int) -> None:
        """So many of the next frames do not arrive."""
        self._num_to_lose += count

    def lose_answers(self, count: int) -> None:
        """So many answers with weights do not arrive: a replica has patched some buckets then, and others not."""
        self._num_answers_to_lose += count

    def cut(self) -> None:
        """A connection to the relay is closed, with what is on its way; the next frame opens another one."""
        self._num_to_cut += 1

    def mute(self) -> None:
        """Nothing passes on a connection any more, and nobody is told."""
        self._num_to_mute += 1

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(10.0)
        assert not self._thread.is_alive(), "the proxy hangs"

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.setsockopt(option, value)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _run(self) -> None:
        while not self._is_closing:
            is_holding = any(link.up.is_holding or link.down.is_holding for link in self._links.values())
            self._poller.poll(_HELD_MS if is_holding else _IDLE_MS)
            self._strike()
            while (frames := _next(self._front)) is not None:
                self._take(self._links.setdefault(frames[0], _Link(self._faults)).up, frames[1:])
            for route, link in self._links.items():
                self._pass_on(route, link)
        for link in self._links.values():
            self._disconnect(link)
        self._front.close()

    def _pass_on(self, route: bytes, link: _Link) -> None:
        while link.back is not None and (frames := _next(link.back)) is not None:
            self._take_answer(link.down, frames)
        while (frames := link.up.next_due()) is not None:
            if not link.is_mute:
                if link.back is None:
                    link.back = self._socket(zmq.DEALER)
                    link.back.connect(self._relay)
                link.back.send_multipart(frames)
        while (frames := link.down.next_due()) is not None:
            if not link.is_mute:
                self._front.send_multipart([route, *frames])

    def _take_answer(self, held: Held, frames: list[bytes]) -> None:
        is_long = len(frames[-1]) >= _LONG_BYTES
        if is_long and self._num_answers_to_lose and self._faults.happens(0.1, "answers lost"):
            self._num_answers_to_lose -= 1
        else:
            self._take(held, frames)

    def _take(self, held: Held, frames: list[bytes]) -> None:
        if self._num_to_lose and self._faults.happens(0.2, "frames lost"):
            self._num_to_lose -= 1
        else:
            held.put(frames, may_repeat=True)

    def _strike(self) -> None:
        links = [link for link in self._links.values() if link.back is not None and not link.is_mute]
        if self._num_to_cut and links:
            self._num_to_cut -= 1
            self._disconnect(self._faults.rng.choice(links))
            self._faults.counts["cuts"] += 1
        if self._num_to_mute and links:
            self._num_to_mute -= 1
            self._faults.rng.choice(links).is_mute = True
            self._faults.counts["mutes"] += 1

    def _disconnect(self, link: _Link) -> None:
        if link.back is not None:
            self._poller.unregister(link.back)
            link.back.close()
            link.back = None


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    with contextlib.suppress(zmq.Again):
        return socket.recv_multipart(zmq.NOBLOCK)
    return None
