"""What goes wrong around a relay, one case at a time; `tests/faults/relay.py` draws such cases at random."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engines.control.transport import Server
from engines.relay.client import Relay
from engines.relay.server import RelayServer
from tests.engines.test_relay import TOKEN, Replica, Trainer, closing
from tests.engines.test_sharding import BASE

__all__ = ["closing"]


class RelayInThread:
    """A relay that can be ended, and started again at its address."""

    def __init__(self, max_bytes: int = 2**26, kind: type[RelayServer] = RelayServer) -> None:
        self._max_bytes, self._port = max_bytes, 0
        self.start(kind)
        self.relay = Relay(self._server.address, TOKEN, patience_s=5.0, timeout_s=10.0)
        self._port = int(self.relay.address.rpartition(":")[2])

    def start(self, kind: type[RelayServer] = RelayServer) -> None:
        self._server = Server(TOKEN, port=self._port, interval_s=0.1, patience_s=5.0)
        self._thread = threading.Thread(target=kind(self._server, self._max_bytes).serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close()
        self._thread.join()


@pytest.fixture
def relay(closing: Any) -> Any:
    return closing(RelayInThread())


def connections() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "control-transport"]


def test_connections_that_were_lost_leave_nothing_behind(relay: RelayInThread) -> None:
    before = len(connections())
    trainer, replica = Trainer(BASE, relay.relay), Replica(BASE, 2, relay.relay)
    for number in range(3):
        version = trainer.push(number)
        replica.pull(version)
        trainer.finish()
        relay.close()
        clients = [one._client for one in (*trainer.pushers, *replica.pullers)]
        while not all(client is None or client.is_lost for client in clients):
            time.sleep(0.01)
        relay.start()
    trainer.push(3)
    trainer.finish()
    trainer.close()
    replica.close()
    assert len(connections()) == before
