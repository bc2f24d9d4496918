"""When replicas may start with new weights that travel by a relay: a pipeline of buckets (ROSE §4.2, Figs. 10, 15).

A bucket passes, on the trainers' side, `gather`, `encode`, `send` and `ingress`; receivers then pull batches of buckets
by `egress` and `receive`, and `decode` them into their weights. The relay is near the receivers: only `send` crosses
between clusters, once for each bucket, and all ranks of a node share its NIC. Each stage serves what comes first, one
after the other, and has room for all that waits. Torch-free.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from engines.constraints import Count, NonNegative, Share, check_fields
from research.simulator.links import Link

Rung = Literal["batch", "async", "shards", "sparse"]
"""Fig. 10a; each adds to the one before it.

- `batch`: one rank gathers all weights and sends them; replicas pull all of them, and then load them. A step begins
  when the one before it has ended.
- `async`: the same sender and receivers, as a pipeline of buckets.
- `shards`: each trainer rank sends its own share, and each receiver pulls its shard.
- `sparse`: what changed, encoded.
"""
DENSE_RUNGS: tuple[Rung, ...] = ("batch", "async", "shards")
Rate = Annotated[float, Meta(gt=0, description="above 0, or inf (bytes per second)")]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Who sends and who receives; by default as the paper has them (§6.3). Raises ValueError for a bad field."""

    model_bytes: Count
    trainer_ranks: Count = 16
    trainer_nodes: Count = 2
    serving_ranks: Count = 16
    serving_nodes: Count = 2
    tp_size: Count = 1
    """Of the serving replicas."""
    cross: Link
    """From the NIC of each trainer node to the relay."""
    local: Link
    """The NIC of each node to others of its cluster, each way."""
    relay: Link
    """Of all that the relay takes in, and of all that it gives out."""
    load_rate: Rate
    """Bytes per second at which a serving rank puts dense weights in their place."""
    bucket_bytes: Count = 64_000_000
    pull_bytes: Count = 1_000_000_000
    """Of weights, before they are encoded."""

    def __post_init__(self) -> None:
        check_fields(self)
        for ranks, parts in (
            ("trainer_ranks", "trainer_nodes"),
            ("serving_ranks", "serving_nodes"),
            ("serving_ranks", "tp_size"),
        ):
            if getattr(self, ranks) % getattr(self, parts):
                raise ValueError(
                    f"Deployment.{ranks}={getattr(self, ranks)}: must be a multiple of {parts}={getattr(self, parts)}"
                )


