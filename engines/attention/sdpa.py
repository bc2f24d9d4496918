"""The reference attention backend: gathers each sequence's blocks, then runs torch's scaled_dot_product_attention.

Runs on any device and dtype. A backend has two functions: `plan(batch, block_size)`, called once per forward pass, and
`attention(q, k_cache, v_cache, plan)`, called once per layer.

Memory for gathered KV and masks is bounded for any batch: sequences are processed in pieces of at most `PIECE_TOKENS`
tokens of padded context, and a piece's queries in groups whose masks take at most `PIECE_BYTES` bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.attention.batch import ForwardBatch
from engines.memory.plan import PIECE_BYTES, PIECE_TOKENS

capturable = False
"""Whether `plan` and `attention` of decodes are fit for a CUDA graph: they need no value on the host, and their cost
depends on the contexts, not on the width of the block table. This backend gathers the whole table."""


@dataclass(frozen=True, kw_only=True)
class _Context:
    """The contexts of S sequences: their blocks, padded to L tokens each."""

    num_seqs: int
    blocks: Tensor
    """int64 [S * L / block_size]"""

    def gather(self, cache: Tensor) -> Tensor:
        """Returns [S, num_kv_heads, L, head_dim], gathered from a layer's cache."""
        return cache.index_select(0, self.blocks).view(self.num_seqs, -1, *cache.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class _Decodes:
    """Sequences with one new token each: the first rows of the batch."""

    context: _Context
    visible: Tensor
    """bool [S, 1, 1, L]"""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sequences with several new tokens, run together and padded to Q new tokens each."""

    context: _Context
    rows_SQ: Tensor
    """int64: row of each new token in the flat batch; padding repeats the sequence's first row."""
    positions_SQ: Tensor
    """int64: position of each new token in its sequence; the token attends to positions up to its own."""
    flat_rows: Tensor | None
    """int64 [tokens of the bucket]: flat rows without padding; None when nothing is padded."""
    padded_rows: Tensor | None
    """int64 [tokens of the bucket]: places of these rows in the padded [S * Q]; None when nothing is padded."""


@dataclass(frozen=True, kw_only=True)
class SdpaPlan:
    """All that `attention` needs of a batch, the same for every layer."""

    decodes: list[_Decodes]
    buckets: list[Bucket]


def plan(batch: ForwardBatch, block_size: int) -> SdpaPlan:
    """Groups sequences whose numbers of new tokens round up to the same power of two: less than half is padding."""
    num_decodes = sum(length == 1 for length in batch.seqlens_q)
    return SdpaPlan(
        decodes=_plan_decodes(batch, num_decodes, block_size),
        buckets=plan_buckets(batch, num_decodes, block_size),
    )


def plan_buckets(batch: ForwardBatch, num_decodes: int, block_size: int) -> list[Bucket]:
    """Returns the buckets of the sequences after the first `num_decodes`."""
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(num_decodes, len(batch.seqlens_q)):
        members[(batch.seqlens_q[index] - 1).bit_length()].append(index)
    padded = _padded_lengths(batch, block_size)
    return [_plan_bucket(batch, piece, block_size) for same in members.values() for piece in _pieces(same, padded)]


def _padded_lengths(batch: ForwardBatch, block_size: int) -> list[int]:
    """Returns for each sequence the number of tokens that are gathered when it is alone in its piece."""
    if batch.context_lens.device.type == "cpu":
        return batch.context_lens.tolist()
    return [batch.block_table.shape[1] * block_size] * len(batch.seqlens_q)  # see `_plan_context`


def _pieces(indices: Iterable[int], lengths: list[int]) -> Iterator[list[int]]:
    """Cuts `indices` into runs of one or more, of at most `PIECE_TOKENS` tokens when padded to the run's longest."""
    piece: list[int] = []
    longest = 0
    for index in indices:
        longest = max(longest, lengths[index])
        if piece and (len(piece) + 1) * longest > PIECE_TOKENS:
            yield piece
            piece, longest = [], lengths[index]
        piece.append(index)
    if piece:
        yield piece


def _plan_decodes(batch: ForwardBatch, num_decodes: int, block_size: int) -> list[_Decodes]:
    plans = []
    for piece in _pieces(range(num_decodes), _padded_lengths(batch, block_size)):
        rows = slice(piece[0], piece[-1] + 1)
        contexts = batch.context_lens[rows]
        context, key_positions = _plan_context(contexts, batch.block_table[rows], block_size)
        plans.append(_Decodes(context=context, visible=(key_positions < contexts[:, None])[:, None, None]))
    return plans


def _plan_context(contexts: Tensor, table: Tensor, block_size: int) -> tuple[_Context, Tensor]:
    on_host = contexts.device.type == "cpu"  # on others, reading the longest would wait for the device
    num_blocks = -(-int(contexts.max()) // block_size) if on_host else table.shape[1]
    key_positions = torch.arange(num_blocks * block_size, device=contexts.device)
    # A block behind the context may be another model's now: it may hold NaN, and even masked, 0 * NaN is NaN.
    is_behind = key_positions[::block_size] >= contexts[:, None]
    blocks = torch.where(is_behind, table[:, :1], table[:, :num_blocks])
    return _Context(num_seqs=len(contexts), blocks=blocks.flatten().long()), key_positions


def _plan_bucket(batch: ForwardBatch, indices: list[int], block_size: int) -> Bucket:
    device = batch.tokens.device
    pick = torch.tensor(indices, device=device)
    starts, contexts = batch.cu_seqlens_q[pick].long(), batch.context_lens[pick].long()
    lengths = [batch.seqlens_q[i] for i in indices]
    max_q = max(lengths)
    new = torch.tensor(lengths, device=device)[:, None]
    offsets = torch.arange(max_q, device=device)[None, :]
    real_SQ = offsets < new
    rows_SQ = starts[:, None] + torch.where(real_SQ, offsets, 0)
    context, _ = _plan_context(contexts, batch.block_table[pick], block_size)
    padded = min(lengths) != max_q
    return Bucket(
        context=context,
        rows_SQ=rows_SQ,
        positions_SQ=contexts[:, None] - new + torch.where(real_SQ, offsets, 0),
        flat_rows=rows_SQ[real_SQ] if padded else None,
        padded_rows=real_SQ.flatten().nonzero().squeeze(1) if padded else None,
    )


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SdpaPlan) -> Tensor:
    """Returns causal grouped-query attention of new tokens over the paged cache, [T, num_heads, head_dim].

    q: [T, num_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads, head_dim], with the new tokens already
    written. Scores are scaled by head_dim ** -0.5.
    """
    if len(plan.decodes) == 1 and not plan.buckets:
        return _attend_decodes(q, k_cache, v_cache, plan.decodes[0])
    out = torch.empty_like(q)
    row = 0
    for decodes in plan.decodes:
        rows = slice(row, row + decodes.context.num_seqs)
        out[rows] = _attend_decodes(q[rows], k_cache, v_cache, decodes)
        row = rows.stop
    for bucket in plan.buckets:
        attend_bucket(out, q, k_cache, v_cache, bucket)
    return out


def _attend_decodes(q: Tensor, k_cache: Tensor, v_cache: Tensor, decodes: _Decodes) -> Tensor:
    """Returns [S, num_heads, head_dim]. Query heads with the same KV head become its query rows: no key is repeated."""
    num_seqs = decodes.context.num_seqs
    q_rows = q.view(num_seqs, k_cache.shape[2], -1, q.shape[2])
    keys, values = decodes.context.gather(k_cache), decodes.context.gather(v_cache)
    return scaled_dot_product_attention(q_rows, keys, values, attn_mask=decodes.visible).reshape(num_seqs, *q.shape[1:])


def attend_bucket(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: Bucket) -> None:
    """Writes the bucket's rows of `out`."""
    num_seqs, max_q = bucket.rows_SQ.shape
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    keys, values = bucket.context.gather(k_cache), bucket.context.gather(v_cache)
    # A boolean mask, and the mask made of it; on a CPU a bfloat16 mask takes as much memory as a float32 one.
    row_bytes = num_seqs * group * keys.shape[2] * (1 + max(4, q.element_size()))
    step = max(1, PIECE_BYTES // row_bytes)
    results = []
    for start in range(0, max_q, step):
        rows_SQ, positions_SQ = bucket.rows_SQ[:, start : start + step], bucket.positions_SQ[:, start : start + step]
        num_q = rows_SQ.shape[1]
        q_padded = q.index_select(0, rows_SQ.flatten()).view(num_seqs, num_q, num_kv_heads, group, head_dim)
        q_rows = q_padded.permute(0, 2, 1, 3, 4).reshape(num_seqs, num_kv_heads, num_q * group, head_dim)
        # No query of the piece attends further; on other devices reading this number would wait.
        seen = int(positions_SQ.max()) + 1 if q.device.type == "cpu" else keys.shape[2]
        mask = _mask(positions_SQ.repeat_interleave(group, dim=1), seen, q.dtype)
        result = scaled_dot_product_attention(q_rows, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask)
        result = result.reshape(num_seqs, num_kv_heads, num_q, group, head_dim).permute(0, 2, 1, 3, 4)
        results.append(result.reshape(num_seqs, num_q, num_heads, head_dim))
    flat = (results[0] if len(results) == 1 else torch.cat(results, dim=1)).flatten(0, 1)
    if bucket.flat_rows is None or bucket.padded_rows is None:
        out.index_copy_(0, bucket.rows_SQ.flatten(), flat)
    else:
        out.index_copy_(0, bucket.flat_rows, flat.index_select(0, bucket.padded_rows))


def _mask(positions_SR: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Returns [S, 1, R, L], added to the scores of R query rows: 0 for keys up to a row's position, else -inf.

    From a boolean mask, `scaled_dot_product_attention` would make this one, and also the negated mask.
    """
    hidden = torch.arange(num_keys, device=positions_SR.device) > positions_SR[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
