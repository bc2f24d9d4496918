"""A scratch KV cache in which forward passes are timed, beside the cache that sequences use."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from dataclasses import dataclass

import numpy as np
import torch

from engines.attention.batch import ForwardBatch
from engines.kvcache.paged import PagedKVCache
from engines.models.decoder import Decoder
from engines.parallel.collectives import Communicator
from engines.sampling.sampler import SamplingBatch, make_sampling_batch, sample


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """A cache whose contents do not matter. All ranks of the replica make the same calls, and get the same times."""

    decoder: Decoder
    kv: PagedKVCache
    tensor_parallel: Communicator

    @classmethod
    def like(cls, kv: PagedKVCache, num_tokens: int, decoder: Decoder, tensor_parallel: Communicator) -> Scratch | None:
        """Returns one like `kv` with room for `num_tokens` tokens, wherever in a block they begin; None if a rank has
        no memory for it."""
        _, block_size, num_heads, head_dim = kv.keys[0].shape
        made: PagedKVCache | None = None
        with contextlib.suppress(RuntimeError):  # what torch's allocators raise
            made = PagedKVCache(
                num_layers=len(kv.keys),
                num_blocks=-(-num_tokens // block_size) + 1,
                block_size=block_size,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                dtype=kv.keys[0].dtype,
                device=kv.keys[0].device,
            )
        if slowest(math.inf if made is None else 0.0, tensor_parallel) > 0:
            return None
        assert made is not None
        return cls(decoder=decoder, kv=made, tensor_parallel=tensor_parallel)

    def measure(self, num_sequences: int, num_tokens: int, context: int, *, draws: bool = False, repeats: int) -> float:
        """Returns the seconds of a pass over the last `num_tokens` tokens of sequences that have `context` tokens: the
        minimum over some passes, and of that the maximum over the ranks. With `draws` each sequence draws a token."""
        seconds = [self._time(num_sequences, num_tokens, context, draws) for _ in range(repeats)]
        return slowest(min(seconds), self.tensor_parallel)

    @torch.no_grad()
    def _time(self, num_sequences: int, num_tokens: int, context: int, draws: bool) -> float:
        batch = self._batch(num_sequences, num_tokens, context, draws)
        drawn = _sampling_batch(num_sequences, self.decoder.device)
        start = time.perf_counter()
        logits = self.decoder.forward(batch, self.kv)
        if draws:
            sample(logits, drawn, self.decoder.kernels.draw).tokens.cpu()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Waits for the device."""
        if self.kv.keys[0].is_cuda:
            torch.cuda.synchronize(self.kv.keys[0].device)

    def blocks(self, num_tokens: int) -> list[int]:
        """Returns a block table that repeats the cache's few blocks."""
        num_blocks, block_size = self.kv.keys[0].shape[:2]
        return [index % num_blocks for index in range(-(-num_tokens // block_size))]

    def _batch(self, num_sequences: int, num_tokens: int, context: int, draws: bool) -> ForwardBatch:
        """Sequences that share all their blocks, and whose tokens all have id 0."""
        device, block_size = self.kv.keys[0].device, self.kv.keys[0].shape[1]
        positions = torch.arange(context - num_tokens, context)
        table = torch.tensor(self.blocks(context), dtype=torch.int32)
        slots = table[positions // block_size] * block_size + positions % block_size
        ends = num_tokens * torch.arange(num_sequences + 1)
        return ForwardBatch(
            tokens=torch.zeros(num_sequences * num_tokens, dtype=torch.int64, device=device),
            positions=positions.repeat(num_sequences).to(device),
            cu_seqlens_q=ends.to(torch.int32).to(device),
            context_lens=torch.full((num_sequences,), context, dtype=torch.int32, device=device),
            block_table=table.repeat(num_sequences, 1).to(device),
            slot_mapping=slots.repeat(num_sequences).to(device),
            logit_rows=(ends[1:] - 1 if draws else ends[:0]).to(device),
            seqlens_q=[num_tokens] * num_sequences,
        )


def slowest(seconds: float, tensor_parallel: Communicator) -> float:
    """Returns the maximum over the replica's ranks, which wait for each other."""
    told = tensor_parallel.all_gather_bytes(struct.pack("<d", seconds))
    return max(struct.unpack("<d", one)[0] for one in told)


def _sampling_batch(rows: int, device: torch.device) -> SamplingBatch:
    keys, ones = np.arange(rows), np.ones(rows)
    off = {"top_k": np.full(rows, -1), "top_p": ones, "min_p": np.zeros(rows)}
    return make_sampling_batch(keys=keys, positions=keys, temperature=ones, device=device, **off)
