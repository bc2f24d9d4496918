"""Brings the ranks of a group the parts of arrays that they lack in another layout: which parts, and how (PAT §4.3).

Ranks hold intervals of the same arrays, along one dimension of each. PAT gathers the arrays of all ranks on every rank,
which then slices ("all_gather"); "all_to_all" sends each rank only what it lacks. Either way the arrays of a layer move
at a time: memory is bounded by what is sent and received of one layer. Nothing moves where no rank lacks anything, as
when nested replicas grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engines.config import Exchange
from engines.parallel.collectives import Communicator

Interval = tuple[int, int]


class Part(NamedTuple):
    """Part of a rank's arrays that another rank takes: `take` returns it from the array of this number."""

    array: int
    take: Callable[[Tensor], Tensor]
    shape: torch.Size


Parts = Callable[[int, int], Sequence[Part]]
"""(holder, member) -> what the member takes from the holder; a function of its arguments alone."""


def lacking(held: Sequence[Interval], wanted: Interval, member: int) -> list[tuple[int, int, int]]:
    """Returns (holder, start, stop) for the parts of `wanted` that are not in `held[member]`, in ascending order.

    `held` are the members' intervals. Where several hold a part, members take it from different ones.
    """
    own = held[member]
    parts = []
    for start, stop in ((wanted[0], min(wanted[1], own[0])), (max(wanted[0], own[1]), wanted[1])):
        while start < stop:
            holders = [other for other, (first, last) in enumerate(held) if first <= start < last]
            holder = holders[member % len(holders)]
            end = min(stop, held[holder][1])
            parts.append((holder, start, end))
            start = end
    return parts


def exchange(
    group: Communicator, how: Exchange, arrays: Sequence[Tensor], shapes: Sequence[Sequence[torch.Size]], parts: Parts
) -> list[list[Tensor]]:
    """Returns, for each member, the parts of its arrays that this rank takes, bit for bit. All call it together.

    `arrays` are this rank's, of one dtype and device; `shapes` those of each member's.
    """
    wanted = [parts(holder, group.rank) for holder in range(group.size)]
    if how == "all_gather":
        sizes = [[shape.numel() for shape in member] for member in shapes]
        flat = arrays[0].new_zeros(max(map(sum, sizes)))
        flat[: sum(sizes[group.rank])] = torch.cat([array.reshape(-1) for array in arrays])
        gathered = []
        for everything, counts, member in zip(group.all_gather(flat), sizes, shapes, strict=True):
            pieces = everything[: sum(counts)].split(counts)
            gathered.append([piece.view(shape) for piece, shape in zip(pieces, member, strict=True)])
        return [[part.take(held[part.array]) for part in one] for held, one in zip(gathered, wanted, strict=True)]
    sent = [
        [part.take(arrays[part.array]).reshape(-1) for part in parts(group.rank, member)]
        for member in range(group.size)
    ]
    counts = [sum(map(len, pieces)) for pieces in sent]
    flat = torch.cat([arrays[0].new_empty(0), *(piece for pieces in sent for piece in pieces)])
    receives = [[part.shape.numel() for part in one] for one in wanted]
    received = group.all_to_all(flat, counts, [sum(sizes) for sizes in receives])
    return [
        [piece.view(part.shape) for piece, part in zip(whole.split(sizes), one, strict=True)]
        for whole, sizes, one in zip(received.split([sum(sizes) for sizes in receives]), receives, wanted, strict=True)
    ]


def reuse_storage(tensor: Tensor, shape: Sequence[int]) -> None:
    """Gives a contiguous tensor another shape in its own memory. Values are arbitrary then, but finite if they were;
    memory that must grow is taken anew, after the old is freed, and zeroed."""
    num_bytes = torch.Size(shape).numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    grows = storage.nbytes() < num_bytes
    if grows:
        storage.resize_(0)
        storage.resize_(num_bytes)
    tensor.set_(storage, 0, tuple(shape), torch.empty(tuple(shape), device="meta").stride())
    if grows:
        tensor.zero_()
