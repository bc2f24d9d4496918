"""When a rollout may step on a GPU that serves: Dual-SLO admission (ROSE §4.1, Eq. 1 and 2). Torch-free.

One model computes at a time. Slack is how long the serving model could do nothing, and still give each token in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engines.constraints import Count, NonNegative, Seconds, check_fields
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace, decode_seconds
from engines.serving.policies import AdmissionPolicy, ServingView

Form = Literal["printed", "cumulative"]
"""How slack is computed.

- `printed`: each prompt as if it were alone. It admits too much: Eq. 1 leaves out the prompts ahead in the queue; and
  where one replica has prompts and decodes, Eq. 2 leaves out the prompt tokens in the next pass.
- `cumulative`: with all of this, for a replica whose pass has a token of each decode and then prompt tokens, first come
  first served. With one SLO for all requests this is also the order of their deadlines. It counts on pages and
  slots for all.
"""
_PRICED = 16
"""Passes that are priced one by one: each takes about 8 us."""


@dataclass(frozen=True, kw_only=True)
class ServingTimes:
    """The profile of a serving model, made before the run: seconds of its passes without a rollout beside it.

    Raises ValueError for a bad field; its methods, for an estimate that is negative or NaN.
    """

    prefill_s: Callable[[int], float]
    """T_prf: prompt tokens -> seconds of all passes that compute them, in chunks."""
    decode_s: Callable[[int, int], float]
    """T_dec: sequences, their context tokens in all -> seconds of a pass that gives each one token."""
    chunk_tokens: Count
    """Most tokens in a pass, of decodes and prompts together (`EngineConfig.max_num_batched_tokens`)."""
    beside_s: Callable[[int, int], float] | None = None
    """As `decode_s`: what these decodes add to a pass of `chunk_tokens` prompt tokens. None: as much as a pass of their
    own. That counts the weights twice, and waits become 1.5 to 2 times as long (8B, H100, 512 tokens a pass)."""
    max_num_seqs: Count | None = None
    """Most sequences in a pass (`EngineConfig.max_num_seqs`). None: all that wait may decode together."""
    margin: NonNegative = 0.0
    """Share that is added to each estimate, for what the profile is wrong by."""

    def __post_init__(self) -> None:
        check_fields(self)

    def prefill(self, num_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        return (1 + self.margin) * _checked(f"prefill_s({num_tokens})", self.prefill_s(num_tokens))

    def decode(self, batch: int, num_context_tokens: int) -> float:
        if not batch:
            return 0.0
        seconds = self.decode_s(batch, num_context_tokens)
        return (1 + self.margin) * _checked(f"decode_s({batch}, {num_context_tokens})", seconds)

    def beside(self, batch: int, num_context_tokens: int) -> float:
        if self.beside_s is None or not batch:
            return self.decode(batch, num_context_tokens)
        seconds = self.beside_s(batch, num_context_tokens)
        return (1 + self.margin) * _checked(f"beside_s({batch}, {num_context_tokens})", seconds)

    @staticmethod
    def of(pace: Pace, spec: ReplicaSpec, *, chunk_tokens: int, max_num_seqs: int | None = None) -> ServingTimes:
        """Returns those of a replica at this pace."""

        def chunk(start: int, end: int, draws: bool, batch: int = 0, num_context_tokens: int = 0) -> float:
            output = StepOutput(
                num_running=batch + 1,
                num_tokens=batch + end - start,
                num_context_tokens=num_context_tokens + end,
                num_pairs=num_context_tokens + (end * (end + 1) - start * (start + 1)) // 2,
                num_sampled=batch + draws,
            )
            return pace.step(spec, output)

        @lru_cache(4096)
        def prefill(num_tokens: int) -> float:
            starts = range(0, num_tokens, chunk_tokens)
            ends = [*starts[1:], num_tokens]
            return sum(chunk(start, end, end == num_tokens) for start, end in zip(starts, ends, strict=True))

        alone_s = chunk(0, chunk_tokens, True)

        def beside(batch: int, num_context_tokens: int) -> float:
            return chunk(0, chunk_tokens, True, batch, num_context_tokens) - alone_s

        return ServingTimes(
            prefill_s=prefill,
            decode_s=lambda batch, num_context_tokens: decode_seconds(pace, spec, batch, num_context_tokens),
            chunk_tokens=chunk_tokens,
            beside_s=beside,
            max_num_seqs=max_num_seqs,
        )


def prefill_slacks(view: ServingView, ttft_s: float, times: ServingTimes, form: Form = "printed") -> Iterator[float]:
    """Yields the slack of each queued request in seconds (Eq. 1 takes the least), below 0 if it is late."""
    waits: Iterable[float] = first_token_waits(view, times)
    if form == "printed":
        waits = (times.prefill(request.num_tokens) for request in view.queued)
    for request, wait in zip(view.queued, waits, strict=True):
        yield request.arrived + ttft_s - view.now - wait


def decode_slack(view: ServingView, tpot_s: float, times: ServingTimes, form: Form = "printed") -> float:
    """Returns the least slack of the sequences that decode in seconds (Eq. 2), below 0 if one is late; inf without any.

    Each gap between two tokens of a sequence is held to the SLO, not only their mean.
    """
    if not view.last_token_times:
        return math.inf
    decodes = len(view.last_token_times), view.num_context_tokens
    if form == "printed" or not view.queued:
        next_pass = times.decode(*decodes)
    else:
        room = max(1, times.chunk_tokens - len(view.last_token_times))
        num_tokens = min(room, sum(request.num_tokens for request in view.queued))
        next_pass = times.prefill(num_tokens) + times.beside(*decodes)
    return min(view.last_token_times) + tpot_s - view.now - next_pass


def first_token_waits(view: ServingView, times: ServingTimes) -> Iterator[float]:
    """Yields the seconds after which each queued request has its first token, at the latest, if only serving runs.

    A pass has the decodes, also of requests that were ahead, and then prompt tokens, also of requests behind. What a
    prompt takes beyond as many separate chunks is its attention to earlier ones. The first passes are priced one by
    one; all later ones alike, as if all that wait decoded already, so that a long queue does not hold up the decision.
    """
    batch, context, chunk = len(view.last_token_times), view.num_context_tokens, times.chunk_tokens
    num_left = sum(request.num_tokens for request in view.queued)
    num_ahead, seconds, num_passes = 0, 0.0, 0  # of the passes until now: prompt tokens beyond the last request, time
    later: tuple[int, float] | None = None  # prompt tokens of a later pass, and its time
    for place, request in enumerate(view.queued):
        while num_ahead < request.num_tokens:
            if num_passes < _PRICED:
                num_tokens = min(max(1, chunk - batch), num_left)
                seconds += times.prefill(num_tokens) + times.beside(batch, context)
                context += batch
                num_passes += 1
            else:
                later = later or _later_pass(times, batch + len(view.queued) - place, context, num_left)
                count = -(-(request.num_tokens - num_ahead) // later[0])
                num_tokens = count * later[0]
                seconds += count * later[1]
            num_ahead += num_tokens
            num_left = max(0, num_left - num_tokens)
        num_ahead -= request.num_tokens
        full, rest = divmod(request.num_tokens, chunk)
        seconds += max(0.0, times.prefill(request.num_tokens) - full * times.prefill(chunk) - times.prefill(rest))
        yield seconds
        batch = batch + 1 if times.max_num_seqs is None else min(batch + 1, times.max_num_seqs)
        context += request.num_tokens + 1


def _later_pass(times: ServingTimes, batch: int, context: int, num_left: int) -> tuple[int, float]:
    """Returns the prompt tokens of a pass beside all decodes that there may be, and the most that it takes."""
    batch = batch if times.max_num_seqs is None else min(batch, times.max_num_seqs)
    room = max(1, times.chunk_tokens - batch)
    context += num_left + batch * -(-num_left // room)
    return room, times.prefill(times.chunk_tokens) + times.beside(batch, context)


@dataclass(frozen=True, kw_only=True)
class DualSLO:
    """An `AdmissionPolicy`: a rollout's step is admitted if it ends, and a guard passes, within the slack of serving.

    Raises ValueError for a bad field or estimate. The paper's evaluation has TTFT 0.5 s and TPOT 0.15 s for a 7B model,
    1 s and 0.45 s for 32B (Appendix D): inputs.
    """

    times: ServingTimes
    ttft_s: Seconds | None
    """From a request's arrival to its first token; None to ignore it (Fig. 9: TPOT-only)."""
    tpot_s: Seconds | None
    """Between two tokens of a sequence; None to ignore it (Fig. 9: TTFT-only)."""
    form: Form = "printed"
    guard_s: NonNegative = 1e-3
    """Seconds of slack that must be left."""
    guard_share: NonNegative = 0.05
    """The same as a share of the step; the larger of the two counts."""

    def __post_init__(self) -> None:
        check_fields(self)

    def admits(self, view: ServingView, seconds: float) -> bool:
        least = _checked("seconds", seconds) + max(self.guard_s, self.guard_share * seconds)
        if self.tpot_s is not None and decode_slack(view, self.tpot_s, self.times, self.form) < least:
            return False  # without a look at the queue, which takes longer
        if self.ttft_s is None:
            return True
        return all(slack >= least for slack in prefill_slacks(view, self.ttft_s, self.times, self.form))


