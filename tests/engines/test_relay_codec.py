"""Buckets of weights: the bits that come out are those that went in, or there is one error that names the field."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from engines.relay import codec, message
from engines.relay.codec import Bits, apply, encode, read_update
from engines.relay.message import BIT_TYPES, HEADER_BYTES, Bucket, DType, Header, read_bucket

DTYPES = get_args(DType)


def bucket(dtype: DType = "bfloat16", length: int = 1000, base_version: int | None = 6) -> Bucket:
    return Bucket(model="00ff" * 8, dtype=dtype, start=64, length=length, version=7, base_version=base_version)


def weights(length: int, seed: int = 0) -> Bits:
    """Bits of bfloat16 weights from N(0, 0.02)."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
    return values.view(torch.uint16).numpy()


def moved(base: Bits, density: float, seed: int = 0) -> Bits:
    """Random elements move to a neighbour."""
    rng, bits = np.random.default_rng(seed), base.copy()
    at = rng.random(len(base)) < density
    bits[at] += rng.choice(np.array([1, -1]), at.sum()).astype(bits.dtype)
    return bits


def decoded(data: bytes, expected: Bucket, base: Bits | None) -> Bits:
    return apply(read_update(data, expected), base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_changes_come_back_bit_for_bit(dtype: DType) -> None:
    """Of any bits, NaN, -0.0 and infinities among them; sparse and dense; in full, and by parts of a shard."""
    rng, kinds = np.random.default_rng(1), set()
    for case in range(300):
        length = int(rng.choice([1, 2, 255, 256, 4000, 200_000] if case < 12 else [1, 7, 700]))
        of = bucket(dtype, length)
        base = rng.integers(0, np.iinfo(BIT_TYPES[dtype]).max, length, BIT_TYPES[dtype], endpoint=True)
        bits, at = base.copy(), rng.random(length) < rng.choice([0, 0.0004, 0.03, 0.5, 1])
        bits[at] = rng.integers(0, np.iinfo(bits.dtype).max, at.sum(), bits.dtype, endpoint=True)
        if case % 2:
            bits[at] = base[at] + rng.integers(0, 3, at.sum()).astype(bits.dtype) - 1
        before, data = base.copy(), encode(bits, of, base)
        update = read_update(data, of)
        kinds.add(update.positions is None)
        assert read_bucket(data) == update.bucket == replace(of, base_version=None if update.positions is None else 6)
        assert np.array_equal(apply(update, base), bits) and np.array_equal(base, before)
        if update.positions is not None:
            assert np.array_equal(update.positions, np.flatnonzero(bits != base))
            which = update.positions % 3 == 0
            mine = update.positions[which]
            assert np.array_equal(update.new_bits(base[mine], which), bits[mine])
        alone = encode(bits, replace(of, base_version=None))
        assert np.array_equal(decoded(alone, replace(of, base_version=None), None), bits)
        assert len(data) <= len(alone)
    assert kinds == {True, False}


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_bits_like_others(dtype: DType) -> None:
    kind = getattr(torch, dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0], dtype=kind)
    integers = torch.int32 if dtype == "float32" else torch.int16
    with_payload = (special.view(integers) + torch.tensor([0, 0, 0, 0, 1, 0], dtype=integers)).view(kind)
    old = special.repeat_interleave(6).view(integers).numpy().view(BIT_TYPES[dtype])
    new = with_payload.repeat(6).view(integers).numpy().view(BIT_TYPES[dtype])
    of = bucket(dtype, 36)
    assert np.array_equal(decoded(encode(new, of, old), of, old), new)


def test_sizes() -> None:
    base, of = weights(4096), bucket(length=4096)
    assert len(encode(base, of, base)) == HEADER_BYTES + 3 * 8  # nothing changed: three empty sections
    one = base.copy()
    one[300] += 1
    sections = [bytes([255, 45]), bytes([2]), bytes([0])]  # 300 = 255 + 45; 1 by zigzag; no high byte
    assert encode(one, of, base)[HEADER_BYTES:] == b"".join(struct.pack("<Q", len(part)) + part for part in sections)
    assert len(encode(one, of, base, mode="paper")) == HEADER_BYTES + 6
    noise = np.random.default_rng(0).integers(0, 2**16, 4096, np.uint16)
    assert len(encode(noise, of, base)) == HEADER_BYTES + 2 * (8 + 4096)  # nothing deflates: dense, as it is
    assert read_bucket(encode(noise, of, base)).base_version is None


@pytest.mark.parametrize(("density", "times"), [(0.001, 1000), (0.01, 100), (0.04, 30), (0.5, 8)])
def test_messages_are_small(density: float, times: int) -> None:
    """Near the entropy: of where something changes, and one bit for the direction."""
    base, of = weights(2**22), bucket(length=2**22)
    bits = moved(base, density)
    size = len(encode(bits, of, base))
    assert of.num_bytes > times * size
    entropy = -density * np.log2(density) - (1 - density) * np.log2(1 - density) + density
    assert 0.97 < 8 * size / (entropy * 2**22) < (1.25 if density == 0.5 else 1.15)


