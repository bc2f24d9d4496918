"""PAT in the main job: the layout in which each rollout begins, and what its switches took."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from algos.collect import Collector
from engines.config import ModelConfig, longest_sequence
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout, nested_layout
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


def first_layout(controller: PatController, collector: Collector, index: int) -> Layout:
    """Returns the layout, with the next epoch, in which a rollout should begin whose first problem is `index`.

    All ranks call it together: only the controller of rank 0 learns lengths.
    """
    llm, params = collector.llm, collector.params

    def choose() -> str:
        problems = [collector.task.train_problem(index + place) for place in range(collector.prompts_per_step)]
        prompts = np.repeat([len(tokens) for tokens in llm.encode([one.prompt for one in problems])], params.n)
        limits = np.clip(llm.max_model_len - prompts, 1, params.max_tokens)
        return str(controller.first_tp_size(prompts.astype(float), limits.astype(float)))

    size = int(launch.on_rank_0(collector.group, choose))
    return nested_layout(range(collector.group.size), size, epoch=llm.layout.epoch + 1)


def switch_metrics(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Returns the TP sizes of a rollout, the number of its switches, and their mean seconds: from the last step before
    to the first one after."""
    epochs = [[step for step in steps if step.epoch == epoch] for epoch in sorted({step.epoch for step in steps})]
    gaps = [min(s.start for s in new) - max(s.start + s.seconds for s in old) for old, new in pairwise(epochs)]
    metrics = {
        "rollout/num_switches": float(len(gaps)),
        "rollout/first_tp_size": float(epochs[0][0].tp_size),
        "rollout/last_tp_size": float(epochs[-1][0].tp_size),
    }
    return metrics | ({"timing_s/switch": float(np.mean(gaps))} if gaps else {})
