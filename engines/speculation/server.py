"""The grouped draft server (Seer §4.4): replicas send it what they generate, and fetch what others did. Torch-free.

It keeps tokens, not trees: each replica drafts from its own trees, so that no step waits for the server.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from engines.control.ends import Received
from engines.control.transport import Server
from engines.decoding import DecodeError
from engines.speculation.messages import (
    Answer,
    DraftCacheInfo,
    Expected,
    Fetched,
    RegisterGroup,
    UpdateCst,
    decode_requests,
    encode,
)

COUNTED: Final = ("malformed", "doubled", "gap", "evicted", "expired")
"""Events of a store: payloads that are no list of requests; updates without a new token; updates whose preceding tokens
are missing; groups dropped because of the byte bound; groups dropped because their TTL had passed."""
_GROUP_BYTES: Final = 512
_REQUEST_BYTES: Final = 256
_POLL_S: Final = 1.0


@dataclass(kw_only=True)
class _Group:
    ttl_seconds: int
    used: float
    version: int
    requests: dict[int, array[int]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return _GROUP_BYTES + sum(_REQUEST_BYTES + 4 * len(tokens) for tokens in self.requests.values())


class DraftStore:
    """Group -> request -> generated tokens, in at most `max_bytes`: then the group used longest ago is dropped.

    It has no clock: `now` is in seconds and never decreases.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._groups: OrderedDict[str, _Group] = OrderedDict()  # the one used longest ago first
        self._versions = itertools.count(1)  # of all groups: one that is dropped and made anew has another version
        self.num_bytes = 0
        """Bytes of the tokens, with an estimate of what holds them."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def answer(self, payload: bytes, now: float) -> bytes:
        """Obeys a client's requests; returns the answers, or b"" for none. Never raises, for any bytes."""
        try:
            requests = decode_requests(payload)
        except DecodeError:
            self.counts["malformed"] += 1
            return b""
        self.expire(now)
        answers: list[Answer] = []
        for request in requests:
            if isinstance(request, RegisterGroup):
                self.register_group(request.group_id, request.ttl_seconds, now)
            elif isinstance(request, UpdateCst):
                answers += self.update_cst(request, now)
            else:
                answers += self.fetch_cst(request.group_ids, request.draft_cache_infos, now)
        return encode(answers) if answers else b""

    def expire(self, now: float) -> None:
        """Drops the groups whose TTL has passed since their last use."""
        for group_id in [one for one, group in self._groups.items() if now - group.used > group.ttl_seconds]:
            self._drop(group_id, "expired")

    def register_group(self, group_id: str, ttl_seconds: int, now: float) -> None:
        group = self._use(group_id, now)
        if group is None:
            group = _Group(ttl_seconds=ttl_seconds, used=now, version=next(self._versions))
            self._groups[group_id] = group
            self._grow(_GROUP_BYTES)
        group.ttl_seconds = ttl_seconds

    def update_cst(self, update: UpdateCst, now: float) -> list[Answer]:
        """Appends the tokens that are new. If tokens before them are missing, appends none, and returns `Expected`."""
        group = self._use(update.group_id, now)
        known = array("i") if group is None else group.requests.get(update.request_id, array("i"))
        if group is None or update.prev_token_count > len(known):
            self.counts["gap"] += 1
            return [Expected(group_id=update.group_id, request_id=update.request_id, token_count=len(known))]
        if fresh := update.new_tokens[len(known) - update.prev_token_count :]:
            num_bytes = 4 * len(fresh) + (0 if known else _REQUEST_BYTES)
            group.requests.setdefault(update.request_id, known).extend(fresh)
            group.version = next(self._versions)
            self._grow(num_bytes)
        else:
            self.counts["doubled"] += 1
        return []

    def fetch_cst(self, group_ids: list[str], infos: list[DraftCacheInfo], now: float) -> list[Answer]:
        """Returns the tokens that the client lacks, `Expected` where the server has fewer, and last `Fetched`."""
        answers: list[Answer] = []
        versions: dict[str, int] = {}
        for group_id, info in zip(group_ids, infos, strict=True):
            group = self._use(group_id, now)
            versions[group_id] = 0 if group is None else group.version
            if group is not None and group.version == info.version:
                continue
            requests = {} if group is None else group.requests
            for request_id in requests.keys() | info.token_counts.keys():
                tokens, count = requests.get(request_id, array("i")), info.token_counts.get(request_id, 0)
                if count > len(tokens):
                    answers.append(Expected(group_id=group_id, request_id=request_id, token_count=len(tokens)))
                elif new := tokens[count:].tolist():
                    update = UpdateCst(group_id=group_id, request_id=request_id, prev_token_count=count, new_tokens=new)
                    answers.append(update)
        return [*answers, Fetched(versions=versions)]

    def _use(self, group_id: str, now: float) -> _Group | None:
        group = self._groups.get(group_id)
        if group is not None:
            group.used = now
            self._groups.move_to_end(group_id)
        return group

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._groups)), "evicted")

    def _drop(self, group_id: str, reason: str) -> None:
        self.num_bytes -= self._groups.pop(group_id).num_bytes
        self.counts[reason] += 1


class DraftServer:
    """A thread that serves a `DraftStore` to the clients that have the token, at `address`."""

    def __init__(self, token: bytes, *, host: str = "127.0.0.1", port: int = 0, max_bytes: int = 64 * 2**20) -> None:
        """Raises as `Server` does."""
        self._store = DraftStore(max_bytes=max_bytes)
        self._server = Server(token, host=host, port=port)
        self.address = self._server.address
        self._thread = threading.Thread(target=self._serve, name="draft-server", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Events by kind: those of the store, and the messages that the transport has dropped."""
        return {**self._store.counts, **self._server.rejected}

    def close(self) -> None:
        """Ends all connections. May be called twice."""
        self._server.close()
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError):  # closed
            while True:
                notice = self._server.receive(_POLL_S)
                if isinstance(notice, Received):
                    answers = self._store.answer(notice.payload, time.monotonic())
                    if answers:
                        with contextlib.suppress(ConnectionError):  # the client has left meanwhile
                            self._server.send(notice.peer, answers)
                elif notice is None:
                    self._store.expire(time.monotonic())