@dataclass(frozen=True, kw_only=True)
class Coding:
    """What a codec makes of weights. Raises ValueError for a bad field."""

    size: NonNegative
    """Bytes that are sent for each byte of weights."""
    encode_rate: Rate
    """Bytes of weights per second, on each trainer rank."""
    decode_rate: Rate
    """Alike, on each serving rank: decoded, and in their place."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Codec:
    """Codings by the share of weights that changed: straight lines between these points, in size and seconds per byte.

    Raises ValueError unless the densities rise.
    """

    points: tuple[tuple[Share, Coding], ...]

    def __post_init__(self) -> None:
        densities = [density for density, _ in self.points]
        if not densities or any(low >= high for low, high in itertools.pairwise(densities)):
            raise ValueError(f"Codec.points: have the densities {densities}; give some, each above the one before")

    def at(self, density: float) -> Coding:
        """Beyond the points, as at the nearest one."""
        at = [point for point, _ in self.points]

        def line(value: Callable[[Coding], float]) -> float:
            return float(np.interp(density, at, [value(one) for _, one in self.points]))

        encode_s, decode_s = line(lambda one: 1 / one.encode_rate), line(lambda one: 1 / one.decode_rate)
        return Coding(size=line(lambda one: one.size), encode_rate=_inverse(encode_s), decode_rate=_inverse(decode_s))


@dataclass(frozen=True)
class Transfer:
    """What a transfer takes."""

    seconds: float
    """Until the last replica may start."""
    busy: dict[str, float]
    """Stage -> seconds for which the busiest of its servers works."""

    @property
    def bottleneck(self) -> str:
        """The stage that is busy for longest; the first of several."""
        return max(self.busy, key=lambda stage: round(self.busy[stage], 9))


@dataclass
class _Pipeline:
    """Jobs that have passed some stages."""

    ready: list[float]
    """When each job is through the last stage."""
    busy: dict[str, float] = field(default_factory=dict)

    def serve(self, stage: str, servers: Items[int], seconds: Items[float], latency_s: float = 0.0) -> None:
        """Each job goes to its server, which takes them as they come (ties: by number), and needs these seconds."""
        free: dict[int, float] = defaultdict(float)
        busy: dict[int, float] = defaultdict(float)
        for job in sorted(range(len(self.ready)), key=self.ready.__getitem__):
            server = servers[job]
            free[server] = max(self.ready[job], free[server]) + seconds[job]
            busy[server] += seconds[job]
            self.ready[job] = free[server] + latency_s
        self.busy[stage] = max(busy.values())

    def wait_for_all(self) -> None:
        self.ready = [max(self.ready)] * len(self.ready)


def transfer(rung: Rung, deployment: Deployment, coding: Coding | None = None) -> Transfer:
    """Returns what a transfer takes. `coding` is for `sparse` alone, which sends dense weights where those are smaller;
    it has encoded them in vain then."""
    if (rung == "sparse") != (coding is not None):
        raise ValueError(f"coding={coding!r}: give one for the rung sparse, and None for others; this is {rung!r}")
    dense = Coding(size=1.0, encode_rate=float("inf"), decode_rate=deployment.load_rate)
    if coding is None:
        coding = dense
    elif coding.size >= 1:
        coding = Coding(size=1.0, encode_rate=coding.encode_rate, decode_rate=deployment.load_rate)
    buckets = _buckets(deployment, 1 if rung in ("batch", "async") else deployment.trainer_ranks)
    line = _push(rung, deployment, coding, buckets)
    if rung == "batch":
        line.wait_for_all()
    return _pull(rung, deployment, coding, [size for _, size in buckets], line)


def break_even(deployment: Deployment, codec: Codec) -> float | None:
    """Returns the share of changed weights from which `sparse` is not faster than `shards` (Fig. 11b).

    0 if it never is, below the codec's first density; None if it is up to the last one.
    """
    dense = transfer("shards", deployment).seconds

    def pays(density: float) -> bool:
        return transfer("sparse", deployment, codec.at(density)).seconds < dense * (1 - 1e-9)

    low, high = codec.points[0][0], codec.points[-1][0]
    if not pays(low):
        return 0.0
    if pays(high):
        return None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


def _buckets(deployment: Deployment, senders: int) -> list[tuple[int, float]]:
    """(sender, bytes): each sender's share in buckets, all senders in turn."""
    share = deployment.model_bytes / senders
    full, rest = divmod(share, deployment.bucket_bytes)
    sizes = [float(deployment.bucket_bytes)] * int(full) + ([rest] if rest else [])
    return [(sender, size) for size in sizes for sender in range(senders)]


def _push(rung: Rung, deployment: Deployment, coding: Coding, buckets: Items[tuple[int, float]]) -> _Pipeline:
    senders = [sender for sender, _ in buckets]
    nodes = [sender * deployment.trainer_nodes // deployment.trainer_ranks for sender in senders]
    sent = [size * coding.size for _, size in buckets]
    line = _Pipeline([0.0] * len(buckets))
    if rung in ("batch", "async"):
        others = 1 - 1 / deployment.trainer_nodes  # what is on the sender's own node crosses no NIC
        gathered = [size * others / deployment.local.bandwidth for _, size in buckets]
        line.serve("gather", nodes, gathered, deployment.local.latency_s)
        if rung == "batch":
            line.wait_for_all()
    line.serve("encode", senders, [size / coding.encode_rate for _, size in buckets])
    line.serve("send", nodes, [size / deployment.cross.bandwidth for size in sent], deployment.cross.latency_s)
    line.serve("ingress", [0] * len(sent), [size / deployment.relay.bandwidth for size in sent])
    return line


def _pull(rung: Rung, deployment: Deployment, coding: Coding, sizes: Items[float], line: _Pipeline) -> Transfer:
    """A batch is pulled when all of its buckets are at the relay; the receivers' turns alternate."""
    part = 1.0 if rung in ("batch", "async") else 1 / deployment.tp_size
    together = max(1, int(deployment.pull_bytes / (deployment.bucket_bytes * part)))
    starts = range(0, len(sizes), together)
    ranks = range(deployment.serving_ranks)
    pulled = [sum(sizes[start : start + together]) * part for start in starts for _ in ranks]
    sent = [size * coding.size for size in pulled]
    receivers = [rank for _ in starts for rank in ranks]
    nodes = [rank * deployment.serving_nodes // deployment.serving_ranks for rank in receivers]
    line.ready = [max(line.ready[start : start + together]) for start in starts for _ in ranks]
    line.serve("egress", [0] * len(sent), [size / deployment.relay.bandwidth for size in sent])
    line.serve("receive", nodes, [size / deployment.local.bandwidth for size in sent], deployment.local.latency_s)
    if rung == "batch":
        line.wait_for_all()
    line.serve("decode", receivers, [size / coding.decode_rate for size in pulled])
    return Transfer(max(line.ready), line.busy)


def _inverse(value: float) -> float:
    return 1 / value if value else float("inf")
