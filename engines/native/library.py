"""Compiles `kernels.cpp` once per machine, and calls it. Without a compiler torch's operations are used instead."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.config import Kernels

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
MARCH_VARIABLE = "CURTAIL_MARCH"
"""Environment variable with the processor to compile for, as in the compiler's -march; by default this machine's. With
x86-64-v3 (any AVX2 processor) one machine shows how the kernels run on another."""
COMPILE_S = 120.0
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}

logger = logging.getLogger(__name__)


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
    """Returns the library's path in the user's cache, named by source, flags, compiler and processor, or None."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler (c++, g++, clang++, or $CXX): small operations run in torch, which is slower")
        return None
    try:
        flags = (*FLAGS, f"-march={os.environ.get(MARCH_VARIABLE, 'native')}")
        sources = [path.read_text() for path in (SOURCE, *sorted(FOLDER.glob("*.h")))]
        what = "\n".join((*sources, *flags, compiler, _processor()))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "curtail"
        path = folder / f"kernels-{hashlib.blake2b(what.encode(), digest_size=12).hexdigest()}.so"
        with contextlib.suppress(OSError):  # not compiled yet, or damaged
            ctypes.CDLL(str(path))
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / "kernels.so"
            command = [*shlex.split(compiler), *flags, str(SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
            built.replace(path)  # whole or absent, also when other processes compile it now
        ctypes.CDLL(str(path))
        return path
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        logger.warning("%s cannot compile %s: %s; small operations run in torch", compiler, SOURCE.name, told[-300:])
        return None


def _processor() -> str:
    """Returns all that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return "\n".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features")))


def address(tensor: Tensor | None) -> int | None:
    """Returns the address of the first element, None for None; the tensor must be contiguous."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels take contiguous tensors"
    return tensor.data_ptr()
