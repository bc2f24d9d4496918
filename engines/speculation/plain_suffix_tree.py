"""The drafts of `suffix_tree.cpp` by counts in plain Python: slow and large, for machines without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.speculation.drafter import NO_DRAFT, Draft

if TYPE_CHECKING:
    from engines.speculation.suffix_tree import SpeculationArgs

NODE_BYTES = 256
"""Of a node with its dictionary; as many are counted for each token of the sequences."""


@dataclass(slots=True)
class _Node:
    """A path of tokens from the root, one token longer than its parent's."""

    count: int = 0
    """Occurrences of the path in the sequences."""
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    ends: list[_Node] = field(default_factory=list)
    """The nodes of the last suffixes, up to `max_depth` tokens long; the longest one first."""
    is_finished: bool = False


class PlainSuffixTree:
    """A trie that has a node for each distinct path: up to `max_depth` nodes for each token."""

    def __init__(self, max_depth: int, max_bytes: int) -> None:
        self.num_tokens = self.num_evictions = self._num_nodes = 0
        self._depth, self._max_bytes = max_depth, max_bytes
        self._sequences: dict[int, _Sequence] = {}  # oldest first
        self._root = _Node()

    @property
    def num_bytes(self) -> int:
        return (self._num_nodes + self.num_tokens) * NODE_BYTES

    def length(self, request_id: int) -> int:
        return len(self._sequences[request_id].tokens) if request_id in self._sequences else 0

    def finish(self, request_id: int) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].is_finished = True

    def append(self, request_id: int, tokens: NDArray[np.integer]) -> bool:
        if ((tokens < 0) | (tokens >= 2**31)).any():
            return False
        for token in tokens.tolist():
            while self.num_bytes + (self._depth + 1) * NODE_BYTES > self._max_bytes and self._sequences:
                others = [one for one in self._sequences if one != request_id] or [request_id]
                self.remove(next((one for one in others if self._sequences[one].is_finished), others[0]))
                self.num_evictions += 1
            self._push(self._sequences.setdefault(request_id, _Sequence()), token)
        return True

    def _push(self, sequence: _Sequence, token: int) -> None:
        sequence.tokens.append(token)
        self.num_tokens += 1
        ends = [*sequence.ends[1 - self._depth :], self._root]
        self._num_nodes += sum(token not in end.children for end in ends)
        sequence.ends = [end.children.setdefault(token, _Node()) for end in ends]
        for end in sequence.ends:
            end.count += 1

    def remove(self, request_id: int) -> None:
        gone = self._sequences.pop(request_id, _Sequence()).tokens
        self.num_tokens -= len(gone)
        for start in range(len(gone)):
            node = self._root
            for token in gone[start : start + self._depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    self._num_nodes -= 1
                node = child

    def speculate(self, request_id: int, pattern: NDArray[np.integer] | None, args: SpeculationArgs) -> list[Draft]:
        own = self._sequences.get(request_id)
        tokens = pattern.tolist() if pattern is not None else own.tokens if own else []
        for size in range(min(args.pattern_lookup_max, len(tokens), self._depth - 1), args.pattern_lookup_min - 1, -1):
            context = tokens[len(tokens) - size :]
            if max(self._continuations(context).values(), default=0) >= args.min_count:
                return self._search(context, args)
        return []

    def _search(self, context: list[int], args: SpeculationArgs) -> list[Draft]:
        paths = [NO_DRAFT]
        for length in range(args.max_spec_tokens):
            candidates: list[Draft] = []
            for path in paths:
                score = path.probabilities[-1] if path.tokens else 1.0
                counts = self._continuations(context + path.tokens) if len(path.tokens) == length else {}
                among = sum(counts.values())
                scores = {token: score * (counts[token] / among) for token in sorted(counts)}
                longer = [
                    Draft([*path.tokens, token], [*path.probabilities, one])
                    for token, one in scores.items()
                    if counts[token] >= args.min_count and one >= args.min_probability
                ]
                candidates += longer or ([path] if path.tokens else [])
            paths = sorted(candidates, key=lambda one: -one.probabilities[-1])[: args.top_k]  # ties stay in order
        return paths

    def _continuations(self, context: Sequence[int]) -> dict[int, int]:
        """Returns how often each token follows the context, or what of it the trie is deep enough for."""
        node = self._root
        for token in context[1 - self._depth :]:
            if token not in node.children:
                return {}
            node = node.children[token]
        return {token: child.count for token, child in node.children.items()}

    def check(self) -> int:
        """Returns 0, or 1 if the counts are not those of the sequences."""
        anew = PlainSuffixTree(self._depth, self._max_bytes)
        for sequence in self._sequences.values():
            again = _Sequence()
            for token in sequence.tokens:
                anew._push(again, token)
        mine, right = ((one._root, one._num_nodes, one.num_tokens) for one in (self, anew))
        return int(mine != right)
