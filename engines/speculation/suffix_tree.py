"""Drafts from what a group has generated before: a suffix tree with counts (Seer §4.4; Oliaro et al. 2024). Torch-free.

A tree holds the sequences of one group. Each suffix of each sequence, cut to `max_depth` tokens, is a path from the
root, and each node has the number of occurrences of its path. A draft continues the longest suffix of a pattern that
the tree can continue. The pattern is mostly the end of a sequence of the tree, whose suffixes' nodes are known.

The probability of a token is its share of the continuations of its context; an occurrence at the end of a sequence has
none. A context has at most `max_depth` - 1 tokens: a longer draft drops its first tokens, and goes on.

Appending takes O(max_depth) per token, removing O(num_tokens + max_depth x tokens removed). A draft of s tokens after a
pattern of p takes O(p + s) if the pattern is the end of the request's sequence (p compares of neighbours in memory),
else O(p log p + s); a beam search reads all children of the nodes that it extends. A call in C++ holds Python's lock.
`experiments/bench/suffix_tree.py` measures.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from engines.constraints import Fraction, WholeNumber, check_fields, check_value
from engines.speculation.drafter import Draft
from engines.speculation.native_suffix_tree import NativeSuffixTree, load, speculate
from engines.speculation.plain_suffix_tree import PlainSuffixTree

UNBOUNDED = 2**62
NO_REQUEST = -1
INTEGERS = (np.int32, np.int64)

Size = Annotated[int, Meta(ge=1, le=1024, description="an integer of 1 to 1024")]
Depth = Annotated[int, Meta(ge=2, le=1024, description="an integer of 2 to 1024")]
Bound = Annotated[int, Meta(ge=2**16, le=UNBOUNDED, description="an integer of at least 65536")] | None
Tokens = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class SpeculationArgs:
    """How one request is drafted for (Seer, Table 4, and the filters of §4.4)."""

    max_spec_tokens: Size = 8
    """Tokens of a path at most."""
    pattern_lookup_max: Size = 16
    """Tokens of the pattern that a match has at most. More than the tree's max_depth - 1 have no effect."""
    pattern_lookup_min: Size = 1
    """Tokens of the pattern that a match has at least."""
    top_k: Size = 1
    """Paths at most: the width of the beam search."""
    min_count: Size = 1
    """A drafted token has followed its context at least this often."""
    min_probability: Fraction = 0.1
    """A path ends where its probability would be lower."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pattern_lookup_min > self.pattern_lookup_max:
            raise ValueError(
                f"SpeculationArgs.pattern_lookup_min={self.pattern_lookup_min}: is above "
                f"pattern_lookup_max={self.pattern_lookup_max}; lower it"
            )

    @functools.cached_property
    def packed(self) -> bytes:
        """As `Arguments` of suffix_tree.cpp."""
        lookup = (self.pattern_lookup_max, self.pattern_lookup_min)
        return struct.pack("5i4xd", self.max_spec_tokens, *lookup, self.top_k, self.min_count, self.min_probability)


@dataclass(frozen=True, kw_only=True)
class DraftBuffers:
    """Arrays that `batch_speculate` writes into: the caller keeps them for many calls."""

    tokens: NDArray[np.int32]
    """[requests, paths, tokens]; tokens after the end of a path stay as they were."""
    lengths: NDArray[np.int32]
    """[requests, paths]; 0 where there is no such path."""
    probabilities: NDArray[np.float64]
    """[requests, paths, tokens]: of the path up to each token. The best path is the first one."""

    @classmethod
    def empty(cls, requests: int, paths: int, tokens: int) -> DraftBuffers:
        shape = (requests, paths)
        return cls(
            tokens=np.zeros((*shape, tokens), np.int32),
            lengths=np.zeros(shape, np.int32),
            probabilities=np.zeros((*shape, tokens)),
        )

    def drafts(self, row: int) -> list[Draft]:
        """Returns the paths of a request, the best first."""
        return [
            Draft(self.tokens[row, path, :length].tolist(), self.probabilities[row, path, :length].tolist())
            for path, length in enumerate(self.lengths[row].tolist())
            if length
        ]

    def __post_init__(self) -> None:
        fields = {"tokens": (np.int32, 3), "lengths": (np.int32, 2), "probabilities": (np.float64, 3)}
        for name, (kind, dimensions) in fields.items():
            _check_array(f"DraftBuffers.{name}", getattr(self, name), (kind,), dimensions)
            if not getattr(self, name).flags.writeable:
                raise ValueError(f"DraftBuffers.{name}: is read-only; give an array that can be written")
        for name, wanted in (("lengths", self.tokens.shape[:2]), ("probabilities", self.tokens.shape)):
            if (shape := getattr(self, name).shape) != wanted:
                raise ValueError(f"DraftBuffers.{name}: has shape {shape}; give {wanted}, as tokens has")


class SuffixTree:
    """The tree of one group: in C++ where it compiles, else a slow one in Python."""

    def __init__(self, *, max_depth: int = 24, max_bytes: int | None = None) -> None:
        """`num_bytes` never exceeds `max_bytes`: whole sequences are evicted, finished ones first, then the oldest, and
        the growing one last, which then begins anew."""
        for name, value, hint in (("max_depth", max_depth, Depth), ("max_bytes", max_bytes, Bound)):
            check_value(f"SuffixTree.{name}", value, hint)
        library, bound = load(), max_bytes or UNBOUNDED
        self._tree: NativeSuffixTree | PlainSuffixTree
        self._tree = NativeSuffixTree(library, max_depth, bound) if library else PlainSuffixTree(max_depth, bound)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self._tree.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of the nodes, tokens and sequences in use, in Python about 80 times as many as in C++. Up to twice as
        much may be allocated."""
        return self._tree.num_bytes

    @property
    def num_evictions(self) -> int:
        """Sequences evicted since the tree was made."""
        return self._tree.num_evictions

    def length(self, request_id: int) -> int:
        """Tokens of the request's sequence; 0 if it is not in the tree, as after an eviction."""
        return self._tree.length(_checked_id(request_id))

    def append(self, request_id: int, tokens: Tokens) -> None:
        """Appends to the request's sequence, which begins here if the tree does not hold it."""
        array = _as_tokens("tokens", tokens)
        if not self._tree.append(_checked_id(request_id), array):
            wrong = array[(array < 0) | (array >= 2**31)][0]
            raise ValueError(f"tokens: {wrong} is no token; give numbers of 0 to 2^31 - 1")

    def finish(self, request_id: int) -> None:
        """Marks a request that has ended as one of the first to evict. Does nothing if the tree does not hold it."""
        self._tree.finish(_checked_id(request_id))

    def remove(self, request_id: int) -> None:
        """Removes the request's sequence, as if it had never been added. Does nothing if the tree does not hold it."""
        self._tree.remove(_checked_id(request_id))

    def speculate(
        self, args: SpeculationArgs, *, request_id: int | None = None, pattern: Tokens | None = None
    ) -> list[Draft]:
        """Returns up to `top_k` drafts after the pattern, the best first (ties: the smaller token first).

        The pattern is by default the end of the request's sequence. If both are given, the draft is the pattern's, and
        is found faster if the pattern is that end.
        """
        if request_id is None and pattern is None:
            raise ValueError("SuffixTree.speculate: neither request_id nor pattern; give one")
        request_id = NO_REQUEST if request_id is None else _checked_id(request_id)
        array = None if pattern is None else _as_tokens("pattern", pattern)
        return self._tree.speculate(request_id, array, args)

    def check_integrity(self) -> None:
        """Raises RuntimeError if the nodes do not agree with the sequences. Slow: for tests."""
        if (failed := self._tree.check()) != 0:
            raise RuntimeError(f"SuffixTree: check {failed} failed; this is a bug")


