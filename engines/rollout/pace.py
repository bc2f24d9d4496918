"""How long a replica's work takes where this machine's own time does not count: for paced runs and the simulator.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, Protocol

from engines.config import LOOKUPS, EngineConfig
from engines.constraints import NonNegative, check_fields
from engines.parallel.layout import Layout, ReplicaSpec
from engines.replica.replica import StepOutput
from engines.speculation.drafter import DraftPass
from engines.speculation.policy import DraftPolicy, Prices, RowSeconds, elsewhere

Path = Literal["host", "network"]
"""Between a replica's devices and the memory of their host, or another host's memory."""


class Pace(Protocol):
    """Each method returns seconds. In a paced run, work that takes less time waits until they have passed."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        """Of one forward pass and its draws. A function of the arguments alone (`prices_of`), as `draft` is."""
        ...

    def draft(self, spec: ReplicaSpec, method: str, passes: Items[DraftPass]) -> float:
        """Of a drafter's passes, one after the other, on the ranks of this replica. `method` is the kind of drafter, or
        the name of the small model. Each rank drafts for its share of the rows."""
        ...

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        """Of moving the KV of this many tokens out of a replica or into it; 0 for none."""
        ...

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        """Of a regroup: from the moment at which all ranks of a new replica have left their old ones until it is ready.

        `num_kv_tokens`: KV that a rank gets from the caches of other ranks, in tokens of all heads. What was exported
        before is not counted here.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ShortestStep:
    """A `Pace` by which a step takes at least `step_s` seconds, and everything else its own time."""

    step_s: NonNegative

    def __post_init__(self) -> None:
        check_fields(self)

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return self.step_s

    def draft(self, spec: ReplicaSpec, method: str, passes: Items[DraftPass]) -> float:
        return 0.0

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.0

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 0.0


def paced_step_s(pace: Pace, spec: ReplicaSpec, output: StepOutput, method: str) -> float:
    """Returns the seconds of a step, drafting included; 0 of a pass without sequences, which only let sequences leave
    whose KV had been stored, or waited for drafts."""
    drafting = pace.draft(spec, method, output.draft_passes) if output.draft_passes else 0.0
    return drafting + (pace.step(spec, output) if output.num_running else 0.0)


def row_seconds(pace: Pace, spec: ReplicaSpec) -> RowSeconds:
    """Each row attends to itself alone: the KV that draft tokens attend to is read for their sequence in any case."""
    return lambda rows: decode_seconds(pace, spec, rows, rows)


def prices_of(pace: Pace, spec: ReplicaSpec, config: EngineConfig) -> Prices:
    """Returns the times by which a replica's `SpeculationPolicy` decides, in a paced run and in the simulator."""

    def draft(num_sequences: int, length: int) -> float:
        passes = [DraftPass(num_sequences)] * (1 if config.drafter in LOOKUPS else length)
        return pace.draft(spec, config.draft_method, passes)

    return Prices(row_seconds(pace, spec), draft)


def of_pace(policy: DraftPolicy, pace: Pace | None, spec: ReplicaSpec, config: EngineConfig) -> DraftPolicy:
    """Returns the policy of a replica that decides by its pace, if it has one, and not by this machine's times."""
    if pace is None:
        return policy
    prices = prices_of(pace, spec, config)
    return lambda measured: policy(prices._replace(draft=elsewhere) if measured.draft is elsewhere else prices)


def decode_seconds(pace: Pace, spec: ReplicaSpec, batch: int, num_context_tokens: int) -> float:
    """Returns the seconds of a step that gives each sequence of a batch its next token."""
    output = StepOutput(
        num_running=batch,
        num_tokens=batch,
        num_context_tokens=num_context_tokens,
        num_pairs=num_context_tokens,
        num_sampled=batch,
    )
    return pace.step(spec, output)
