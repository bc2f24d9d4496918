"""The flat order of a model, and what a relay keeps of it: against numbering the elements one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.config import ModelConfig
from engines.models.parameters import logical_shapes
from engines.parallel.sharding import Shard
from engines.relay.codec import Bits, encode
from engines.relay.flat import FlatModel, cut, held_by
from engines.relay.message import Bucket
from engines.relay.requests import Commit, Entry, List, Open, Read, Version
from engines.relay.store import RelayStore
from tests.engines.test_sharding import BASE, CONFIGS

MODEL, LENGTH = "ab" * 16, 100
KEYS = [(0, 40), (40, 60)]


def flat_of(config: ModelConfig) -> FlatModel:
    return FlatModel.of(config, logical_shapes(config))


def numbered(flat: FlatModel) -> dict[str, np.ndarray]:
    """Each element's place in the flat order, block after block."""
    places = {name: np.full(shape, -1) for name, shape in flat.shapes.items()}
    count = 0
    for block in flat.blocks:
        area = block.rectangle
        places[area.name][area.rows, area.columns] = count + np.arange(area.size).reshape(-1, area.width)
        count += area.size
    return places


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_flat_order_has_each_element_once(config: ModelConfig) -> None:
    flat = flat_of(config)
    places = np.concatenate([place.reshape(-1) for place in numbered(flat).values()])
    assert np.array_equal(np.sort(places), np.arange(flat.length))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pieces_are_the_elements_of_a_run(config: ModelConfig) -> None:
    flat, rng = flat_of(config), random.Random(0)
    places = numbered(flat)
    for _ in range(60):
        start = rng.randrange(flat.length)
        length = rng.randint(1, min(flat.length - start, rng.choice([3, 500, flat.length])))
        found = []
        for piece in flat.pieces(start, length):
            area = places[piece.rectangle.name][piece.rectangle.rows, piece.rectangle.columns].reshape(-1)
            assert piece.start == area[0]
            found.append(area)
        assert np.array_equal(np.concatenate(found), np.arange(start, start + length))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_runs_are_what_ranks_hold_row_by_row(config: ModelConfig) -> None:
    """Parts as ZeRO-3 makes them, the last one short: no element twice, none left out, and no run longer than asked."""
    flat = flat_of(config)
    places = numbered(flat)
    for num_ranks in (1, 2, 3, 5):
        seen = []
        for rank in range(num_ranks):
            held = {}
            for name, (rows, columns) in flat.shapes.items():
                each = -(-rows * columns // num_ranks)
                first = min(rank * each, rows * columns)
                held[name] = (first, min(each, rows * columns - first))
            runs = cut(flat.runs(held), 37)
            assert all(length <= 37 for _, length in runs)
            mine = np.concatenate([np.arange(start, start + length) for start, length in runs])
            expected = [places[name].reshape(-1)[first : first + count] for name, (first, count) in held.items()]
            assert np.array_equal(mine, np.sort(np.concatenate(expected)))
            seen.append(mine)
        assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(flat.length))


def test_what_a_shard_lacks_is_a_few_runs() -> None:
    """Of a model that 8 shards cut evenly: one run per shard of 2, 4 and 8, but for what several shards hold."""
    config = replace(BASE, vocab_size=128, num_kv_heads=8, output_bias=False, mlp_bias=False)
    flat = flat_of(config)
    places = numbered(flat)
    for count in (2, 4, 8):
        for index in range(count):
            shard = Shard(index=index, count=count, max_count=8)
            own = []
            for name, shape in flat.shapes.items():
                held = held_by(config, name, shape, shard)
                assert held is not None
                if held.size < shape[0] * shape[1]:
                    own.append(places[name][held.rows, held.columns].reshape(-1))
            mine = np.sort(np.concatenate(own))
            assert np.count_nonzero(np.diff(mine) > 1) == 0


def test_fingerprints_are_of_names_shapes_and_order() -> None:
    prints = {flat_of(config).fingerprint for config in CONFIGS.values()}
    assert len(prints) == len(CONFIGS) and flat_of(BASE).fingerprint in prints


# -- the store


def bits_of(length: int, number: int) -> Bits:
    bits = np.random.default_rng(length).integers(0, 2**16, length, np.uint16)
    bits[number % length] = number
    return bits


def message(key: tuple[int, int], number: int, base: int | None = None, **fields: object) -> bytes:
    start, length = key
    bucket = Bucket(model=MODEL, dtype="bfloat16", start=start, length=length, version=number, base_version=base)
    old = None if base is None else bits_of(length, base)
    return encode(bits_of(length, number), replace(bucket, **fields), old)  # type: ignore[arg-type]


