"""x @ weight.T + bias, with the weight as it is, or packed once for the CPU's matrix library (oneDNN), or in C++.

`linear` packs a weight anew in each call. Packed ones take a second copy of the matrices, and give 1.1 to 2.5 times
the speed. A product of few rows is a matter of reading the matrix once: ours reads it from end to end as it lies, and
takes half as long as packed ones, which read it in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from engines.models.parameters import DecoderParameters
from engines.native.library import Library, address

Project = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""As `project`."""

_SMALLEST_FLOAT32 = 1 << 17
"""Elements of a float32 matrix from which on packing gains: small ones go to another library, which starts faster."""


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of this kind can be packed."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(parameters: DecoderParameters) -> DecoderParameters:
    """The same parameters with packed copies of the matrices that gain by it; all else is shared."""
    layers = [
        replace(
            layer,
            **{name: pack_matrix(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")},
        )
        for layer in parameters.layers
    ]
    return replace(parameters, layers=layers, head=pack_matrix(parameters.head))


def pack_matrix(weight: Tensor) -> Tensor:
    """A packed copy, or the matrix itself where it gains nothing."""
    if weight.dtype is torch.float32 and weight.numel() < _SMALLEST_FLOAT32:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [T, in]; weight: [out, in], plain or packed. Returns [T, out]."""
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return linear(x, weight, bias)


class FewRows:
    """`project` for few rows, by the compiled kernels: its weights are never packed."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.most_rows = library.most_rows
        """Rows up to which it is the faster way."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x.contiguous()  # what attention gives may lie otherwise
        (rows, inputs), outputs = x.shape, len(weight)
        out = x.new_empty((rows, outputs))
        self._library.few_rows(address(x), address(weight), address(out), rows, inputs, outputs)
        return out if bias is None else out.add_(bias)
