"""What a trainer's rank holds of each parameter: which part of it the rank pushes, and its bits (ROSE §4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.models.checksums import checksum_parts
from engines.relay.codec import Bits
from engines.relay.flat import FlatModel, Piece
from engines.relay.message import BIT_TYPES, DType

_CHUNK = 1 << 15
"""Elements that are converted at once on a CPU: more would wake torch's other threads, which the rollout uses."""


@dataclass(frozen=True)
class Held:
    """The elements of a parameter that a rank has, row by row."""

    first: int
    """Number of the first one in the parameter."""
    tensor: Tensor
    """[N], contiguous, of floating point."""
    is_shared: bool = False
    """Whether every rank has these elements, which are then divided among the ranks; else this one pushes them all."""


def check_held(flat: FlatModel, held: Mapping[str, Held], spans: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Raises ValueError, naming the parameter, for one that is missing, unknown or of another size, or no longer has
    the elements `spans`, which `owned` has returned."""
    sizes = {name: rows * columns for name, (rows, columns) in flat.shapes.items()}
    if strange := sorted(held.keys() ^ sizes.keys()):
        which = "is no parameter of the model" if strange[0] in held else "is not held"
        raise ValueError(f"weights: {strange[0]!r} {which}; the trainer and the replicas must have the same model")
    for name, one in held.items():
        if not isinstance(one, Held) or not isinstance(one.tensor, Tensor):
            raise ValueError(f"weights: {name!r} is a {type(one).__name__}; give Held(first, tensor)")
        if one.tensor.dim() != 1 or not one.tensor.is_contiguous() or not one.tensor.is_floating_point():
            what = f"{one.tensor.dtype} {[*one.tensor.shape]}"
            raise ValueError(f"weights: {name!r} is {what}; give its elements as one row of floating point, contiguous")
        if one.first < 0 or one.first + len(one.tensor) > sizes[name]:
            stop = one.first + len(one.tensor)
            raise ValueError(f"weights: {name!r}: elements from {one.first} to {stop}, of {sizes[name]} in all")
        first, count = (0, 0) if spans is None else spans[name]
        if count and (one.first > first or one.first + len(one.tensor) < first + count):
            raise ValueError(f"weights: {name!r}: elements {first} to {first + count} are not held any more")


def owned(
    flat: FlatModel, held: Mapping[str, Held], rank: int, num_ranks: int
) -> tuple[list[tuple[int, int]], dict[str, tuple[int, int]]]:
    """Returns the runs of the flat order that this rank pushes, and the elements of each parameter that it needs."""
    spans = {name: (one.first, len(one.tensor)) for name, one in held.items()}
    if all(one.is_shared for one in held.values()) and sum(count for _, count in spans.values()) == flat.length:
        start, stop = (flat.length * index // num_ranks for index in (rank, rank + 1))
        return ([(start, stop - start)] if stop > start else []), spans
    for name, (first, count) in spans.items():
        if held[name].is_shared:
            start, stop = (count * index // num_ranks for index in (rank, rank + 1))
            spans[name] = (first + start, stop - start)
    return flat.runs(spans), spans


def held_bits(held: Mapping[str, Held], flat: FlatModel, pieces: list[Piece], dtype: DType) -> Bits:
    """Returns the bits of these pieces, one after the other, as the engine holds them in `dtype`."""
    kind, at = BIT_TYPES[dtype], 0
    bits: Bits = np.empty(sum(piece.rectangle.size for piece in pieces), kind)
    for piece in pieces:
        area = piece.rectangle
        one, columns = held[area.name], flat.shapes[area.name][1]
        rows = one.tensor.detach().as_strided(
            (area.rows.stop - area.rows.start, area.width),
            (columns, 1),
            one.tensor.storage_offset() + area.rows.start * columns + area.columns.start - one.first,
        )
        found = signed(_converted(rows, getattr(torch, dtype)).cpu()).numpy().view(kind)
        bits[at : at + area.size] = found.reshape(-1)
        at += area.size
    return bits


def _converted(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype is dtype:
        return rows
    step = max(1, _CHUNK // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
    return torch.cat([part.to(dtype) for part in rows.split(step)])


def checksum_of(bits: Bits, pieces: list[Piece]) -> int:
    """Returns the checksum of these pieces, whose bits stand one after the other (`checksum_parts`)."""
    first = pieces[0].start
    parts = (
        (
            piece.rectangle.name,
            as_tensor(bits[piece.start - first : piece.stop - first]).view(-1, piece.rectangle.width),
            (piece.rectangle.rows, piece.rectangle.columns),
        )
        for piece in pieces
    )
    return checksum_parts(parts, num_threads=1)  # the rollout uses the others


def signed(tensor: Tensor) -> Tensor:
    """Returns a view of the bits as integers, for which torch has all operations."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def as_tensor(bits: Bits) -> Tensor:
    """Returns the same memory as `signed` integers."""
    return torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i")))
