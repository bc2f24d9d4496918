"""Weights by a relay in the main job (`train.py --weights relay`, docs/relay.md).

Each rank pushes its part by a thread as soon as the optimizer step is done, and pulls what its shard of the rollout
engine lacks. The weights may change again once all that was pushed has arrived.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

import msgspec

from algos.trainer import Trainer
from engines import LLM
from engines.decoding import from_msgpack
from engines.models.parameters import logical_shapes
from engines.parallel.groups import GroupCache
from engines.relay.client import Relay
from engines.relay.flat import FlatModel
from engines.relay.message import dtype_of
from engines.relay.process import RelayProcess, room_for
from engines.relay.push import Pusher
from engines.relay.requests import Version
from experiments import launch


class _Meeting(msgspec.Struct, frozen=True):
    """What rank 0 sends the other ranks."""

    address: str
    token: bytes
    session: str


class RelayedWeights:
    """A run's relay, which rank 0 starts, and this rank's part of the pushes and pulls. All ranks call all methods."""

    def __init__(self, llm: LLM, trainer: Trainer, groups: GroupCache, *, timeout_s: float) -> None:
        """Raises ValueError, naming the option, for weights that cannot be pushed, before the relay is started."""
        self._llm, self._group = llm, groups.world
        dtype = dtype_of("rollout.dtype", llm.config.dtype)
        flat = FlatModel.of(llm.model_config, logical_shapes(llm.model_config))
        trainer.held_weights()
        self.process: RelayProcess | None = None
        meeting = None
        address = groups.address
        if groups.world.rank == 0:
            token, room = secrets.token_bytes(32), room_for(flat.length, dtype)
            model = flat.fingerprint, dtype, flat.length
            self.process = RelayProcess(token, max_bytes=room, model=model, host=address, timeout_s=timeout_s)
            meeting = _Meeting(self.process.relay.address, token, secrets.token_hex(8))
        data = groups.world.broadcast_bytes(None if meeting is None else msgspec.msgpack.encode(meeting))
        meeting = from_msgpack(data, _Meeting)
        self.relay = Relay(meeting.address, meeting.token, timeout_s=timeout_s)
        self._pusher = Pusher(
            self.relay,
            flat,
            trainer.held_weights,
            dtype=dtype,
            session=meeting.session,
            rank=groups.world.rank,
            num_ranks=groups.world.size,
            deflates=len(set(groups.hosts)) > 1,
        )
        self._waited_s = 0.0

    def push(self, step: int) -> None:
        """Begins to push the trainer's weights after this step."""
        self._pusher.push(step)

    def version(self, step: int) -> Version:
        """What other replicas pull."""
        return self._pusher.version(step)

    def pull(self, step: int) -> int:
        """Gives the engine the weights of this step; returns their checksum."""
        return self._llm.update_weights(source=self.relay, version=self.version(step))

    def finish(self) -> None:
        """Must be called before the trainer's weights change."""
        began = time.perf_counter()
        self._pusher.finish()
        self._waited_s = time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Returns what the weights of the rollout took: sums over the ranks, and the slowest one's seconds."""
        mine = {"push": asdict(self._pusher.records[-1]), "pull": asdict(self._llm.pulls[-1]), "wait": self._waited_s}
        everyone: list[dict[str, Any]] = launch.gather(self._group, mine)

        def total(way: str, name: str) -> float:
            return float(sum(one[way][name] for one in everyone))

        def slowest(way: str, name: str) -> float:
            return float(max(one[way][name] for one in everyone))

        return {
            "relay/pushed_bytes": total("push", "num_bytes"),
            "relay/pulled_bytes": total("pull", "num_bytes"),
            "relay/density": total("push", "num_changed") / total("push", "num_elements"),
            "relay/dense_buckets": total("push", "num_dense") / total("push", "num_buckets"),
            "relay/versions_behind": slowest("pull", "behind"),
            "timing_s/relay_encode": slowest("push", "encode_s"),
            "timing_s/relay_push": slowest("push", "seconds"),
            "timing_s/relay_pull": slowest("pull", "seconds"),
            "timing_s/relay_apply": slowest("pull", "apply_s"),
            "timing_s/relay_check": slowest("pull", "check_s"),
            "timing_s/relay_wait": max(one["wait"] for one in everyone),
        }

    def close(self) -> None:
        self._pusher.close()
        if self.process is not None:
            self.process.close()
