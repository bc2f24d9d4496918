"""What a replica's work takes on named GPUs: the `Pace` of paced runs and of the simulator. Torch-free.

Real processes that wait and simulated ones ask the same object, so that both are priced alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from engines.config import LOOKUPS
from engines.constraints import Count, NonNegative, Positive, check_fields
from engines.parallel.layout import Layout, ReplicaSpec, share_lacked
from engines.rollout.pace import Path
from engines.speculation.drafter import DraftPass
from research.simulator.datasheets import BYTES_PER_ELEMENT, Device, ModelShape
from research.simulator.latency import TP_SIZES, Efficiencies, LatencyProfile, profile
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
    sequence_scale: Count = 1
    """Sequences of the profile per sequence here, which then run together: few stand for many."""
    restart_s: NonNegative = 2.13
    """What a regroup to another TP size takes beside weights and KV: 0.73 s for CUDA graphs, 1.40 s for control (PAT,
    Fig. 12: 8 A40, Llama-3.1-8B)."""
    lookup_s: NonNegative = 8e-6
    """To look up one sequence's draft, before the pass; suffix trees are on the host (measured: docs/drafting.md)."""
    draft_shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Of small models that draft, by the name that `draft` is given. Each runs on single GPUs."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, name: str, *, scale: float = 1.0, token_scale: float = 1.0) -> ProfilePace:
        """That of the latency profile of this name, as "h100-8b-tp1". Raises ValueError as `latency.profile`."""
        one = profile(name)
        return cls(device=one.device, shape=one.shape, scale=scale, token_scale=token_scale)

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

    def num_kv_tokens(self, longest: int) -> dict[int, int]:
        """Tokens here that a replica's KV cache holds, by the TP sizes in which a sequence of `longest` tokens fits."""
        held = self.token_scale * self.sequence_scale
        sizes = {size: int(one.kv_tokens_capacity() // held) for size, one in self.profiles.items()}
        return {size: count for size, count in sizes.items() if count >= longest}

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        count, num_tokens = self.sequence_scale, self.sequence_scale * output.num_tokens
        seconds = self.profiles[spec.tp_size].step_seconds(
            count * output.num_running,
            num_tokens,
            max(num_tokens, round(count * output.num_context_tokens * self.token_scale)),
            pairs=max(num_tokens, count * output.num_pairs * self.token_scale),
            logit_rows=count * output.num_sampled,
        )
        return self.scale * seconds

    def draft(self, spec: ReplicaSpec, method: str, passes: Items[DraftPass]) -> float:
        """Raises ValueError for a small model without a shape here."""
        if method in LOOKUPS:
            return self.scale * self.lookup_s * self.sequence_scale * sum(one.num_rows for one in passes)
        if method not in self.draft_shapes:
            raise ValueError(
                f"ProfilePace.draft_shapes={sorted(self.draft_shapes)}: has no shape of draft model {method!r}; add it"
            )
        small = self._small[method]
        seconds = 0.0
        for one in passes:
            rows, context = (
                -(-self.sequence_scale * one.num_rows // spec.tp_size),
                round(self.sequence_scale * one.num_context_tokens * self.token_scale / spec.tp_size),
            )
            seconds += small.step_seconds(rows, rows, max(rows, context))
        return self.scale * seconds

    @cached_property
    def _small(self) -> dict[str, LatencyProfile]:
        """One GPU with each of the small models."""
        return {
            name: LatencyProfile(device=self.device, shape=shape, tp_size=1, efficiencies=self.efficiencies)
            for name, shape in self.draft_shapes.items()
        }

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        """Each rank moves its own KV heads at the same time as the others."""
        num_bytes = num_tokens * self._kv_bytes_per_token / spec.tp_size
        return self._move_scale * self.links.seconds(path, num_bytes)

    @property
    def _kv_bytes_per_token(self) -> float:
        """Of a token here."""
        return self.sequence_scale * self.token_scale * self.shape.kv_bytes_per_token

    @property
    def _move_scale(self) -> float:
        """A sequence has fewer steps than the one it stands for, so what comes between steps takes less, too."""
        return self.scale / self.token_scale

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        """Weights and KV that a rank lacks come over its device's link; where TP sizes change, `restart_s` more."""
        changes = [
            (before.replica_of(rank), spec, rank)
            for spec in set(after.replicas) - set(before.replicas)
            for rank in spec.ranks
        ]
        if not changes:
            return 0.0
        share = max(share_lacked(*change) for change in changes)
        num_bytes = share * self.shape.num_parameters * BYTES_PER_ELEMENT
        num_bytes += num_kv_tokens * self._kv_bytes_per_token
        is_wider = any(old is None or old.tp_size != new.tp_size for old, new, _ in changes)
        moving = num_bytes / (self.device.link_bandwidth * self.device.link_efficiency)
        return self._move_scale * (moving + is_wider * self.restart_s)


@dataclass(frozen=True)
class WideReplica:
    """A `Pace` by which each rank takes as long as a replica of `tp_size` GPUs."""

    pace: ProfilePace
    tp_size: int

    def _wide(self, spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, ranks=tuple(range(self.tp_size)))

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return self.pace.step(self._wide(spec), output)

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return self.pace.transfer(self._wide(spec), num_tokens, path)

    def draft(self, spec: ReplicaSpec, method: str, passes: Items[DraftPass]) -> float:
        return self.pace.draft(self._wide(spec), method, passes)

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 0.0
