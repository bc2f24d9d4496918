"""Weights as integers, in C++: the same as in numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines.models.checksums import checksum_parts
from engines.native import bits


@pytest.fixture(autouse=True)
def compiled() -> None:
    if bits.load() is None:
        pytest.skip("needs a C++ compiler")


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_changes_are_those_of_numpy(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    cases = []
    for length in (1, 2, 3, 4, 5, 63, 64, 65, 1000, 4099):
        for density in (0.0, 0.01, 0.5, 1.0):
            old = rng.integers(0, np.iinfo(kind).max, length, kind, endpoint=True)
            new = np.where(rng.random(length) < density, rng.integers(0, 2**16, length, kind), old).astype(kind)
            cases.append((new, old, *bits.changes(new, old)))
    monkeypatch.setattr(bits, "load", lambda: None)
    for new, old, positions, differences in cases:
        expected = bits.changes(new, old)
        assert positions.dtype == np.int64 and differences.dtype == kind
        assert np.array_equal(positions, expected[0]) and np.array_equal(differences, expected[1])
        assert np.array_equal(positions, np.flatnonzero(new != old))
    assert any(len(positions) == len(new) > 1 for new, _, positions, _ in cases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_checksums_are_those_of_torch(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices and vectors of any size, of parts with a place of their own, and of slices with gaps."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(70, 130, generator=generator).to(dtype)
    parts = [
        ("matrix", whole, ()),
        ("one row", whole[3:4], (slice(3, 4),)),
        ("columns", whole[:, 20:77], (slice(None), slice(20, 77))),
        ("vector", whole[:, 0].clone(), ()),
        ("none", whole[:0], ()),
    ]
    found = [checksum_parts([part], num_threads=threads) for part in parts]
    monkeypatch.setattr(bits, "load", lambda: None)
    assert found == [checksum_parts([part]) for part in parts]
    assert len(set(found)) == len(found)
