"""How long bytes travel: a replica's way to host memory, to a disk, and to other hosts. Torch-free.

All numbers are inputs, and results depend on them: docs/simulator.md names their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.constraints import Count, NonNegative, Positive, check_fields
from engines.rollout.pace import Path


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way that several GPUs share evenly: each has its part of the bandwidth, whether the others send or not.

    A fixed share needs no knowledge of others, so that real processes, which cannot see each other's transfers, and the
    simulator come to the same times. Raises ValueError for a bandwidth that is not above 0 or a negative latency.
    """

    bandwidth: Positive
    """Bytes per second, of the whole link."""
    latency_s: NonNegative = 0.0
    num_gpus: Count = 1
    """How many share it."""

    def __post_init__(self) -> None:
        check_fields(self)

    def seconds(self, num_bytes: float) -> float:
        """For one GPU's bytes; 0 for none."""
        return self.latency_s + num_bytes * self.num_gpus / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """The links of a host of eight GPUs."""

    host: Link = Link(bandwidth=50e9, latency_s=20e-6)
    """PCIe 5.0 x16 of each GPU: 64 GB/s per direction, of which copies reach about 50."""
    disk: Link = Link(bandwidth=6e9, latency_s=100e-6, num_gpus=8)
    """One NVMe disk for all GPUs of the host: assumed."""
    network: Link = Link(bandwidth=50e9, latency_s=50e-6)
    """A NIC of 400 Gb/s for each GPU, as SpecActor's and Heddle's hosts have them; latency assumed."""

    def seconds(self, path: Path, num_bytes: float) -> float:
        """For one GPU's bytes. What comes from a disk or another host goes through host memory, one after the other."""
        seconds = self.host.seconds(num_bytes)
        if path == "disk":
            seconds += self.disk.seconds(num_bytes)
        elif path == "network":
            seconds += self.network.seconds(num_bytes)
        return seconds
