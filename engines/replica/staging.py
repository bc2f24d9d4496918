"""Host memory that passes reuse: inputs go to the device in one copy, and results come back in one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engines.sampling.sampler import Sampled

_ALIGNMENT = 64
Shapes = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""A pass's arrays: name -> (type, shape)."""


class Staging:
    """The arrays of one pass, in one buffer: written on the host, moved together. The next pass overwrites them.

    The buffer grows with the largest pass so far. On CUDA it is pinned and has a twin on the device; on a CPU the
    tensors share the arrays' memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._shapes: Shapes = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._tensors: dict[str, Tensor] = {}
        self._copied = torch.cuda.Event() if self._on_cuda else None
        self._resize(0)

    def arrays(self, shapes: Shapes) -> dict[str, np.ndarray]:
        """Returns arrays of these shapes by name, contents undefined."""
        self.wait()
        if shapes != self._shapes:
            self._lay_out(shapes)
        return self._arrays

    def wait(self) -> None:
        """Waits until the last copy to the device has ended, so that the arrays may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()

    def move(self) -> dict[str, Tensor]:
        """Copies the arrays to the device and returns the tensors by name. On CUDA it does not wait for the copy."""
        if self._copied is not None:
            self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device))
        return self._tensors

    def _resize(self, num_bytes: int) -> None:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        self._there = torch.empty_like(host, device=self._device) if self._on_cuda else host
        self._host = host

    def _lay_out(self, shapes: Shapes) -> None:
        offsets = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            size = math.prod(shape) * np.dtype(dtype).itemsize
            offsets[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._host):
            self._resize(2 * end)
        self._used = end
        host = self._host.numpy()
        self._arrays = {name: host[offsets[name]].view(dtype).reshape(shape) for name, (dtype, shape) in shapes.items()}
        self._tensors = {
            name: self._there[offsets[name]].view(torch.from_numpy(array).dtype).view(array.shape)
            for name, array in self._arrays.items()
        }
        self._shapes = dict(shapes)  # last: after an interrupt the next call lays out again


class Readback:
    """Copies drawn tokens and their log-probs to the host together."""

    def __init__(self, device: torch.device, most_draws: int) -> None:
        self._device = device
        self._pinned: Tensor | None = None
        if device.type == "cuda":
            self._pinned = torch.empty(2 * most_draws, dtype=torch.float64, pin_memory=True)

    def read(self, sampled: Sampled) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the device; returns tokens, integers [N], and log-probs, floats [N], valid until the next call."""
        if self._pinned is None:
            return sampled.tokens.numpy(), sampled.logprobs.numpy()
        count = len(sampled.tokens)
        # float64 holds every token id and every float32.
        both = torch.cat((sampled.tokens.double(), sampled.logprobs.double()))
        self._pinned[: 2 * count].copy_(both, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        numbers = self._pinned.numpy()
        return numbers[:count].astype(np.int64), numbers[count : 2 * count]
