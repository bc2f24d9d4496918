"""What goes wrong around a relay, one case at a time; `tests/faults/relay.py` draws such cases at random."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from engines.control.transport import Server
from engines.relay.client import Relay
from engines.relay.codec import encode
from engines.relay.message import Bucket
from engines.relay.process import RelayProcess, room_for
from engines.relay.requests import Answer, Commit, Listing, Open, State, Version
from engines.relay.server import RelayServer
from engines.relay.store import RelayStore
from tests.engines.test_relay import TOKEN, Replica, Trainer, closing
from tests.engines.test_sharding import BASE

__all__ = ["closing"]


class RelayInThread:
    """A relay that can be ended, and started again at its address."""

    def __init__(self, kind: type[RelayServer] = RelayServer, patience_s: float = 5.0) -> None:
        self._port = 0
        self.start(kind)
        self.relay = Relay(self._server.address, TOKEN, patience_s=patience_s, timeout_s=10.0)
        self._port = int(self.relay.address.rpartition(":")[2])

    def start(self, kind: type[RelayServer] = RelayServer) -> None:
        self._server = Server(TOKEN, port=self._port, interval_s=0.1, patience_s=5.0)
        self._thread = threading.Thread(target=kind(self._server, 2**26).serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close()
        self._thread.join()


@pytest.fixture
def relay(closing: Any) -> Any:
    return closing(RelayInThread())


def connections() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "control-transport"}


def test_connections_that_were_lost_leave_nothing_behind(relay: RelayInThread) -> None:
    before = connections()
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
    assert connections() - before == {relay._server._loop._thread}, "the relay's own"


def test_a_pusher_that_is_closed_says_so_and_leaves_nothing(relay: RelayInThread, closing: Any) -> None:
    """Before, while and after it pushes; the second rank does not push, so that the first one's push does not end."""
    before = set(threading.enumerate())
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
    assert not set(threading.enumerate()) - before


def test_a_pusher_that_is_closed_while_it_joins_leaves_no_connection(relay: RelayInThread) -> None:
    relay.close()
    before = set(threading.enumerate())
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
    assert not set(threading.enumerate()) - before


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


class Slow(RelayProcess):
    """Starts again only when it may."""

    def __init__(self, **options: Any) -> None:
        self.begins, self.may_go = threading.Event(), threading.Event()
        super().__init__(TOKEN, max_bytes=2**20, **options)

    def _start(self) -> None:
        if self.num_starts:
            self.begins.set()
            self.may_go.wait()
        super()._start()


def test_a_relay_that_is_closed_while_it_starts_again_ends() -> None:
    process = Slow()
    assert process.process is not None
    process.process.kill()
    process.begins.wait()
    closer = threading.Thread(target=process.close)
    closer.start()
    while not process._is_closing:
        time.sleep(0.01)
    process.may_go.set()
    process._thread.join(10.0)
    assert process.num_starts == 2 and process.process.poll() is not None
    closer.join()


def test_a_relay_has_room_for_the_most_that_trainers_push() -> None:
    """A bucket that is sent dense, twice against a base, as the first of these was small, and dense again; then the
    trainer dies, and another one sends it dense."""
    length, seen = 2**20, []
    rng = np.random.default_rng(0)
    of: dict[str, Any] = {"model": "ab" * 16, "dtype": "bfloat16", "start": 0, "length": length}
    store = RelayStore(room_for(length, "bfloat16") - (64 << 20) + 4 * 200)
    for session in ("first", "second"):
        store.open(Open(session, "ab" * 16, "bfloat16", length))
        old = np.zeros(length, np.uint16)
        for number, share in enumerate((1.0, 0.41, 0.9, 1.0)):
            bits = np.where(rng.random(length) < share, rng.integers(0, 2**16, length, np.uint16), old)
            base = number - 1 if number in (1, 2) else None
            message = encode(bits, Bucket(version=number, base_version=base, **of), old if base is not None else None)
            seen.append(len(message) / bits.nbytes)
            store.put(session, message)
            if number < 3:
                store.commit(Commit(Version(session, number), 0, 1, [(0, length)], 0))
            old = bits
    assert 0.45 < seen[1] < 0.5 and 0.9 < seen[2] < 1, seen
    assert store.state() == State(Version("second", 2), Version("second", 3), [], store.num_bytes)


def test_what_ends_a_pull_does_not_end_the_next_one(relay: RelayInThread, closing: Any) -> None:
    """Answers that were on their way are not taken for those to other requests."""
    trainer = closing(Trainer(BASE, relay.relay))
    replica = closing(Replica(BASE, 1, relay.relay, dtype="float32"))
    version = trainer.push(0)
    trainer.finish()
    for _ in range(2):
        with pytest.raises(ValueError, match="dtype='bfloat16': expected 'float32'"):
            replica.pull(version)


class Busy(RelayServer):
    """Answers the first question about its state only when another request has come."""

    late: list[tuple[str, Answer]] | None = None

    def _say(self, peer: str, answer: Answer) -> None:
        if isinstance(answer, State) and self.late is None:
            self.late = [(peer, answer)]
            return
        for one in self.late or []:
            super()._say(*one)
        self.late = []
        super()._say(peer, answer)


def test_an_answer_that_came_too_late_is_not_taken_for_another(closing: Any) -> None:
    relay = closing(RelayInThread(kind=Busy, patience_s=1.5))
    trainer = closing(Trainer(BASE, relay.relay, ranks=1))
    replica = closing(Replica(BASE, 1, relay.relay))
    with pytest.raises(ConnectionError, match=r"no answer to Ask for 1\.5 s"):
        replica.pullers[0].wait_for_one()
    version = trainer.push(0)
    trainer.finish()
    assert replica.pullers[0].wait_for_one() == version
    replica.pull(version)
    replica.assert_equal(trainer.weights)
