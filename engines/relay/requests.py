"""What trainers and replicas ask a relay, and its answers. Torch-free."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from engines.relay.message import HEADER_BYTES

PIECE_BYTES: Final = 4 << 20
"""Messages travel in pieces, so that heartbeats pass between them and no process holds many in flight."""
NUM_AHEAD: Final = 4
"""Pieces that are sent, or asked for, before the first is answered: hides the round trip."""
BUCKET_BYTES: Final = 64 << 20
"""Most bytes of a bucket's bits (ROSE §4.2)."""
MAX_MESSAGE: Final = HEADER_BYTES + BUCKET_BYTES + (1 << 16)

BucketBytes = Annotated[int, Meta(ge=1024, le=BUCKET_BYTES, description=f"from 1024 to {BUCKET_BYTES}")]
Session = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 letters, digits, '.', '_' and '-'")
]
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=256)]


class Version(Struct, frozen=True, order=True):
    """A version of the weights. A number alone would mix up runs: a resumed trainer may make other weights of it."""

    session: Text
    """Of the trainer; all its ranks share it, and a trainer that starts again has another."""
    number: Whole


class Open(Struct, frozen=True, tag=True):
    """A trainer's rank is about to push; answered with `Opened`. Older sessions are closed."""

    session: Text
    model: Text
    dtype: Text
    length: Whole
    """Logical elements of the model."""
    began: Whole = 0
    """When the pusher was made, in nanoseconds since 1970: so a relay that was started again knows which of two
    sessions is the newer one."""
    rank: Whole = 0
    pusher: Text = ""
    """Names the rank's `Pusher`: it may come back, and no other may go on under its session."""


class Opened(Struct, frozen=True, tag=True):
    store: Text
    """Names the relay's memory: another name means that all pushed before is gone."""


class Put(Struct, frozen=True, tag=True):
    """The next piece of a message that is pushed; answered with `Done`. The last one makes the relay check it."""

    session: Text
    start: Whole
    """Bytes of the message before this piece."""
    total: Annotated[int, Meta(ge=1, le=MAX_MESSAGE)]
    data: bytes


class Commit(Struct, frozen=True, tag=True):
    """A rank has pushed all its buckets of a version; answered with `Done`."""

    version: Version
    rank: Whole
    num_ranks: Annotated[int, Meta(ge=1, le=2**20)]
    buckets: list[tuple[Whole, Whole]]
    """(start, length) of each."""
    checksum: Annotated[int, Meta(ge=0)]
    """Of the rank's elements (`checksum_parts`), modulo 2^64."""


class Done(Struct, frozen=True, tag=True):
    problem: str = ""
    """Why the request was refused; empty if it was not."""


class Entry(Struct, frozen=True):
    """A message that the relay keeps."""

    start: Whole
    length: Whole
    number: Whole
    """Of the version, in the session of the listing."""
    base: Whole | None
    num_bytes: Whole


class List(Struct, frozen=True, tag=True):
    """Which messages make a version; answered with `Listing` as soon as there are more than `skip` buckets of it, or it
    is whole, or with `Done` and the problem."""

    version: Version
    have: Version | None
    """What the replica has: messages begin there, or are dense."""
    skip: Whole = 0
    """Buckets that were listed before."""
    only_whole: bool = False
    """Whether to answer only once the version is whole."""


class Listing(Struct, frozen=True, tag=True):
    entries: list[list[Entry]]
    """Per bucket, in the order of arrival, the messages to apply one after the other; none if the replica has it."""
    checksum: int | None
    """Of the whole weights; None while buckets are missing."""


class Read(Struct, frozen=True, tag=True):
    """A piece of a message; answered with `Data`, which is empty if the message was dropped."""

    session: Text
    start: Whole
    length: Whole
    number: Whole
    first: Whole
    """Bytes before the piece."""
    count: Annotated[int, Meta(ge=1, le=PIECE_BYTES)]


class Data(Struct, frozen=True, tag=True):
    data: bytes


class Ask(Struct, frozen=True, tag=True):
    """Answered with `State`."""


class State(Struct, frozen=True, tag=True):
    newest: Version | None
    """The newest whole version."""
    pushed: Version | None
    """The newest version that is being pushed."""
    missing: list[int]
    """Ranks that have not committed that one; empty also where none has."""
    num_bytes: Whole

    @property
    def late(self) -> str:
        return f"ranks {self.missing}" if self.missing else "all ranks"


Request = Open | Put | Commit | List | Read | Ask
Answer = Opened | Done | Listing | Data | State
