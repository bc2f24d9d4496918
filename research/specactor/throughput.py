"""Tokens per second of one sequence by mode and window (SpecActor §4.1). Torch-free.

`p` is the probability that a guess is right if all before it were, `window` the paper's w. `draft_s` is D, the seconds
of a drafter's pass, which makes one guess for each of its sequences; V are the seconds of a verifier's pass.

What the paper's model leaves out, and what is chosen here:

- Its tau halves what a window with a miss yields. A miss costs a period without tokens, so that the rate is the mean
  yield of a window over its mean number of periods: `renewal_tau`.
- In its model drafter and verifier begin their periods together. Here both run freely. A drafter hears of a miss in the
  middle of a pass, and loses the rest of it; so whole windows are verified in every second or third pass after a miss,
  where w D is a little below V.
- Only `strict` waits for whole windows. A `filled` verifier takes the guesses that have come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

DecoupledMode = Literal["filled", "strict"]


def accept_distribution(p: float, window: int) -> list[float]:
    """Returns P(a, w) for a = 0 to w: the probability that just the first a guesses of a window are accepted."""
    return [p**a * (1 - p) for a in range(window)] + [p**window]


def printed_tau(p: float, window: int) -> float:
    """Returns tau_w as printed: tokens of a period, where a miss after a guesses counts (a + 1) / 2."""
    *misses, full = accept_distribution(p, window)
    return sum(chance * (a + 1) / 2 for a, chance in enumerate(misses)) + window * full


def renewal_tau(p: float, window: int) -> float:
    """Returns the tokens of a period in the long run, where a window with a miss takes two periods, others one."""
    return drawn(p, window) / (2 - p**window)


def drawn(p: float, rows: int) -> float:
    """Returns the expected tokens of a pass in which a sequence has `rows` rows: its last token and rows - 1 guesses.

    Of w rows, w - 1 guesses are right and the token behind them is any; a window of w guesses, whose last one is that
    token, has the same mean.
    """
    return sum(p**place for place in range(rows))


def coupled(p: float, window: int, drafting_s: float, verify_s: float) -> float:
    """Returns tokens per second where each pass of w + 1 rows (`verify_s`) waits for w guesses (`drafting_s`).

    With window 0 this is plain decoding. Naive disaggregation, where the drafter is elsewhere and waits, too, has the
    same form.
    """
    return drawn(p, window + 1) / (drafting_s + verify_s)


class Rate(NamedTuple):
    """What decoupled speculation gives a sequence, in the long run."""

    tokens_per_second: float
    rows: float
    """Of a sequence in a pass of the verifier, on average: 1 and the guesses tried, or 0 where it sits out."""


@dataclass(frozen=True)
class Pair:
    """A drafter and a verifier that share a batch of like sequences."""

    draft_s: float
    verify: Callable[[float], float]
    """Rows of a sequence in a pass, on average -> V."""
    batch: int
    delay_s: float = 0.0
    """Of a message; at most about one pass of the drafter."""


def decoupled(pair: Pair, p: float, window: int, mode: DecoupledMode, *, ahead: bool = True) -> Rate:
    """Returns the rate of one sequence, by a fixed point of the rows, on which V depends.

    The drafter may be 2 w guesses ahead of the known tokens; without `ahead` w, so that it waits for the verifier. The
    rows of a pass vary with its sequences, which makes passes longer where V rises faster than by a line.

    `strict` needs w D seconds for a window where that is more than V: then sequences that have missed wait for the
    others' next windows, and a miss costs just one period. With V between w D and (w + 1) D it may be off by a tenth;
    where V and w D are equal within a percent, or few sequences may all wait at once, by a third.
    """
    p = min(p, 1 - 1e-6)  # without a miss a sequence may stay in one of several cycles of the chain
    full_s = window * pair.draft_s
    if mode == "strict" and full_s >= pair.verify(window):
        return Rate(renewal_tau(p, window) / full_s, window / (2 - p**window))
    rows, spread, slope = 1.0 if mode == "filled" else float(window), 0.0, 0.0
    last = None
    for _ in range(100):
        verify_s = (pair.verify(max(0.0, rows - spread)) + pair.verify(rows + spread)) / 2
        yields, found, variance = _steady(pair, p, window, mode, verify_s / pair.draft_s, window * (2 if ahead else 1))
        spread = math.sqrt(variance / pair.batch)
        if abs(found - rows) < 1e-3:
            break
        if last is not None:
            slope = min(0.9, max(-0.9, (found - last[1]) / (rows - last[0])))
        last = rows, found
        rows += (found - rows) / (1 - slope)
    return Rate(yields / verify_s, found)


def most_per_pass(p: float, window: int) -> float:
    """Returns an upper bound of the tokens of a verifier's pass: each miss, one in 1 / (1 - p) tokens, has at least one
    pass without guesses behind it, and others yield at most `drawn(p, window + 1)`."""
    return (2 - p) / (1 - p + 1 / drawn(p, window + 1))


_Drafting = Literal["on", "next", "now"]


class _State(NamedTuple):
    """A sequence at the start of a verifier's pass."""

    guesses: int
    """That have come, and continue its tokens."""
    drafting: _Drafting
    """The drafter is in a pass for it; or, after a miss or at the limit of guesses, begins with its next pass; or
    at once, because it has waited for all of its sequences."""


