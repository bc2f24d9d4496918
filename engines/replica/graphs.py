"""Passes of decodes alone at a few fixed shapes, so that a CUDA graph of each can be replayed.

`PaddedDecodes` owns the shapes and the memory that the passes read, on any device; `Graphs` captures and replays, on
CUDA (`tests/engines/test_gpu.py`).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engines.attention.batch import ForwardBatch
from engines.replica.staging import Staging

LARGEST = 512
"""Most rows of a pass with a graph: the device computes larger passes longer than the host takes to launch them. Limits
the number of graphs, and the memory that they share."""


def ladder(most: int) -> tuple[int, ...]:
    """Returns the numbers of rows that passes of 1 to `most` rows are padded to: 1, 2, 4, then multiples of 8, and from
    64 on eight sizes per doubling; the last is `most`.
    """
    sizes = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return (*sizes, most)


class PaddedDecodes:
    """Rows of one new token each, padded to a size of the ladder, in tensors at fixed addresses.

    The host sends token, position and slot of each row, and the changes of the block tables; the device derives the
    rest. A padding row is the first token of a sequence all of whose blocks are the scratch block, which no sequence
    holds: it writes and reads nothing else.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_blocks: int,
        max_rows: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        """Allocates tensors for `num_slots` sequences of up to `max_blocks` blocks, and passes of `max_rows` rows."""
        self.sizes = ladder(min(max_rows, LARGEST))
        self._block_size = block_size
        self._padding_slot = num_slots
        self._table = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self._table[self._padding_slot] = scratch_block
        self._ends = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(self.sizes[-1], device=device)
        self._changes = Staging(device)
        self._staging = Staging(device)
        self._fields = self._staging.arrays({"fields": (np.int64, (3, self.sizes[-1]))})["fields"]
        self._fields[:] = 0
        self._rows = self._staging.move()["fields"]

    def fits(self, num_rows: int) -> bool:
        return num_rows <= self.sizes[-1]

    def fill(
        self, tokens: list[int], positions: np.ndarray, slots: np.ndarray, changes: tuple[np.ndarray, np.ndarray]
    ) -> int:
        """Sets the rows, all [N], and returns the size that they are padded to. `changes`: see
        `SlotTable.take_changes`.
        """
        num_rows = len(tokens)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        self._staging.wait()
        self._fields[:, :num_rows] = tokens, positions, slots
        self._fields[:, num_rows:size] = [[0], [0], [self._padding_slot]]
        self._staging.move()
        flat, blocks = changes
        if len(flat):
            staged = self._changes.arrays({"flat": (np.int64, flat.shape), "blocks": (np.int32, blocks.shape)})
            staged["flat"][:], staged["blocks"][:] = flat, blocks
            moved = self._changes.move()
            self._table.view(-1).index_copy_(0, moved["flat"], moved["blocks"])
        return size

    def batch(self, size: int) -> ForwardBatch:
        """Returns the first `size` rows, padding included, as views of the same memory each time, or as tensors that
        the device computes from it. The block table is as wide as the longest sequence may need.
        """
        tokens, positions, slots = (self._rows[field, :size] for field in range(3))
        block_table = self._table.index_select(0, slots)
        block = block_table.gather(1, (positions // self._block_size)[:, None]).squeeze(1)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            cu_seqlens_q=self._ends[: size + 1],
            context_lens=(positions + 1).int(),
            block_table=block_table,
            slot_mapping=block.long() * self._block_size + positions % self._block_size,
            logit_rows=self._logit_rows[:size],
            seqlens_q=[1] * size,
        )

    def next_positions(self, num_rows: int) -> Tensor:
        """Returns int64 [num_rows]: the positions of the tokens that the first rows will draw."""
        return self._rows[1, :num_rows] + 1


class Graphs:
    """Replays `forward`, captured once per size at the size's first call. All graphs share one pool of memory.

    The memory that `forward(size)` reads must stay at its address: `drop` the graphs before it moves. The next call
    overwrites the returned tensor.
    """

    def __init__(self, forward: Callable[[int], Tensor], device: torch.device) -> None:
        self._forward = forward
        self._device = device
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, size: int) -> Tensor:
        """Returns `forward(size)`. Raises RuntimeError when it cannot be captured."""
        if size not in self._captured:
            with torch.cuda.device(self._device):
                self._captured[size] = self._capture(size)
        graph, out = self._captured[size]
        graph.replay()
        return out

    def drop(self) -> None:
        """Removes the graphs and releases their memory."""
        if self._captured:
            torch.cuda.synchronize(self._device)
            self._captured.clear()
            torch.cuda.empty_cache()

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size)  # makes workspaces and compiled kernels, which a capture cannot contain
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._captured.values()), None)
        collects = gc.isenabled()
        gc.disable()  # if it freed the graphs of another engine now, this capture would fail
        try:
            # Other threads may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                out = self._forward(size)
        except RuntimeError as error:
            raise RuntimeError(
                f"a pass of {size} decodes cannot be captured in a CUDA graph ({error}); give "
                f"EngineConfig.cuda_graphs=False"
            ) from error
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, out