def batch_speculate(
    trees: Sequence[SuffixTree],
    request_ids: NDArray[np.int64],
    args: Sequence[SpeculationArgs],
    drafts: DraftBuffers,
    *,
    patterns: NDArray[np.integer] | None = None,
    starts: NDArray[np.int64] | None = None,
    stops: NDArray[np.int64] | None = None,
) -> None:
    """Writes the drafts of request i from trees[i] into row i of `drafts`, in one call without copies (Seer, Table 4).

    The request's pattern is patterns.flat[starts[i]:stops[i]], int32 or int64. Without `patterns` it is the end of the
    request's sequence. A request that no tree holds has the request_id -1.
    """
    span = None
    arrays = {"request_ids": request_ids}
    if patterns is not None:
        if starts is None or stops is None:
            raise ValueError("starts, stops: are missing; patterns needs both")
        _check_array("patterns", patterns, INTEGERS, None)
        arrays |= {"starts": starts, "stops": stops}
        span = (patterns, starts, stops)
    for name, array in arrays.items():
        _check_array(name, array, (np.int64,), 1)
    for name, length in {"args": len(args), **{name: len(array) for name, array in arrays.items()}}.items():
        if length != len(trees):
            raise ValueError(f"{name}: has {length} entries; give one for each of the {len(trees)} trees")
    if not trees:
        return
    wanted = (len(trees), max(one.top_k for one in args), max(one.max_spec_tokens for one in args))
    if any(have < want for have, want in zip(drafts.tokens.shape, wanted, strict=True)):
        raise ValueError(f"drafts: is of shape {drafts.tokens.shape}; give at least {wanted}")
    if span is not None and (span[1].min() < 0 or (span[2] < span[1]).any() or span[2].max() > span[0].size):
        raise ValueError(f"starts, stops: give 0 <= starts <= stops <= {span[0].size}, the size of patterns")
    natives = [tree._tree for tree in trees if isinstance(tree._tree, NativeSuffixTree)]
    if len(natives) == len(trees):
        return speculate(natives, request_ids, args, drafts, span)
    drafts.lengths[: len(trees)] = 0
    for i, tree in enumerate(trees):
        pattern = None if span is None else span[0].reshape(-1)[span[1][i] : span[2][i]]
        for k, (tokens, probabilities, *_) in enumerate(tree._tree.speculate(int(request_ids[i]), pattern, args[i])):
            drafts.tokens[i, k, : len(tokens)], drafts.probabilities[i, k, : len(tokens)] = tokens, probabilities
            drafts.lengths[i, k] = len(tokens)
    return None


def _as_tokens(name: str, tokens: Tokens) -> NDArray[np.integer]:
    try:
        array = np.ascontiguousarray(tokens if len(tokens) else np.zeros(0, np.int64))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={str(tokens)[:100]}: is no list of tokens; give integers") from None
    _check_array(name, array, INTEGERS, 1)
    return array


def _check_array(name: str, array: NDArray[Any], kinds: Sequence[type], dimensions: int | None) -> None:
    if array.dtype not in kinds or dimensions not in (None, array.ndim) or not array.flags.c_contiguous:
        names = " or ".join(kind.__name__ for kind in kinds)
        shape = "" if dimensions is None else f" of {dimensions} dimensions"
        raise ValueError(f"{name}: is {array.dtype} of shape {array.shape}; give a contiguous array of {names}{shape}")


def _checked_id(request_id: int) -> int:
    if type(request_id) is not int or not 0 <= request_id < 2**63:
        check_value("request_id", request_id, WholeNumber)
    return request_id