def _steady(
    pair: Pair, p: float, window: int, mode: DecoupledMode, ratio: float, limit: int
) -> tuple[float, float, float]:
    """Returns a sequence's tokens and rows per verifier's pass, and the variance of the rows, in the steady state of a
    Markov chain over `_State`.

    During a pass of the verifier the drafter ends floor(ratio) passes or one more, where `ratio` is V / D, by the
    phase, which is taken as random in each.
    """
    start = _State(0, "next")
    all_wait = p ** (window * (pair.batch - 1))  # that no other sequence has missed
    made = {drafting: _made(drafting, ratio, 2 * pair.delay_s / pair.draft_s) for drafting in get_args(_Drafting)}
    drawn_of = [drawn(p, taken) for taken in range(window + 2)]
    states, numbers = [start], {start: 0}
    yields: list[float] = []
    rows: list[int] = []
    moves: list[tuple[int, int, float]] = []
    for number, state in enumerate(states):  # it grows
        taken = _rows(state, window, mode)
        yields.append(drawn_of[taken])
        rows.append(taken)
        kept = p**taken
        followers = [(start, 1 - kept)]
        for num_made, chance in made[state.drafting]:
            ahead = min(state.guesses + num_made, limit)
            if ahead < taken:  # the guess that is being made is for a token that is known
                followers.append((start, kept * chance))
            elif ahead < limit:
                followers.append((_State(ahead - taken, "on"), kept * chance))
            else:
                followers.append((_State(ahead - taken, "now"), kept * chance * all_wait))
                followers.append((_State(ahead - taken, "next"), kept * chance * (1 - all_wait)))
        for follower, chance in followers:
            if chance > 1e-9:
                if follower not in numbers:
                    numbers[follower] = len(states)
                    states.append(follower)
                moves.append((numbers[follower], number, chance))
    matrix = -np.eye(len(states))
    for after, before, chance in moves:
        matrix[after, before] += chance
    matrix[-1] = 1.0  # the sum of all shares, in place of one of the equations
    shares = np.linalg.solve(matrix, np.eye(len(states))[-1])
    mean = float(shares @ rows)
    return float(shares @ yields), mean, max(0.0, float(shares @ np.square(rows)) - mean**2)


def _rows(state: _State, window: int, mode: DecoupledMode) -> int:
    """Returns the rows of a sequence in the pass that begins."""
    if mode == "filled":
        return min(state.guesses, window) + 1
    return window if state.guesses >= window else 0


def _made(drafting: _Drafting, ratio: float, delay: float) -> list[tuple[int, float]]:
    """Returns how many guesses come during a pass of the verifier, each with its chance."""
    if drafting == "on":
        return [(math.floor(ratio), 1 - ratio % 1), (math.floor(ratio) + 1, ratio % 1)]
    passes = max(0.0, ratio - delay)
    if drafting == "now":
        return [(math.floor(passes), 1.0)]
    return [(max(0, math.floor(passes) - 1), 1 - passes % 1), (math.floor(passes), passes % 1)]
