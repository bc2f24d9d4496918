"""What Heddle's experiments roll out: agents on replicas of a 14B model on H100, and who says how long they are.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from engines.coordination.policies import SchedulePolicy
from engines.parallel.layout import Layout, ReplicaSpec
from engines.rollout.pace import decode_seconds
from engines.rollout.prediction import LengthPredictor
from engines.sequence import SequenceId
from experiments.comparison.rollouts import Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from research.heddle.baselines import Router
from research.heddle.policy import Costs, HeddleOptions, HeddlePolicy, Planner
from research.simulator.datasheets import H100, QWEN3_14B, ModelShape
from research.simulator.pace import ProfilePace
from research.workloads.agents import (
    AGENTS,
    GROUP_SIZE,
    NUM_PROMPT_TOKENS,
    AgentName,
    Errors,
    StatedPredictions,
    scaled,
)
from research.workloads.trajectories import Later, TrajectoryLengths, Turn

PREDICTION_S: Mapping[AgentName, float] = {"coding": 0.099, "search": 0.15, "math": 0.27}
"""Table 1, 14B."""
BLOCK_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """An agent's trajectories on replicas of one model. Tokens and seconds are those here unless said otherwise."""

    name: AgentName
    shape: ModelShape = QWEN3_14B
    per_gpu: int = 100
    """Trajectories (§7, "Baselines")."""
    sequence_scale: int = 1
    """Trajectories of the profile per trajectory here."""
    kv_share: float = 0.5
    """KV caches hold this share of what all trajectories need at once; never less than the longest needs."""
    scale: float = 1.0
    """Seconds here per second of the profile."""
    token_scale: int = 16
    """Tokens of the profile per token here."""
    gpus_per_host: int | None = None
    """None: all GPUs are of one host."""

    @cached_property
    def lengths(self) -> TrajectoryLengths:
        return scaled(AGENTS[self.name], self.token_scale, self.scale)

    @property
    def num_prompt_tokens(self) -> int:
        return NUM_PROMPT_TOKENS // self.token_scale

    @property
    def max_model_len(self) -> int:
        return self.num_prompt_tokens + self.lengths.cap

    @cached_property
    def pace(self) -> ProfilePace:
        return ProfilePace(
            device=H100,
            shape=self.shape,
            scale=self.scale,
            token_scale=self.token_scale,
            sequence_scale=self.sequence_scale,
        )

    def draw(self, num_gpus: int, seed: int) -> list[list[list[Turn]]]:
        """Groups of trajectories."""
        return self.lengths.draw(-(-num_gpus * self.per_gpu // GROUP_SIZE), GROUP_SIZE, seed)

    def workload(self, groups: list[list[list[Turn]]], prompts: list[list[int]] | None = None) -> Workload:
        return Workload.of_trajectories(
            groups, num_prompt_tokens=self.num_prompt_tokens, most=self.lengths.cap, prompts=prompts
        )

    def demand(self, groups: Items[Items[Items[Turn]]]) -> int:
        """Tokens of KV of all trajectories at the moment at which they are most, if they advance alike."""
        changes: dict[int, int] = {}
        for turns in (one for group in groups for one in group):
            time, held = 0, self.num_prompt_tokens
            changes[0] = changes.get(0, 0) + held
            for turn in turns:
                time += turn.num_generated
                grown = turn.num_generated + turn.num_observed
                held += grown
                changes[time] = changes.get(time, 0) + grown
            changes[time] -= held
        most = now = 0
        for time in sorted(changes):
            now += changes[time]
            most = max(most, now)
        return most

    def num_kv_tokens(self, num_gpus: int, groups: Items[Items[Items[Turn]]]) -> int:
        """Of each GPU."""
        return max(self.max_model_len + BLOCK_SIZE, round(self.kv_share * self.demand(groups) / num_gpus))

    def options(self) -> dict[str, Any]:
        """Arguments of `LLM` for all variants."""
        return {
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 256,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 2048,
            "preemption": "swap",
        }

    def world(self) -> SimulatedWorld:
        cluster = {"records_steps": False, "gpus_per_host": self.gpus_per_host}
        return SimulatedWorld(pace=self.pace, options=self.options(), cluster=cluster)

    def variant(
        self,
        layout: Layout,
        num_kv_tokens: int,
        schedule: Callable[[], SchedulePolicy],
        turns: Mapping[SequenceId, Items[Turn]] | None,
        errors: Errors,
        **options: Any,
    ) -> Variant:
        errors = replace(errors, seconds=PREDICTION_S[self.name] * self.scale / self.token_scale)
        return Variant(
            layout=layout,
            num_kv_tokens=num_kv_tokens,
            schedule=schedule,
            predictor=partial(_stated, turns or {}, errors),
            options=options,
        )

    def costs(self) -> Costs:
        context = self.lengths.cap // 8
        return Costs(
            token_s=lambda spec, size: decode_seconds(self.pace, spec, size, size * context),
            transfer_s=lambda spec, count: self.pace.transfer(spec, count, "host"),
        )

    def heddle(
        self, planner: Planner, options: HeddleOptions | None = None, router: Callable[[], Router | None] = lambda: None
    ) -> Callable[[], HeddlePolicy]:
        return lambda: HeddlePolicy(planner, self.costs(), options, router())


def _stated(turns: Mapping[SequenceId, Items[Turn]], errors: Errors, later: Later) -> LengthPredictor:
    """By its name, as processes are sent it."""
    return StatedPredictions(turns, later, errors)


def singles(num_gpus: int) -> Layout:
    return Layout(epoch=0, replicas=tuple(ReplicaSpec(id=rank, ranks=(rank,)) for rank in range(num_gpus)))
