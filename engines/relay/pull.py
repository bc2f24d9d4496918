"""A replica pulls what its shards lack of a version, and patches its weights in place (ROSE §4.2).

What was applied is checked by the trainer's checksum over all logical elements. If it differs, the replica reads dense
messages once, and gives up if it still differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from engines.decoding import from_msgpack
from engines.models.decoder import Decoder
from engines.models.parameters import logical_shapes
from engines.parallel.collectives import Communicator
from engines.relay.client import DroppedError, Relay, RelayClient
from engines.relay.codec import Bits, Update, read_update
from engines.relay.flat import FlatModel, Piece, Rectangle, held_by
from engines.relay.held import as_tensor, signed
from engines.relay.message import BIT_TYPES, Bucket, dtype_of
from engines.relay.requests import Entry, List, Listing, State, Version

_MOST_DROPS = 8
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PullRecord:
    """What one version took on this rank."""

    number: int
    num_bytes: int
    """That came from the socket, all headers and answers included."""
    behind: int
    """How many versions newer it is than what the shard had; 0 if that came from no relay, or another trainer."""
    num_buckets: int
    """Of which this shard holds a part."""
    num_skipped: int
    """Of which it holds none."""
    num_dense: int
    """Buckets that were read whole."""
    apply_s: float
    check_s: float
    """Checksum of all weights, and those of the other shards."""
    seconds: float
    """From the call on: it includes the time until the version was there."""


class _Pulled(msgspec.Struct, frozen=True):
    """What a shard says to the other shards of its replica."""

    wanted: int
    """The trainer's checksum."""
    found: int
    """Of this shard's part."""
    problem: str = ""


