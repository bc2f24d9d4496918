"""What goes wrong around a relay, one case at a time; `tests/faults/relay.py` draws such cases at random."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engines.control.transport import Server
from engines.relay.client import Relay
from engines.relay.requests import Answer, Listing
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


def test_a_pusher_that_is_closed_says_so_and_leaves_nothing(relay: RelayInThread, closing: Any) -> None:
    """Before, while and after it pushes; the second rank does not push, so that the first one's push does not end."""
    before = threading.active_count()
    for moment in ("before", "while", "after"):
        trainer = Trainer(BASE, relay.relay)
        first = trainer.pushers[0]
        if moment == "while":
            first.push(1)
            while not first._bases:
                time.sleep(0.001)
        elif moment == "after":
            trainer.push(1)
            trainer.finish()
        trainer.close()
        with pytest.raises(ConnectionError, match="closed"):
            if moment != "while":
                first.push(2)
            first.finish()
    assert threading.active_count() == before


def test_a_pusher_that_is_closed_while_it_joins_leaves_no_connection(relay: RelayInThread) -> None:
    relay.close()
    before = threading.active_count()
    trainer = Trainer(BASE, relay.relay, ranks=1)
    trainer.push(1)
    while not connections():
        time.sleep(0.01)
    closer = threading.Thread(target=trainer.close)
    closer.start()
    while not trainer.pushers[0]._is_closing:
        time.sleep(0.01)
    relay.start()
    closer.join()
    trainer.pushers[0]._thread.join()
    relay.close()
    assert threading.active_count() == before


def test_a_relay_that_dies_later_gets_the_last_version_again(relay: RelayInThread, closing: Any) -> None:
    """The trainer's weights are others by then."""
    trainer = closing(Trainer(BASE, relay.relay))
    replica = closing(Replica(BASE, 2, relay.relay))
    for number in range(2):
        weights = trainer.step(seed=number)
        version = trainer.push(number)
        trainer.finish()
    for _ in range(2):
        trainer.step(share=0.5, seed=7)
        relay.close()
        relay.start()
        replica.pull(version)
        replica.assert_equal(weights)
    weights = trainer.step(seed=8)
    version = trainer.push(2)
    replica.pull(version)
    replica.assert_equal(weights)
    assert [one.num_attempts for one in trainer.finish()] == [1, 1]


class Deaf(RelayServer):
    """Tells one rank only that a version is whole."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_said = False

    def _say(self, peer: str, answer: Answer) -> None:
        if isinstance(answer, Listing):
            if self.has_said:
                return
            self.has_said = True
        super()._say(peer, answer)


def test_a_relay_that_dies_between_two_ranks_ends_does_not_hold_the_second(closing: Any) -> None:
    """The first one knows that the version is whole, and changes its weights."""
    relay = closing(RelayInThread(kind=Deaf))
    trainer = closing(Trainer(BASE, relay.relay))
    replica = closing(Replica(BASE, 2, relay.relay))
    weights = trainer.step()
    version = trainer.push(1)
    while not any(one._whole == 1 for one in trainer.pushers):
        time.sleep(0.01)
    first, second = sorted(trainer.pushers, key=lambda one: one._whole != 1)
    first.finish()
    relay.close()
    relay.start(RelayServer)
    second.finish()
    replica.pull(version)
    replica.assert_equal(weights)
