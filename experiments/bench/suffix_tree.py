"""What the suffix tree of a group costs: appends, drafts, removal, and its memory.

    python experiments/bench/suffix_tree.py

Two token streams, each cut into the sequences of one group: "text" is a Markov chain over Zipf's successors that now
and then copies an earlier passage; "uniform" is random tokens, where nearly every suffix is a path of its own. Times
are per token for appends and per request for drafts. `own` drafts continue a sequence of the tree, `foreign` ones a
pattern from the middle of one, which is searched from the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.constraints import Count
from engines.speculation.suffix_tree import DraftBuffers, SpeculationArgs, SuffixTree, batch_speculate
from experiments.bench import harness
from experiments.comparison.turns import interleave, make_row, short, timed

PATTERN = 24
"""Tokens of a foreign pattern."""


@dataclass(frozen=True, kw_only=True)
class SuffixTreeBench(harness.BenchConfig):
    """Time the suffix tree on text with repeats and on random tokens, interleaved."""

    tokens: Count = 100_000
    """Tokens in the tree."""
    sequences: Count = 16
    """Sequences in the tree."""
    vocabulary: Count = 32_000
    """Different tokens at most."""
    max_depth: Count = 24
    """Tokens of the tree's longest paths."""
    chunk: Count = 64
    """Tokens of a call of `append`."""
    draft: Count = 8
    """Tokens of a draft."""
    batch: Count = 64
    """Requests of a call of `batch_speculate`."""
    calls: Count = 500
    """Calls timed in a turn."""


def measure(config: SuffixTreeBench) -> dict[str, Any]:
    streams = {"text": text(config), "uniform": np.random.default_rng(0).integers(0, config.vocabulary, config.tokens)}
    kept: list[SuffixTree] = []  # so that one stream's trees do not reuse the memory of another's
    memory = {name: _memory(config, stream, kept) for name, stream in streams.items()}
    variants = {name: partial(_turn, config, stream.astype(np.int32)) for name, stream in streams.items()}
    turns = interleave(variants, config.turns)
    operations = turns["text"][0].keys()
    rows = [
        make_row(operation, {name: [one[operation] for one in some] for name, some in turns.items()})
        for operation in operations
    ]
    return {"rows": rows, "bytes_per_token": memory}


def text(config: SuffixTreeBench) -> NDArray[np.int64]:
    """Returns a Markov chain: 12 successors per token, unequally likely; in 3 % of the steps 8 to 40 earlier tokens."""
    rng = np.random.default_rng(0)
    successors = rng.zipf(1.3, (config.vocabulary, 12)) % config.vocabulary
    shares = 1 / np.arange(1, 13) ** 1.2
    choices, copies = rng.choice(12, config.tokens, p=shares / shares.sum()), rng.random(config.tokens) < 0.03
    tokens = [0]
    while len(tokens) < config.tokens:
        at = len(tokens)
        if copies[at] and at > 100:
            size = int(rng.integers(8, 41))
            start = int(rng.integers(0, at - size))
            tokens += tokens[start : start + size]
        else:
            tokens.append(int(successors[tokens[-1], choices[at]]))
    return np.array(tokens[: config.tokens])


def _turn(config: SuffixTreeBench, stream: NDArray[np.int32]) -> dict[str, float]:
    """Builds a tree and uses it; returns the seconds of each operation."""
    rng = np.random.default_rng(0)
    sequences = np.array_split(stream, config.sequences)
    patterns = rng.integers(0, len(stream) - PATTERN, config.calls)[:, None] + np.arange(PATTERN)
    foreign = stream[patterns]
    one, four = (
        SpeculationArgs(max_spec_tokens=config.draft, top_k=paths, pattern_lookup_max=PATTERN, min_probability=0.0)
        for paths in (1, 4)
    )
    seconds, tree = {}, SuffixTree(max_depth=config.max_depth)
    seconds["append, per token"] = timed(lambda: _fill(config, tree, sequences))[0] / len(stream)
    own = [index % config.sequences for index in range(config.calls)]
    seconds["draft, own"] = timed(lambda: [tree.speculate(one, request_id=index) for index in own])[0] / config.calls
    for name, args in (("draft, foreign", one), ("4 paths, foreign", four)):
        seconds[name] = timed(partial(_draft_all, tree, args, foreign))[0] / config.calls
    ids, starts = np.arange(config.batch) % config.sequences, PATTERN * (np.arange(config.batch) % config.calls)
    drafts = DraftBuffers.empty(config.batch, 1, config.draft)
    batch = partial(batch_speculate, [tree] * config.batch, ids, [one] * config.batch, drafts)
    seconds["batch, own"] = timed(batch)[0] / config.batch
    found = partial(batch, patterns=foreign, starts=starts, stops=starts + PATTERN)
    seconds["batch, foreign"] = timed(found)[0] / config.batch
    seconds["append, one token a call"] = timed(partial(_append_all, tree, own, stream))[0] / config.calls
    seconds["remove a sequence"] = timed(lambda: tree.remove(0))[0]
    return seconds


def _fill(config: SuffixTreeBench, tree: SuffixTree, sequences: list[NDArray[np.int32]]) -> None:
    """All sequences grow together, as in a rollout."""
    for start in range(0, len(sequences[0]), config.chunk):
        for index, sequence in enumerate(sequences):
            tree.append(index, sequence[start : start + config.chunk])


def _append_all(tree: SuffixTree, request_ids: list[int], stream: NDArray[np.int32]) -> None:
    for position, request_id in enumerate(request_ids):
        tree.append(request_id, stream[position : position + 1])


def _draft_all(tree: SuffixTree, args: SpeculationArgs, patterns: NDArray[np.int32]) -> None:
    for pattern in patterns:
        tree.speculate(args, pattern=pattern)


def _memory(config: SuffixTreeBench, stream: NDArray[np.int64], kept: list[SuffixTree]) -> dict[str, float]:
    """Bytes per token: as the tree counts them, and by which the process grows with each of four trees."""
    sequences = np.array_split(stream.astype(np.int32), config.sequences)
    trees = [SuffixTree(max_depth=config.max_depth) for _ in range(4)]
    kept += trees
    before = _resident()
    for tree in trees:
        _fill(config, tree, sequences)
    grown = (_resident() - before) / len(trees)
    return {"counted": short(trees[0].num_bytes / len(stream)), "resident": short(grown / len(stream))}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    harness.run(SuffixTreeBench, measure)
