"""Batch-invariant products: a row has the same bits whatever other rows are in the batch. For CPUs.

A matrix library picks the kernel, and with it the order of each sum, by the number of rows: oneDNN cuts the sums of a
single row of more than 1024 elements in parts, MKL has special kernels for few rows and for the last of an odd number.
The choice depends on shapes and threads, never on values. So each number of rows is tried once per kind of matrix, on
sums that reveal their order, and `project` runs only with numbers of rows that agree in all their rows. Any other
number is padded to the next of these, or split.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from engines.models.parameters import DecoderParameters
from engines.models.projection import pack_matrix, project

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that are tried."""
REFERENCES = (64, 16, 4, 1)
"""Candidates for the reference, with which the others must agree: the first whose own rows all have the same bits."""


class Product(NamedTuple):
    """All that a matrix library's choice of a kernel can depend on, except the number of rows."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    packed: bool
    biased: bool
    threads: int


def check_products(parameters: DecoderParameters) -> None:
    """Tries the numbers of rows for every kind of matrix, before the first pass."""
    for layer in parameters.layers:
        for weight, bias in ((layer.qkv, layer.qkv_bias), (layer.gate_up, layer.gate_up_bias)):
            checked_sizes(_product(weight, bias))
        for weight in (layer.output, layer.down):
            checked_sizes(_product(weight, None))
    checked_sizes(_product(parameters.head, None))


def project_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `projection.project`, on a CPU: a row's bits depend only on the row, weight, bias and number of threads."""
    sizes = checked_sizes(_product(weight, bias))
    rows, most = len(x), sizes[-1]
    if rows <= most:
        return _project_padded(x, weight, bias, sizes)
    out = x.new_empty((rows, weight.shape[0]))
    for start in range(0, rows, most):
        out[start : start + most] = _project_padded(x[start : start + most], weight, bias, sizes)
    return out


def _product(weight: Tensor, bias: Tensor | None) -> Product:
    outputs, inputs = weight.shape
    return Product(outputs, inputs, weight.dtype, weight.is_mkldnn, bias is not None, torch.get_num_threads())


def _project_padded(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
    rows = len(x)
    size = sizes[bisect_left(sizes, rows)]
    if size == rows:
        return project(x, weight, bias)
    padded = x.new_zeros((size, x.shape[1]))
    padded[:rows] = x
    return project(padded, weight, bias)[:rows]


@functools.cache
def checked_sizes(product: Product) -> tuple[int, ...]:
    """Returns those of SIZES in which every row has the same bits as the rows of the reference."""
    weight, bias, row = _telling(product)
    if product.packed:
        weight = pack_matrix(weight, product.dtype)

    def run(size: int) -> Tensor:
        return project(row.repeat(size, 1), weight, bias).contiguous().view(torch.uint8)

    def agrees(results: Tensor, expected: Tensor) -> bool:
        return torch.equal(results, expected.expand_as(results))

    expected = next(results[:1] for results in map(run, REFERENCES) if agrees(results, results[:1]))
    return tuple(size for size in SIZES if agrees(run(size), expected))


def _telling(product: Product) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns a matrix, a bias and a row [1, inputs] whose products cancel: only order-dependent rounding remains."""
    generator = torch.Generator().manual_seed(0)
    half = product.inputs // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(product.dtype)

    places = torch.randperm(2 * half, generator=generator)
    weight, row = normal(product.outputs, product.inputs), normal(1, product.inputs)
    some, values = normal(product.outputs, half), normal(1, half)
    weight[:, : 2 * half] = torch.cat((some, some), dim=1)[:, places]
    row[:, : 2 * half] = torch.cat((values, -values), dim=1)[:, places]
    if product.inputs % 2:
        row[:, -1] = 0
    return weight, normal(product.outputs) * 1e-6 if product.biased else None, row
