"""A serving process that `rose_borrowed.py` starts: it replays requests, and lends itself to the job over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from engines.fleet.borrowing import PATH
from engines.serving.lending import Lender
from engines.serving.refusals import Refused
from experiments.rose_serving import Lending, Models, Run, ServingProcess
from research.workloads.arrivals import Arrival

_START_S, _END_S = 120.0, 60.0
_MOST_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class LenderOrders:
    """What a serving process is to do."""

    models: Models
    lending: Callable[[], Lending]
    arrivals: list[Arrival]
    """With times from `begin` on."""
    seed: int


class LendingProcess:
    """A serving process, seen from the one that has started it."""

    def __init__(self, orders: LenderOrders, name: str) -> None:
        """It dies with this process."""
        self._name = name
        self._pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(orders, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def address(self) -> str:
        """Waits until it serves; returns its URL."""
        return str(self._hear(_START_S))

    def begin(self, at: float) -> None:
        """Its time 0 is `at`, by the monotonic clock."""
        self._say(at)

    def end(self) -> None:
        """No more requests come."""
        self._say(None)

    def result(self) -> Run:
        """Waits until its requests have ended. This and all others but `close` raise RuntimeError, naming it, if it has
        ended or takes too long."""
        found = self._hear(_END_S)
        self._process.join(_END_S)
        assert isinstance(found, Run)
        return found

    def close(self) -> None:
        self._process.kill()

    def _say(self, what: float | None) -> None:
        try:
            self._pipe.send(what)
        except OSError:
            raise self._has_ended() from None

    def _has_ended(self) -> RuntimeError:
        self._process.join(1.0)
        return RuntimeError(f"{self._name}: has ended with code {self._process.exitcode}; see above")

    def _hear(self, timeout_s: float) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise self._has_ended() from None
        raise RuntimeError(f"{self._name}: was waited for longer than {timeout_s:g} s")


def _serve(orders: LenderOrders, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    process = ServingProcess(orders.models)
    process.run(orders.arrivals[:3], None, seed=0)  # warm
    with ExitStack() as undo:

        def begin(lender: Lender) -> float:
            server = HTTPServer(("127.0.0.1", 0), _handler_of(lender))
            undo.callback(server.server_close)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            undo.callback(server.shutdown)
            pipe.send(f"http://127.0.0.1:{server.server_port}")
            start: float = pipe.recv()
            time.sleep(max(0.0, start - time.monotonic()))
            return start

        run = process.lend(
            orders.arrivals, orders.lending(), seed=orders.seed, begin=begin, goes_on=lambda: not pipe.poll()
        )
    pipe.send(run)


def _handler_of(lender: Lender) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(min(_MOST_BYTES, int(self.headers.get("Content-Length", 0))))
            try:
                if self.path != PATH:
                    raise Refused(404, f"{self.path}: only {PATH} is here")
                lender.lend(body)
                self.send_response(202)
                self.end_headers()
            except Refused as error:
                self.send_error(error.status, error.message)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
