"""Turns a decoder's parameters into those of another shard, in place, with parts from other ranks (PAT §4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from engines.config import Exchange, ModelConfig
from engines.models.parameters import DecoderParameters, LayerParameters, layer_views
from engines.parallel.collectives import Communicator
from engines.parallel.parts import Interval, Part, exchange, lacking, reuse_storage
from engines.parallel.sharding import Shard, shard_config, shard_slices, vocab_rows

Views = Callable[[Shard], dict[str, Tensor]]
"""Returns the logical views of some tensors, which have the shapes of this shard."""


@dataclass(frozen=True, kw_only=True)
class WeightMove:
    """Which shard each rank of a group holds before and after a regroup; before, they hold the whole model."""

    group: Communicator
    how: Exchange
    before: Sequence[Shard]
    after: Sequence[Shard]


@torch.no_grad()
def reshard_parameters(parameters: DecoderParameters, config: ModelConfig, move: WeightMove) -> int:
    """Makes the parameters of this rank's shard before those of its shard after, bit for bit. All ranks of the group
    call it together.

    Rows that pad the vocabulary get arbitrary values. Takes memory for one layer at a time, or for the embedding or the
    head alone. Returns the bytes that this rank lacked.
    """
    mine = move.after[move.group.rank]
    num_bytes = 0
    for tensors, shapes, views in _units(parameters, config, mine):
        fresh, received = _collect(views, config, move)
        for tensor, shape in zip(tensors, shapes, strict=True):
            reuse_storage(tensor, shape)
        for name, view in views(mine).items():
            view.copy_(fresh[name])
        num_bytes += received
    return num_bytes


def change_shapes(parameters: DecoderParameters, config: ModelConfig, shard: Shard) -> None:
    """Gives the parameters the shapes of a shard, and releases their memory; `DecoderParameters.resize` takes it."""
    for tensors, shapes, _ in _units(parameters, config, shard):
        for tensor, shape in zip(tensors, shapes, strict=True):
            reuse_storage(tensor, shape)
            tensor.untyped_storage().resize_(0)


def _units(
    parameters: DecoderParameters, config: ModelConfig, shard: Shard
) -> Iterator[tuple[list[Tensor], list[torch.Size], Views]]:
    """Yields tensors that are resharded at a time, their shapes in `shard`, and their views. The final norm is left
    out, since all shards have it."""

    def of_layer(layer: LayerParameters, index: int, shard: Shard) -> dict[str, Tensor]:
        return layer_views(layer, index, shard_config(config, shard))

    def of_rows(tensor: Tensor, name: str, shard: Shard) -> dict[str, Tensor]:
        rows = vocab_rows(config, shard)
        return {name: tensor[: rows.stop - rows.start]}

    dtype = parameters.embedding.dtype
    new = DecoderParameters.allocate(shard_config(config, shard), dtype, torch.device("meta"))
    rows = partial(of_rows, parameters.embedding, "model.embed_tokens.weight")
    yield [parameters.embedding], [new.embedding.shape], rows
    for index, (layer, shapes) in enumerate(zip(parameters.layers, new.layers, strict=True)):
        yield layer.tensors(), [one.shape for one in shapes.tensors()], partial(of_layer, layer, index)
    if parameters.head is not parameters.embedding:
        yield [parameters.head], [new.head.shape], partial(of_rows, parameters.head, "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A logical parameter, cut along `dim`; intervals are by rank of the group, all the same for a whole one."""

    mine: Tensor
    dim: int
    before: Sequence[Interval]
    after: Sequence[Interval]

    @classmethod
    def of(cls, mine: Tensor, config: ModelConfig, name: str, move: WeightMove) -> _Cut:
        def interval(shard: Shard) -> Interval:
            last = shard_slices(config, name, shard)[-1]
            return (0, mine.shape[0]) if last == slice(None) else (last.start, last.stop)

        slices = shard_slices(config, name, move.before[0])
        dim = 0 if slices[-1] == slice(None) else len(slices) - 1
        return cls(mine=mine, dim=dim, before=[*map(interval, move.before)], after=[*map(interval, move.after)])

    @cached_property
    def lacking(self) -> list[list[tuple[int, int, int]]]:
        """By rank of the group, what it lacks; see `parts.lacking`."""
        return [lacking(self.before, wanted, member) for member, wanted in enumerate(self.after)]

    def shape(self, interval: Interval) -> torch.Size:
        sizes = list(self.mine.shape)
        sizes[self.dim] = interval[1] - interval[0]
        return torch.Size(sizes)

    def narrow(self, tensor: Tensor, whole: Interval, part: Interval) -> Tensor:
        return tensor.narrow(self.dim, part[0] - whole[0], part[1] - part[0])


def _collect(views: Views, config: ModelConfig, move: WeightMove) -> tuple[dict[str, Tensor], int]:
    """Returns copies of this rank's new views, by name, and the bytes that it lacked."""
    me, members = move.group.rank, range(move.group.size)
    cuts = {name: _Cut.of(view, config, name, move) for name, view in views(move.before[me]).items()}

    def parts(holder: int, member: int) -> list[Part]:
        return [
            Part(number, partial(cut.narrow, whole=cut.before[holder], part=(start, stop)), cut.shape((start, stop)))
            for number, cut in enumerate(cuts.values())
            for source, start, stop in cut.lacking[member]
            if source == holder
        ]

    received: list[list[Tensor]] = [[] for _ in members]
    if any(part for cut in cuts.values() for part in cut.lacking):
        arrays = [cut.mine for cut in cuts.values()]
        shapes = [[cut.shape(cut.before[member]) for cut in cuts.values()] for member in members]
        received = exchange(move.group, move.how, arrays, shapes, parts)
    pieces = [iter(one) for one in received]
    fresh = {}
    for name, cut in cuts.items():
        old, new = cut.before[me], cut.after[me]
        value = fresh[name] = cut.mine.new_empty(cut.shape(new))
        kept = max(old[0], new[0]), min(old[1], new[1])
        if kept[0] < kept[1]:
            cut.narrow(value, new, kept).copy_(cut.narrow(cut.mine, old, kept))
        for holder, start, stop in cut.lacking[me]:
            cut.narrow(value, new, (start, stop)).copy_(next(pieces[holder]))
    return fresh, sum(piece.nbytes for one in received for piece in one)
