"""A trainer's rank pushes the weights that it owns, by a thread, without a gather (ROSE §4.2, "Shard-aware")."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.constraints import Count, WholeNumber, check_value
from engines.relay.client import LinkSeconds, RefusedError, Relay, RelayClient, listens
from engines.relay.codec import Bits, encode
from engines.relay.flat import FlatModel, cut
from engines.relay.held import Held, check_held, checksum_of, held_bits, owned
from engines.relay.message import BIT_TYPES, Bucket, DType, dtype_of, num_written
from engines.relay.requests import (
    BUCKET_BYTES,
    BucketBytes,
    Commit,
    Done,
    List,
    Listing,
    Open,
    Opened,
    Session,
    Version,
)

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PushRecord:
    """What one version took on this rank."""

    number: int
    num_bytes: int
    """That were given to the socket, all headers and requests included."""
    num_elements: int
    num_changed: int
    """Elements that the messages write."""
    num_dense: int
    """Buckets that were sent whole."""
    num_buckets: int
    encode_s: float
    """Reading, comparing, coding and checksums."""
    seconds: float
    """Until all that this rank owns was at the relay."""
    num_attempts: int


@dataclass
class _Base:
    number: int
    bits: Bits
    num_sparse: int
    """Messages since the last dense one, and their bytes."""
    num_bytes: int


class Pusher:
    """Pushes this rank's elements of each version. Those that it alone has are its own; what every rank has whole is
    divided among them, so that no two push the same.

    The base of the next message is what the relay has acknowledged. When the relay has lost its memory, or refuses a
    message, all is pushed again, dense. Between `push` and `finish` the weights must not change. Until the next `push`,
    a relay that has lost them gets the bases: other ranks may not have finished, and replicas come late.
    """

    def __init__(
        self,
        relay: Relay,
        flat: FlatModel,
        held: Callable[[], Mapping[str, Held]],
        *,
        dtype: DType,
        session: str,
        rank: int = 0,
        num_ranks: int = 1,
        snapshot_every: int = 64,
        bucket_bytes: int = BUCKET_BYTES,
        deflates: bool = True,
        link_seconds: LinkSeconds | None = None,
    ) -> None:
        """`held` returns what this rank has, by Hugging Face name; the tensors are converted to `dtype`. All ranks of a
        trainer share a `session` that no other trainer has. After `snapshot_every` messages against a base, or when
        those are half as large as the bucket, a bucket is sent dense, so that late replicas read little. Without
        `deflates`, which pays on slow links, dense messages are larger and quicker to make. Raises ValueError for
        parameters of other names or sizes, and for other options that cannot be."""
        for name, value, hint in (
            ("rank", rank, WholeNumber),
            ("num_ranks", num_ranks, Count),
            ("snapshot_every", snapshot_every, WholeNumber),
            ("bucket_bytes", bucket_bytes, BucketBytes),
            ("session", session, Session),
        ):
            check_value(f"Pusher.{name}", value, hint)
        if rank >= num_ranks:
            raise ValueError(f"Pusher.rank={rank}: must be below num_ranks={num_ranks}")
        dtype = dtype_of("Pusher.dtype", dtype)
        self._relay, self._flat, self._held, self._dtype = relay, flat, held, dtype
        self._session, self._rank, self._num_ranks = session, rank, num_ranks
        self._snapshot_every, self._link_seconds = snapshot_every, link_seconds
        self._mode: Any = "lossless" if deflates else "raw"
        most = bucket_bytes // np.dtype(BIT_TYPES[dtype]).itemsize
        first = held()
        check_held(flat, first)
        runs, self._spans = owned(flat, first, rank, num_ranks)
        self._buckets = cut(runs, most)
        self._name, self._began = os.urandom(8).hex(), time.time_ns()
        self._bases: dict[int, _Base] = {}
        self._last: tuple[Commit, dict[int, Bits]] | None = None
        """The last whole version, until the next push."""
        self._client: RelayClient | None = None
        self._store = ""
        self.records: list[PushRecord] = []
        """One per version that became whole."""
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._whole: int | None = None
        self._error: BaseException | None = None
        self._is_busy = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="relay-push", daemon=True)
        self._thread.start()

    def push(self, number: int) -> None:
        """Begins to push the weights as they are, as this version; returns at once. Raises what ended the push before,
        or ConnectionError behind `close`; RuntimeError if that has not been finished, and ValueError for a number that
        is not above the one before."""
        check_value("version", number, WholeNumber)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._wanted is not None:
                raise RuntimeError(f"push({number}): version {self._wanted} is being pushed; call finish() first")
            if self.records and number <= self.records[-1].number:
                raise ValueError(f"version={number}: {self.records[-1].number} was pushed before; give a higher number")
            self._wanted, self._whole = number, None
            self._changed.notify_all()

    def version(self, number: int) -> Version:
        """What a replica pulls to have the weights of `push(number)`."""
        return Version(self._session, number)

    def finish(self) -> PushRecord | None:
        """Returns when the version that is being pushed is whole, None if there is none; the weights may change then.

        Raises ConnectionError or TimeoutError, which name who was waited for, or ValueError if the relay refuses it.
        """
        with self._changed:
            while self._error is None and self._wanted is not None and (self._is_busy or self._whole != self._wanted):
                self._changed.wait(_POLL_S)
            if self._error is not None:
                raise self._error
            if self._wanted is None:
                return None
            self._wanted = None
            return self.records[-1]

    def close(self) -> None:
        """Ends the thread, and what it pushes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if (client := self._client) is not None:
            client.close()
        self._thread.join(self._relay.patience_s)

    # -- the thread

    def _run(self) -> None:
        error: BaseException = ConnectionError(f"relay {self._relay.address}: the pusher was closed; make a new one")
        try:
            while self._wait_for_work():
                if (number := self._wanted) is None:
                    self._restore()
                    continue
                record = self._push(number)
                with self._changed:
                    self._whole = number
                    self.records.append(record)
        except BaseException as problem:
            error = problem
        self._leave()
        with self._changed:
            self._error, self._is_busy = error, False
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Returns False once the pusher is closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while not self._is_closing and not self._has_work():
                self._changed.wait(_POLL_S)
            self._is_busy = True
            return not self._is_closing

    def _has_work(self) -> bool:
        """Whether to push a version, or again what the relay may have lost."""
        if self._wanted is not None and self._whole != self._wanted:
            return True
        is_lost = self._client is None or self._client.is_lost
        return is_lost and (self._wanted is not None or self._last is not None)

    def _restore(self) -> None:
        """Gives the last version to a relay that has lost it; the weights may be others by now."""
        assert self._last is not None
        commit, kept = self._last
        if not listens(self._relay.address):  # to join would take its patience, and `close` would wait for that
            time.sleep(_POLL_S)
            return
        try:
            client = self._join()
            for start, _ in self._buckets:
                if self._wanted is not None or self._is_closing:
                    return
                if start not in self._bases:
                    client.put(self._session, *self._encoded(commit.version.number, start, kept[start]))
            client.ask(commit, Done)
        except ConnectionError:
            self._leave()
        except RefusedError:  # of another trainer, or it cannot be had any more
            self._last = None
            self._leave()

    def _push(self, number: int) -> PushRecord:
        began, refused = time.monotonic(), False
        self._last = None
        deadline = began + self._relay.timeout_s
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._attempt(number, began, deadline, attempts)
            except ConnectionError:
                if self._is_closing or time.monotonic() > deadline:
                    raise
                self._leave()
            except RefusedError:
                if refused:
                    raise
                refused = True
                self._bases.clear()
                self._leave()

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _attempt(self, number: int, began: float, deadline: float, attempts: int) -> PushRecord:
        client = self._join()
        sent, encode_s, checksum, changed, dense = client.num_bytes_sent, 0.0, 0, 0, 0
        held = self._held()
        check_held(self._flat, held, self._spans)
        for start, length in self._buckets:
            if self._is_closing:
                raise ConnectionError("the pusher was closed")
            at = time.monotonic()
            pieces = list(self._flat.pieces(start, length))
            bits = held_bits(held, self._flat, pieces, self._dtype)
            checksum += checksum_of(bits, pieces)
            message, acknowledge = self._encoded(number, start, bits)
            written = num_written(message)
            changed += length if written is None else written
            dense += written is None
            encode_s += time.monotonic() - at
            client.put(self._session, message, acknowledge)
        client.drain()
        at_relay = time.monotonic()
        version = self.version(number)
        commit = Commit(version, self._rank, self._num_ranks, self._buckets, checksum % 2**64)
        client.ask(commit, Done)
        self._wait_for_others(client, version, deadline)
        self._last = commit, {start: base.bits for start, base in self._bases.items()}
        return PushRecord(
            number=number,
            num_bytes=client.num_bytes_sent - sent,
            num_elements=sum(length for _, length in self._buckets),
            num_changed=changed,
            num_dense=dense,
            num_buckets=len(self._buckets),
            encode_s=encode_s,
            seconds=at_relay - began,
            num_attempts=attempts,
        )

    def _encoded(self, number: int, start: int, bits: Bits) -> tuple[bytes, Callable[[], None]]:
        """Returns a bucket's message, and what to call once the relay has it."""
        base = self._base_for(start, bits.nbytes)
        bucket = Bucket(
            model=self._flat.fingerprint,
            dtype=self._dtype,
            start=start,
            length=len(bits),
            version=number,
            base_version=None if base is None else base.number,
        )
        message = encode(bits, bucket, None if base is None else base.bits, mode=self._mode)
        after = _Base(number, bits, 0, 0)
        if base is not None and num_written(message) is not None:
            after = _Base(number, bits, base.num_sparse + 1, base.num_bytes + len(message))

        def acknowledge() -> None:
            self._bases[start] = after

        return message, acknowledge

    def _join(self) -> RelayClient:
        """Returns the connection; a new one begins without bases if the relay's memory is not the one that had them."""
        if self._client is not None and not self._client.is_lost:
            return self._client
        self._leave()
        self._client = client = RelayClient(self._relay, self._link_seconds)
        model = self._flat.fingerprint, self._dtype, self._flat.length
        opening = Open(self._session, *model, self._began, self._rank, self._name)
        store = client.ask(opening, Opened).store
        if store != self._store:
            self._bases.clear()
        self._store = store
        if self._is_closing:
            raise ConnectionError("the pusher was closed")
        return client

    def _base_for(self, start: int, num_bytes: int) -> _Base | None:
        base = self._bases.get(start)
        if base is None or base.num_sparse >= self._snapshot_every or 2 * base.num_bytes > num_bytes:
            return None
        return base

    def _wait_for_others(self, client: RelayClient, version: Version, deadline: float) -> None:
        whole = List(version, version, only_whole=True)
        seconds = max(self._relay.patience_s, deadline - time.monotonic())
        try:
            client.ask(whole, Listing, timeout_s=seconds)
        except ConnectionError:
            if client.is_lost:
                raise
            self._leave()
            raise TimeoutError(
                f"version {version.number} of the weights: {self._join().state().late} did not push it within "
                f"{self._relay.timeout_s:g} s; look for what they do"
            ) from None
