"""Hostile bytes, against everything that decodes what other processes, sockets and files give."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from algos.rewards import protocol
from algos.workers import messages
from engines.control import messages as m
from engines.parallel.collectives import SingleRank
from engines.rollout.journal import Journal
from engines.sequence import SequenceState
from engines.speculation import messages as drafts
from engines.speculation.server import DraftStore
from tests.states import make_state

DEPTH = 3000
STATE = make_state(1, [5, 6]).to_bytes()
END = {"replica_id": 0, "rank": 0, "phase": 0, "epoch": 0, "seq": 0}
NESTED = {"list": b"\x91" * DEPTH + b"\xc0", "dict": b"\x81\xa1x" * DEPTH + b"\xc0"}


def field(name: str, value: bytes) -> bytes:
    """A field of an object of msgpack, as msgpack."""
    return msgspec.msgpack.encode(name) + value


def nested() -> list[bytes]:
    """Requests to a draft server, an object and a list of nothing in lists in lists, or in objects in objects."""
    bodies = [b"\x82" + field("x", value) + field("type", b"\xa9UpdateCst") for value in NESTED.values()]
    return [body for one in bodies for body in (b"\x91" + one, one)] + list(NESTED.values())


def hostile() -> list[bytes]:
    """Nested; cut; with lengths of gigabytes; no UTF-8; random."""
    rng = random.Random(3)
    commands = [m.EndPhase(**END), m.PauseSequences(**END, sequence_ids=None, with_kv=True)]
    valid = [STATE, *map(m.encode, commands), m.encode(m.PhaseEnded(**END, acks=1))]
    valid.append(drafts.encode([drafts.UpdateCst(group_id="a", request_id=1, prev_token_count=0, new_tokens=[1])]))
    long = [kind + b"\xff\xff\xff\xff" for kind in (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")]
    out = [b"", b"\xa2\xff\xfe", *nested(), *long]
    for data in valid:
        place = rng.randrange(1, len(data))
        out += [data[:cut] for cut in range(0, len(data), 7)]
        out += [data[:place] + bad + data[place:] for bad in (*long, *NESTED.values(), b"\xa2\xff\xfe")]
        # A first field more, behind the number of fields.
        if 0x80 <= data[0] < 0x8F:
            more = bytes([data[0] + 1])
            out += [more + field("x", bad) + data[1:] for bad in (*NESTED.values(), *long, b"\xa2\xff\xfe")]
    return out + [rng.randbytes(rng.randrange(60)) for _ in range(2000)]


def receive(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<Q", len(data)) + data)
        return messages.receive(ours, protocol.Result)


DECODERS: dict[str, tuple[Callable[[bytes], Any], type[Exception]]] = {
    "decode_command": (m.decode_command, m.ProtocolError),
    "decode_event": (m.decode_event, m.ProtocolError),
    "SequenceState": (SequenceState.from_bytes, msgspec.DecodeError),
    "draft requests": (drafts.decode_requests, msgspec.DecodeError),
    "draft answers": (drafts.decode_answers, msgspec.DecodeError),
    "reward": (receive, msgspec.DecodeError),
}


@pytest.mark.parametrize("name", DECODERS)
def test_hostile_bytes_are_one_error(name: str) -> None:
    decode, error = DECODERS[name]
    num_refused = 0
    for data in hostile():
        try:
            decode(data)
        except error:
            num_refused += 1
    assert num_refused > 2000


def test_a_draft_store_goes_on() -> None:
    store = DraftStore(max_bytes=2**20)
    store.answer(drafts.encode([drafts.RegisterGroup(group_id="a", ttl_seconds=9)]), 0.0)
    for data in hostile():
        store.answer(data, 0.0)
    assert store.counts["malformed"] > 2000
    expected = drafts.Expected(group_id="b", request_id=1, token_count=0)
    update = drafts.UpdateCst(group_id="b", request_id=1, prev_token_count=1, new_tokens=[1])
    assert drafts.decode_answers(store.answer(drafts.encode([update]), 0.0)) == [expected]


@pytest.mark.parametrize(
    "line", [b"[" * DEPTH, b'{"x":' * DEPTH, b'{"weights": 1, "x": ' + b"[" * DEPTH, b'{"\xff": 1}']
)
def test_a_line_of_a_journal_loses_itself_alone(line: bytes, tmp_path: Path) -> None:
    journal = Journal(tmp_path, SingleRank())
    journal.path.write_bytes(line + b"\n")
    journal.recover(0)
    assert journal.find([make_state(1, [5, 6])], 1) == {}
    journal.close()
