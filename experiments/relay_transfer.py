"""Parts of `relay.py` that need no training: densities, bytes at the socket, and seconds over slow links.

The transfer has two trainer ranks, as two nodes with a link each, and a replica outside, in a process of its own, near
the relay. It is done when the replica has answered with a token of the new weights.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engines.decoding import from_msgpack
from experiments import launch
from experiments.bench.models import checkpoint, random_sequence
from experiments.comparison.turns import interleave, short
from research.rose.transfer import DENSE_RUNGS, Rung
from research.simulator.links import Link
from research.workloads.shapes import DecoderShape

if TYPE_CHECKING:
    from torch import Tensor

    from engines.fleet.fleet import Fleet
    from engines.parallel.collectives import TorchGroup
    from engines.relay.flat import FlatModel

SHAPE = DecoderShape(
    hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=16384, tied=True
)  # 33 M parameters
SPREAD = 0.02
STEPS = (1e-6, 1e-5, 1e-4)
DENSITIES = (0.1, 1.0, 4.0, 50.0)
"""Percent."""
BY_DENSITY = (0.0, 1.0, 4.0, 10.0, 25.0, 50.0)
STEP = 2.5e-4
"""Of the weights that change: more than half of the gap to the next bfloat16, below 0.125."""
GIGABIT = 1e9 / 8
BUCKET_BYTES = 4 << 20
"""Smaller than usual, so that this small model has as many as a trainer's share of a large one."""
RUNGS: tuple[Rung, ...] = (*DENSE_RUNGS, "sparse")
Weights = dict[str, Any]


