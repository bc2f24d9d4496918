"""What a replica's work takes on named GPUs: the `Pace` of paced runs and of the simulator. Torch-free.

Real processes that wait and simulated ones ask the same object, so that both are priced alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from engines.constraints import NonNegative, Positive, check_fields
from engines.parallel.layout import Layout, ReplicaSpec
from engines.rollout.pace import Path
from research.simulator.datasheets import Device, ModelShape
from research.simulator.latency import TP_SIZES, Efficiencies, LatencyProfile
from research.simulator.links import HostLinks

if TYPE_CHECKING:
    from engines.replica.replica import StepOutput


@dataclass(frozen=True, kw_only=True)
class ProfilePace:
    """Seconds of steps, KV transfers and regroups of one model on one kind of GPU.

    A `scale` above 1 slows everything down alike, so that a small machine can follow.
    """

    device: Device
    shape: ModelShape
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    links: HostLinks = field(default_factory=HostLinks)
    scale: Positive = 1.0
    """Seconds here per second of the profile."""
    token_scale: Positive = 1.0
    """Tokens of the profile's context per token here: short sequences stand for long ones."""
    lookup_s: NonNegative = 8e-6
    """To look up one sequence's draft, before the pass; suffix trees are on the host (measured: docs/drafting.md)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def profiles(self) -> dict[int, LatencyProfile]:
        """By TP size, those into which the model's heads can be split."""
        return {
            tp_size: LatencyProfile(
                device=self.device, shape=self.shape, tp_size=tp_size, efficiencies=self.efficiencies
            )
            for tp_size in TP_SIZES
            if self.shape.splits_into(tp_size)
        }

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        seconds = self.profiles[spec.tp_size].step_seconds(
            output.num_running,
            output.num_tokens,
            max(output.num_tokens, round(output.num_context_tokens * self.token_scale)),
            pairs=max(output.num_tokens, output.num_pairs * self.token_scale),
            logit_rows=output.num_sampled,
        )
        return self.scale * (seconds + output.num_looked_up * self.lookup_s)

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        """Each rank moves its own KV heads at the same time as the others."""
        num_bytes = num_tokens * self.token_scale * self.shape.kv_bytes_per_token / spec.tp_size
        return self.scale * self.links.seconds(path, num_bytes)

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        """A regroup as it is today: each rank whose replica is new reads its weights from host memory.

        KV that is exported before and imported after is counted by `transfer`, not here.
        """
        new = set(after.replicas) - set(before.replicas)
        num_bytes = max((self.profiles[spec.tp_size].weight_bytes_per_rank for spec in new), default=0.0)
        return self.scale * self.links.seconds("host", num_bytes)
