"""The decoder's small operations: in torch, on any device, and the same in C++ for a CPU (`engines/native`). They are
also in Triton for a GPU (`triton_operations.py`).

All round where Hugging Face does; sums and exponentials may differ in their last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import silu

from engines.kvcache.paged import write_kv
from engines.models.rope import rotate
from engines.native.library import Library, address

if TYPE_CHECKING:
    from engines.models.triton_operations import TritonOperations


class TorchOperations:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMS norm of x [T, hidden] in max(float32, dtype), cast back before the weight, as HF does."""
        return torch.rms_norm(x, x.shape[-1:], None, eps) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (norm of x + residual, x + residual), each [T, hidden]; `residual` may be overwritten."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up [T, inner]; `gate_up` is [T, 2 * inner], gate before up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def rotate_and_store(
        self,
        heads: Tensor,
        norms: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        eps: float,
    ) -> Tensor:
        """Normalises (unless `norms` is None) and rotates queries and keys, and writes keys and values to the layer's
        cache, [num_blocks, block_size, num_kv_heads, head_dim]. Returns the queries, [T, num_heads, head_dim].

        heads: [T, num_heads + 2 num_kv_heads, head_dim]; norms: [2, head_dim], of queries, of keys; rotary: see
        `RotaryTable.at`; slots: int64 [T], where in the cache.
        """
        num_kv_heads = keys.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        qk, v = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            of_head = torch.cat((norms[:1].expand(num_heads, -1), norms[1:].expand(num_kv_heads, -1)))
            qk = self.rms_norm(qk, of_head, eps)
        q, k = rotate(qk, *rotary).split([num_heads, num_kv_heads], dim=1)
        write_kv(keys, slots, k)
        write_kv(values, slots, v)
        return q


class NativeOperations:
    """As `TorchOperations`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._library.rms_norm(address(x), address(weight), address(out), len(x), x.shape[1], eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        self._library.add_rms_norm(
            address(x), address(residual), address(weight), address(out), len(x), x.shape[1], eps
        )
        return out, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._library.silu_mul(address(gate_up), address(out), rows, size)
        return out

    def rotate_and_store(
        self,
        heads: Tensor,
        norms: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        eps: float,
    ) -> Tensor:
        num_tokens, num_all, dim = heads.shape
        num_kv_heads = keys.shape[2]
        num_heads = num_all - 2 * num_kv_heads
        q = heads.new_empty((num_tokens, num_heads, dim))
        self._library.rotate_and_store(
            *(address(heads), address(norms), address(rotary[0]), address(rotary[1]), address(slots)),
            *(address(q), address(keys), address(values), num_tokens, num_heads, num_kv_heads, dim, eps),
        )
        return q


Operations: TypeAlias = "TorchOperations | NativeOperations | TritonOperations"
