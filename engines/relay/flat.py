"""The canonical flat order of a model's logical elements, in which buckets of weights are runs (ROSE §4.2).

The order is that of the shards of the largest usual tensor-parallel size: first what all shards hold, then what shard 0
holds, parameter by parameter, then what shard 1 holds and shard 0 does not, and so on. So a shard of that size, or of
one that divides it, reads a few long runs, whichever rank pushed them. Torch-free.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec

from engines.config import ModelConfig
from engines.parallel.sharding import Shard, is_first_holder, is_shardable, shard_slices

SIZES = (8, 4, 2, 1)
"""The order is that of the first of these tensor-parallel sizes into which the model can be cut."""


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a parameter; a vector is a matrix of one column."""

    name: str
    rows: slice
    columns: slice

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def size(self) -> int:
        return (self.rows.stop - self.rows.start) * self.width

    def part(self, rows: slice, columns: slice) -> Rectangle | None:
        """Returns what is inside these rows and columns too, or None."""
        top, bottom = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        left, right = max(self.columns.start, columns.start), min(self.columns.stop, columns.stop)
        return Rectangle(self.name, slice(top, bottom), slice(left, right)) if top < bottom and left < right else None


@dataclass(frozen=True)
class Piece:
    """A rectangle whose elements, row by row, are a run of the flat order."""

    start: int
    rectangle: Rectangle

    @property
    def stop(self) -> int:
        return self.start + self.rectangle.size


@dataclass(frozen=True)
class FlatModel:
    """Where each logical element is in the flat order. `blocks` ascend and leave nothing out."""

    blocks: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, int]]
    """Rows and columns by Hugging Face name; a tied head has no name of its own."""

    @classmethod
    def of(cls, config: ModelConfig, shapes: Mapping[str, Items[int]]) -> FlatModel:
        """`shapes` are those of the whole parameters (`logical_shapes`)."""
        size = next(size for size in SIZES if is_shardable(config, size))
        matrices = {name: (shape[0], shape[1] if len(shape) > 1 else 1) for name, shape in sorted(shapes.items())}
        shared: list[Rectangle] = []
        own: list[Rectangle] = []
        for shard in (Shard(index=index, count=size, max_count=size) for index in range(size)):
            for name, shape in matrices.items():
                if (one := held_by(config, name, shape, shard)) is not None and is_first_holder(config, name, shard):
                    (shared if one.size == shape[0] * shape[1] else own).append(one)
        starts = accumulate((one.size for one in shared + own), initial=0)
        return cls(tuple(Piece(start, one) for start, one in zip(starts, shared + own, strict=False)), matrices)

    @cached_property
    def length(self) -> int:
        """Logical elements."""
        return self.blocks[-1].stop

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that two models share only if their names, shapes and order are the same."""
        where = [(one.rectangle.name, one.rectangle.rows.start, one.rectangle.columns.start) for one in self.blocks]
        data = msgspec.msgpack.encode((dict(self.shapes), where))
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    @cached_property
    def _starts(self) -> list[int]:
        return [one.start for one in self.blocks]

    def pieces(self, start: int, length: int) -> Iterator[Piece]:
        """Yields the rectangles of a run, in order, each whole rows of a block or a part of one row."""
        stop, index = start + length, bisect_right(self._starts, start) - 1
        while start < stop:
            block = self.blocks[index]
            end = min(stop, block.stop)
            while start < end:
                row, column = divmod(start - block.start, block.rectangle.width)
                count = end - start
                if column or count < block.rectangle.width:
                    count = min(count, block.rectangle.width - column)
                    columns = slice(column, column + count)
                    num_rows = 1
                else:
                    num_rows = count // block.rectangle.width
                    count = num_rows * block.rectangle.width
                    columns = slice(0, block.rectangle.width)
                top, left = block.rectangle.rows.start + row, block.rectangle.columns.start
                rows, columns = slice(top, top + num_rows), slice(left + columns.start, left + columns.stop)
                yield Piece(start, Rectangle(block.rectangle.name, rows, columns))
                start += count
            index += 1

    def runs(self, held: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns (start, length) of the longest runs that are in `held`: by name, the first element and the number of
        elements of a parameter, row by row."""
        runs: list[tuple[int, int]] = []
        for block in self.blocks:
            first, count = held.get(block.rectangle.name, (0, 0))
            begin, end = (self._before(block.rectangle, at) for at in (first, first + count))
            if begin == end:
                continue
            if runs and sum(runs[-1]) == block.start + begin:
                runs[-1] = (runs[-1][0], runs[-1][1] + end - begin)
            else:
                runs.append((block.start + begin, end - begin))
        return runs

    def _before(self, block: Rectangle, element: int) -> int:
        """Returns the number of a block's elements before this element of its parameter, both row by row."""
        row, column = divmod(element, self.shapes[block.name][1])
        full = min(max(row - block.rows.start, 0), block.rows.stop - block.rows.start) * block.width
        inside = block.rows.start <= row < block.rows.stop
        return full + (min(max(column - block.columns.start, 0), block.width) if inside else 0)


def held_by(config: ModelConfig, name: str, shape: tuple[int, int], shard: Shard) -> Rectangle | None:
    """Returns what a shard holds of a parameter of (rows, columns); None for nothing, as of a vocabulary's padding."""
    rows, columns = (*shard_slices(config, name, shard), slice(None))[:2]
    top, bottom, _ = rows.indices(shape[0])
    left, right, _ = columns.indices(shape[1])
    return Rectangle(name, slice(top, bottom), slice(left, right)) if top < bottom and left < right else None


def cut(runs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Returns the runs, cut into runs of at most `most` elements."""
    return [(at, min(most, start + length - at)) for start, length in runs for at in range(start, start + length, most)]