def opened(session: str = "s", max_bytes: int = 10**6) -> RelayStore:
    store = RelayStore(max_bytes)
    store.open(Open(session, MODEL, "bfloat16", LENGTH))
    return store


def push(store: RelayStore, number: int, base: int | None = None, session: str = "s") -> None:
    for key in KEYS:
        store.put(session, message(key, number, base))
    store.commit(Commit(Version(session, number), 0, 1, KEYS, number))


def wanted(store: RelayStore, number: int, have: int | None = None, session: str = "s") -> Any:
    """By bucket, (version, base) of the messages that are listed."""
    listing = store.list(List(Version(session, number), None if have is None else Version("s", have)))
    assert listing is not None and listing.checksum == number
    return [[(one.number, one.base) for one in path] for path in listing.entries]


def test_a_replica_reads_from_what_it_has_or_from_the_dense_one() -> None:
    store = opened()
    push(store, 1)
    push(store, 2, 1)
    push(store, 3, 2)
    assert wanted(store, 3) == [[(1, None), (2, 1), (3, 2)]] * 2
    assert wanted(store, 3, have=1) == [[(2, 1), (3, 2)]] * 2
    assert wanted(store, 3, have=3) == [[], []]
    assert wanted(store, 3, have=7) == wanted(store, 3), "a version that the relay never had"
    assert wanted(store, 2) == [[(1, None), (2, 1)]] * 2
    listing = store.list(List(Version("s", 3), Version("another trainer", 2)))
    assert listing is not None and len(listing.entries[0]) == 3


def test_what_is_older_than_the_newest_dense_one_is_dropped_once_that_is_whole() -> None:
    store = opened()
    push(store, 1)
    push(store, 2, 1)
    store.put("s", message(KEYS[0], 3))
    assert wanted(store, 2) == [[(1, None), (2, 1)]] * 2, "version 3 is not whole"
    store.put("s", message(KEYS[1], 3))
    store.commit(Commit(Version("s", 3), 0, 1, KEYS, 3))
    assert wanted(store, 3, have=2) == [[(3, None)]] * 2
    assert store.num_bytes == sum(len(message(key, 3)) for key in KEYS)
    with pytest.raises(ValueError, match="version=2: was dropped; the newest whole one is 3"):
        store.list(List(Version("s", 2), None))
    assert store.read(Read("s", *KEYS[0], 2, 0, 10)) == b""
    assert store.read(Read("s", *KEYS[0], 3, 2, 10)) == message(KEYS[0], 3)[2:12]


def test_until_the_next_one_is_whole_the_last_version_stays() -> None:
    """Also where a trainer died in the middle, and another one began and died, too."""
    store = opened()
    push(store, 1)
    store.put("s", message(KEYS[0], 2, 1))
    assert store.state().newest == Version("s", 1) and store.state().pushed == Version("s", 2)
    store.open(Open("t", MODEL, "bfloat16", LENGTH))
    store.put("t", message(KEYS[0], 1))
    assert wanted(store, 1, session="s") == [[(1, None)]] * 2
    assert store.list(List(Version("t", 1), None, only_whole=True)) is None
    assert store.list(List(Version("not yet open", 1), None)) is None
    store.open(Open("u", MODEL, "bfloat16", LENGTH))
    push(store, 1, session="u")
    assert store.state().newest == Version("u", 1) and wanted(store, 1, session="u") == [[(1, None)]] * 2
    assert store.num_bytes == sum(len(message(key, 1)) for key in KEYS)
    with pytest.raises(ValueError, match="session='s': was dropped"):
        store.list(List(Version("s", 1), None))
    for session in ("s", "t"):
        with pytest.raises(ValueError, match="another trainer has begun since"):
            store.put(session, message(KEYS[0], 2))
        with pytest.raises(ValueError, match="another trainer has begun since"):
            store.open(Open(session, MODEL, "bfloat16", LENGTH))


def test_buckets_are_listed_as_they_arrive() -> None:
    store = opened()
    assert store.list(List(Version("s", 1), None)) is None
    store.put("s", message(KEYS[1], 1))
    size = len(message(KEYS[1], 1))
    listing = store.list(List(Version("s", 1), None))
    assert listing is not None and listing.checksum is None
    assert listing.entries == [[Entry(*KEYS[1], 1, None, size)]]
    assert (
        store.list(List(Version("s", 1), None, skip=1)) is None
        and store.list(List(Version("s", 1), None, only_whole=True)) is None
    )
    store.put("s", message(KEYS[0], 1))
    store.commit(Commit(Version("s", 1), 0, 2, KEYS[:1], 2**64 - 1))
    assert store.state().missing == [1]
    store.commit(Commit(Version("s", 1), 1, 2, KEYS[1:], 5))
    listing = store.list(List(Version("s", 1), None, skip=2))
    assert listing is not None and listing.checksum == 4 and listing.entries == []


