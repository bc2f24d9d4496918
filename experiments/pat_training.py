"""PAT in the main job: the layout in which each rollout begins, and what its switches took."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from algos.collect import Collector
from engines.config import ModelConfig, longest_sequence
from engines.parallel.groups import GroupCache
from engines.parallel.layout import nested_layout
from engines.replica.engine import kv_capacity
from engines.rollout.telemetry import StepRecord
from experiments import launch
from experiments.config import TrainConfig
from experiments.pat_profile import nested_layouts, subject_of
from research.pat.controller import PatController
from research.pat.profile import Profile


def load_profile(config: TrainConfig) -> Profile | None:
    """Returns the profile if the layout policy is PAT. Raises ValueError or FileNotFoundError."""
    if config.pat_profile is None:
        return None
    if launch.num_ranks() == 1:
        raise ValueError("layout_policy='pat': one rank has only one layout; give --ranks 2 or more")
    return Profile.load(config.pat_profile)


def make_controller(config: TrainConfig, profile: Profile, folder: Path, groups: GroupCache) -> PatController:
    """Raises ValueError if the profile is of another deployment."""
    model = ModelConfig.from_pretrained(folder)
    engine = config.rollout.engine_config(config.seed)
    sizes = [layout.replicas[0].tp_size for layout in nested_layouts(groups.world.size, model)]
    deployment = profile.deployment(
        subject_of(model, engine.dtype, groups),
        num_kv_tokens={size: kv_capacity(model, engine, size) for size in sizes},
        max_num_seqs=engine.max_num_seqs,
        max_model_len=longest_sequence(engine, model),
    )
    return PatController(deployment)


class RolloutLayouts:
    """Chooses the layout in which each rollout begins. All ranks make the same calls; without a controller, which only
    learns lengths on rank 0, they change nothing."""

    def __init__(self, controller: PatController | None, collector: Collector) -> None:
        self._controller, self._collector = controller, collector

    def recall(self, path: Path) -> None:
        """Learns the lengths that a resumed run wrote to this file, one JSON object per step."""
        if self._controller is not None and path.exists():
            for line in path.read_text().splitlines():
                self._controller.learn(json.loads(line)["lengths"])

    def begin(self, index: int, *, keep_weights: bool) -> float:
        """Regroups for a rollout whose first problem is `index`; returns the seconds. Forgets the decisions so far."""
        if self._controller is None:
            return 0.0
        start = time.perf_counter()
        self._controller.log.clear()
        size = int(launch.on_rank_0(self._collector.group, lambda: str(self._first_size(index))))
        llm = self._collector.llm
        if size != llm.layout.replicas[0].tp_size:
            layout = nested_layout(range(self._collector.group.size), size, epoch=llm.layout.epoch + 1)
            llm.regroup(layout, keep_weights=keep_weights)
        return time.perf_counter() - start

    def _first_size(self, index: int) -> int:
        assert self._controller is not None
        one, params = self._collector, self._collector.params
        prompts = [one.task.train_problem(index + place).prompt for place in range(one.prompts_per_step)]
        lengths = np.repeat([len(tokens) for tokens in one.llm.encode(prompts)], params.n)
        limits = np.clip(one.llm.max_model_len - lengths, 1, params.max_tokens)
        return self._controller.first_tp_size(lengths.astype(float), limits.astype(float))

    def decisions(self) -> list[dict[str, Any]]:
        """Returns those of the rollout, with the estimates that they rest on."""
        return [asdict(one) for one in self._controller.log] if self._controller is not None else []

    def metrics(self, steps: Sequence[StepRecord]) -> dict[str, float]:
        return switch_metrics(steps) if self._controller is not None else {}


def switch_metrics(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Returns the TP sizes of a rollout, the number of its switches, and their mean seconds: from the last step before
    to the first one after. Without steps, as when all sequences were in the journal, there was no switch."""
    if not steps:
        return {"rollout/num_switches": 0.0}
    epochs = [[step for step in steps if step.epoch == epoch] for epoch in sorted({step.epoch for step in steps})]
    gaps = [min(s.start for s in new) - max(s.start + s.seconds for s in old) for old, new in pairwise(epochs)]
    metrics = {
        "rollout/num_switches": float(len(gaps)),
        "rollout/first_tp_size": float(epochs[0][0].tp_size),
        "rollout/last_tp_size": float(epochs[-1][0].tp_size),
    }
    return metrics | ({"timing_s/switch": float(np.mean(gaps))} if gaps else {})
