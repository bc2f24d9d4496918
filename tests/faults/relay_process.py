"""A process of a relay's schedule: one rank of a trainer, or a replica with all its shards in threads.

It connects to a socket, reads what it is, then obeys. What the weights of a version are follows from the steps that
have led there, so every process knows them by itself.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import engines.relay.client
from engines.config import ModelConfig
from engines.models.parameters import logical_shapes
from engines.relay.client import Relay
from engines.relay.flat import FlatModel
from engines.relay.held import Held
from engines.relay.push import Pusher
from engines.relay.requests import Version
from tests.engines.test_relay import Replica
from tests.engines.test_sharding import CONFIGS

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """What all processes of a schedule have in common."""

    seed: int
    config_name: str
    dtype: Any
    """Of the weights that travel."""
    is_raw: bool
    """Whether the trainer has that dtype too; else it has float32."""
    piece_bytes: int
    relay: Relay

    @property
    def config(self) -> ModelConfig:
        return CONFIGS[self.config_name]


@dataclass(frozen=True)
class Step:
    seed: int
    density: float
    """Share of the elements that change."""


@dataclass(frozen=True, kw_only=True)
class RankOrders:
    session: str
    rank: int
    num_ranks: int
    how: str
    """"whole", "parts", or "uneven": parts of any size, also none."""
    steps: list[Step]
    """That the trainer has resumed behind."""
    s_per_byte: float
    """Of its link."""
    options: dict[str, Any]
    """Of the pusher."""


@dataclass(frozen=True)
class ReplicaOrders:
    tp_size: int


@dataclass(frozen=True)
class Push:
    number: int
    step: Step


@dataclass(frozen=True)
class Finish:
    pass


@dataclass(frozen=True)
class Pull:
    version: Version
    steps: list[Step]


@dataclass(frozen=True)
class Close:
    pass


@dataclass(frozen=True)
class Reply:
    """How a command ended."""

    error: str = ""
    """The type and message of what it raised."""
    trace: str = ""
    threads: list[str] = field(default_factory=list)
    """That still run after `Close`."""
    counts: dict[str, int] = field(default_factory=dict)


def initial(model: Model) -> Weights:
    generator = torch.Generator().manual_seed(model.seed)
    kind = getattr(torch, model.dtype) if model.is_raw else torch.float32
    shapes = logical_shapes(model.config)
    return {name: (0.02 * torch.randn(shapes[name], generator=generator)).to(kind) for name in sorted(shapes)}


def take(model: Model, step: Step, weights: Weights) -> None:
    """Changes the weights in place: by a little, or to any bits."""
    if not step.density:
        return
    generator = torch.Generator().manual_seed(step.seed)
    for tensor in weights.values():
        at = torch.rand(tensor.shape, generator=generator) < step.density
        if step.seed % 2:
            values = _any_bits(tensor, generator)
            # What a NaN's other bits become in another dtype depends on the instructions that are used.
            tensor[at] = (values if model.is_raw else values.nan_to_num(1.0))[at]
        else:
            tensor[at] *= 1 + 0.01 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)[at]
    first = weights["model.norm.weight"]
    special = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf])
    first[:4] = special[torch.randperm(4, generator=generator)].to(first.dtype)


def _any_bits(tensor: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, tensor.shape, generator=generator)
    return bits.to({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(tensor.dtype)


def after(model: Model, steps: list[Step]) -> Weights:
    weights = initial(model)
    for step in steps:
        take(model, step, weights)
    return weights


def held(weights: Weights, rank: int, num_ranks: int, how: str, seed: int) -> dict[str, Held]:
    """What a rank has; a part is a copy, as it is its own memory."""
    if how == "whole":
        return {name: Held(0, tensor.view(-1), is_shared=True) for name, tensor in weights.items()}
    idle = seed % num_ranks if num_ranks > 2 else None
    parts = {}
    for name, tensor in weights.items():
        size = tensor.numel()
        each = -(-size // num_ranks)
        ends = [min(each * index, size) for index in range(num_ranks + 1)]
        if how == "uneven" and num_ranks > 1:
            rng = random.Random(f"{seed}/{name}")
            ranks = [index for index in range(num_ranks) if index != idle]
            cuts = sorted(rng.randint(1, size - 1) for _ in ranks[1:])
            sizes = dict.fromkeys(range(num_ranks), 0)
            for index, begin, end in zip(ranks, [0, *cuts], [*cuts, size], strict=True):
                sizes[index] = end - begin
            ends = [sum(list(sizes.values())[:index]) for index in range(num_ranks + 1)]
        parts[name] = Held(ends[rank], tensor.view(-1)[ends[rank] : ends[rank + 1]].clone())
        if how == "parts" and size < 30:  # small ones are whole on every rank
            parts[name] = Held(0, tensor.view(-1), is_shared=True)
    return parts


class _Rank:
    def __init__(self, model: Model, orders: RankOrders) -> None:
        self._model, self._weights = model, after(model, orders.steps)
        flat = FlatModel.of(model.config, logical_shapes(model.config))

        def now() -> dict[str, Held]:
            return held(self._weights, orders.rank, orders.num_ranks, orders.how, model.seed)

        self._pusher = Pusher(
            model.relay,
            flat,
            now,
            dtype=model.dtype,
            session=orders.session,
            rank=orders.rank,
            num_ranks=orders.num_ranks,
            link_seconds=(lambda count: orders.s_per_byte * count) if orders.s_per_byte else None,
            **orders.options,
        )

    def obey(self, command: Any) -> dict[str, int]:
        if isinstance(command, Push):
            take(self._model, command.step, self._weights)
            self._pusher.push(command.number)
            return {}
        record = self._pusher.finish()
        assert record is not None
        dense = record.num_dense
        return {"sent sparse": record.num_buckets - dense, "sent dense": dense, "attempts": record.num_attempts}

    def close(self) -> None:
        self._pusher.close()


class _Replica:
    def __init__(self, model: Model, orders: ReplicaOrders) -> None:
        self._model = model
        self._replica = Replica(model.config, orders.tp_size, model.relay, dtype=model.dtype)

    def obey(self, command: Pull) -> dict[str, int]:
        self._replica.pull(command.version)
        try:
            self._replica.assert_equal(after(self._model, command.steps))
        except AssertionError as error:
            raise WrongBits(f"{command.version}: {error}") from None
        records = [puller.records[-1] for puller in self._replica.pullers]
        dense, count = sum(one.num_dense for one in records), sum(one.num_buckets for one in records)
        return {"read dense": dense, "read buckets": count, "versions skipped": records[0].behind > 1}

    def close(self) -> None:
        self._replica.close()


class WrongBits(Exception):
    """What was pulled is not what was pushed."""


def main() -> None:
    torch.set_num_threads(1)
    end = socket.socket(socket.AF_UNIX)
    end.connect(sys.argv[1])
    connection = Connection(end.detach())
    model, orders = connection.recv()
    engines.relay.client.PIECE_BYTES = model.piece_bytes  # type: ignore[misc]
    one = _Rank(model, orders) if isinstance(orders, RankOrders) else _Replica(model, orders)
    connection.send(Reply())
    while not isinstance(command := connection.recv(), Close):
        try:
            connection.send(Reply(counts=one.obey(command)))
        except BaseException as error:
            connection.send(Reply(f"{type(error).__name__}: {error}", traceback.format_exc()))
    one.close()
    deadline = time.monotonic() + 5.0
    while len(left := [thread.name for thread in threading.enumerate()]) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    connection.send(Reply(threads=left[1:]))