def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    store = opened(max_bytes=2000)
    with pytest.raises(ValueError, match="session='x': is not open"):
        store.put("x", message(KEYS[0], 1))
    for field, value in (("model", "cd" * 16), ("dtype", "float16")):
        with pytest.raises(ValueError, match=rf"bucket.{field}='{value}'"):
            store.put("s", message(KEYS[0], 1, **{field: value}))
        opening = {"session": "t", "model": MODEL, "dtype": "bfloat16", "length": LENGTH, field: value}
        with pytest.raises(ValueError, match=f"Open.{field}='{value}': this relay keeps"):
            store.open(Open(**opening))  # type: ignore[arg-type]
    damaged = bytearray(message(KEYS[0], 1))
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match="payload_checksum"):
        store.put("s", bytes(damaged))
    with pytest.raises(ValueError, match="elements 60 to 101, but the model has 100"):
        store.put("s", message((60, 41), 1))
    with pytest.raises(ValueError, match="base_version=1: is not here; push the bucket dense"):
        store.put("s", message(KEYS[0], 2, 1))
    assert store.num_bytes == 0
    push(store, 1)
    kept = store.num_bytes
    store.put("s", message(KEYS[0], 1))
    assert store.num_bytes == kept, "a doubled message"
    with pytest.raises(ValueError, match="version 1 is whole already"):
        store.put("s", message((0, 10), 1))
    store.put("s", message((0, 10), 2))
    with pytest.raises(ValueError, match="overlap another bucket of version 2"):
        store.put("s", message(KEYS[0], 2))
    with pytest.raises(ValueError, match="those of all ranks have 10 elements of the model's 100"):
        store.commit(Commit(Version("s", 2), 0, 1, [(0, 10)], 0))
    with pytest.raises(ValueError, match=r"2 of version 2 are not here, as \(0, 40\)"):
        store.commit(Commit(Version("s", 2), 0, 1, KEYS, 0))
    with pytest.raises(ValueError, match=r"relay: is full: \d+ bytes of at most 2000"):
        for number in range(3, 30):
            store.put("s", message(KEYS[0], number))
    assert wanted(store, 1) == [[(1, None)]] * 2


def test_random_pushes_leave_every_path_whole() -> None:
    """Whatever a trainer's ranks push, lose and push again, every version that is listed can be built from what is
    there, and from every older version that was whole."""
    rng, store = random.Random(3), opened(max_bytes=10**7)
    acknowledged: dict[tuple[int, int], int] = {}
    whole: list[int] = []
    refused = 0
    for number in range(1, 200):
        committed = 0
        for rank, key in enumerate(KEYS):
            base = acknowledged.get(key)
            if rng.random() < 0.15 or base is None:
                base = None
            try:
                store.put("s", message(key, number, base))
            except ValueError as error:  # an answer about a dense one was lost, and what it replaces was dropped
                assert f"base_version={base}: is not here; push the bucket dense" in str(error)
                store.put("s", message(key, number))
                refused += 1
            if rng.random() < 0.8:
                acknowledged[key] = number
            if rng.random() < 0.8:
                store.commit(Commit(Version("s", number), rank, 2, [key], 0))
                committed += 1
        whole += [number] * (committed == 2)
        if not whole:
            continue
        for have in (None, *rng.sample(whole, min(3, len(whole)))):
            listing = store.list(List(Version("s", whole[-1]), None if have is None else Version("s", have)))
            assert listing is not None
            for path in listing.entries:
                bits = None if have is None else np.uint16(have)
                for one in path:
                    assert one.base is None or bits == one.base
                    assert store.read(Read("s", one.start, one.length, one.number, 0, 2**20))
                    bits = np.uint16(one.number)
                assert bits == whole[-1]
    assert len(whole) > 60 and 0 < refused < 60


def test_an_older_trainer_that_comes_back_last_does_not_close_the_newer_one() -> None:
    """As after a restart of the relay, when both give it their weights again."""
    store = RelayStore(10**6)
    for session, began in (("new", 2), ("old", 1)):
        opening = Open(session, MODEL, "bfloat16", LENGTH, began)
        if session == "old":
            with pytest.raises(ValueError, match="session='old': another trainer has begun since"):
                store.open(opening)
        else:
            store.open(opening)
    push(store, 1, session="new")
    store.open(Open("newest", MODEL, "bfloat16", LENGTH, 3))
    push(store, 1, session="newest")