def test_a_change_of_all_bits_is_dense() -> None:
    base, bits, of = weights(2**18), weights(2**18, seed=1), bucket(length=2**18)
    size = len(encode(bits, of, base))
    assert size == len(encode(bits, replace(of, base_version=None)))
    assert size < 0.7 * of.num_bytes  # signs and exponents deflate


def bf16_sums(bits: Bits, base: Bits) -> Bits:
    """What the paper's receiver has, by torch."""
    new, old = (torch.from_numpy(one.copy()).view(torch.bfloat16) for one in (bits, base))
    return (old + (new - old)).view(torch.uint16).numpy()


def test_the_paper_s_sums_lose_bits_and_ours_do_not() -> None:
    """About 1.7 % of the changed elements differ at a perturbation of 1e-3, 13.5 % at 1e-2."""
    rng, of = np.random.default_rng(0), bucket(length=2**18)
    values = torch.from_numpy(rng.normal(0, 0.02, 2**18).astype(np.float32))
    base = values.bfloat16().view(torch.uint16).numpy()
    wrong = {}
    for step in (1e-3, 1e-2):
        steps = torch.from_numpy(rng.normal(0, step, 2**18).astype(np.float32))
        bits = (values + steps).bfloat16().view(torch.uint16).numpy()
        got = decoded(encode(bits, of, base, mode="paper"), of, base)
        assert np.array_equal(got, bf16_sums(bits, base))
        wrong[step] = np.count_nonzero(got != bits) / np.count_nonzero(bits != base)
        assert np.array_equal(decoded(encode(bits, of, base), of, base), bits)
    assert 0.005 < wrong[1e-3] < 0.05 < wrong[1e-2] < 0.3


def test_the_paper_s_sums_of_special_values_are_those_of_torch() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40]).bfloat16()
    old, new = (one.view(torch.uint16).numpy() for one in (special.repeat_interleave(8), special.repeat(8)))
    of = bucket(length=64)
    got = torch.from_numpy(decoded(encode(new, of, old, mode="paper"), of, old)).view(torch.bfloat16)
    wanted = torch.from_numpy(bf16_sums(new, old)).view(torch.bfloat16)
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def resealed(data: bytes, **fields: Any) -> bytes:
    """The message with these header fields, and with checksums that fit."""
    header = Header(*message._HEADER.unpack_from(data))._replace(**fields)
    if "payload_bytes" not in fields and "payload_checksum" not in fields:
        payload = data[HEADER_BYTES:]
        header = header._replace(payload_bytes=len(payload), payload_checksum=zlib.crc32(payload))
    packed = message._HEADER.pack(*header)
    return packed + struct.pack("<I", zlib.crc32(packed)) + data[HEADER_BYTES:]


@pytest.mark.parametrize("mode", get_args(codec.Mode))
def test_every_field_of_the_header_counts(mode: codec.Mode) -> None:
    """Also where all checksums fit."""
    base, of = weights(1000), bucket()
    data = encode(moved(base, 0.05), of, base, mode=mode)
    sections = (("low_planes", 1, "payload"), ("low_planes", 9, "low_planes"), ("gap_bytes", 9, "gap_bytes"))
    for field, value, named in (
        ("magic", b"curtailK", "format"),
        ("format", 1, "format"),
        ("dtype", 1, "dtype"),
        ("dtype", 3, "dtype"),
        ("coding", 4, "coding"),
        ("coding", message.RAW, "base_version"),
        ("coding", message.DENSE, "base_version"),
        ("model", bytes(16), "model"),
        ("start", 0, "start"),
        ("start", 2**63, "start"),
        ("length", 999, "length"),
        ("length", 0, "length"),
        ("length", 2**33, "length"),
        ("base_version", 5, "base_version"),
        ("base_version", 7, "base_version"),
        ("base_version", -2, "base_version"),
        ("version", 8, "version"),
        ("version", -1, "version"),
        ("num_changed", 1, "num_changed|gap_bytes"),
        ("num_changed", 1001, "num_changed"),
        ("payload_bytes", 5, "payload_bytes"),
        ("payload_checksum", 5, "payload_checksum"),
        *(sections if mode == "lossless" else ()),
    ):
        with pytest.raises(ValueError, match=rf"\b({named})"):
            decoded(resealed(data, **{field: value}), of, base)


