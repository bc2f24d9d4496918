"""How long a replica's work takes where this machine's own time does not count: for paced runs and the simulator.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engines.constraints import NonNegative, check_fields
from engines.parallel.layout import Layout, ReplicaSpec

if TYPE_CHECKING:
    from engines.replica.replica import StepOutput

Path = Literal["host", "disk", "network"]
"""Between a replica's devices and the memory of their host; a disk of the host; or another host's memory."""


class Pace(Protocol):
    """Each method returns seconds. In a paced run, work that takes less time waits until they have passed."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        """Of one forward pass and its draws."""
        ...

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        """Of moving the KV of this many tokens out of a replica or into it; 0 for none."""
        ...

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        """Of a regroup: from the moment at which all ranks of a new replica have left their old ones until it is ready.

        `num_kv_tokens` are those that the regroup itself moves, beside what was exported before.
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

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.0

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 0.0
