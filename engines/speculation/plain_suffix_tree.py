"""The suffix tree of `suffix_tree.cpp` in Python, with the same results: slow, for machines without a compiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.speculation.drafter import Draft

if TYPE_CHECKING:
    from engines.speculation.suffix_tree import SpeculationArgs

NODE_BYTES, TOKEN_BYTES, SEQUENCE_BYTES = 48, 8, 128
"""Of the C++ tree, so that both evict at the same time."""


class PlainSuffixTree:
    def __init__(self, max_depth: int, max_bytes: int) -> None:
        self.num_evictions = 0
        self._depth, self._max_bytes = max_depth, max_bytes
        self._sequences: dict[int, _Sequence] = {}  # oldest first
        self._root = _Node(None, _Sequence(), 0, 0)
        self._num_nodes = 1

    @property
    def num_tokens(self) -> int:
        return self._root.count

    @property
    def num_bytes(self) -> int:
        sizes = (self._num_nodes, NODE_BYTES), (self.num_tokens, TOKEN_BYTES), (len(self._sequences), SEQUENCE_BYTES)
        return sum(number * size for number, size in sizes)

    def length(self, request_id: int) -> int:
        return len(self._sequences[request_id].tokens) if request_id in self._sequences else 0

    def finish(self, request_id: int) -> None:
        if request_id in self._sequences:
            self._sequences[request_id].finished = True

    def append(self, request_id: int, tokens: NDArray[np.integer]) -> bool:
        if ((tokens < 0) | (tokens >= 2**31)).any():
            return False
        reserve = self._depth * NODE_BYTES + TOKEN_BYTES + SEQUENCE_BYTES
        for token in tokens.tolist():
            while self.num_bytes + reserve > self._max_bytes and self._sequences:
                order = {one: (one == request_id, not self._sequences[one].finished) for one in self._sequences}
                self.remove(min(order, key=order.__getitem__))  # the first one, which is the oldest, of equals
                self.num_evictions += 1
            self._push(self._sequences.setdefault(request_id, _Sequence()), token)
        return True

    def _push(self, sequence: _Sequence, token: int) -> None:
        sequence.tokens.append(token)
        sequence.ends.append(self._root)
        self._root.count += 1
        self._root.ends += 1
        last = len(sequence.tokens) - 1
        for i in range(max(0, last + 1 - self._depth), last + 1):
            sequence.ends[i] = self._advance(sequence.ends[i], sequence, token)

    def _advance(self, node: _Node, sequence: _Sequence, token: int) -> _Node:
        """Returns the node of a suffix that ended at `node`, after it has grown by the token."""
        below = node.children.get(token)
        if below is None and node.count == 1 and node.parent:  # the only occurrence grows
            node.length += 1
            return node
        if below is None:
            below = _Node(node, sequence, len(sequence.tokens) - 1, 1)
            node.children[token] = below
            self._num_nodes += 1
        elif below.length > 1:
            below = self._split(below)
        node.ends -= 1
        below.count += 1
        below.ends += 1
        self._merge_if_needless(node)
        return below

    def _split(self, node: _Node) -> _Node:
        upper = _Node(node.parent, node.sequence, node.start, 1)
        assert node.parent is not None
        node.parent.children[upper.token] = upper
        upper.count, node.parent = node.count, upper
        node.start, node.length = node.start + 1, node.length - 1
        upper.children[node.token] = node
        self._num_nodes += 1
        return upper

    def _merge_if_needless(self, node: _Node) -> None:
        if node.parent is None or node.ends or len(node.children) != 1:
            return
        (below,) = node.children.values()
        below.start, below.length = below.start - node.length, below.length + node.length
        below.parent = node.parent
        node.parent.children[below.token] = below
        node.count, node.children = 0, {}
        self._num_nodes -= 1

    def remove(self, request_id: int) -> None:
        gone = self._sequences.pop(request_id, None)
        if gone is None:
            return
        touched: dict[_Node, None] = {}
        for end in gone.ends:
            end.ends -= 1
            for node in end.upwards():
                node.count -= 1
                touched[node] = None
        for node in touched:
            if node.count == 0 and node.parent:
                del node.parent.children[node.token]
                self._num_nodes -= 1
        for node in touched:
            self._merge_if_needless(node)
        self._refer_elsewhere(gone, [node for node in touched if node.count and node.parent])

    def _refer_elsewhere(self, gone: _Sequence, touched: Sequence[_Node]) -> None:
        """Edges that are spans of `gone` become spans of others."""
        for other in self._sequences.values():
            for i, node in enumerate(other.ends):
                if node.sequence is gone:
                    stop = min(i + self._depth, len(other.tokens))
                    node.sequence, node.start = other, stop - node.length
        for node in touched:
            span, start = node, 0
            while span.sequence is gone:
                span = next(iter(span.children.values()))
                start -= span.length
            if span is not node:
                node.sequence, node.start = span.sequence, span.start + span.length + start - node.length

    def speculate(self, request_id: int, pattern: NDArray[np.integer] | None, args: SpeculationArgs) -> list[Draft]:
        own = self._sequences.get(request_id)
        tokens = pattern.tolist() if pattern is not None else own.tokens if own else []
        for size in range(min(args.pattern_lookup_max, len(tokens), self._depth - 1), args.pattern_lookup_min - 1, -1):
            context = list(tokens[len(tokens) - size :])
            if any(count >= args.min_count for _, count, _ in self._continuations(context)):
                return self._search(context, args)
        return []

    def _search(self, context: list[int], args: SpeculationArgs) -> list[Draft]:
        paths = [Draft([], [])]
        for drafted in range(args.max_spec_tokens):
            candidates: list[tuple[float, int, int, Draft]] = []
            for rank, draft in enumerate(paths):
                path, score = draft.tokens, [1.0, *draft.probabilities][-1]
                before = len(candidates)
                if len(path) == drafted:
                    for token, count, among in self._continuations(context + path):
                        longer = score * (count / among)
                        if count >= args.min_count and longer >= args.min_probability:
                            longer_draft = Draft([*path, token], [*draft.probabilities, longer])
                            candidates.append((-longer, rank, token, longer_draft))
                if len(candidates) == before and path:
                    candidates.append((-score, rank, -1, draft))
            paths = [draft for *_, draft in sorted(candidates)[: args.top_k]]
        return paths

    def _continuations(self, context: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns (token, occurrences after the context, continued occurrences of the context) of what follows."""
        node, offset = self._root, 0
        for token in context[-(self._depth - 1) :]:
            if offset == node.length:
                if token not in node.children:
                    return []
                node, offset = node.children[token], 1
            elif node.sequence.tokens[node.start + offset] == token:
                offset += 1
            else:
                return []
        if offset < node.length:
            return [(node.sequence.tokens[node.start + offset], node.count, node.count)]
        return [(token, child.count, node.count - node.ends) for token, child in node.children.items()]

    def check(self) -> int:
        """Returns 0, or the number of a failed check, as the C++ tree does."""
        counts: dict[_Node, int] = {self._root: 0}
        ends: dict[_Node, int] = {}
        for sequence in self._sequences.values():
            for i, end in enumerate(sequence.ends):
                ends[end] = ends.get(end, 0) + 1
                stop = min(i + self._depth, len(sequence.tokens))
                for node in end.upwards():
                    counts[node] = counts.get(node, 0) + 1
                    span = node.sequence.tokens[node.start : node.start + node.length]
                    if node.parent and node.sequence not in self._sequences.values():
                        return 2
                    if len(span) != node.length or sequence.tokens[stop - node.length : stop] != span:
                        return 5
                    stop -= node.length
                if stop != i:
                    return 6
        for node, count in counts.items():
            if node.count != count or node.ends != ends.get(node, 0):
                return 7
            if node.parent and not node.ends and len(node.children) == 1:
                return 8
            if any(one.parent is not node or one.token != token for token, one in node.children.items()):
                return 9
            if sum(one.count for one in node.children.values()) + node.ends != count:
                return 11
        return 0 if len(counts) == self._num_nodes else 12


class _Sequence:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[_Node] = []
        self.finished = False


class _Node:
    __slots__ = ("children", "count", "ends", "length", "parent", "sequence", "start")

    def __init__(self, parent: _Node | None, sequence: _Sequence, start: int, length: int) -> None:
        self.parent, self.sequence, self.start, self.length = parent, sequence, start, length
        self.children: dict[int, _Node] = {}
        self.count = self.ends = 0

    @property
    def token(self) -> int:
        return self.sequence.tokens[self.start]

    def upwards(self) -> Iterator[_Node]:
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent
