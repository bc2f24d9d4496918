"""The thread that owns a zmq socket, and how such a socket is opened. Torch-free."""

from __future__ import annotations

import errno
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

from engines.control.sealing import HEADER

_BURST: Final = 256  # messages read before the thread serves its clock and outbox again: a flood starves neither
_LINGER_MS: Final = 500  # longest that close() waits until the last messages are sent
_BIND_S: Final = 1.0  # how long a port may still be in use
_CLOSE_S: Final = 2.0  # the longest that close() takes


class Loop:
    """The thread that owns a zmq socket: no other thread uses it, and heartbeats go on while other threads compute.

    `on_item` gets each item that was `put`, `on_frames` each received message. `on_tick(now, away_s)` is called once
    per interval, `away_s` seconds late. `on_end` gets the error that ended the thread, None for `close`; it returns
    whether to wait until its messages are sent. `on_cut` is called when a client's connection breaks; zmq reconnects.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        interval_s: float,
        on_item: Callable[[Any], None],
        on_frames: Callable[[list[bytes]], None],
        on_tick: Callable[[float, float], None],
        on_end: Callable[[Exception | None], bool],
        *,
        on_cut: Callable[[], None] | None = None,
    ) -> None:
        self._socket, self._interval_s = socket, interval_s
        self._on_cut = on_cut
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if on_cut is not None else None
        self._on_item, self._on_frames, self._on_tick, self._on_end = on_item, on_frames, on_tick, on_end
        self._outbox: deque[Any] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # no thread may write to the eventfd's number once it is closed
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="control-transport", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        with self._lock:
            if not self._is_open:
                raise ConnectionError("this end of the control connection is closed; make a new one")
            self._outbox.append(item)
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _run(self) -> None:
        problem = None
        try:
            self._serve()
        except Exception as error:
            problem = error
        linger_ms = 0
        try:
            linger_ms = _LINGER_MS if self._on_end(problem) else 0
        finally:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        due = time.monotonic()
        while self._is_open:
            ready = dict(poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000))))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._monitor in ready and self._monitor is not None and self._on_cut is not None:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                self._on_cut()
            self._send_all()
            for frames in itertools.islice(iter(self._receive, None), _BURST):
                self._on_frames(frames)
            now = time.monotonic()
            if now >= due:
                self._on_tick(now, now - due)
                due = now + self._interval_s
        self._send_all()

    def _send_all(self) -> None:
        while self._outbox:
            self._on_item(self._outbox.popleft())

    def _receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Binds the socket; retries while the port is in use, as zmq frees the port of a closed socket a moment later."""
    deadline = time.monotonic() + _BIND_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def open_socket(kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    """Opens a socket in the process's only context, which is never terminated: libzmq's term() was seen to hang, about
    once in 2000 closes that raced with a peer's close."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, HEADER.size))  # per frame: zmq disconnects a larger one's sender
    # No limit on unsent messages: a peer that does not read is dropped for its silence, and does not block others.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 100)  # per connection, of up to MAXMSGSIZE each
    return socket
