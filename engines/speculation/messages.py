"""Messages between draft clients and a draft server, after Seer's Table 3, sent as msgpack. Torch-free.

A payload is a list of requests, or a list of answers. A group's prompt is never sent: token counts are of generated
tokens, and every client that asks for a group has its prompt.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from engines.decoding import from_msgpack

Token = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**40)]
GroupId = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[int, Meta(ge=0, lt=2**62)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A tagged struct: its kind travels with it."""


class RegisterGroup(_Message, frozen=True, kw_only=True):
    """The server keeps the group until `ttl_seconds` have passed since its last use by any client."""

    group_id: GroupId
    ttl_seconds: Annotated[int, Meta(ge=1, lt=2**31)]


class UpdateCst(_Message, frozen=True, kw_only=True):
    """The request's tokens from number `prev_token_count` on; also the server's answer to a fetch, per request."""

    group_id: GroupId
    request_id: RequestId
    prev_token_count: Count
    new_tokens: list[Token]


class DraftCacheInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client has of a group."""

    version: Count
    """The last one in `Fetched`; with 0 the server compares all counts."""
    token_counts: dict[RequestId, Count]
    """Request -> number of its tokens that client and server both had."""


class FetchCst(_Message, frozen=True, kw_only=True):
    """Asks for the tokens of these groups that the client lacks. Answered by `UpdateCst`s, `Expected`s, `Fetched`."""

    group_ids: list[GroupId]
    draft_cache_infos: list[DraftCacheInfo]

    def __post_init__(self) -> None:
        if len(self.group_ids) != len(self.draft_cache_infos):
            raise ValueError("FetchCst: give a DraftCacheInfo for each group")


class Expected(_Message, frozen=True, kw_only=True):
    """The server has only the request's first `token_count` tokens; the client sends the others again."""

    group_id: GroupId
    request_id: RequestId
    token_count: Count


class Fetched(_Message, frozen=True, kw_only=True):
    """The last answer to a fetch."""

    versions: dict[GroupId, Count]
    """Group -> its version, which changes with its tokens; 0 if the server does not have the group."""


Request = RegisterGroup | UpdateCst | FetchCst
Answer = UpdateCst | Expected | Fetched

encode = msgspec.msgpack.Encoder().encode


def decode_requests(data: bytes) -> list[Request]:
    return from_msgpack(data, list[Request])


def decode_answers(data: bytes) -> list[Answer]:
    return from_msgpack(data, list[Answer])
