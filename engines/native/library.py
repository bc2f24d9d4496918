"""Calls `kernels.cpp`, which is compiled once per machine. Without a compiler torch's operations are used instead."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.config import Kernels
from engines.native.build import build, march

SOURCE = Path(__file__).parent / "kernels.cpp"
FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class Library:
    """The functions of `kernels.cpp`, for contiguous tensors of one dtype on the CPU."""

    rms_norm: Any
    add_rms_norm: Any
    few_rows: Any
    sample: Any
    silu_mul: Any
    rotate_and_store: Any
    paged_attention: Any

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        library = ctypes.CDLL(str(path))
        suffix = _DTYPES[dtype]
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        signatures = {
            "rms_norm": (*[pointer] * 3, *[integer] * 2, number),
            "add_rms_norm": (*[pointer] * 4, *[integer] * 2, number),
            "few_rows": (*[pointer] * 3, *[integer] * 3),
            "sample": (pointer, integer, *[pointer] * 5, *[integer] * 2),
            "silu_mul": (*[pointer] * 2, *[integer] * 2),
            "rotate_and_store": (*[pointer] * 8, *[integer] * 4, number),
            "paged_attention": (*[pointer] * 5, integer, *[pointer] * 2, *[integer] * 5, number),
        }
        for name, arguments in signatures.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)
        self.sample_wide = self.sample
        """`sample` for processed logits, whose dtype is at least float32."""
        if dtype is torch.bfloat16:
            self.sample_wide = library.sample_float32
            self.sample_wide.argtypes, self.sample_wide.restype = signatures["sample"], None
        most_rows = getattr(library, f"most_rows_{suffix}")
        most_rows.restype = integer
        self.most_rows: int = most_rows()
        """Most rows for which `few_rows` is the faster way."""


def choose_library(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Library | None:
    """Returns the library for this dtype and device, or None for torch's own operations.

    Raises ValueError when `kernels` is "native" and there is no library; "auto" logs the reason once.
    """
    if kernels == "torch":
        return None
    path = _build() if device.type == "cpu" else None
    if path is None and kernels == "native":
        raise ValueError(
            f"EngineConfig.kernels='native': cannot be had on {device.type} here (they need a CPU and a C++ compiler; "
            "the log says more); use 'auto' or 'torch'"
        )
    return Library(path, dtype) if path is not None else None


@functools.cache
def _build() -> Path | None:
    return build(SOURCE, (*FLAGS, march()), "small operations run in torch")


def address(tensor: Tensor | None) -> int | None:
    """Returns the address of the first element, None for None; the tensor must be contiguous."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels take contiguous tensors"
    return tensor.data_ptr()
