"""Messages between verifiers and the drafters on other ranks, sent as msgpack. Torch-free.

A payload is a list of messages. Each is whole in itself: to get one twice, or late, does no harm.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from engines.decoding import from_msgpack
from engines.sequence import SamplingParams, SequenceId, SequenceKey

Token = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, lt=2**40)]
Share = Annotated[float, Meta(ge=0, le=1)]


class _Post(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """A tagged struct: its kind travels with it."""


class Enter(_Post, frozen=True, kw_only=True):
    """Draft for this sequence, of which the drafter may know nothing."""

    number: Count
    """What the guesses say again: a later rollout may have another sequence of the same key."""
    key: SequenceKey
    group_id: int
    params: SamplingParams
    num_prompt_tokens: Count
    tokens: list[Token]
    window: Count
    ahead: bool


class Commit(_Post, frozen=True, kw_only=True):
    """The sequence has these tokens from number `start` on. Answered by `Lacks` if the drafter has fewer before."""

    sequence_id: SequenceId
    start: Count
    tokens: list[Token]
    window: Count
    ahead: bool


class Leave(_Post, frozen=True, kw_only=True):
    sequence_ids: list[SequenceId]


class Guessed(_Post, frozen=True, kw_only=True):
    """All guesses behind the first `num_known` tokens of the sequence, which the drafter knows to be drawn."""

    sequence_id: SequenceId
    number: Count
    """That of its `Enter`."""
    num_known: Count
    tokens: list[Token]
    shares: list[Share]
    is_all: bool
    """Whether no more follow before the verifier has drawn: the last one ends the sequence, say."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.shares):
            raise ValueError("Guessed: give a share for each token")


class Lacks(_Post, frozen=True, kw_only=True):
    """The drafter knows only the first `num_known` tokens of the sequence; 0: it does not know the sequence."""

    sequence_id: SequenceId
    num_known: Count


class Serves(_Post, frozen=True, kw_only=True):
    """Whether the rank drafts now."""

    is_so: bool


ToDrafter = Enter | Commit | Leave
ToVerifier = Guessed | Lacks
"""What `RemoteDrafter` takes from a link."""

encode = msgspec.msgpack.Encoder().encode


def decode_to_drafter(data: bytes) -> list[ToDrafter]:
    """Raises DecodeError."""
    return from_msgpack(data, list[ToDrafter])


def decode_to_verifier(data: bytes) -> list[ToVerifier | Serves]:
    """Raises DecodeError."""
    return from_msgpack(data, list[ToVerifier | Serves])
