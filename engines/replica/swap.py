"""Decides whether the KV of a preempted sequence is stored or recomputed, by costs measured at first use."""

from __future__ import annotations

import math
import time

import torch

from engines.config import Preemption
from engines.kvcache.cost import CopyCost, PassTime, PrefillCost, SwapCost, fit_prefill
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv, to_host
from engines.kvcache.store import KVContent, KVStore, Tier
from engines.models.decoder import Decoder
from engines.parallel.collectives import Communicator
from engines.replica.scratch import Scratch, slowest

_SHORT = 32  # tokens
_LONGEST = 512
_DEEPEST = 2048
_PASS_S = 0.05  # after a pass that takes longer, no pass of more tokens is timed
_COPY_BYTES = 8 << 20
_TIERS = ("none", "host", "disk")
_UNUSABLE = CopyCost(bytes_per_token=1, out_bandwidth=1.0, in_bandwidth=1.0, latency=math.inf)
_NO_ROOM = (math.inf, math.inf)
_FREE = PrefillCost(latency=0.0, seconds_per_token=0.0, seconds_per_pair=0.0)


class SwapPolicy:
    """Decides for each preempted sequence whether its KV is stored; the same on every rank of the replica.

    `auto` compares costs by a model. Its constants are measured at the first preemption and before a tier's first use,
    which takes some tenths of a second. So `auto` depends on time; `swap` and `recompute` do not. Data that was just
    written to a disk is mostly read back from memory, in the measurement as in use.
    """

    def __init__(
        self,
        preemption: Preemption,
        decoder: Decoder,
        kv: PagedKVCache,
        max_model_len: int,
        tensor_parallel: Communicator,
    ) -> None:
        self._preemption = preemption
        self._decoder, self._kv, self._max_model_len = decoder, kv, max_model_len
        self._group = tensor_parallel
        self._prefill: PrefillCost | None = None
        self.costs: dict[str, SwapCost] = {}
        """Name of a tier -> its costs, for the tiers that have been measured."""

    def swaps(self, num_tokens: int, num_known: int, store: KVStore, *, num_stored: int = 0) -> bool:
        """Whether to store the KV of a sequence of `num_tokens` computed tokens, the first `num_known` of which lie in
        blocks that other sequences also hold, and the first `num_stored` of which are stored already.

        All ranks of the replica call it together.
        """
        if self._preemption == "recompute":
            return False
        tier = store.tier_for(max(0, num_tokens - num_stored) * self._kv.bytes_per_token)
        mine = 0 if tier is None else _TIERS.index(tier.name)
        everyone = [told[0] for told in self._group.all_gather_bytes(bytes([mine]))]
        if not all(everyone):
            return False
        if self._preemption == "swap":
            return True
        name = _TIERS[max(everyone)]  # the slowest: the ranks wait for each other
        if name not in self.costs:
            assert tier is not None
            self.costs[name] = self._measure(tier)
        return self.costs[name].cheaper(num_tokens, num_known) == "swap"

    @torch.no_grad()
    def _measure(self, tier: Tier) -> SwapCost:
        scratch = Scratch.like(self._kv, min(_LONGEST, self._max_model_len), self._decoder, self._group)
        if scratch is None:
            return SwapCost(prefill=_FREE, copy=_UNUSABLE)
        if self._prefill is None:
            self._prefill = self._measure_prefill(scratch)
        return SwapCost(prefill=self._prefill, copy=self._measure_copy(scratch, tier.store))

    def _measure_prefill(self, scratch: Scratch) -> PrefillCost:
        def measure(num_tokens: int, context: int) -> PassTime:
            seconds = scratch.measure(1, num_tokens, context, repeats=2)  # the first may pay for memory and caches
            return PassTime(num_tokens=num_tokens, context=context, seconds=seconds)

        num_tokens, longest = min(_SHORT, self._max_model_len), min(_LONGEST, self._max_model_len)
        one = measure(1, num_tokens)
        short = long = measure(num_tokens, num_tokens)
        while long.seconds < _PASS_S and 4 * long.num_tokens <= longest:
            long = measure(4 * long.num_tokens, 4 * long.num_tokens)
        return fit_prefill(one, short, long, measure(num_tokens, min(_DEEPEST, self._max_model_len)))

    def _measure_copy(self, scratch: Scratch, store: KVStore) -> CopyCost:
        """Fits the times of an entry of one token and one of several MiB, halved until the store has room."""
        token_bytes = scratch.kv.bytes_per_token
        one = self._time_copy(scratch, store, 1)
        num_tokens = max(2, min(self._max_model_len, _COPY_BYTES // token_bytes))
        while (many := self._time_copy(scratch, store, num_tokens)) == _NO_ROOM and num_tokens > 2:
            num_tokens //= 2
        if _NO_ROOM in (one, many):
            return _UNUSABLE
        num_bytes = (num_tokens - 1) * token_bytes
        out_bandwidth, in_bandwidth = (num_bytes / max(b - a, 1e-9) for a, b in zip(one, many, strict=True))
        return CopyCost(
            bytes_per_token=token_bytes, out_bandwidth=out_bandwidth, in_bandwidth=in_bandwidth, latency=sum(one)
        )

    def _time_copy(self, scratch: Scratch, store: KVStore, num_tokens: int) -> tuple[float, float]:
        """Returns the seconds to store an entry and to load it; both infinite where the store cannot keep it."""
        kv = scratch.kv
        _, _, num_heads, head_dim = kv.keys[0].shape
        content = KVContent(
            policy_version=0, tokens_digest="", dtype=str(kv.keys[0].dtype).removeprefix("torch."),
            num_layers=len(kv.keys), first_token=0, num_tokens=num_tokens, first_head=0, num_heads=num_heads,
            head_dim=head_dim,
        )  # fmt: skip
        blocks, times = scratch.blocks(num_tokens), []
        for _ in range(2):  # the first may pay for memory
            start = time.perf_counter()
            part = store.export(content, to_host(read_kv(kv, blocks, num_tokens)))
            if part is None:
                break
            stored = time.perf_counter()
            try:
                fill_kv(kv, blocks, num_tokens, store.load(part, content))
                scratch.wait()
                times.append((stored - start, time.perf_counter() - stored))
            except ValueError:
                break
            finally:
                store.drop(part)
        out_s, in_s = map(min, zip(*times, strict=True)) if len(times) == 2 else _NO_ROOM
        return slowest(out_s, self._group), slowest(in_s, self._group)
