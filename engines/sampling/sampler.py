"""Draws tokens and their log-probs: a pure function of the logits, the sampling parameters and the noise key."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.memory.plan import rows_sampled_at_once
from engines.native.library import Library, address
from engines.sampling.edits import Edit, apply_edits
from engines.sampling.noise import gumbel, gumbel_at
from engines.sequence import Ranked

# Above the largest value that `engines.sampling.noise` can draw.
GUMBEL_MAX = 22.9
# For vocabularies up to this size, drawing all noise costs less than finding the tokens that can still win.
_DENSE_VOCAB = 4096
_NUM_LEADERS = 8

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [N, V], keys, positions, temperatures [N]) -> (tokens, log-probs) as in `Sampled`: the result of `sample` for
logits that only need scaling; a temperature of 0 is greedy. The row stride of logits may exceed V."""


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of N rows. Processors that no row uses are None, and cost nothing."""

    keys: Tensor
    """int64 [N]: `SequenceKey.noise_key` of the row's sequence."""
    positions: Tensor
    """int64 [N]: absolute position of the token to be drawn."""
    temperatures: Tensor
    """float64 [N]; 0 is greedy."""
    any_greedy: bool
    any_random: bool
    top_k: Tensor | None
    """int64 [N], 2^31 where off."""
    top_p: Tensor | None
    """float64 [N], 1 where off."""
    min_p: Tensor | None
    """float64 [N], 0 where off."""
    edits: Sequence[Edit | None] | None = None
    """Per row."""
    num_top: int | None = None
    """Most likely tokens that `Sampled.top` has; None: there is no `top`."""

    @property
    def is_processed(self) -> bool:
        """Whether the logits of some row are not only scaled, or are needed themselves."""
        is_filtered = self.top_k is not None or self.top_p is not None or self.min_p is not None
        return is_filtered or self.edits is not None or self.num_top is not None

    def rows(self, part: slice) -> SamplingBatch:
        """Returns the batch of these rows."""
        columns: dict[str, Any] = {name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **columns, edits=None if self.edits is None else self.edits[part])


class Top(NamedTuple):
    """The most likely tokens of N rows."""

    tokens: Tensor
    """int64 [N, k]"""
    logprobs: Tensor
    """[N, k]"""
    ranks: Tensor
    """int64 [N]: of the row's own token."""


class Sampled(NamedTuple):
    tokens: Tensor
    """int64 [N]"""
    logprobs: Tensor
    """[N] in max(float32, logits' dtype): log-probs of the tokens under the processed distribution."""
    top: Top | None = None
    """Where `SamplingBatch.num_top` asks for it."""


