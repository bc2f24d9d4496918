"""uvicorn around a service: its socket, its start, and its end without losing a request. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from engines.serving.app import make_app
from engines.serving.service import Service

_SEND_BUFFER = 256 * 2**10
"""Bytes that the kernel keeps for a client that does not read."""
_POLL_S = 0.05
_CLOSE_S = 5.0
"""Seconds for the last bytes of answers."""
_KEEP_ALIVE_S = 75
"""Seconds of an idle connection. Clients must give it up first (httpx: 5 s), or one may send just as it is closed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str = "127.0.0.1", port: int = 8000, *, api_key: str | None = None) -> socket.socket:
    """Returns a socket that takes no connections yet; port 0 takes a free one. Raises ValueError if it cannot be had,
    or without a key for a host that other machines reach."""
    if host not in LOOPBACK and not api_key:
        raise ValueError(f"host={host!r}: other machines can reach it, so it needs an api_key")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"host={host!r}, port={port}: cannot be listened to ({error}); give others") from None
    return bound


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `Server`: uvicorn would close the socket before the running requests have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves until `stop`, or SIGTERM, SIGINT or SIGHUP where `run` is called by the main thread. Then new requests get
    503, running ones have `drain_s` to end; a second signal ends them at once."""

    def __init__(self, service: Service, bound: socket.socket, *, api_key: str | None = None) -> None:
        """`bound`: see `bind`."""
        self._service, self._socket, self._api_key = service, bound, api_key
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        # Connections inherit these: asyncio sets no TCP_NODELAY on those of a socket that it has not made itself, and
        # then each chunk could wait for 40 ms; and the kernel drops a connection whose peer reads nothing for so long.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stall_ms = min(int(2000 * service.limits.stall_s), 2**31 - 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        host, self.port = bound.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._stops = self._ends = False

    def run(self, on_start: Callable[[], None] = lambda: None) -> int:
        """Returns how many requests did not end in time."""
        return asyncio.run(self._run(on_start))

    def stop(self) -> None:
        """For any thread, and signals: the first call drains, the second one ends."""
        self._ends = self._stops
        self._stops = True

    async def _run(self, on_start: Callable[[], None]) -> int:
        service = self._service
        config = uvicorn.Config(
            make_app(service, api_key=self._api_key),
            **{"http": "h11", "loop": "asyncio", "ws": "none", "lifespan": "off"},  # type: ignore[arg-type]
            **{"log_level": "warning", "access_log": False, "server_header": False},  # type: ignore[arg-type]
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_CLOSE_S),
        )
        server = _Uvicorn(config)
        self._catch_signals()
        service.start()
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(_POLL_S)
            if serving.done():  # another process has taken the port since it was bound
                await serving
            on_start()
            while not (self._stops or serving.done()):
                await asyncio.sleep(_POLL_S)
            num_lost = await self._drain()
            server.should_exit, server.force_exit = True, self._ends
            await serving
        finally:
            service.stop()
        return num_lost

    async def _drain(self) -> int:
        """Returns how many requests were ended, since their time was over."""
        service = self._service
        service.is_draining = True
        end = asyncio.get_running_loop().time() + service.limits.drain_s
        while service.num_calls and not self._ends and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
        num_lost = service.num_calls
        service.fail_all("the server is shutting down")
        return num_lost

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