class Puller:
    """Pulls for one shard. All shards of a replica call `pull` together. Buckets are read while others are pushed."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._client: RelayClient | None = None
        self._flat: FlatModel | None = None
        self.records: list[PullRecord] = []

    def wait_for_one(self) -> Version:
        """Returns the newest whole version, as soon as there is one. Raises ConnectionError if the relay does not
        answer, TimeoutError, which says what it has, if there is none."""
        deadline = time.monotonic() + self.relay.timeout_s
        while (state := self._state()).newest is None:
            if time.monotonic() > deadline:
                waited = f"{self.relay.timeout_s:g} s"
                raise TimeoutError(f"weights: no version became whole in {waited}; the relay has {state}")
            time.sleep(_POLL_S)
        return state.newest

    def pull(self, decoder: Decoder, group: Communicator, version: Version, have: Version | None) -> int:
        """Gives `decoder` the weights of a version, for which it waits. Returns their checksum, over all shards.

        `have` is the version that its weights are, if they came from a relay. Raises ConnectionError or TimeoutError,
        which name who was waited for, ValueError if the weights are of another model or dtype or the version was
        dropped, and RuntimeError if the checksum is wrong. The weights are of no version then.
        """
        began = time.monotonic()
        for base in (have, None) if have is not None else (None,):
            problem: Exception | None = None
            own = _Pulled(0, 0)
            try:
                pulling = _Pulling(self, decoder, version, base, began + self.relay.timeout_s)
                checksum = pulling.run()
                checking = time.monotonic()
                own = _Pulled(checksum, decoder.checksum())
            except Exception as error:
                problem = error
                self.leave()
                own = _Pulled(0, 0, f"{type(error).__name__}: {error}")
            shards = [from_msgpack(data, _Pulled) for data in group.all_gather_bytes(msgspec.msgpack.encode(own))]
            if problem is not None:
                raise problem
            if said := next((one.problem for one in shards if one.problem), ""):
                raise RuntimeError(f"{version}: another shard of the replica could not pull it: {said}")
            if sum(one.found for one in shards) % 2**64 == own.wanted:
                self.records.append(pulling.record(checking, began))
                return own.wanted
        raise RuntimeError(
            f"weights: {version}: they are not the trainer's, with dense messages, either; are trainer and "
            "replica of one installation?"
        )

    def _state(self) -> State:
        try:
            return self.client().state()
        except ConnectionError:
            self.leave()
            raise

    def flat(self, decoder: Decoder) -> FlatModel:
        if self._flat is None:
            self._flat = FlatModel.of(decoder.config, logical_shapes(decoder.config))
        return self._flat

    def client(self) -> RelayClient:
        if self._client is None or self._client.is_lost:
            self.leave()
            self._client = RelayClient(self.relay)
        return self._client

    def leave(self) -> None:
        """Closes the connection: late answers must not be taken for those to other requests."""
        if self._client is not None:
            self._client.close()
        self._client = None

    close = leave


class _Pulling:
    """One attempt to patch a shard."""

    def __init__(
        self, puller: Puller, decoder: Decoder, version: Version, have: Version | None, deadline: float
    ) -> None:
        self._puller, self._version, self._have, self._deadline = puller, version, have, deadline
        same = have is not None and have.session == version.session
        self._behind = version.number - have.number if have is not None and same else 0
        self._flat = puller.flat(decoder)
        self._shard = _Shard(self._flat, decoder)
        self._num_bytes = self._num_buckets = self._num_skipped = self._num_dense = 0
        self._apply_s = 0.0

    def run(self) -> int:
        """Returns the version's checksum. After a lost connection, and after a message was dropped, it begins
        again with dense messages, as some weights are new then."""
        drops = 0
        while True:
            try:
                return self._follow()
            except ConnectionError:
                if time.monotonic() > self._deadline:
                    raise
            except DroppedError:
                drops += 1
                if drops > _MOST_DROPS:
                    raise TimeoutError(f"{self._version}: was dropped {drops} times while it was read") from None
            except BaseException:
                self._puller.leave()  # answers to what was asked may still come
                raise
            self._have = None
            self._puller.leave()

    def _follow(self) -> int:
        skip = 0
        client = self._puller.client()
        received = client.num_bytes_received
        try:
            while True:
                listing = self._list(client, skip)
                self._patch(client, listing)
                skip += len(listing.entries)
                if listing.checksum is not None:
                    return listing.checksum
        finally:
            self._num_bytes += client.num_bytes_received - received

    def _list(self, client: RelayClient, skip: int) -> Listing:
        request = List(self._version, self._have, skip)
        seconds = max(0.0, self._deadline - time.monotonic())
        try:
            return client.ask(request, Listing, timeout_s=seconds)
        except ConnectionError:
            if client.is_lost:
                raise
            self._puller.leave()
            state = self._puller.client().state()
            raise TimeoutError(
                f"weights: {self._version} did not come within the relay's timeout_s; newest whole: {state.newest}, "
                f"being pushed: {state.pushed}, of which {state.late} are not done; look for what the trainer does"
            ) from None

    def _patch(self, client: RelayClient, listing: Listing) -> None:
        wanted = [path for path in listing.entries if path and self._shard.holds_of(path[0])]
        self._num_buckets += len(wanted)
        self._num_skipped += len(listing.entries) - len(wanted)
        entries = [entry for path in wanted for entry in path]
        for entry, message in zip(entries, client.read(self._version.session, entries), strict=True):
            at = time.monotonic()
            expected = Bucket(
                model=self._flat.fingerprint,
                dtype=self._shard.dtype,
                start=entry.start,
                length=entry.length,
                version=entry.number,
                base_version=entry.base,
            )
            update = read_update(message, expected)
            self._num_dense += update.positions is None
            self._shard.apply(update)
            self._apply_s += time.monotonic() - at

    def record(self, checking: float, began: float) -> PullRecord:
        now = time.monotonic()
        return PullRecord(
            number=self._version.number,
            num_bytes=self._num_bytes,
            behind=self._behind,
            num_buckets=self._num_buckets,
            num_skipped=self._num_skipped,
            num_dense=self._num_dense,
            apply_s=self._apply_s,
            check_s=now - checking,
            seconds=now - began,
        )


class _Shard:
    """The bits of a shard's weights, which updates change in place."""

    def __init__(self, flat: FlatModel, decoder: Decoder) -> None:
        self._flat = flat
        self.dtype = dtype_of("EngineConfig.dtype", str(decoder.dtype).removeprefix("torch."))
        self._kind = BIT_TYPES[self.dtype]
        self._bits: dict[str, Tensor] = {}
        self._held: Mapping[str, Rectangle | None] = {
            name: held_by(decoder.config, name, shape, decoder.shard) for name, shape in flat.shapes.items()
        }
        for name, view in decoder.logical_views().items():
            self._bits[name] = signed(view).view(len(view), flat.shapes[name][1] if len(view) == 0 else -1)

    def holds_of(self, entry: Entry) -> bool:
        return any(self._part(piece) is not None for piece in self._flat.pieces(entry.start, entry.length))

    def _part(self, piece: Piece) -> Rectangle | None:
        held = self._held[piece.rectangle.name]
        return None if held is None else piece.rectangle.part(held.rows, held.columns)

    def apply(self, update: Update) -> None:
        for piece in self._flat.pieces(update.bucket.start, update.bucket.length):
            if (part := self._part(piece)) is not None:
                if update.positions is None:
                    self._write(update, piece, part)
                else:
                    self._change(update, update.positions, piece, part)

    def _write(self, update: Update, piece: Piece, part: Rectangle) -> None:
        start, whole = update.bucket.start, piece.rectangle
        values = update.values[piece.start - start : piece.stop - start].reshape(-1, whole.width)
        inner = values[_inside(part.rows, whole.rows), _inside(part.columns, whole.columns)]
        held = self._held[part.name]
        assert held is not None
        target = self._bits[part.name][_inside(part.rows, held.rows), _inside(part.columns, held.columns)]
        target.copy_(as_tensor(np.ascontiguousarray(inner)))

    def _change(self, update: Update, positions: np.ndarray, piece: Piece, part: Rectangle) -> None:
        start, whole, held = update.bucket.start, piece.rectangle, self._held[part.name]
        assert held is not None
        first, last = np.searchsorted(positions, (piece.start - start, piece.stop - start))
        if first == last:
            return
        places = positions[first:last] - (piece.start - start)
        which: slice | np.ndarray = slice(first, last)
        if part == whole and whole.width == held.width:
            places += (whole.rows.start - held.rows.start) * held.width
        else:
            rows, columns = np.divmod(places, whole.width)
            rows += whole.rows.start - held.rows.start
            columns += whole.columns.start - held.columns.start
            inside = (rows >= 0) & (rows < held.rows.stop - held.rows.start) & (columns >= 0) & (columns < held.width)
            which = first + np.flatnonzero(inside)
            places = rows[inside] * held.width + columns[inside]
        flat = self._bits[part.name].view(-1)
        index = torch.from_numpy(places).to(flat.device)
        old: Bits = flat[index].cpu().numpy().view(self._kind)
        flat[index] = as_tensor(update.new_bits(old, which)).to(flat.device)


def _inside(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
