"""x @ weight.T + bias: with a plain weight, with one packed once for the CPU's matrix library (oneDNN), or in C++.

`linear` packs a weight in each call. Packing once takes a second copy of the matrices and gives 1.1 to 2.5 times the
speed. Where the processor has no bfloat16 instructions, the copies of bfloat16 matrices are float32: the library's own
bfloat16 product takes 5 to 20 times as long there. The time of a product of few rows should be that of reading the
matrix, also where they are drafts of a few sequences: our kernel reads it once from end to end, and computes tiles of
outputs and rows whose sums stay in registers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from engines.models.parameters import DecoderParameters
from engines.native.library import Library, address

Project = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function like `project`."""

_MATRICES = ("qkv", "output", "gate_up", "down")
_SMALLEST_FLOAT32 = 1 << 17
"""Fewest elements of a float32 matrix that is packed: another library, which starts faster, multiplies smaller ones."""


def copy_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Returns the dtype of the copies with which products of `dtype` matrices are computed; None without copies."""
    if device.type != "cpu":
        return None
    if dtype is torch.bfloat16:
        return dtype if has_bfloat16_products() else torch.float32
    return dtype if dtype is torch.float32 and torch.backends.mkldnn.is_available() else None


def has_bfloat16_products() -> bool:
    """Whether this processor has bfloat16 instructions that the matrix library uses."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported()


def pack(parameters: DecoderParameters, dtype: torch.dtype) -> DecoderParameters:
    """Returns the parameters with packed copies, in `dtype`, of the matrices that gain speed; the rest is shared."""
    layers = [
        replace(layer, **{name: pack_matrix(getattr(layer, name), dtype) for name in _MATRICES})
        for layer in parameters.layers
    ]
    return replace(parameters, layers=layers, head=pack_matrix(parameters.head, dtype))


def packed_bytes(parameters: DecoderParameters, dtype: torch.dtype) -> int:
    """Returns an upper bound of the copies' bytes: packed matrices are padded to tiles of at most 64 x 64."""
    matrices = [getattr(layer, name) for layer in parameters.layers for name in _MATRICES]
    sizes = (
        -(-matrix.shape[0] // 64) * -(-matrix.shape[1] // 64) * 64 * 64
        for matrix in [*matrices, parameters.head]
        if matrix.dtype is torch.bfloat16 or matrix.numel() >= _SMALLEST_FLOAT32
    )
    return sum(sizes) * dtype.itemsize


def pack_matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a packed copy in `dtype`; a plain copy, or the matrix itself, where packing gains nothing."""
    weight = weight.to(dtype)
    is_small = dtype is torch.float32 and weight.numel() < _SMALLEST_FLOAT32
    if is_small or not torch.backends.mkldnn.is_available():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns [T, out] in the dtype of x. x: [T, in]; weight: [out, in], plain or packed, in that dtype or a wider."""
    if weight.dtype is not x.dtype:
        wide_bias = None if bias is None else bias.to(weight.dtype)
        return project(x.to(weight.dtype), weight, wide_bias).to(x.dtype)
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return linear(x, weight, bias)


class FewRows:
    """`project` for few rows by a compiled kernel, with weights that are not packed."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.most_rows = library.most_rows
        """Most rows for which this is the faster way."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x.contiguous()  # the output of attention may not be
        (rows, inputs), outputs = x.shape, len(weight)
        out = x.new_empty((rows, outputs))
        self._library.few_rows(address(x), address(weight), address(out), rows, inputs, outputs)
        return out if bias is None else out.add_(bias)