def density_part() -> dict[str, Any]:
    """Shares of bfloat16 weights from N(0, 0.02) that change when their float32 masters take a step, by learning rate;
    and E[min(1, step / ulp)]."""
    import torch

    masters = torch.randn(2**24, generator=torch.Generator().manual_seed(0)) * SPREAD
    signs = torch.randint(0, 2, masters.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    before = masters.bfloat16()
    found = {}
    for step in STEPS:
        changed = ((masters + step * signs).bfloat16() != before).float().mean()
        found[f"{step:g}"] = {"measured": short(float(changed)), "closed_form": short(closed_form(step))}
    return {"density": found}


def closed_form(step: float) -> float:
    """The expectation over the binades of N(0, 0.02): bfloat16 has 7 bits of mantissa."""

    def below(value: float) -> float:
        return math.erf(value / SPREAD / math.sqrt(2))

    return sum(
        (below(2.0 ** (exponent + 1)) - below(2.0**exponent)) * min(1.0, step / 2.0 ** (exponent - 7))
        for exponent in range(-60, 4)
    )


def changed(weights: Mapping[str, Tensor], percent: float, seed: int) -> Weights:
    """Weights of which this share, anywhere, has taken a step of fixed size and random sign, rounded to bfloat16."""
    import torch

    generator, after = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        moves = torch.rand(tensor.shape, generator=generator) < percent / 100
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        moved = (tensor.float() + STEP * signs).bfloat16()
        after[name] = torch.where(moves, moved, tensor).contiguous()
    return after


class Trainers:
    """This rank as a trainer's rank and, on rank 0, the fleet with the replica. All ranks call all methods."""

    def __init__(self, world: TorchGroup, model: str) -> None:
        import torch

        from engines.config import ModelConfig
        from engines.fleet.fleet import Fleet
        from engines.models.parameters import logical_shapes
        from engines.relay.client import Relay
        from engines.relay.flat import FlatModel

        self._world = world
        config = ModelConfig.from_pretrained(model)
        shapes = logical_shapes(config)
        self.flat: FlatModel = FlatModel.of(config, shapes)
        generator = torch.Generator().manual_seed(5)
        before = {name: (torch.randn(shape, generator=generator) * SPREAD).bfloat16() for name, shape in shapes.items()}
        self.weights: dict[float, Weights] = {0.0: before}
        for percent in sorted({*DENSITIES, *BY_DENSITY} - {0.0}):
            self.weights[percent] = changed(before, percent, seed=round(10 * percent))
        self.fleet: Fleet | None = None
        where = None
        if world.rank == 0:
            options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_bytes": 2**24, "timeout_s": 120.0}
            self.fleet = Fleet(model, num_replicas=1, weights="relay", **options)
            self.fleet.wait_for_replicas(1)
            where = msgspec.msgpack.encode((self.fleet.relay.address, self.fleet.relay.token))
        address, token = from_msgpack(world.broadcast_bytes(where), tuple[str, bytes])
        self._relay = Relay(address, token, timeout_s=120.0)
        self.num_bytes = 2 * self.flat.length

    def transfer(self, rung: Rung, gigabits: float, percent: float, *, deflates: bool = False) -> tuple[float, int]:
        """Returns the seconds until the replica runs with new weights, and the bytes that were sent, on all ranks'
        sockets. It had the old weights from the same trainer before."""
        from engines.relay.held import Held
        from engines.relay.push import Pusher

        gathers = rung in ("batch", "async")
        link: list[Link | None] = [None]
        now = [self.weights[0.0]]
        session = self._world.broadcast_bytes(secrets.token_hex(8).encode() if self._world.rank == 0 else None).decode()
        pusher = None
        if self._world.rank == 0 or not gathers:
            pusher = Pusher(
                self._relay,
                self.flat,
                lambda: {name: Held(0, tensor.view(-1), is_shared=True) for name, tensor in now[0].items()},
                dtype="bfloat16",
                session=session,
                rank=0 if gathers else self._world.rank,
                num_ranks=1 if gathers else self._world.size,
                snapshot_every=64 if rung == "sparse" else 0,
                bucket_bytes=BUCKET_BYTES,
                deflates=deflates,
                link_seconds=lambda count: 0.0 if link[0] is None else link[0].seconds(count),
            )
        try:
            self._push_and_run(pusher, session, 0, at_once=True)
            link[0], now[0] = Link(bandwidth=gigabits * GIGABIT), self.weights[percent]
            self._world.barrier()
            start = time.perf_counter()
            if gathers:
                self._gather(now[0])
            self._push_and_run(pusher, session, 1, at_once=rung != "batch")
            seconds = time.perf_counter() - start
            sent = 0 if pusher is None else pusher.records[-1].num_bytes
        finally:
            if pusher is not None:
                pusher.close()
        everyone = launch.gather(self._world, (seconds, sent))
        return everyone[0][0], sum(one[1] for one in everyone)

    def _push_and_run(self, pusher: Any, session: str, number: int, *, at_once: bool) -> None:
        from engines.relay.requests import Version

        if pusher is not None:
            pusher.push(number)
            if not at_once:
                pusher.finish()
        if self.fleet is not None:
            state = random_sequence(number, num_tokens=4, length=1)
            self.fleet.roll_out([state], weights_source=Version(session, number))
        if pusher is not None:
            pusher.finish()

    def _gather(self, weights: Weights) -> None:
        """Brings each rank's half of all parameters to the others, as a gather under ZeRO-3 does."""
        import torch

        for tensor in weights.values():
            half = tensor.view(-1).view(torch.int16)[: len(tensor.view(-1)) // self._world.size]
            self._world.all_gather(half)

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()
        self._world.barrier()


def transfer_part(world: TorchGroup, *, turns: int, gigabits: Items[float]) -> dict[str, Any]:
    """Fields of the result. All ranks call it."""
    with checkpoint(SHAPE, max_positions=64, dtype="bfloat16", world=world) as model:
        trainers = Trainers(world, model)
        try:
            return _bytes(trainers) | _ladder(trainers, turns, gigabits)
        finally:
            trainers.close()


def _bytes(trainers: Trainers) -> dict[str, Any]:
    dense = trainers.transfer("shards", 1000.0, 1.0, deflates=True)[1] / trainers.num_bytes
    found = {
        f"{percent:g}": short(trainers.transfer("sparse", 1000.0, percent, deflates=True)[1] / trainers.num_bytes)
        for percent in DENSITIES
    }
    return {"bytes_vs_dense": found, "deflated_dense": short(dense), "model_bytes": trainers.num_bytes}


def _ladder(trainers: Trainers, turns: int, gigabits: Items[float]) -> dict[str, Any]:
    """Medians of interleaved turns. Dense rungs are sent as they are, and the last of them deflated, too."""
    table: dict[str, Any] = {}
    for rate in gigabits:

        def seconds(rung: Rung, percent: float = 1.0, *, deflates: bool = False, rate: float = rate) -> float:
            return trainers.transfer(rung, rate, percent, deflates=deflates)[0]

        variants: dict[str, Callable[[], float]] = {rung: partial(seconds, rung) for rung in RUNGS}
        variants["shards, deflated"] = partial(seconds, "shards", deflates=True)
        took = interleave(variants, turns, name=f"{rate:g} Gb/s", warm_up=False)
        medians = {name: short(statistics.median(values)) for name, values in took.items()}
        by_density = {f"{percent:g}": short(seconds("sparse", percent)) for percent in BY_DENSITY}
        best = min(medians["shards"], medians["shards, deflated"])
        table[f"{rate:g}"] = {
            **medians,
            "gain": short(best / medians["sparse"]),
            "by_density": by_density,
            "break_even": _crossing({float(at): value for at, value in by_density.items()}, best),
        }
    return {"transfer": table}


def _crossing(seconds: Mapping[float, float], limit: float) -> float | None:
    """Returns the density, in percent, from which sparse takes longer than this; None up to the last one."""
    for (low, fast), (high, slow) in itertools.pairwise(seconds.items()):
        if fast <= limit < slow:
            return short(float(np.interp(limit, [fast, slow], [low, high])))
    return None if max(seconds.values()) <= limit else min(seconds)
