"""The suffix tree, in C++ and in Python, against counts of all substrings by brute force."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.native import build
from engines.speculation.drafter import Draft
from engines.speculation.native_suffix_tree import NativeSuffixTree, load
from engines.speculation.plain_suffix_tree import NODE_BYTES, PlainSuffixTree
from engines.speculation.suffix_tree import DraftBuffers, SpeculationArgs, SuffixTree, batch_speculate

KERNELS = ("python",) if load() is None else ("native", "python")
NO_LIMIT: dict[str, Any] = {"min_probability": 0.0}
needs_compiler = pytest.mark.skipif(load() is None, reason="no C++ compiler here")


class Oracle:
    """The sequences alone: every question is answered by a look at all of them. Bytes are those of a tree in C++, or
    in Python."""

    def __init__(self, kernels: str, depth: int, max_nodes: int) -> None:
        self.depth, self.is_native = depth, kernels == "native"
        self.node, self.token, self.sequence = (48, 8, 128) if self.is_native else (NODE_BYTES, NODE_BYTES, 0)
        self.max_bytes = max_nodes * self.node
        self.sequences: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.num_evictions = 0

    @property
    def num_bytes(self) -> int:
        """In Python a node is a path that is not empty; in C++ the root, the end of a suffix, or a path with two
        continuations."""
        paths, ends = Counter[tuple[int, ...]](), set()
        for tokens in self.sequences.values():
            for i in range(len(tokens)):
                path = tuple(tokens[i : i + self.depth])
                paths.update(dict.fromkeys((path[:n] for n in range(len(path) + 1)), 1))
                ends.add(path)
        parts = Counter(path[:-1] for path in paths if path)
        nodes = {(), *ends, *(path for path, number in parts.items() if number > 1)}
        num_nodes = len(nodes) if self.is_native else len(paths.keys() - {()})
        num_tokens = sum(map(len, self.sequences.values()))
        return num_nodes * self.node + num_tokens * self.token + len(self.sequences) * self.sequence

    def append(self, request_id: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            reserve = self.depth * self.node + self.token + self.sequence
            while self.max_bytes and self.sequences and self.num_bytes + reserve > self.max_bytes:
                others = [one for one in self.sequences if one != request_id] or [request_id]
                self.remove(next((one for one in others if one in self.finished), others[0]))
                self.num_evictions += 1
            self.sequences.setdefault(request_id, []).append(token)

    def finish(self, request_id: int) -> None:
        self.finished |= {request_id} & self.sequences.keys()

    def remove(self, request_id: int) -> None:
        self.sequences.pop(request_id, None)
        self.finished.discard(request_id)

    def after(self, context: Sequence[int]) -> Counter[int]:
        context = context[-(self.depth - 1) :]
        size, tokens = len(context), [*self.sequences.values()]
        return Counter(one[i + size] for one in tokens for i in range(len(one) - size) if one[i : i + size] == context)

    def speculate(self, pattern: list[int], args: SpeculationArgs) -> list[tuple[list[int], list[float]]]:
        longest = min(args.pattern_lookup_max, len(pattern), self.depth - 1)
        for size in range(longest, args.pattern_lookup_min - 1, -1):
            if max(self.after(pattern[-size:]).values(), default=0) >= args.min_count:
                return self.beam(pattern[-size:], args)
        return []

    def beam(self, context: list[int], args: SpeculationArgs) -> list[tuple[list[int], list[float]]]:
        beams: list[tuple[list[int], list[float]]] = [([], [])]
        for length in range(1, args.max_spec_tokens + 1):
            longer: list[tuple[list[int], list[float]]] = []
            for tokens, scores in beams:
                score = scores[-1] if scores else 1.0
                follow = self.after(context + tokens) if len(tokens) == length - 1 else Counter[int]()
                shares = {one: score * (follow[one] / follow.total()) for one in sorted(follow)}
                keep = {one for one in shares if follow[one] >= args.min_count and shares[one] >= args.min_probability}
                longer += [([*tokens, one], [*scores, shares[one]]) for one in shares if one in keep]
                longer += [(tokens, scores)] if not keep and tokens else []
            beams = sorted(longer, key=lambda beam: -beam[1][-1])[: args.top_k]  # stable: ranks, then tokens break ties
        return beams


def pairs(drafts: list[Draft]) -> list[tuple[list[int], list[float]]]:
    return [(draft.tokens, draft.probabilities) for draft in drafts]


def make(kernels: str, depth: int, max_bytes: int = 0) -> SuffixTree:
    """With any bound: users may give no smaller one than 64 KiB."""
    tree = SuffixTree(max_depth=depth)
    bound = max_bytes or 2**62
    native = kernels == "native"
    tree._tree = NativeSuffixTree(load(), depth, bound) if native else PlainSuffixTree(depth, bound)
    return tree


def random_args(rng: random.Random) -> SpeculationArgs:
    most = rng.randint(1, 9)
    return SpeculationArgs(
        max_spec_tokens=rng.randint(1, 6),
        pattern_lookup_max=most,
        pattern_lookup_min=rng.randint(1, most),
        top_k=rng.choice([1, 1, 2, 4]),
        min_count=rng.choice([1, 1, 2]),
        min_probability=rng.choice([0.0, 0.1, 0.5]),
    )


def play(rng: random.Random) -> Counter[str]:
    """Plays random operations on both trees, each with an oracle; returns the number of operations by name. The trees
    evict at different times, each as its own oracle does."""
    depth, vocabulary = rng.choice([2, 3, 4, 7]), rng.choice([1, 2, 2, 3, 5])
    max_nodes = rng.choice([0, 0, rng.randint(15, 52)])
    oracles = [Oracle(kernels, depth, max_nodes) for kernels in KERNELS]
    trees = [make(kernels, depth, one.max_bytes) for kernels, one in zip(KERNELS, oracles, strict=True)]
    played = Counter[str]()
    for _ in range(rng.randint(1, 24)):
        name = rng.choice(["append", "append", "append", "speculate", "speculate", "remove", "finish"])
        request_id = rng.randrange(3)
        if name == "append":
            tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 8))]
            for one in (*oracles, *trees):
                one.append(request_id, tokens)
        elif name == "speculate":
            args, most = random_args(rng), rng.randint(1, 9)
            foreign = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 8))]
            kind = rng.choice(["none", "foreign", "end"])
            for tree, oracle in zip(trees, oracles, strict=True):
                own = oracle.sequences.get(request_id, [])
                pattern = {"none": None, "foreign": foreign, "end": own[-most:]}[kind]
                expected = oracle.speculate(own if pattern is None else pattern, args)
                assert pairs(tree.speculate(args, request_id=request_id, pattern=pattern)) == expected
                played["drafted" if expected else "no draft"] += 1
        else:
            for one in (*oracles, *trees):
                getattr(one, name)(request_id)
        played[name] += 1
    for kernels, tree, oracle in zip(KERNELS, trees, oracles, strict=True):
        tree.check_integrity()
        assert tree.num_bytes == oracle.num_bytes <= (oracle.max_bytes or math.inf)
        assert tree.num_tokens == sum(map(len, oracle.sequences.values()))
        assert [tree.length(one) for one in range(3)] == [len(oracle.sequences.get(one, [])) for one in range(3)]
        assert tree.num_evictions == oracle.num_evictions
        played[f"evicted, {kernels}"] += oracle.num_evictions
    return played


@pytest.mark.parametrize("seed", range(4))
def test_random_operations(seed: int) -> None:
    rng, played = random.Random(seed), Counter[str]()
    for _ in range(2500):
        played += play(rng)
    names = ("append", "drafted", "no draft", "remove", "finish", *(f"evicted, {kernels}" for kernels in KERNELS))
    assert min(played[name] for name in names) > 500


@needs_compiler
@pytest.mark.parametrize("vocabulary", [2, 50, 30_000])
def test_long_sequences(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    trees = [make(kernels, 24) for kernels in KERNELS]
    text = rng.integers(0, vocabulary, 1500)
    for start in range(0, 1500, 100):
        part = text[: start // 2] if start % 300 == 0 else text[start : start + 100]  # some of it again
        for tree in trees:
            tree.append(start % 7, part)
    for request_id in (None, 3, 1, 6):
        for tree in trees:
            if request_id is not None:
                tree.remove(request_id)
            tree.check_integrity()
        assert trees[0].num_tokens == trees[1].num_tokens
        for top_k in (1, 4):
            args = SpeculationArgs(max_spec_tokens=30, top_k=top_k, **NO_LIMIT)
            for at in range(30, 1500, 300):
                native, plain = (tree.speculate(args, pattern=text[at - 20 : at]) for tree in trees)
                assert native == plain
                assert native or vocabulary == 30_000


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts(kernels: str) -> None:
    tree, args = make(kernels, 4), SpeculationArgs()
    tree.append(0, [1, 2, 3, 4, 5, 6, 7])
    assert tree.speculate(args, request_id=0) == [], "the end of a sequence is no match of itself"
    assert pairs(tree.speculate(args, pattern=[9, 2, 3])) == [([4, 5, 6, 7], [1.0] * 4)], "longer than the tree is deep"
    tree.append(1, [8, 2, 3, 5])
    tree.append(2, [9, 3, 4])
    both = SpeculationArgs(top_k=2)
    assert pairs(tree.speculate(both, pattern=[2, 3])) == [([4, 5, 6, 7], [0.5] * 4), ([5], [0.5])]
    assert tree.speculate(args, pattern=[3])[0].probabilities[0] == 2 / 3
    assert pairs(tree.speculate(SpeculationArgs(min_count=2), pattern=[2, 3])) == [([4], [2 / 3])], (
        "by the shorter match"
    )
    assert tree.speculate(SpeculationArgs(min_probability=0.6), pattern=[2, 3]) == []
    assert tree.speculate(SpeculationArgs(pattern_lookup_min=2), pattern=[9, 9, 3, 9]) == []
    assert tree.speculate(args, request_id=7) == [] == tree.speculate(args, pattern=[])
    assert tree.speculate(args, pattern=[-1, 2**40]) == [], "no tokens, so they match nothing"


@needs_compiler
def test_a_deep_tree() -> None:
    tree = make("native", 1024)
    tree.append(0, [5] * 4000)
    tree.check_integrity()
    (draft,) = tree.speculate(SpeculationArgs(max_spec_tokens=1000, pattern_lookup_max=1000), request_id=0)
    assert draft == Draft([5] * 1000, [1.0] * 1000)
    tree.remove(0)
    tree.check_integrity()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_batch(kernels: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    trees = [make(kernels, 8) for _ in range(3)]
    buffer = rng.integers(0, 3, (6, 40)).astype(dtype)  # a row per request
    sizes = rng.integers(0, 40, 6)
    for row, size in enumerate(sizes):
        trees[row % 3].append(row, buffer[row, :size])
    args = [SpeculationArgs(max_spec_tokens=row + 1, top_k=1 + row % 3) for row in range(6)]
    many, ids = [trees[row % 3] for row in range(6)], np.array([0, 1, 2, -1, 4, 5])
    drafts = DraftBuffers(
        tokens=np.full((7, 4, 9), -7, np.int32), lengths=np.ones((7, 4), np.int32), probabilities=-np.ones((7, 4, 9))
    )
    starts = np.arange(6) * 40
    batch_speculate(many, ids, args, drafts, patterns=buffer, starts=starts, stops=starts + sizes)
    found = 0
    for row in range(6):
        expected = many[row].speculate(args[row], request_id=row, pattern=buffer[row, : sizes[row]])
        assert drafts.lengths[row].tolist() == [*(len(one.tokens) for one in expected), *[0] * (4 - len(expected))]
        for k, one in enumerate(expected):
            assert drafts.tokens[row, k].tolist() == [*one.tokens, *[-7] * (9 - len(one.tokens))]
            assert drafts.probabilities[row, k].tolist() == [*one.probabilities, *[-1] * (9 - len(one.tokens))]
        found += len(expected)
    assert found > 6
    own = DraftBuffers.empty(6, 3, 6)
    batch_speculate(many, np.arange(6), args, own)
    assert (own.lengths == drafts.lengths[:6, :3]).all()
    assert (drafts.tokens[6] == -7).all() and (drafts.lengths[6] == 1).all(), "of a row beyond the batch"
    batch_speculate([], np.zeros(0, np.int64), [], own)


@pytest.mark.parametrize("kernels", KERNELS)
def test_memory_is_bounded_and_given_back(kernels: str) -> None:
    rng, bound = np.random.default_rng(0), 2**16 if kernels == "native" else 2**22
    tree = make(kernels, 24, bound)
    floor = tree.num_bytes
    for request_id in range(4):
        tree.append(request_id, rng.integers(0, 9, 100))
    tree.finish(2)
    most = 0
    while tree.num_evictions < 3:
        tree.append(9, rng.integers(0, 9, 20))
        most = max(most, tree.num_bytes)
        if tree.num_evictions == 1:
            assert [tree.length(one) for one in range(4)] == [100, 100, 0, 100], "the finished one first"
    assert 0.9 * bound < most <= bound
    assert [tree.length(one) for one in range(4)] == [0, 0, 0, 100], "then the oldest"
    while tree.num_evictions < 5:
        tree.append(9, rng.integers(0, 9, 20))
        most = max(most, tree.num_bytes)
    assert most <= bound and 0 < tree.length(9) <= 20, "what grows alone begins anew"
    tree.check_integrity()
    tree.remove(9)
    assert tree.num_bytes == floor and tree.num_tokens == 0


@needs_compiler
def test_no_memory_is_lost() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tokens = np.random.default_rng(0).integers(0, 1000, 10_000)
    tree = SuffixTree()
    before = resident()
    for _ in range(60):
        tree.append(0, tokens)
        assert tree.num_bytes > 500_000
        tree.remove(0)
        SuffixTree().append(0, tokens)
    assert resident() - before < 30 * 500_000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda tree: SuffixTree(max_depth=1), r"SuffixTree.max_depth=1: must be an integer of 2 to 1024"),
        (
            lambda tree: SuffixTree(max_bytes=10),
            r"SuffixTree.max_bytes=10: must be an integer of at least 65536, or No",
        ),
        (lambda tree: SpeculationArgs(top_k=0), r"SpeculationArgs.top_k=0: must be an integer of 1 to 1024"),
        (lambda tree: SpeculationArgs(min_probability=2.0), r"min_probability=2.0: must be at least 0, at most 1"),
        (lambda tree: SpeculationArgs(pattern_lookup_min=17), r"pattern_lookup_min=17: is above pattern_lookup_max=16"),
        (lambda tree: tree.append(-1, [1]), r"request_id=-1: must be an integer of at least 0"),
        (lambda tree: tree.append("a", [1]), r"request_id='a': must be an integer"),
        (lambda tree: tree.remove(True), r"request_id=True: must be an integer"),
        (lambda tree: tree.append(0, [3, -4]), r"tokens: -4 is no token; give numbers of 0 to 2\^31 - 1"),
        (lambda tree: tree.append(0, [2**31]), r"tokens: 2147483648 is no token"),
        (
            lambda tree: tree.append(0, [1.5]),
            r"tokens: is float64 of shape \(1,\); give a contiguous array of int32 or",
        ),
        (lambda tree: tree.append(0, [[1], [2]]), r"tokens: is int64 of shape \(2, 1\); .* of 1 dimensions"),
        (lambda tree: tree.append(0, [[1], 2]), r"tokens=\[\[1\], 2\]: is no list of tokens; give integers"),
        (lambda tree: tree.append(0, 3), r"tokens=3: is no list of tokens; give integers"),
        (lambda tree: tree.speculate(SpeculationArgs()), r"neither request_id nor pattern; give one"),
        (lambda tree: tree.speculate(SpeculationArgs(), pattern=["a"]), r"pattern: is <U1 of shape"),
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_malformed_arguments(kernels: str, call: Any, words: str) -> None:
    tree = make(kernels, 4)
    with pytest.raises(ValueError, match=words):
        call(tree)
    assert tree.num_tokens == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"request_ids": np.zeros(2, np.int32)}, r"request_ids: is int32 of shape \(2,\); give .* of int64"),
        ({"request_ids": np.zeros(3, np.int64)}, r"request_ids: has 3 entries; give one for each of the 2 trees"),
        ({"args": [SpeculationArgs()]}, r"args: has 1 entries"),
        (
            {"args": [SpeculationArgs(), SpeculationArgs(top_k=2)]},
            r"drafts: is of shape \(2, 1, 8\); give at least \(2, 2",
        ),
        ({"starts": None}, r"starts, stops: are missing"),
        ({"starts": np.array([0, -1])}, r"starts, stops: give 0 <= starts <= stops <= 10"),
        ({"stops": np.array([3, 4])}, r"starts, stops: give 0 <= starts"),
        ({"stops": np.array([3, 11])}, r"starts, stops: give 0 <= starts"),
        ({"patterns": np.zeros((5, 4), np.int64)[:, ::2]}, r"patterns: is int64 of shape \(5, 2\); give a contiguous"),
    ],
)
def test_malformed_batches(changed: dict[str, Any], words: str) -> None:
    given = {
        "request_ids": np.zeros(2, np.int64),
        "args": [SpeculationArgs()] * 2,
        "patterns": np.zeros(10, np.int64),
        "starts": np.array([0, 5]),
        "stops": np.array([5, 10]),
        **changed,
    }
    with pytest.raises(ValueError, match=words):
        batch_speculate([SuffixTree()] * 2, drafts=DraftBuffers.empty(2, 1, 8), **given)


@pytest.mark.parametrize("name", ["tokens", "lengths", "probabilities"])
def test_malformed_buffers(name: str) -> None:
    shape = (2, 1, 8)
    right = {"tokens": np.zeros(shape, np.int32), "lengths": np.zeros(shape[:2], np.int32)}
    right["probabilities"] = np.zeros(shape)
    fixed = right[name].copy()
    fixed.flags.writeable = False
    wrong = {"is uint8": right[name].astype(np.uint8), "is read-only": fixed}
    if name != "tokens":
        wrong |= {r"has shape \(1, ": right[name][:1]}
    for words, array in wrong.items():
        with pytest.raises(ValueError, match=f"DraftBuffers.{name}: {words}"):
            DraftBuffers(**{**right, name: array})


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            trees = [SuffixTree() for _ in range(3)]
        assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text and "in Python" in caplog.text
        assert isinstance(trees[0]._tree, PlainSuffixTree)
    finally:
        load.cache_clear()
