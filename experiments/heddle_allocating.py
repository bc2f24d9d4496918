"""Allocations in the main job (`train.py --layout-policy heddle`): the sizes of the replicas of each rollout, from the
lengths of those before it (Heddle, §6)."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from algos.collect import Collector
from engines.parallel.groups import nested_groups
from engines.parallel.layout import Layout
from engines.rollout.telemetry import StepRecord
from experiments import launch
from research.heddle.allocation import chosen, layout_of, placed
from research.heddle.interference import server_of
from research.heddle.placement import Lengths
from research.pat.deployment import Deployment

MARGIN = 1.05
"""Promised gain from which replicas are regrouped."""


def block_size(num_ranks: int) -> int:
    """Ranks of which replicas are made: the largest power of two that divides them."""
    return num_ranks & -num_ranks


def sizes_of(num_ranks: int, tp_sizes: Iterable[int]) -> list[int]:
    """Returns those of these TP sizes that allocations have."""
    return [size for size in sorted(tp_sizes) if size & (size - 1) == 0 and size <= block_size(num_ranks)]


def groups_of(num_ranks: int, tp_sizes: Iterable[int]) -> list[tuple[int, ...]]:
    """Returns the groups of ranks that allocations over these TP sizes need."""
    return [*nested_groups(range(num_ranks), sizes_of(num_ranks, tp_sizes))]


class Allocations:
    """Chooses the sizes of replicas before each rollout. All ranks make the same calls."""

    def __init__(self, deployment: Deployment, collector: Collector) -> None:
        self.log = deque[object]()
        self._deployment, self._collector = deployment, collector
        self._lengths: list[int] = []
        """Of the last rollout that trained, observed tokens included; rank 0's."""

    def recall(self, path: Path) -> None:
        """Learns the lengths of the last step that a resumed run wrote to this file."""
        if path.exists() and (lines := path.read_text().splitlines()):
            self._lengths = json.loads(lines[-1])["lengths"]

    def learn(self, lengths: list[int]) -> None:
        """Notes what a rollout has generated."""
        self._lengths = lengths

    def begin(self, index: int, *, keep_weights: bool) -> float:
        """Regroups for a rollout after an update, if that promises enough; returns the seconds."""
        if keep_weights:
            return 0.0
        start = time.perf_counter()
        sizes = launch.on_rank_0(self._collector.group, self._sizes)
        llm, num_ranks = self._collector.llm, self._collector.group.size
        layout = layout_of(sizes, gpus_per_host=block_size(num_ranks), epoch=llm.layout.epoch + 1)
        if {spec.ranks for spec in layout.replicas} != {spec.ranks for spec in llm.layout.replicas}:
            llm.regroup(layout, keep_weights=False)
        return time.perf_counter() - start

    def _sizes(self) -> list[int]:
        llm, num_ranks = self._collector.llm, self._collector.group.size
        now = sorted((spec.tp_size for spec in llm.layout.replicas), reverse=True)
        if not self._lengths:
            return now
        lengths: Lengths = np.sort(np.maximum(np.asarray(self._lengths, float), 1.0))[::-1]
        mean = float(lengths.mean())
        servers = {
            size: server_of(self._deployment, size, context=min(mean, self._deployment.num_kv_tokens[size]))
            for size in sizes_of(num_ranks, self._deployment.steps)
        }
        found = chosen(lengths, num_ranks, servers, start=tuple(now))
        before = placed(tuple(now), lengths, servers)
        return list(found.tp_sizes if MARGIN * found.makespan < before.makespan else now)

    def metrics(self, _: Collection[StepRecord]) -> dict[str, float]:
        """Returns how many replicas there are of each size."""
        layout: Layout = self._collector.llm.layout
        counts = Counter(spec.tp_size for spec in layout.replicas)
        return {f"rollout/num_replicas/tp{size}": float(count) for size, count in sorted(counts.items())}
