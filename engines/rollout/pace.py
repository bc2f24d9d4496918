"""How long a replica's work takes where it is not this machine's own time: what paced runs and the simulator ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from engines.parallel.layout import Layout, ReplicaSpec

if TYPE_CHECKING:
    from engines.replica.replica import StepOutput

Path = Literal["host", "disk", "network"]
"""Between a replica's devices and the memory of their host; a disk of the host; or another host's memory."""


class Pace(Protocol):
    """All answers are seconds of the clock that the run goes by."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        """Of a forward pass and its draws."""
        ...

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        """Of moving a replica's KV of this many tokens; 0 for none."""
        ...

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        """Of a regroup, from the moment in which all ranks of a new replica have left their old ones."""
        ...
