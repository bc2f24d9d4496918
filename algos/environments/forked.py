"""A worker as the pool's thread sees it: a connection to the process, and one to its guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from algos.environments.protocol import METHODS, Call, EnvironmentConfig, Ready, Result
from algos.workers.messages import encode, read
from engines.decoding import DecodeError

_GRACE = 0.2
"""An async call is cancelled at `timeout_s`; if it goes on, its process is killed this share of the limit later."""
END_S = 10.0
"""Most seconds that a guard may take to kill what it guards."""


class LostError(Exception):
    """The worker ended, or was killed, before it answered. The message says how."""

    def __init__(self, result: Result, *, was_sent: bool = True, is_certain: bool = False) -> None:
        """`was_sent`: whether the worker can have had the call. `is_certain`: it was the only one that the worker had,
        and hung."""
        super().__init__(result.error)
        self.result, self.was_sent, self.is_certain = result, was_sent, is_certain


class ForkedWorker:
    """Belongs to the running event loop. `on_lost` is called once, when the process and what it started are gone."""

    def __init__(
        self,
        template: socket.socket,
        ready: Ready,
        config: EnvironmentConfig,
        on_lost: Callable[[ForkedWorker], None],
    ) -> None:
        """Orders a worker of the template, and waits for nothing. Raises `OSError` when the template is gone."""
        self._ready, self._config, self._on_lost = ready, config, on_lost
        self.objects: set[int] = set()
        self.is_lost = self.has_started = False
        self._running: dict[int, asyncio.Future[Result]] = {}
        self._turn = asyncio.Lock()
        self._guard: int | None = None
        self._how = "was killed together with its guard"
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        channel, theirs = socket.socketpair()
        self._lifeline, its_guards = socket.socketpair()
        with theirs, its_guards:
            socket.send_fds(template, [b"+"], [theirs.fileno(), its_guards.fileno()])
        self._loop.add_reader(self._lifeline, self._hear_guard)
        self._connection = self._loop.create_task(asyncio.open_unix_connection(sock=channel))
        self._reading = self._loop.create_task(self._read())
        self._loop.call_later(config.start_timeout_s, self._give_up_start)

    async def call(self, call: Call) -> Result:
        """Makes a call. Raises `LostError` when the worker ends, by this call or another one."""
        is_async = any(self._ready.methods.get(name, False) for name in METHODS[call.method])
        async with contextlib.nullcontext() if is_async else self._turn:
            await asyncio.shield(self.started)
            if self.is_lost:
                raise LostError(self._lost(call.object), was_sent=False)
            _, writer = await asyncio.shield(self._connection)
            start, limit_s = time.monotonic(), self._config.timeout_s
            answered = self._running[call.object] = self._loop.create_future()
            writer.write(encode(call))
            try:
                async with asyncio.timeout(limit_s * (1 + _GRACE * is_async)):
                    result = await answered
            except TimeoutError:
                is_certain = len(self._running) == 1
                self.kill()
                await asyncio.shield(self.ended)
                error = f"{call.method} was not done after {limit_s:g} s"
                late = Result(object=call.object, failure="timed_out", error=error, seconds=time.monotonic() - start)
                raise LostError(late, is_certain=is_certain) from None
            return replace(result, seconds=time.monotonic() - start)

    def kill(self) -> None:
        """Lets the guard end the process and all that it has started. The loss follows."""
        self._signal_guard(signal.SIGCONT)  # user code may have stopped it
        with contextlib.suppress(OSError):
            self._lifeline.send(b"-")
        self._loop.call_later(END_S, self._signal_guard, signal.SIGKILL)

    def _signal_guard(self, number: signal.Signals) -> None:
        if self._guard is not None and not self.is_lost:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._guard, number)

    async def _read(self) -> None:
        """Hands on the results. A worker that closes the connection, or sends what is no result, is killed."""
        most = 8 * self._config.max_chars + 10_000
        with contextlib.suppress(EOFError, OSError, DecodeError):
            reader, _ = await asyncio.shield(self._connection)
            while True:
                result = await read(reader, Result, most)
                answered = self._running.pop(result.object, None)
                if answered is not None and not answered.done():
                    answered.set_result(result)
        self.kill()

    def _hear_guard(self) -> None:
        """The guard sends its pidfd and, when all else has ended, its worker's status."""
        data: bytes = b""
        fds: list[int] = []
        with contextlib.suppress(ConnectionError):
            data, fds, *_ = socket.recv_fds(self._lifeline, 1, 1)
        if fds:
            self._guard, self.has_started = fds[0], True
            self.started.set_result(None)
            return
        if data:
            name = next((one.name for one in signal.Signals if one == data[0] - 128), None)
            self._how = f"was killed by {name}" if name else f"exited with status {data[0]}"
        self._lose()

    def _give_up_start(self) -> None:
        if not self.has_started:
            self._lose()

    def _lost(self, number: int) -> Result:
        return Result(object=number, failure="lost", error=f"its process {self._how}")

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._lifeline)
        self._lifeline.close()
        self._reading.cancel()
        self._connection.add_done_callback(lambda done: done.result()[1].close())
        if self._guard is not None:
            os.close(self._guard)
        for number, answered in self._running.items():
            if not answered.done():
                answered.set_exception(LostError(self._lost(number)))
        if not self.started.done():
            self.started.set_result(None)
        self.ended.set_result(None)
        self._on_lost(self)
