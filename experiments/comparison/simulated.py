"""Rollouts in virtual time: the same core, policies and prices as paced ones. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.config import EngineConfig
from engines.rollout.pace import Pace
from engines.sequence import Finished
from engines.speculation.marginal_gain import MarginalGain
from experiments.comparison.rollouts import Rollout, Tier, Variant, Workload
from research.simulator.cluster import Cluster, ClusterConfig
from research.simulator.drafts import DraftAcceptance


@dataclass(frozen=True, kw_only=True)
class SimulatedWorld:
    """Simulated GPUs: tier sim."""

    pace: Pace
    options: Mapping[str, Any]
    """Arguments of `LLM` for all variants: `max_model_len`, `draft_policy`, `own_drafter`, and fields of
    `EngineConfig`."""
    num_kv_tokens: Mapping[int, int] | None = None
    """Tokens that a replica's KV cache holds, by its TP size; by default what the variant gives each of its ranks."""
    drafts: DraftAcceptance = field(default_factory=DraftAcceptance)
    """How often drafts are right, in variants that draft."""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `ClusterConfig`."""

    @property
    def tier(self) -> Tier:
        return "sim"

    def roll_out(
        self, workload: Workload, variant: Variant, on_finished: Callable[[Finished], object] = lambda _: None
    ) -> Rollout:
        assert workload.lengths is not None
        cluster, layout_policy = self.start(workload, variant)
        states = workload.states()
        if cluster.config.drafts is not None:
            states.sort(key=lambda state: state.key.sample_index)  # as `LLM.generate` does
        done = cluster.roll_out(states, on_finished=on_finished)
        marks = [one.now for one in done.decisions if one.action in ("regroup", "resume")]
        return Rollout(
            steps=done.steps,
            makespan_s=done.makespan,
            finish_times=done.finish_times,
            switches=[(start, end - start) for start, end in zip(marks[::2], marks[1::2], strict=True)],
            layout_policy=layout_policy,
            lengths=done.lengths,
            num_preempted=done.num_preempted,
            turns=done.turns,
            way_back_s=self.pace.switch(cluster.core.layout, variant.layout, 0),
        )

    def start(self, workload: Workload, variant: Variant) -> tuple[Cluster, Any]:
        """Returns a cluster that has not begun, and its layout policy."""
        options = {**self.options, **variant.options}
        max_model_len, draft_policy = options.pop("max_model_len"), options.pop("draft_policy", MarginalGain)
        own_drafter = options.pop("own_drafter", None)
        engine = EngineConfig(**options)
        sizes = range(1, 1 + sum(spec.tp_size for spec in variant.layout.replicas))
        config = ClusterConfig(
            layout=variant.layout,
            engine=engine,
            pace=self.pace,
            num_kv_tokens=self.num_kv_tokens or {size: size * variant.num_kv_tokens for size in sizes},
            max_model_len=max_model_len,
            drafts=None if engine.drafter in ("none", "own") else self.drafts,
            own_drafter=own_drafter,
            draft_policy=draft_policy,
            **self.cluster,
        )
        layout_policy = variant.layout_policy()
        cluster = Cluster(
            config,
            schedule_policy=variant.schedule(),
            lengths=workload.lengths or {},
            turns=workload.turns,
            layout_policy=layout_policy,
            predictor=variant.predictor,
        )
        return cluster, layout_policy
