"""A whole copy of the weights on each host, from which its ranks load their shards when the layout changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engines.config import DType, ModelConfig
from engines.models.parameters import logical_shapes
from engines.parallel.groups import GroupCache

_ALIGNMENT = 64


def host_bytes(shapes: Iterable[torch.Size], dtype: torch.dtype) -> int:
    """Returns the bytes that the copy takes for parameters of these shapes."""
    return sum(-(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


class HostWeights:
    """Memory that the ranks of a host share: one of them writes the weights, all of them read."""

    def __init__(self, groups: GroupCache, config: ModelConfig, dtype: DType) -> None:
        """All ranks of the world must make it together. Raises RuntimeError when a host has no room for the copy."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        num_bytes = 0
        for name, shape in logical_shapes(config).items():
            self._places[name] = (num_bytes, shape)
            num_bytes += host_bytes([shape], self._dtype)
        self._segment, self._writes = groups.map_together(num_bytes)

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields a stream of whole parameters unchanged, and copies each one. Other ranks may read after a barrier."""
        for name, tensor in weights:
            yield name, tensor  # first, so that the consumer can refuse a wrong shape or a repeated name
            if self._writes and name in self._places:
                self._view(name).copy_(tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and tensors of the copy."""
        for name in self._places:
            yield name, self._view(name)

    def close(self) -> None:
        """Unmaps the memory on this rank; it cannot write or read the copy any more."""
        self._segment.close()

    def _view(self, name: str) -> Tensor:
        start, shape = self._places[name]
        return torch.frombuffer(self._segment.memory, dtype=self._dtype, count=shape.numel(), offset=start).view(shape)
