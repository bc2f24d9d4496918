"""Products in Triton that give a row the same bits whatever other rows are there.

cuBLAS picks the kernel, its tile, and whether a sum is cut in parts, by the number of rows. Here tile and order are
fixed by dtype and matrix (as in Thinking Machines' "Defeating Nondeterminism in LLM Inference", 2025): one program
computes ROWS x COLUMNS outputs and goes along all inputs, INNER at a time, in float32.

Why a row's bits are its own: the number of rows decides how many programs there are and which of their rows are masked,
and nothing else; Triton is told not to compile another kernel for it (it would for 1, and for multiples of 16). An
element of a tile is summed over its own row and column: on CUDA cores (float32) by one thread, one fused product after
the other; on tensor cores (bfloat16) by a sequence of matrix instructions that is the same in all tiles. NVIDIA does
not write down in which order one such instruction adds, nor that it adds alike for all of its rows: so that is tried on
the device, for every kind of matrix, when weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.models.parameters import DecoderParameters


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """What one program computes at once."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


_WIDE = 2**14
"""Outputs from which on columns alone are programs enough, so that each may take more of them."""


def choose_product_tile(outputs: int, itemsize: int) -> ProductTile:
    """By the matrix alone, never by the rows.

    Decodes read each matrix once if they fill a single tile of rows; a low tile with few columns gives them the most
    programs. What is under way takes at most 96 KiB of shared memory, which all devices from Ampere on have.
    """
    if itemsize == 4:  # float32 products are not for tensor cores: more would spill
        return ProductTile(rows=32, columns=64, inner=32, num_warps=4, num_stages=3)
    return ProductTile(rows=64, columns=128 if outputs >= _WIDE else 64, inner=64, num_warps=4, num_stages=4)


def project_in_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `projection.project`: x [T, in], weight [out, in], both of one dtype of at most float32; [T, out].

    A row's bits depend on the row, the weight and the bias alone.
    """
    x = alike(x)
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = choose_product_tile(outputs, x.element_size())
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _project[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns))](
            *(x, weight, weight if bias is None else bias, out, rows), **constants(outputs, inputs, bias, tile)
        )
    return out


def check_products_in_triton(parameters: DecoderParameters) -> None:
    """Tries every kind of matrix, before the first pass: a row by itself, and at each place of two tiles and a bit.

    Raises ValueError where it has other bits. A few sums might agree by chance; these are some thousands each time.
    """
    layer = parameters.layers[0]  # the others are of the same kinds
    biased = ((layer.qkv, layer.qkv_bias), (layer.gate_up, layer.gate_up_bias))
    for weight, bias in (*biased, (layer.output, None), (layer.down, None), (parameters.head, None)):
        outputs, inputs = weight.shape
        row = torch.randn(1, inputs, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
        places = 2 * choose_product_tile(outputs, weight.element_size()).rows + 1
        alone = project_in_triton(row, weight, bias)
        results = project_in_triton(row.expand(places, -1), weight, bias)
        if not torch.equal(results.view(torch.uint8), alone.expand(places, -1).contiguous().view(torch.uint8)):
            raise ValueError(
                f"EngineConfig.batch_invariant=True: on {weight.device} a row's product with a matrix of {outputs} x "
                f"{inputs} has other bits at another place; switch it off"
            )


def constants(outputs: int, inputs: int, bias: Tensor | None, tile: ProductTile) -> dict[str, Any]:
    """What `_project` is compiled for."""
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "HAS_BIAS": bias is not None,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "INNER": tile.inner,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def alike(x: Tensor) -> Tensor:
    """The same values, contiguous, from a multiple of 16 bytes on: Triton compiles another kernel for other addresses,
    which may spread a sum over other threads."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@triton.jit(do_not_specialize=("num_rows",))
def _project(
    x, weight, bias, out, num_rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # Tiles of rows are neighbours, so that a tile of the matrix is read from memory once, and then found in the cache.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < OUTPUTS
    x_rows = x + rows.to(tl.int64)[:, None] * INPUTS
    weight_rows = weight + columns.to(tl.int64)[None, :] * INPUTS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < INPUTS
        some = tl.load(x_rows + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        matrix = tl.load(weight_rows + inner[:, None], mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(some, matrix, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_rows = out + rows.to(tl.int64)[:, None] * OUTPUTS
    tl.store(out_rows + columns[None, :], total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
