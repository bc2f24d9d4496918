"""How long a forward pass of this engine takes by its rows: measured when asked, to decide how much to draft."""

from __future__ import annotations

from functools import partial

import numpy as np

from engines.config import EngineConfig
from engines.kvcache.paged import PagedKVCache
from engines.models.decoder import Decoder
from engines.parallel.collectives import Communicator
from engines.replica.scratch import Scratch, slowest

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

    def _measure_next(self) -> None:
        last, seconds = self._points[-1] if self._points else (0, 0.0)
        rows = max(1, 2 * last)
        if rows > self._most_rows or (self._points and seconds >= max(_ENOUGH_S, 4 * self._points[0][1])):
            self._is_complete = True
            return
        scratch = Scratch.like(self._kv, self._context, self._decoder, self._group)
        if scratch is None:
            self._points, self._is_complete = [(1, 1.0), (2, 2.0)], True  # as if each row cost a pass: no drafts
            return
        measure = partial(scratch.measure, rows, 1, self._context, draws=True)
        seconds = seconds or measure(repeats=1)
        self._points.append((rows, measure(repeats=min(10, max(2, int(_POINT_S / seconds))))))


class DraftTimes:
    """Seconds in which the small models of a replica's ranks, which share the sequences, draft: a pass for each token
    of the longest draft. The same on all ranks."""

    def __init__(self, times: RowTimes, tensor_parallel: Communicator) -> None:
        """`times` are those of this rank's small model."""
        self._times, self._group = times, tensor_parallel
        self._known: dict[int, float] = {}

    def __call__(self, num_sequences: int, length: int) -> float:
        share = -(-num_sequences // self._group.size)
        if share not in self._known:
            self._known[share] = slowest(self._times(share), self._group)
        return length * self._known[share]