def make_sampling_batch(
    *,
    keys: np.ndarray,
    positions: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    device: torch.device,
) -> SamplingBatch:
    """Moves columns [N] to `device`, without processors that no row uses (off: top_k -1, top_p 1, min_p 0)."""

    def move(column: np.ndarray) -> Tensor:
        return torch.from_numpy(column).to(device, non_blocking=True)

    return SamplingBatch(
        keys=move(keys),
        positions=move(positions),
        temperatures=move(temperature),
        any_greedy=bool((temperature == 0).any()),
        any_random=bool(temperature.any()),
        top_k=move(np.where(top_k < 0, 2**31, top_k)) if (top_k >= 0).any() else None,
        top_p=move(top_p) if (top_p < 1).any() else None,
        min_p=move(min_p) if (min_p > 0).any() else None,
    )


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Applies edits, temperature, top-k, top-p, min-p, in that order, as Hugging Face's logits processors do.

    logits: [N, V]. Returns [N, V] in max(float32, dtype), -inf where a token is excluded. Greedy rows (T = 0)
    are not scaled.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if batch.edits is not None:
        logits = apply_edits(logits, batch.edits)
    temperatures = batch.temperatures.to(logits.dtype)
    if batch.any_greedy:
        temperatures = temperatures.masked_fill(temperatures == 0, 1.0)
    logits = logits / temperatures[:, None]
    if batch.top_k is not None or batch.top_p is not None:
        logits = _top_k_top_p(logits, batch.top_k, batch.top_p)
    if batch.min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + batch.min_p.to(logits.dtype).log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Applies both with one stable descending sort. Ties at the k-th value are all kept."""
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    if top_k is not None:
        kth = ranked.gather(1, (top_k.clamp(max=logits.shape[-1]) - 1)[:, None])
        ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    if top_p is not None:
        # A token stays if the mass *before* it is below top_p, so the first token always stays.
        masses = _masses(ranked, ranked[:, :1])
        up_to = masses.cumsum(dim=-1)
        least_dropped = top_p[:, None] * up_to[:, -1:].double()
        drop = (up_to.sub_(masses).double() >= least_dropped) & (top_p[:, None] < 1)
        drop[:, 0] = False
        ranked = ranked.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)


def _masses(logits: Tensor, highest: Tensor) -> Tensor:
    """Returns exp(logits - highest), int64 [N, V], as multiples of a power of two, so that sums of a row are exact.

    Sums of integers do not depend on their order, sums of floats depend on the kernel's. So top-p keeps the same tokens
    of a row on any device and in any batch. A sum's relative error is below 1e-8 up to a vocabulary of 2^18.
    """
    scale = 2.0 ** (62 - (logits.shape[-1] - 1).bit_length())
    return (logits.double() - highest.double()).exp_().mul_(scale).round_().long()


def sample(logits: Tensor, batch: SamplingBatch, draw: Draw | None = None) -> Sampled:
    """Draws one token per row: argmax(processed logits + Gumbel noise), ties to the lowest id.

    logits: [N, V] in any floating dtype. A row's result has the same bits in any batch, except log-probs on CUDA,
    whose last bits may depend on the row's place in memory. A compiled `draw` gives the same tokens. To bound
    memory, only some rows are processed at a time.
    """
    step = rows_sampled_at_once(logits.shape[-1], logits.device.type)
    if len(logits) <= step or (draw is not None and not batch.is_processed):
        return _sample(logits, batch, draw)
    parts = [slice(start, start + step) for start in range(0, len(logits), step)]
    tokens, logprobs, tops = zip(*(_sample(logits[part], batch.rows(part), draw) for part in parts), strict=True)
    top = None if batch.num_top is None else Top(*map(torch.cat, zip(*tops, strict=True)))
    return Sampled(tokens=torch.cat(tokens), logprobs=torch.cat(logprobs), top=top)


def _sample(logits: Tensor, batch: SamplingBatch, draw: Draw | None) -> Sampled:
    if draw is not None and not batch.is_processed:
        return Sampled(*draw(logits, batch.keys, batch.positions, batch.temperatures))
    processed = process_logits(logits, batch)
    if draw is not None:  # the logits are scaled already; a temperature of 0 is still greedy
        tokens, logprobs = draw(processed, batch.keys, batch.positions, batch.temperatures.clamp(max=1).ceil_())
    else:
        tokens, logprobs = _draw(processed, batch)
    top = None if batch.num_top is None else most_likely(processed.log_softmax(dim=-1), tokens, batch.num_top)
    return Sampled(tokens, logprobs, top)


def most_likely(logprobs: Tensor, tokens: Tensor, count: int) -> Top:
    """Returns the `count` most likely tokens of each row of logprobs [N, V], and the ranks of its own, tokens [N]."""
    ranks = 1 + (logprobs > logprobs.gather(1, tokens[:, None])).sum(dim=-1)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return Top(ids, values, ranks)


def ranked(
    tokens: Iterable[int], logprobs: Iterable[float], top: Top, counts: Iterable[int | None]
) -> list[list[Ranked]]:
    """Returns for each row its own token, then the others among its `count` most likely tokens that are not excluded;
    nothing for a row whose count is None."""
    rows = zip(tokens, logprobs, top.ranks.tolist(), top.tokens.tolist(), top.logprobs.tolist(), counts, strict=True)
    result: list[list[Ranked]] = []
    for token, logprob, rank, ids, values, count in rows:
        others = zip(ids[:count], values[:count], itertools.count(1), strict=False)
        own: Ranked = (token, logprob, rank)
        result.append([] if count is None else [own, *(one for one in others if one[0] != token and one[1] > -np.inf)])
    return result


def _draw(processed: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    if not batch.any_random:
        tokens = processed.argmax(dim=-1)
    else:
        # On other devices all noise costs less than waiting for the list of tokens that can still win.
        is_dense = processed.shape[-1] <= _DENSE_VOCAB or processed.device.type != "cpu"
        find = _draw_dense if is_dense else _draw_sparse
        tokens = find(processed, batch.keys, batch.positions)
        if batch.any_greedy:
            tokens = torch.where(batch.temperatures == 0, processed.argmax(dim=-1), tokens)
    # Not logsumexp: torch sums a single row in parts, one per thread.
    return tokens, processed.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def draw_natively(
    library: Library, logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """A `Draw` for logits of the library's dtype, or for processed logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    logprobs = torch.empty(len(logits), dtype=dtype)
    draw = library.sample_wide if logits.dtype is dtype else library.sample
    draw(
        *(logits.data_ptr(), logits.stride(0), address(keys), address(positions)),
        *(address(temperatures), address(tokens), address(logprobs), *logits.shape),
    )
    return tokens, logprobs


def _draw_dense(processed: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    return (processed + gumbel(keys, positions, processed.shape[-1])).argmax(dim=-1)


def _draw_sparse(processed: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Returns the same tokens as `_draw_dense`, with noise only for candidates that can still win.

    Noise is bounded, so the best score among a few leaders excludes every token that could not reach it even with the
    largest noise.
    """
    num_rows, vocab_size = processed.shape
    leaders, leader_ids = processed.topk(min(_NUM_LEADERS, vocab_size), dim=-1)
    repeat = leader_ids.shape[1]
    noise = gumbel_at(keys.repeat_interleave(repeat), positions.repeat_interleave(repeat), leader_ids.flatten())
    best = (leaders + noise.view(num_rows, repeat)).amax(dim=-1, keepdim=True)
    # In float64: added to a large float32 logit, the bound would be rounded away, and the leader itself excluded.
    rows, tokens = torch.nonzero(processed.double() + GUMBEL_MAX >= best, as_tuple=True)
    scores = processed[rows, tokens] + gumbel_at(keys[rows], positions[rows], tokens)
    top = scores.new_full((num_rows,), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = torch.where(scores == top[rows], tokens, vocab_size)
    drawn = winners.new_full((num_rows,), vocab_size).scatter_reduce_(0, rows, winners, "amin")
    return drawn.clamp_(max=vocab_size - 1)  # a row of NaN has no candidate; its log-prob is NaN
