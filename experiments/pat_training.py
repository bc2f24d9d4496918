"""PAT in the main job: the layout in which each rollout begins, and what its switches took."""

from __future__ import annotations

import json
import time
import warnings
from collections import deque
from collections.abc import Collection
from pathlib import Path

import numpy as np

from algos.collect import Collector
from engines.config import ModelConfig
from engines.coordination.policies import named
from engines.parallel.layout import nested_layout
from engines.rollout.telemetry import StepRecord, SwitchRecord
from experiments import launch
from experiments.config import TrainConfig
from experiments.pat_measuring import deployment_with, nested_layouts
from experiments.policies import layout_controller
from research.pat.controller import Considered, PatController
from research.pat.deployment import Deployment
from research.pat.lifetimes import lifetimes_of
from research.pat.profile import Profile


def load_profile(config: TrainConfig, model: ModelConfig) -> Profile | None:
    """Returns the profile if there is a layout policy. Raises ValueError or FileNotFoundError, also for a profile of
    another deployment; only its transport is not known before the ranks have met."""
    if config.pat_profile is None:
        return None
    if launch.num_ranks() == 1:
        raise ValueError(
            f"layout_policy={config.layout_policy!r}: one rank has only one layout; give --ranks 2 or more"
        )
    profile = Profile.load(config.pat_profile)
    transport = str(profile.subject.get("transport"))
    if config.layout_policy == "heddle":
        deployed(config, profile, model, transport)
    else:
        make_controller(config, profile, model, transport)
    return profile


def deployed(config: TrainConfig, profile: Profile, model: ModelConfig, transport: str) -> Deployment:
    """Returns the profile's times for this run. Raises ValueError for a profile of another deployment."""
    engine = config.rollout.engine_config(config.seed)
    return deployment_with(profile, model, engine, launch.num_ranks(), transport)


def make_controller(config: TrainConfig, profile: Profile, model: ModelConfig, transport: str) -> PatController:
    """Returns PAT's controller, or a user's own. Raises ValueError for one that cannot be made, or a profile of
    another deployment."""
    deployment = deployed(config, profile, model, transport)
    if config.layout_policy == "pat":
        return PatController(deployment, config.pat)
    own = layout_controller("layout_policy", config.layout_policy, ["none", "pat", "heddle"])
    try:
        controller: PatController = own(deployment, ended=())
    except Exception as error:
        told = f"cannot be made with (deployment, ended=()): {type(error).__name__}: {error}"
        raise ValueError(f"layout_policy={config.layout_policy!r}: {told}") from error
    return controller


class RolloutLayouts:
    """Chooses the layout in which each rollout begins. All ranks make the same calls; without a controller, which only
    learns lengths on rank 0, they change nothing."""

    def __init__(self, controller: PatController | None, collector: Collector) -> None:
        self.log = controller.log if isinstance(controller, PatController) else deque[Considered]()
        """On rank 0 PAT's decisions since `begin`, with the estimates that they rest on."""
        self._controller, self._collector = controller, collector
        self._first = self._num_before = 0

    def recall(self, path: Path) -> None:
        """Learns the lengths that a resumed run wrote to this file, one JSON object per step. One without reasons, of
        an earlier version, teaches nothing."""
        if self._controller is not None and path.exists():
            for step in map(json.loads, path.read_text().splitlines()):
                self._controller.learn(lifetimes_of(zip(step["lengths"], step.get("finish_reasons", ()), strict=False)))

    def begin(self, index: int, *, keep_weights: bool) -> float:
        """Regroups for a rollout whose first problem is `index`; returns the seconds. Forgets the decisions so far."""
        if self._controller is None:
            return 0.0
        start = time.perf_counter()
        self.log.clear()
        size = int(launch.on_rank_0(self._collector.group, lambda: str(self._first_size(index))))
        llm = self._collector.llm
        if size != llm.layout.replicas[0].tp_size:
            layout = nested_layout(range(self._collector.group.size), size, epoch=llm.layout.epoch + 1)
            llm.regroup(layout, keep_weights=keep_weights)
        self._first, self._num_before = size, len(self._switches())
        return time.perf_counter() - start

    def _first_size(self, index: int) -> int:
        assert self._controller is not None
        one, params = self._collector, self._collector.params
        with warnings.catch_warnings(action="ignore"):  # of problems passed over: the rollout gives them
            problems, _ = one._draw(index)
        prompts = one.llm.encode([problem.tokens or problem.prompt for problem in problems])
        lengths = np.repeat([len(tokens) for tokens in prompts], params.n)
        limits = np.clip(one.llm.max_model_len - lengths, 1, params.most_tokens)
        size = self._controller.first_tp_size(lengths.astype(float), limits.astype(float), params.n)
        layouts = nested_layouts(one.group.size, one.llm.model_config)
        if size not in (sizes := [layout.replicas[0].tp_size for layout in layouts]):
            raise ValueError(
                f"layout_policy {named(self._controller)}: first_tp_size gave {size!r}; give one of {sizes}"
            )
        return size

    def metrics(self, _: Collection[StepRecord]) -> dict[str, float]:
        """Returns the TP sizes at both ends, the number of switches since `begin`, and their mean seconds."""
        if self._controller is None:
            return {}
        switches = self._switches()[self._num_before :]
        metrics = {
            "rollout/num_switches": float(len(switches)),
            "rollout/first_tp_size": float(self._first),
            "rollout/last_tp_size": float(switches[-1].tp_size if switches else self._first),
        }
        return metrics | ({"timing_s/switch": float(np.mean([one.seconds for one in switches]))} if switches else {})

    def _switches(self) -> list[SwitchRecord]:
        """Returns those of this rank, all of a run."""
        assert self._collector.llm.rollout is not None
        return self._collector.llm.rollout.switches
