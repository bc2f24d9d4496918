"""Calls `suffix_tree.cpp`, which is compiled once per machine."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.native.build import build
from engines.speculation.drafter import Draft

if TYPE_CHECKING:
    from engines.speculation.suffix_tree import DraftBuffers, SpeculationArgs

SOURCE = Path(__file__).parent / "suffix_tree.cpp"
BAD_TOKEN, NO_MEMORY = 1, 2


@functools.cache
def load() -> Any:
    """Returns the library, or None without a C++ compiler."""
    path = build(SOURCE, (), "drafts are made in Python")
    if path is None:
        return None
    library = ctypes.PyDLL(str(path))  # holds Python's lock: a call is short, and no two work on one tree
    pointer, integer, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    requests = (pointer, pointer, integer)
    signatures: dict[str, tuple[Any, ...]] = {
        "make": (pointer, word, integer),
        "free": (None, pointer),
        "append": (word, pointer, integer, pointer, integer, integer),
        "remove": (word, pointer, integer),
        "finish": (None, pointer, integer),
        "length": (integer, pointer, integer),
        "num_tokens": (integer, pointer),
        "num_bytes": (integer, pointer),
        "num_evictions": (integer, pointer),
        "check": (word, pointer),
        "speculate": (word, *requests, pointer, integer, *[pointer] * 6, integer, integer),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"suffix_tree_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


class NativeSuffixTree:
    def __init__(self, library: Any, max_depth: int, max_bytes: int) -> None:
        self._library = library
        self.handle: int = library.make(max_depth, max_bytes)
        if self.handle is None:
            raise MemoryError("no memory for a suffix tree")
        weakref.finalize(self, library.free, self.handle)

    @property
    def num_tokens(self) -> int:
        return self._library.num_tokens(self.handle)

    @property
    def num_bytes(self) -> int:
        return self._library.num_bytes(self.handle)

    @property
    def num_evictions(self) -> int:
        return self._library.num_evictions(self.handle)

    def length(self, request_id: int) -> int:
        return self._library.length(self.handle, request_id)

    def append(self, request_id: int, tokens: NDArray[np.integer]) -> bool:
        # A copy's address is cheaper to have than an array's.
        status = self._library.append(self.handle, request_id, tokens.tobytes(), tokens.itemsize, len(tokens))
        _raise_without_memory(status)
        return status != BAD_TOKEN

    def finish(self, request_id: int) -> None:
        self._library.finish(self.handle, request_id)

    def remove(self, request_id: int) -> None:
        _raise_without_memory(self._library.remove(self.handle, request_id))

    def check(self) -> int:
        return self._library.check(self.handle)

    def speculate(self, request_id: int, pattern: NDArray[np.integer] | None, args: SpeculationArgs) -> list[Draft]:
        paths, longest = args.top_k, args.max_spec_tokens
        tokens, lengths = (ctypes.c_int32 * (paths * longest))(), (ctypes.c_int32 * paths)()
        probabilities, one = (ctypes.c_double * (paths * longest))(), ctypes.c_int64 * 1
        buffer: tuple[Any, ...] = (None, 8, None, None)
        if pattern is not None:
            buffer = (pattern.tobytes(), pattern.itemsize, one(0), one(len(pattern)))
        request = ((ctypes.c_void_p * 1)(self.handle), one(request_id), 1)
        outputs = (tokens, lengths, probabilities, paths, longest)
        status = self._library.speculate(*request, *buffer, args.packed, *outputs)
        _raise_without_memory(status)
        spans = [slice(k * longest, k * longest + lengths[k]) for k in range(paths) if lengths[k]]
        return [Draft(tokens[span], probabilities[span]) for span in spans]


def speculate(
    trees: Sequence[NativeSuffixTree],
    request_ids: NDArray[np.int64],
    args: Sequence[SpeculationArgs],
    drafts: DraftBuffers,
    span: tuple[NDArray[np.integer], NDArray[np.int64], NDArray[np.int64]] | None,
) -> None:
    """`batch_speculate`, whose arguments are right. The span is patterns, starts and stops."""
    handles = (ctypes.c_void_p * len(trees))(*[tree.handle for tree in trees])
    buffer: tuple[Any, ...] = (None, 8, None, None)
    if span is not None:
        buffer = (_address(span[0]), span[0].itemsize, _address(span[1]), _address(span[2]))
    packed = b"".join([one.packed for one in args])
    outputs = (_address(array) for array in (drafts.tokens, drafts.lengths, drafts.probabilities))
    sizes = drafts.tokens.shape[1:]
    status = load().speculate(handles, _address(request_ids), len(trees), *buffer, packed, *outputs, *sizes)
    _raise_without_memory(status)


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _raise_without_memory(status: int) -> None:
    if status == NO_MEMORY:
        raise MemoryError("no memory for the suffix tree; set SuffixTree.max_bytes")
