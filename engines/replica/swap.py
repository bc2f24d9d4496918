"""Whether the KV of a preempted sequence is kept or computed again, by costs measured when that is first asked."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from engines.attention.batch import ForwardBatch
from engines.config import Preemption
from engines.kvcache.cost import (
    CopyCost,
    PassTime,
    PrefillCost,
    SwapCost,
    fit_prefill,
    slowest_copy,
    slowest_prefill,
)
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv, to_host
from engines.kvcache.store import KVContent, KVStore, Tier
from engines.models.decoder import Decoder
from engines.parallel.collectives import Communicator

_SHORT = 32  # tokens
_LONGEST = 512
_DEEPEST = 2048
_PASS_S = 0.05  # after one that takes longer no longer one is timed
_COPY_BYTES = 8 << 20
_TIERS = ("none", "host", "disk")
_UNUSABLE = CopyCost(bytes_per_token=1, out_bandwidth=1.0, in_bandwidth=1.0, latency=math.inf)
_FREE = PrefillCost(latency=0.0, seconds_per_token=0.0, seconds_per_pair=0.0)

_T = TypeVar("_T")


class SwapPolicy:
    """Says of each sequence that is to be preempted whether its KV is kept; the same on every rank of the replica.

    `auto` asks a cost model, whose constants are measured when a sequence is first preempted, and of each tier when it
    is first to be used: some tenths of a second. That depends on time; the two other ways do not. What a disk has just
    been given it mostly gives back from memory, in the measurement as in use.
    """

    def __init__(
        self,
        preemption: Preemption,
        decoder: Decoder,
        kv: PagedKVCache,
        *,
        max_model_len: int,
        tensor_parallel: Communicator,
    ) -> None:
        self._preemption = preemption
        self._decoder, self._kv, self._max_model_len = decoder, kv, max_model_len
        self._group = tensor_parallel
        self._prefill: PrefillCost | None = None
        self.costs: dict[str, SwapCost] = {}
        """By the name of the tier, as far as measured."""

    def swaps(self, num_tokens: int, num_known: int, store: KVStore) -> bool:
        """Whether to store the KV of a sequence of `num_tokens` computed tokens, the first `num_known` of which lie in
        blocks that other sequences also hold.

        All ranks of the replica call it together.
        """
        if self._preemption == "recompute":
            return False
        tier = store.tier_for(num_tokens * self._kv.bytes_per_token)
        mine = 0 if tier is None else _TIERS.index(tier.name)
        everyone = [told[0] for told in self._group.all_gather_bytes(bytes([mine]))]
        if not all(everyone):
            return False
        if self._preemption == "swap":
            return True
        name = _TIERS[max(everyone)]  # the ranks wait for each other
        if name not in self.costs:
            assert tier is not None
            self.costs[name] = self._measure(tier)
        return self.costs[name].cheaper(num_tokens, num_known) == "swap"

    @torch.no_grad()
    def _measure(self, tier: Tier) -> SwapCost:
        scratch: PagedKVCache | None = None
        with contextlib.suppress(RuntimeError):  # what torch's allocators raise: no memory is left to measure in
            scratch = scratch_cache(self._kv, min(_LONGEST, self._max_model_len))
        if not all(self._exchange(scratch is not None)):
            return SwapCost(prefill=_FREE, copy=_UNUSABLE)
        assert scratch is not None
        if self._prefill is None:
            times = time_passes(self._decoder, scratch, self._max_model_len, lambda s: max(self._exchange(s)))
            self._prefill = slowest_prefill(self._exchange(fit_prefill(*times)))
        copies = self._exchange(time_copies(scratch, tier, self._max_model_len))
        return SwapCost(prefill=self._prefill, copy=slowest_copy(copies))

    def _exchange(self, mine: _T) -> list[_T]:
        told = self._group.all_gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(one, type=type(mine)) for one in told]


def scratch_cache(kv: PagedKVCache, num_tokens: int) -> PagedKVCache:
    """A cache like `kv` with room for `num_tokens` tokens, wherever in a block they begin."""
    _, block_size, num_heads, head_dim = kv.keys[0].shape
    return PagedKVCache(
        num_layers=len(kv.keys),
        num_blocks=-(-num_tokens // block_size) + 1,
        block_size=block_size,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype=kv.keys[0].dtype,
        device=kv.keys[0].device,
    )


def time_passes(
    decoder: Decoder, scratch: PagedKVCache, max_model_len: int, agree: Callable[[float], float]
) -> tuple[PassTime, PassTime, PassTime, PassTime]:
    """What `fit_prefill` takes. All ranks call it together; `agree` gives them one number for theirs."""

    def measure(num_tokens: int, context: int) -> PassTime:
        """The shorter of two passes: the first may pay for memory and caches."""
        batch, seconds = _prefill_batch(scratch, num_tokens, context), math.inf
        for _ in range(2):
            start = time.perf_counter()
            decoder.forward(batch, scratch)
            _wait_for(scratch)
            seconds = min(seconds, time.perf_counter() - start)
        return PassTime(num_tokens=num_tokens, context=context, seconds=agree(seconds))

    num_tokens = min(_SHORT, max_model_len)
    one = measure(1, num_tokens)
    short = long = measure(num_tokens, num_tokens)
    while long.seconds < _PASS_S and 4 * long.num_tokens <= min(_LONGEST, max_model_len):
        long = measure(4 * long.num_tokens, 4 * long.num_tokens)
    return one, short, long, measure(num_tokens, min(_DEEPEST, max_model_len))


def time_copies(scratch: PagedKVCache, tier: Tier, max_model_len: int) -> CopyCost:
    """Of a tier, by an entry of one token and one of several MiB, or what it takes."""
    token_bytes = scratch.bytes_per_token
    one = _time_copy(scratch, tier.store, 1)
    num_tokens = max(2, min(max_model_len, _COPY_BYTES // token_bytes))
    many = _time_copy(scratch, tier.store, num_tokens)
    while many is None and num_tokens > 2:
        num_tokens //= 2
        many = _time_copy(scratch, tier.store, num_tokens)
    if one is None or many is None:
        return _UNUSABLE
    num_bytes = (num_tokens - 1) * token_bytes
    out_bandwidth, in_bandwidth = (num_bytes / max(b - a, 1e-9) for a, b in zip(one, many, strict=True))
    return CopyCost(
        bytes_per_token=token_bytes, out_bandwidth=out_bandwidth, in_bandwidth=in_bandwidth, latency=sum(one)
    )


def _time_copy(scratch: PagedKVCache, store: KVStore, num_tokens: int) -> tuple[float, float] | None:
    """Seconds out and in, the shorter of two each; None where there is no room."""
    _, _, num_heads, head_dim = scratch.keys[0].shape
    content = KVContent(
        policy_version=0, tokens_digest="", dtype=str(scratch.keys[0].dtype).removeprefix("torch."),
        num_layers=len(scratch.keys), num_tokens=num_tokens, first_head=0, num_heads=num_heads, head_dim=head_dim,
    )  # fmt: skip
    blocks = _blocks(scratch, num_tokens)
    out_s = in_s = math.inf
    for _ in range(2):  # the first may pay for memory
        start = time.perf_counter()
        part = store.export(content, to_host(read_kv(scratch, blocks, num_tokens)))
        if part is None:
            return None
        out_s = min(out_s, time.perf_counter() - start)
        try:
            start = time.perf_counter()
            fill_kv(scratch, blocks, num_tokens, store.load(part, content))
            _wait_for(scratch)
            in_s = min(in_s, time.perf_counter() - start)
        except ValueError:
            return None
        finally:
            store.drop(part)
    return out_s, in_s


def _wait_for(kv: PagedKVCache) -> None:
    if kv.keys[0].is_cuda:
        torch.cuda.synchronize(kv.keys[0].device)


def _blocks(kv: PagedKVCache, num_tokens: int) -> list[int]:
    """A block table that goes round the few blocks there are: what is in them does not matter."""
    num_blocks, block_size = kv.keys[0].shape[:2]
    return [index % num_blocks for index in range(-(-num_tokens // block_size))]


def _prefill_batch(kv: PagedKVCache, num_tokens: int, context: int) -> ForwardBatch:
    """The last tokens of a context, all of them token 0."""
    device, block_size = kv.keys[0].device, kv.keys[0].shape[1]
    positions = torch.arange(context - num_tokens, context)
    table = torch.tensor([_blocks(kv, context)])
    slots = table[0, positions // block_size] * block_size + positions % block_size
    return ForwardBatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context], dtype=torch.int32, device=device),
        block_table=table.to(torch.int32).to(device),
        slot_mapping=slots.to(device),
        logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        seqlens_q=[num_tokens],
    )
