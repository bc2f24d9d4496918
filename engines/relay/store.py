"""What a relay keeps: messages by bucket and version, and which versions are whole (ROSE §4.2). Torch-free, no sockets.

A version is *whole* when all ranks of its trainer have committed it and its buckets cover the model. Until the next one
is whole, the last one stays. A message against a base is taken only if the relay has the base's message, so that no
chain has a gap. When a version is whole, older messages on which neither it nor a newer one stands are dropped.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.relay.message import read_bucket
from engines.relay.requests import Commit, Entry, List, Listing, Open, Read, State, Version

Key = tuple[int, int]
"""(start, length) of a bucket."""


@dataclass(frozen=True)
class _Kept:
    base: int | None
    message: bytes


@dataclass
class _Progress:
    """A version that is whole or is being pushed."""

    order: list[Key] = field(default_factory=list)
    """Buckets as they arrived."""
    sorted: list[Key] = field(default_factory=list)
    num_ranks: int = 0
    committed: dict[int, Commit] = field(default_factory=dict)
    checksum: int | None = None
    """Once it is whole."""


@dataclass
class _Session:
    name: str
    kept: dict[Key, dict[int, _Kept]] = field(default_factory=dict)
    versions: dict[int, _Progress] = field(default_factory=dict)
    began: int = 0
    newest: int | None = None
    """The newest whole version."""
    pushers: dict[int, str] = field(default_factory=dict)
    """By rank."""


class RelayStore:
    """The messages of one model. All methods raise ValueError, which names field, value and fix, and change nothing
    then."""

    def __init__(self, max_bytes: int, model: tuple[str, str, int] | None = None) -> None:
        """`model` is what trainers must open: fingerprint, dtype and length; by default what the first one does."""
        self.name = os.urandom(8).hex()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._model = model
        self._opened: list[str] = []
        self._pushing: _Session | None = None
        self._whole: _Session | None = None
        """That of the newest whole version, until a newer session has one."""

    def open(self, request: Open) -> None:
        """Begins a trainer's session, or joins it; those that began before end."""
        model = request.model, request.dtype, request.length
        for name, kept, given in zip(("model", "dtype", "length"), self._model or model, model, strict=True):
            if kept != given:
                raise ValueError(f"Open.{name}={given!r}: this relay keeps weights of {kept!r}; start another relay")
        self._model = model
        is_new = request.session not in self._opened
        is_older = self._pushing is not None and request.began < self._pushing.began
        if request.session in self._opened[:-1] or (is_new and is_older):
            raise _closed(request.session)
        if is_new:
            self._opened.append(request.session)
            self._abandon(self._pushing)
            self._pushing = _Session(request.session, began=request.began)
        assert self._pushing is not None
        if self._pushing.pushers.setdefault(request.rank, request.pusher) != request.pusher:
            raise ValueError(
                f"session={request.session!r}: rank {request.rank} of another trainer has pushed under it; its "
                "versions may be other weights, so give a new session"
            )

    def put(self, session: str, message: bytes) -> None:
        """Keeps a message. One that it has already is left as it is."""
        found = self._current(session)
        bucket = read_bucket(message)
        assert self._model is not None
        model, dtype, length = self._model
        for name, given, wanted in (("model", bucket.model, model), ("dtype", bucket.dtype, dtype)):
            if given != wanted:
                raise ValueError(f"bucket.{name}={given!r}: the session was opened with {wanted!r}")
        key, number = (bucket.start, bucket.length), bucket.version
        if sum(key) > length:
            raise ValueError(f"bucket: elements {key[0]} to {sum(key)}, but the model has {length}")
        progress = found.versions.get(number, _Progress())
        kept = found.kept.get(key, {})
        if number in kept:
            return
        if found.newest is not None and number <= found.newest:
            raise ValueError(f"bucket.version={number}: version {found.newest} is whole already; push a newer one")
        if _overlaps(progress.sorted, key):
            raise ValueError(f"bucket: elements {key[0]} to {sum(key)} overlap another bucket of version {number}")
        if bucket.base_version is not None and bucket.base_version not in kept:
            raise ValueError(f"bucket.base_version={bucket.base_version}: is not here; push the bucket dense")
        if self.num_bytes + len(message) > self._max_bytes:
            raise ValueError(
                f"relay: is full: {self.num_bytes} bytes of at most {self._max_bytes}, and {len(message)} more came; "
                "raise max_bytes"
            )
        found.versions[number] = progress
        found.kept.setdefault(key, kept)[number] = _Kept(bucket.base_version, message)
        self.num_bytes += len(message)
        progress.order.append(key)
        insort(progress.sorted, key)

    def commit(self, request: Commit) -> None:
        """Notes that a rank has pushed all it owns; when all have, the version is whole."""
        found, number = self._current(request.version.session), request.version.number
        progress = found.versions.get(number, _Progress())
        lacking = [key for key in request.buckets if number not in found.kept.get(key, {})]
        if lacking:
            raise ValueError(f"Commit.buckets: {len(lacking)} of version {number} are not here, as {lacking[0]}")
        if progress.num_ranks not in (0, request.num_ranks) or request.rank >= request.num_ranks:
            ranks = f"rank {request.rank} of {request.num_ranks}"
            raise ValueError(f"Commit.num_ranks: {ranks} commits version {number}, which {progress.num_ranks} push")
        found.versions[number] = progress
        progress.num_ranks = request.num_ranks
        progress.committed[request.rank] = request
        if progress.checksum is not None or len(progress.committed) < request.num_ranks:
            return
        keys = {key for commit in progress.committed.values() for key in commit.buckets}
        assert self._model is not None
        if (covered := sum(length for _, length in keys)) != self._model[2]:
            del progress.committed[request.rank]
            raise ValueError(
                f"Commit.buckets: those of all ranks have {covered} elements of the model's {self._model[2]}; push "
                "every parameter"
            )
        progress.checksum = sum(commit.checksum for commit in progress.committed.values()) % 2**64
        found.newest = number
        self._settle(found)

    def list(self, request: List) -> Listing | None:
        """Returns what a replica should read; None where it has to wait."""
        session, number = request.version.session, request.version.number
        found = next((one for one in (self._pushing, self._whole) if one is not None and one.name == session), None)
        if found is None:
            if session in self._opened:
                raise ValueError(f"session={session!r}: was dropped; another trainer has pushed a whole version since")
            return None
        progress = found.versions.get(number)
        if progress is None:
            if found.newest is not None and number < found.newest:
                raise _dropped(number, found.newest)
            return None
        is_whole = progress.checksum is not None
        if not is_whole and (request.only_whole or len(progress.order) <= request.skip):
            return None
        have = request.have.number if request.have is not None and request.have.session == found.name else None
        entries = [_path(found.kept[key], key, number, have) for key in progress.order[request.skip :]]
        return Listing(entries, progress.checksum)

    def read(self, request: Read) -> bytes:
        """Returns a piece of a message; nothing if it was dropped."""
        for found in (self._pushing, self._whole):
            if found is not None and found.name == request.session:
                kept = found.kept.get((request.start, request.length), {}).get(request.number)
                return b"" if kept is None else kept.message[request.first : request.first + request.count]
        return b""

    def state(self) -> State:
        whole, pushing = self._whole, self._pushing
        newest = None if whole is None or whole.newest is None else Version(whole.name, whole.newest)
        number = max(pushing.versions, default=None) if pushing is not None else None
        if pushing is None or number is None:
            return State(newest, None, [], self.num_bytes)
        progress = pushing.versions[number]
        missing = [rank for rank in range(progress.num_ranks) if rank not in progress.committed]
        return State(newest, Version(pushing.name, number), missing, self.num_bytes)

    def _current(self, session: str) -> _Session:
        if self._pushing is None or session not in self._opened:
            raise ValueError(f"session={session!r}: is not open; send Open first")
        if session != self._pushing.name:
            raise _closed(session)
        return self._pushing

    def _settle(self, found: _Session) -> None:
        """Drops what no replica needs any more, after a version has become whole."""
        if self._whole is not None and self._whole is not found:
            self._drop(self._whole)
        self._whole, number = found, found.newest
        assert number is not None
        for kept in found.kept.values():
            needed: set[int] = set()
            for at in kept:
                if at >= number:
                    needed.update(_chain(kept, at))
            for at in kept.keys() - needed:
                self.num_bytes -= len(kept.pop(at).message)
        for at in [at for at in found.versions if at < number]:
            if any(at not in kept for kept in found.kept.values()):
                del found.versions[at]

    def _abandon(self, found: _Session | None) -> None:
        """Drops what will not become whole."""
        if found is None or found.newest is None:
            self._drop(found)
            return
        for kept in found.kept.values():
            for at in [at for at in kept if at > found.newest]:
                self.num_bytes -= len(kept.pop(at).message)
        for at in [at for at in found.versions if at > found.newest]:
            del found.versions[at]

    def _drop(self, found: _Session | None) -> None:
        if found is not None:
            self.num_bytes -= sum(len(one.message) for kept in found.kept.values() for one in kept.values())


def _path(kept: dict[int, _Kept], key: Key, number: int, have: int | None) -> list[Entry]:
    """Returns the messages from what a replica has, or from a dense one, to version `number`."""
    path = [Entry(*key, at, kept[at].base, len(kept[at].message)) for at in _chain(kept, number, have)]
    return path[::-1]


def _chain(kept: dict[int, _Kept], number: int, have: int | None = None) -> Iterator[int]:
    """Yields a version and those it stands on, up to a dense one, or to what a replica has."""
    at: int | None = number
    while at is not None and at != have:
        yield at
        at = kept[at].base


def _overlaps(keys: list[Key], key: Key) -> bool:
    after = bisect_left(keys, key)
    before = keys[after - 1] if after else (0, 0)
    return sum(before) > key[0] or (after < len(keys) and keys[after][0] < sum(key))


def _closed(session: str) -> ValueError:
    return ValueError(f"session={session!r}: another trainer has begun since; only one pushes to a relay")


def _dropped(number: int, newest: int) -> ValueError:
    return ValueError(f"version={number}: was dropped; the newest whole one is {newest}")
