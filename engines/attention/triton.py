"""Attention on a GPU, in Triton: reads the paged cache in place, with as many programs as fill the device.

A program computes a tile of rows for one KV head. The rows are the query heads that share the KV head, for each of a
sequence's new tokens, so that each key is read once for all of them. Decodes are one launch, sequences with several new
tokens (verification, prefill) another. Softmax is online, in float32 and to the base 2 (FlashAttention-2, Dao 2023).
When the rows alone are too few to fill the device, a sequence's context is cut into parts, whose results a second
kernel merges (Flash-Decoding, Dao et al. 2023).

The host never waits for the device. The grid of the decodes depends only on the batch size and the width of the block
table; all other inputs are tensors, so that a captured launch can be replayed for other lengths. The output of a
sequence with a context of 0, which pads a batch, is zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.attention.batch import ForwardBatch

MIN_PART = 256
"""Fewest tokens of context that are worth a program."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the piece that one program computes at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(rows: int, head_dim: int, itemsize: int) -> Tile:
    """Returns the tile for sequences with `rows` rows: its rows are a power of two, from 16 to what registers hold.

    A tile's keys and values take at most 32 KiB of shared memory per pipeline stage.
    """
    dim = _padded(head_dim)
    most = 16 if itemsize == 4 else 128 if dim <= 128 else 64  # float32 products are not for tensor cores
    rows = min(most, max(16, triton.next_power_of_2(rows)))
    keys = max(16, min(64, 2**14 // (dim * itemsize)))
    is_large = itemsize == 4 or rows * dim > 64 * 128
    return Tile(rows=rows, keys=keys, num_warps=8 if is_large else 4, num_stages=2 if is_large else 3)


def count_parts(num_programs: int, num_processors: int, max_context: int) -> int:
    """Returns the number of parts of each context: two programs per processor, if contexts are long enough."""
    wanted = -(-2 * num_processors // num_programs)
    return max(1, min(wanted, max_context // MIN_PART))


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """Sequences that are run in one launch."""

    num_tiles: int
    tile: Tile
    places: Tensor | None
    """int32 [num_tiles, 2]: sequence and first row of each tile; None for decodes: the tile's number gives both."""
    num_parts: int
    """Number of parts of each context."""


@dataclass(frozen=True, kw_only=True)
class TritonPlan:
    """All that `attention` needs of a batch, the same for every layer."""

    starts: Tensor
    contexts: Tensor
    table: Tensor
    launches: list[_Launch]


class TritonAttention:
    """A backend with the interface of `sdpa`, for any block size, and head sizes up to 256."""

    capturable = True

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """The numbers of heads are this shard's."""
        self._group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._itemsize = dtype.itemsize
        self._num_processors = _num_processors(device)

    def plan(self, batch: ForwardBatch, block_size: int) -> TritonPlan:
        num_decodes = sum(length == 1 for length in batch.seqlens_q)
        max_context = batch.block_table.shape[1] * block_size
        launches = []
        if num_decodes:
            tile = choose_tile(self._group, self._head_dim, self._itemsize)
            num_tiles = num_decodes * -(-self._group // tile.rows)
            launches.append(self._launch(num_tiles, tile, None, max_context))
        several = batch.seqlens_q[num_decodes:]
        if several:
            tile = choose_tile(max(several) * self._group, self._head_dim, self._itemsize)
            places = place_tiles(several, num_decodes, self._group, tile.rows)
            on_device = torch.from_numpy(places).to(batch.block_table.device, non_blocking=True)
            launches.append(self._launch(len(places), tile, on_device, max_context))
        return TritonPlan(
            starts=batch.cu_seqlens_q, contexts=batch.context_lens, table=batch.block_table, launches=launches
        )

    def _launch(self, num_tiles: int, tile: Tile, places: Tensor | None, max_context: int) -> _Launch:
        num_parts = count_parts(num_tiles * self._num_kv_heads, self._num_processors, max_context)
        return _Launch(num_tiles=num_tiles, tile=tile, places=places, num_parts=num_parts)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TritonPlan) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.cuda.device_of(q):  # Triton launches on the current device
            for launch in plan.launches:
                self._run(q, k_cache, v_cache, out, plan, launch)
        return out

    def _run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, plan: TritonPlan, launch: _Launch) -> None:
        num_parts, tile = launch.num_parts, launch.tile
        in_parts = num_parts > 1
        rows = (num_parts, *q.shape[:2]) if in_parts else (1,)
        sums = torch.empty((*rows, self._head_dim) if in_parts else (1,), dtype=torch.float32, device=q.device)
        tops, weights = torch.empty((2, *rows), dtype=torch.float32, device=q.device)
        where: dict[str, Any] = {
            "starts": plan.starts,
            "contexts": plan.contexts,
            "places": launch.places if launch.places is not None else plan.starts,
            "num_rows": q.shape[0] * q.shape[1],
            "num_parts": num_parts,
            "GROUP": self._group,
            "KV_HEADS": self._num_kv_heads,
            "DIM": self._head_dim,
            "PADDED_DIM": _padded(self._head_dim),
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "IS_DECODE": launch.places is None,
        }
        grid = (launch.num_tiles, self._num_kv_heads)
        _attend[(*grid, num_parts)](
            *(q, k_cache, v_cache, out, sums, tops, weights, plan.table),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            table_width=plan.table.stride(0),
            scale=self._head_dim**-0.5 * LOG2_E,
            BLOCK=k_cache.shape[1],
            IN_PARTS=in_parts,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **where,
        )
        if in_parts:
            _merge_parts[grid](out, sums, tops, weights, num_warps=tile.num_warps, **where)


def place_tiles(seqlens_q: list[int], first_sequence: int, group: int, tile_rows: int) -> np.ndarray:
    """Returns int32 [num_tiles, 2]: each tile's sequence (numbered from `first_sequence`) and its first row in it."""
    counts = -(-np.asarray(seqlens_q) * group // tile_rows)
    sequence = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
    return np.stack((first_sequence + sequence, index * tile_rows), axis=1).astype(np.int32)


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@functools.cache
def _num_processors(device: torch.device) -> int:
    # Without a GPU this runs under Triton's interpreter: any number does.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


# -- kernels. A row is a query head of a new token; row r of a sequence is head r % GROUP of its token r // GROUP.

_VARYING = ("num_rows", "num_parts", "table_width")
"""Integers that must not cause a kernel to be compiled again."""


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    q, k_cache, v_cache, out, sums, tops, weights, table,
    starts, contexts, places, num_rows, num_parts, q_token_stride, q_head_stride, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, IN_PARTS: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Computes a tile's output; or, IN_PARTS, its sum of values over a part of the context, not divided by weight."""
    sequence, tokens, heads, is_row, positions, end = _place(
        starts, contexts, places, GROUP=GROUP, ROWS=ROWS, IS_DECODE=IS_DECODE
    )
    dims = tl.arange(0, PADDED_DIM)
    is_value = is_row[:, None] & (dims < DIM)[None, :]
    q_rows = tokens * q_token_stride + heads * q_head_stride
    queries = tl.load(q + q_rows[:, None] + dims[None, :], mask=is_value, other=0.0)
    blocks = table + sequence.to(tl.int64) * table_width
    head = tl.program_id(1) * DIM
    rows = tokens * (KV_HEADS * GROUP) + heads
    if IN_PARTS:
        part = tl.program_id(2)
        size = _part_size(tl.load(contexts + sequence), num_parts, KEYS=KEYS)
        if part * size < end:
            top, weight, total = _sum_values(
                queries, k_cache + head, v_cache + head, blocks, positions, part * size,
                tl.minimum(part * size + size, end), scale,
                KV_HEADS=KV_HEADS, DIM=DIM, PADDED_DIM=PADDED_DIM, BLOCK=BLOCK, ROWS=ROWS, KEYS=KEYS,
            )  # fmt: skip
            rows += part.to(tl.int64) * num_rows
            tl.store(tops + rows, top, mask=is_row)
            tl.store(weights + rows, weight, mask=is_row)
            tl.store(sums + rows[:, None] * DIM + dims[None, :], total, mask=is_value)
    else:
        top, weight, total = _sum_values(
            queries, k_cache + head, v_cache + head, blocks, positions, 0, end, scale,
            KV_HEADS=KV_HEADS, DIM=DIM, PADDED_DIM=PADDED_DIM, BLOCK=BLOCK, ROWS=ROWS, KEYS=KEYS,
        )  # fmt: skip
        _store_mean(out, rows, dims, total, weight, is_value, DIM=DIM)


@triton.jit(do_not_specialize=_VARYING)
def _merge_parts(
    out, sums, tops, weights, starts, contexts, places, num_rows, num_parts,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Computes a tile's output from the sums over the parts of its context, in their order."""
    sequence, tokens, heads, is_row, _, end = _place(
        starts, contexts, places, GROUP=GROUP, ROWS=ROWS, IS_DECODE=IS_DECODE
    )
    dims = tl.arange(0, PADDED_DIM)
    is_value = is_row[:, None] & (dims < DIM)[None, :]
    rows = tokens * (KV_HEADS * GROUP) + heads
    size = _part_size(tl.load(contexts + sequence), num_parts, KEYS=KEYS)
    top, weight, total = _nothing(ROWS, PADDED_DIM)
    for part in range(0, tl.cdiv(end, size)):
        part_rows = rows + tl.cast(part, tl.int64) * num_rows
        part_top = tl.load(tops + part_rows, mask=is_row, other=float("-inf"))
        part_weight = tl.load(weights + part_rows, mask=is_row, other=0.0)
        part_total = tl.load(sums + part_rows[:, None] * DIM + dims[None, :], mask=is_value, other=0.0)
        new_top = tl.maximum(top, part_top)
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see no key of the first parts
        rescale = tl.exp2(top - finite)
        part_rescale = tl.exp2(part_top - finite)
        weight = weight * rescale + part_weight * part_rescale
        total = total * rescale[:, None] + part_total * part_rescale[:, None]
        top = new_top
    _store_mean(out, rows, dims, total, weight, is_value, DIM=DIM)


@triton.jit
def _place(starts, contexts, places, GROUP: tl.constexpr, ROWS: tl.constexpr, IS_DECODE: tl.constexpr):
    """Returns for this program's rows: the sequence; each row's token in the batch, query head, whether it exists, and
    position (also the last key that it sees); and the end of the keys that any of the rows sees.
    """
    tile = tl.program_id(0)
    if IS_DECODE:
        sequence = tile // tl.cdiv(GROUP, ROWS)
        first_row = tile % tl.cdiv(GROUP, ROWS) * ROWS
        first_token = sequence
        num_new = 1
    else:
        sequence = tl.load(places + 2 * tile)
        first_row = tl.load(places + 2 * tile + 1)
        first_token = tl.load(starts + sequence)
        num_new = tl.load(starts + sequence + 1) - first_token
    context = tl.load(contexts + sequence)
    rows = first_row + tl.arange(0, ROWS)
    tokens = rows // GROUP
    heads = tl.program_id(1) * GROUP + rows % GROUP
    end = context - num_new + tl.minimum(num_new, (first_row + ROWS - 1) // GROUP + 1)
    return sequence, (first_token + tokens).to(tl.int64), heads, tokens < num_new, context - num_new + tokens, end


@triton.jit
def _part_size(context, num_parts, KEYS: tl.constexpr):
    """Returns the tokens in each part of a context: whole tiles of keys, the same for every row of the sequence."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, num_parts), KEYS), 1) * KEYS


@triton.jit
def _nothing(ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Returns each row's highest score, and its sums of weights and of weighted values relative to it, for no keys."""
    return (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, PADDED_DIM], tl.float32),
    )


@triton.jit
def _sum_values(
    queries, k_cache, v_cache, blocks, positions, first, end, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Returns the same three as `_nothing`, for the keys from `first`, a multiple of KEYS, to `end`."""
    top, weight, total = _nothing(ROWS, PADDED_DIM)
    dims = tl.arange(0, PADDED_DIM)
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        slots = tl.load(blocks + keys // BLOCK, mask=is_key, other=0).to(tl.int64) * BLOCK + keys % BLOCK
        offsets = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        is_value = is_key[:, None] & (dims < DIM)[None, :]
        k = tl.load(k_cache + offsets, mask=is_value, other=0.0)
        v = tl.load(v_cache + offsets, mask=is_value, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores * scale - finite[:, None])
        rescale = tl.exp2(top - finite)
        weight = weight * rescale + tl.sum(p, 1)
        total = tl.dot(p.to(v.dtype), v, total * rescale[:, None], input_precision="ieee")
        top = new_top
    return top, weight, total


@triton.jit
def _store_mean(out, rows, dims, total, weight, is_value, DIM: tl.constexpr):
    mean = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    tl.store(out + rows[:, None] * DIM + dims[None, :], mean.to(out.dtype.element_ty), mask=is_value)
