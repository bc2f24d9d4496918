"""One forward pass as flat tensors: the same format for prefill, chunked prefill, decode and verification."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """T new tokens of S sequences, sequence after sequence. Each token attends to its own past, itself included.

    Sequences with one new token (decodes) come before those with several.
    """

    tokens: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]: absolute position of each token in its sequence."""
    cu_seqlens_q: Tensor
    """int32 [S + 1]: sequence s has rows cu_seqlens_q[s] to cu_seqlens_q[s + 1]."""
    context_lens: Tensor
    """int32 [S]: tokens of the sequence after this pass, new ones included."""
    block_table: Tensor
    """int32 [S, max blocks]: KV blocks in token order; entries after the context may be any valid block."""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset where the token's KV goes."""
    logit_rows: Tensor
    """int64 [R]: rows whose logits are needed."""
    seqlens_q: list[int]
    """New tokens of each sequence, on the host, so that backends can plan without waiting for the device."""
