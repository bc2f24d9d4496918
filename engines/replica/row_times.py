"""How long a forward pass of this engine takes by its rows: measured when asked, to decide how much to draft."""

from __future__ import annotations

import contextlib
import math
import struct
import time

import numpy as np
import torch

from engines.attention.batch import ForwardBatch
from engines.config import EngineConfig
from engines.kvcache.paged import PagedKVCache
from engines.models.decoder import Decoder
from engines.parallel.collectives import Communicator
from engines.replica.swap import scratch_cache
from engines.sampling.sampler import SamplingBatch, make_sampling_batch, sample

_CONTEXT = 256  # tokens that each row attends to
_ENOUGH_S = 0.02  # longer passes are extrapolated from one that takes this long, and four times as long as of one row
_POINT_S = 0.03  # the passes over one number of rows take about this long, but are two at least: the first is slower


class RowTimes:
    """Seconds of a pass over n rows, each a token of another sequence, with a draw at each row.

    Powers of two are measured; between them it is interpolated, beyond the largest one extrapolated. A call measures
    what is missing up to its rows, so that all ranks of the replica must make the same calls; they have the same
    numbers.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKVCache,
        config: EngineConfig,
        max_model_len: int,
        tensor_parallel: Communicator,
        *,
        num_kv_tokens: int,
    ) -> None:
        """Measures passes of at most the rows that the memory plan counts."""
        self._decoder, self._kv, self._group = decoder, kv, tensor_parallel
        self._draw = decoder.kernels.draw
        self._most_rows = min(config.most_draws, num_kv_tokens)
        self._context = min(_CONTEXT, max_model_len)
        self._points: list[tuple[int, float]] = []
        self._is_complete = False

    def __call__(self, rows: int) -> float:
        while not self._is_complete and (not self._points or self._points[-1][0] < rows):
            self._measure_next()
        counts, seconds = zip(*self._points, strict=True)
        if rows > counts[-1] and len(counts) > 1:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
            return float(seconds[-1] + slope * (rows - counts[-1]))
        return float(np.interp(rows, counts, seconds))

    @torch.no_grad()
    def _measure_next(self) -> None:
        last, seconds = self._points[-1] if self._points else (0, 0.0)
        rows = max(1, 2 * last)
        if rows > self._most_rows or (self._points and seconds >= max(_ENOUGH_S, 4 * self._points[0][1])):
            self._is_complete = True
            return
        scratch: PagedKVCache | None = None
        with contextlib.suppress(RuntimeError):  # what torch's allocators raise: no memory is left to measure in
            scratch = scratch_cache(self._kv, self._context)
        if self._slowest(math.inf if scratch is None else 0.0) > 0:
            self._points, self._is_complete = [(1, 1.0), (2, 2.0)], True  # as if each row cost a pass: no drafts
            return
        assert scratch is not None
        seconds = seconds or self._slowest(self._time(scratch, rows))
        times = min(10, max(2, int(_POINT_S / seconds)))
        self._points.append((rows, self._slowest(min(self._time(scratch, rows) for _ in range(times)))))

    def _time(self, scratch: PagedKVCache, rows: int) -> float:
        batch, drawn = _decodes(scratch, rows, self._context), _draws(rows, self._decoder.device)
        start = time.perf_counter()
        logits = self._decoder.forward(batch, scratch)
        sample(logits, drawn, self._draw).tokens.cpu()
        return time.perf_counter() - start

    def _slowest(self, seconds: float) -> float:
        parts = self._group.all_gather_bytes(struct.pack("<d", seconds))
        return max(struct.unpack("<d", part)[0] for part in parts)


def _draws(rows: int, device: torch.device) -> SamplingBatch:
    keys, ones = np.arange(rows), np.ones(rows)
    off = {"top_k": np.full(rows, -1), "top_p": ones, "min_p": np.zeros(rows)}
    return make_sampling_batch(keys=keys, positions=keys, temperature=ones, device=device, **off)


def _decodes(kv: PagedKVCache, rows: int, context: int) -> ForwardBatch:
    """The last token of each of `rows` sequences of `context` tokens, in blocks that all share."""
    block_size = kv.keys[0].shape[1]
    device = kv.keys[0].device
    table = torch.arange(-(-context // block_size), dtype=torch.int32).expand(rows, -1).contiguous()
    return ForwardBatch(
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=torch.full((rows,), context - 1, device=device),
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.full((rows,), context - 1, device=device),
        logit_rows=torch.arange(rows, device=device),
        seqlens_q=[1] * rows,
    )