def test_a_receiver_takes_what_it_expects() -> None:
    base, of = weights(1000), bucket()
    bits = moved(base, 0.05)
    data = encode(bits, of, base)
    for field, value in (("model", "11" * 16), ("dtype", "float16"), ("start", 0), ("length", 1001), ("version", 8)):
        with pytest.raises(ValueError, match=f"{field}="):
            read_update(data, replace(of, **{field: value}))
    with pytest.raises(ValueError, match="base_version=6: the receiver has version 7"):
        read_update(data, replace(of, base_version=7))  # the same message again
    with pytest.raises(ValueError, match="base_version=6: the receiver has no version"):
        read_update(data, replace(of, base_version=None))
    with pytest.raises(ValueError, match="base_version=6"):
        apply(read_update(data, of))
    dense = encode(bits, replace(of, base_version=None))
    assert np.array_equal(decoded(dense, replace(of, base_version=3), base), bits)  # whatever it has


@pytest.mark.parametrize("kind", ["sparse", "dense", "paper", "raw"])
def test_damage_is_an_error(kind: str) -> None:
    """Cut anywhere, doubled, flipped anywhere. Where someone fits the checksums of header and payload to it, too, there
    are as many bits as expected, or there is an error of ours."""
    base, of = weights(300), bucket(length=300)
    bits = moved(base, 0.1)
    if kind in ("dense", "raw"):
        data = encode(bits, replace(of, base_version=None), mode="raw" if kind == "raw" else "lossless")
    else:
        data = encode(bits, of, base, mode="paper" if kind == "paper" else "lossless")
    for cut in range(len(data)):
        with pytest.raises(ValueError, match="bucket of weights: "):
            read_bucket(data[:cut])
    with pytest.raises(ValueError, match="payload_bytes"):
        read_bucket(data + data)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="bucket of weights: "):
            read_bucket(flipped)
        if bit >= 8 * HEADER_BYTES or bit % 8 == 3:
            try:
                assert len(decoded(resealed(bytes(flipped)), of, base)) == of.length
            except ValueError as error:
                assert "bucket of weights: " in str(error) or "Bucket." in str(error)


def test_a_small_message_cannot_take_much_memory() -> None:
    """Sections that would inflate to 64 MiB, in a bucket of 1,000 elements."""
    base, of = weights(1000), bucket()
    stream = zlib.compressobj(9, wbits=-15)
    bomb = stream.compress(bytes(2**26)) + stream.flush()
    assert len(bomb) < 2**17
    section = struct.pack("<Q", len(bomb)) + bomb
    fields = {"num_changed": 1000, "gap_bytes": 1000}
    sparse, dense = encode(moved(base, 1), of, base), encode(base, replace(of, base_version=None))
    small = zlib.compressobj(9, wbits=-15)
    little = small.compress(bytes(2**18)) + small.flush()  # fewer bytes than the section may have
    assert len(little) < 1000
    tracemalloc.start()
    for data in (sparse, dense):
        for payload in (3 * section, 3 * (struct.pack("<Q", len(little)) + little)):
            with pytest.raises(ValueError, match="payload"):
                read_update(resealed(data[:HEADER_BYTES] + payload, **(fields if data is sparse else {})), of)
    with pytest.raises(ValueError, match="num_changed"):
        read_update(resealed(sparse, num_changed=2**40, gap_bytes=2**40), of)
    with pytest.raises(ValueError, match="length"):
        read_update(resealed(sparse, length=2**32, num_changed=2**32, gap_bytes=2**32), of)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_what_a_sender_cannot_mean() -> None:
    base, of = weights(1000), bucket()
    for bits, field in ((base[:999], "bits"), (base.astype(np.uint32), "bits"), (weights(2000)[::2], "bits")):
        with pytest.raises(ValueError, match=f"{field}: "):
            encode(bits, of, base)
    with pytest.raises(ValueError, match="base: "):
        encode(base, of, base[1:])
    with pytest.raises(ValueError, match="base_version=6"):
        encode(base, of)
    with pytest.raises(ValueError, match="base_version=None"):
        encode(base, replace(of, base_version=None), base)
    with pytest.raises(ValueError, match="mode='paper'"):
        encode(base, replace(of, dtype="float16"), base, mode="paper")
    with pytest.raises(ValueError, match=r"Bucket\.model"):
        replace(of, model="tiny")
    with pytest.raises(ValueError, match=r"Bucket\.length"):
        replace(of, length=0)


def test_raw_messages_deflate_no_dense_bits() -> None:
    base, of = weights(2**16), bucket(length=2**16)
    few, many = moved(base, 0.01), moved(base, 0.2)
    for bits in (few, many):
        data = encode(bits, of, base, mode="raw")
        assert np.array_equal(decoded(data, of, base), bits)
        is_dense = read_update(data, of).positions is None
        assert is_dense == (bits is many) and (len(data) > of.num_bytes) == is_dense
    assert len(encode(few, of, base, mode="raw")) == len(encode(few, of, base))
    assert read_update(encode(many, of, base), of).positions is not None
