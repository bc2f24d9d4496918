"""A replica whose shards are threads of one process: what pulls weights by a relay, without steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from engines.attention.choose import choose_backend, setting_of
from engines.config import EngineConfig, ModelConfig
from engines.models.decoder import Decoder
from engines.models.kernels import choose_kernels
from engines.parallel.collectives import SingleRank
from engines.parallel.sharding import Shard, shard_config, shard_slices
from engines.relay.client import Relay
from engines.relay.pull import Puller
from engines.relay.requests import Version


class _Member(SingleRank):
    """One of several threads that exchange bytes; they share no tensors."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[bytes]) -> None:
        self.rank, self.size = rank, len(said)
        self._barrier, self._said = barrier, said

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._said[self.rank] = data
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class ShardedReplica:
    """Decoders of all shards, without KV caches."""

    def __init__(self, config: ModelConfig, tp_size: int, relay: Relay, *, dtype: str = "bfloat16") -> None:
        barrier, said = threading.Barrier(tp_size, timeout=2 * relay.timeout_s), [b""] * tp_size
        self.config, self.have = config, None
        self._members = [_Member(rank, barrier, said) for rank in range(tp_size)]
        engine, device = EngineConfig(attention="sdpa", kernels="torch"), torch.device("cpu")
        self.decoders = []
        for member in self._members:
            shard = Shard(index=member.rank, count=tp_size, max_count=8 if 8 % tp_size == 0 else tp_size)
            local = shard_config(config, shard)
            self.decoders.append(
                Decoder(
                    config,
                    dtype=getattr(torch, dtype),
                    device=device,
                    max_positions=64,
                    shard=shard,
                    tensor_parallel=member,
                    attention=choose_backend(engine, local, device),
                    kernels=choose_kernels("torch", setting_of(engine, local, device)),
                )
            )
        self.pullers = [Puller(relay) for _ in self.decoders]

    have: Version | None

    def pull(self, version: Version) -> None:
        """Raises what the first shard raises; the replica has no weights then."""
        have, self.have = self.have, None

        def one(index: int) -> None:
            self.decoders[index].unpack()
            self.pullers[index].pull(self.decoders[index], self._members[index], version, have)
            self.decoders[index].prepare()

        with ThreadPoolExecutor(len(self.decoders)) as pool:
            list(pool.map(one, range(len(self.decoders))))
        self.have = version

    def differing(self, weights: dict[str, Tensor]) -> list[str]:
        """Returns the names of parameters of which a shard has other bits than these whole tensors."""
        return [name for decoder in self.decoders for name in differing(decoder, weights)]

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()


def differing(decoder: Decoder, weights: dict[str, Tensor]) -> list[str]:
    """Returns the names of parameters of which the shard has other bits than these whole tensors, rounded to its
    dtype."""
    signed = {2: torch.int16, 4: torch.int32}[decoder.dtype.itemsize]
    names = []
    for name, view in decoder.logical_views().items():
        part = weights[name].to(decoder.dtype)[shard_slices(decoder.config, name, decoder.shard)].contiguous()
        if not torch.equal(view.view(signed), part.view(signed)):
            names.append(name)
    return names
