"""Calls `bits.cpp`, which is compiled once per machine: weights as integers. Torch-free."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.native.build import build, march

SUMMED = (2, 4, 8)
"""Bytes of elements that have checksums here."""
SOURCE = Path(__file__).parent / "bits.cpp"


@functools.cache
def load() -> Any:
    """Returns the library, or None without a C++ compiler."""
    path = build(SOURCE, ("-fopenmp", march()), "weights are compared by numpy, and their checksums made by torch")
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for size in SUMMED:
        checksum = getattr(library, f"checksum_{size}")
        checksum.argtypes, checksum.restype = (pointer, integer, integer, pointer, pointer, integer), ctypes.c_uint64
    for size in (2, 4):
        changes = getattr(library, f"changes_{size}")
        changes.argtypes, changes.restype = (pointer, pointer, integer, pointer, pointer), integer
    return library


def changes(bits: NDArray[Any], base: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Returns where two arrays [N] of uint16 or uint32 differ, ascending, and `bits` minus `base` there, modulo 2^16 or
    2^32."""
    if (library := load()) is None:
        positions = np.flatnonzero(bits != base)
        return positions, bits[positions] - base[positions]
    # Memory that is never written takes none.
    positions, differences = np.empty(len(bits), np.int64), np.empty(len(bits), bits.dtype)
    arrays = [one.ctypes.data for one in (positions, differences)]
    call = getattr(library, f"changes_{bits.itemsize}")
    found = call(bits.ctypes.data, base.ctypes.data, len(bits), *arrays)
    return positions[:found].copy(), differences[:found].copy()
