"""How long bytes travel: a replica's way to host memory, and to other hosts. Torch-free.

All numbers are inputs, and results depend on them: docs/simulator.md names their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.constraints import NonNegative, Positive, check_fields
from engines.rollout.pace import Path


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way that each GPU has for itself, so that real processes, which cannot see each other's transfers, and the
    simulator come to the same times.

    Raises ValueError for a bandwidth that is not above 0 or a negative latency.
    """

    bandwidth: Positive
    """Bytes per second."""
    latency_s: NonNegative = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def seconds(self, num_bytes: float) -> float:
        """0 for no bytes."""
        return self.latency_s + num_bytes / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """The links of a host of eight GPUs."""

    host: Link = Link(bandwidth=50e9, latency_s=20e-6)
    """PCIe 5.0 x16 of each GPU: 64 GB/s per direction, of which copies reach about 50."""
    network: Link = Link(bandwidth=50e9, latency_s=50e-6)
    """A NIC of 400 Gb/s for each GPU, as SpecActor's and Heddle's hosts have them; latency assumed."""

    def seconds(self, path: Path, num_bytes: float) -> float:
        """For one GPU's bytes. What comes from another host goes through host memory, one after the other."""
        seconds = self.host.seconds(num_bytes)
        return seconds if path == "host" else seconds + self.network.seconds(num_bytes)