@dataclass(frozen=True)
class QueueDebt:
    """An `AdmissionPolicy` that also bounds what the rollout delays a queue in all: not in the paper.

    Slack is of requests that have come. Where requests come about as fast as they are served, each step of the rollout
    delays all later ones, too, until the queue is empty: Eq. 1 lends up to the SLO, and then the queue grows by itself.
    Here a queue waits at most `most_s` for anything but steps of the serving model, in all, counted from before the
    step in which the first of its requests came. This is measured, and so includes what a rollout adds between steps.
    With the SLO less the P99 of serving alone, a queue that waits for passes only keeps the SLO. One that waits for
    slots may not: steps that are lent while no request is queued make decodes stay in their slots for longer.
    """

    also: AdmissionPolicy
    most_s: float

    def admits(self, view: ServingView, seconds: float) -> bool:
        if view.queued and view.delayed_s - view.delayed_before_s + seconds > self.most_s:
            return False
        return self.also.admits(view, seconds)


@dataclass
class EqualTurns:
    """An `AdmissionPolicy` without SLOs: while the serving model has work, the two step in turn, as where a GPU is
    shared between processes. With `also`, a step must be admitted by that policy, too: one that leaves out an SLO does
    not then keep for itself all of the time that this SLO would guard (Fig. 9: TTFT-only, TPOT-only)."""

    also: AdmissionPolicy | None = None
    _was_admitted: bool = False

    def admits(self, view: ServingView, seconds: float) -> bool:
        is_idle = not (view.queued or view.last_token_times)
        its_turn = is_idle or not self._was_admitted
        self._was_admitted = its_turn and (self.also is None or self.also.admits(view, seconds))
        return self._was_admitted


def _checked(name: str, seconds: float) -> float:
    if not seconds >= 0:
        raise ValueError(f"{name}={seconds}: an estimate must be at least 0 seconds; profile again")
    return seconds
