"""Heddle's three agents as trajectories of stated lengths, and predictors whose errors are stated. Torch-free.

The paper gives the tools' seconds (Table 1, 14B), the cap of 40K tokens, and that the longest trajectory takes above 4
times the median (Fig. 4). Turns and tokens are our choice: coding has a long tail of turns, search many short turns
that read much, math few turns that write much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev
from typing import Literal

from engines.constraints import Fraction, NonNegative, WholeNumber, check_fields
from engines.rollout.prediction import Context
from engines.sequence import SequenceId
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import Later, TrajectoryLengths, Turn

GROUP_SIZE, CAP = 16, 40_000
NUM_PROMPT_TOKENS = 512
AgentName = Literal["coding", "search", "math"]
Residuals = tuple[tuple[float, ...], ...]
"""Of predictions before the first turn, after one turn and so on, the last for all later ones: quantiles, at equal
steps from the least to the largest, of log((predicted + 1) / (true + 1)) of the remaining tokens, over the standard
deviation of log(true + 1): so that the errors of one task can be those of another, whose lengths differ more."""
LOG_NORMAL: Residuals = tuple(
    tuple(NormalDist(0, sigma).inv_cdf((place + 0.5) / 21) for place in range(21)) for sigma in (0.8, 0.5, 0.35)
)
"""Of an assumed predictor, whose errors are log-normal and fall with each turn."""


def _agent(turns: tuple[float, float], generated: tuple[float, float], observed: tuple[float, float], tool_s: float):
    """Medians and spreads; `tool_s` is a mean."""

    def lengths(shape: tuple[float, float], cap: int) -> LogNormalLengths:
        return LogNormalLengths(median=shape[0], sigma=shape[1], cap=cap)

    spread = 0.5
    return TrajectoryLengths(
        num_turns=lengths(turns, 64),
        generated=lengths(generated, CAP),
        observed=lengths(observed, CAP),
        tool_median_s=tool_s / math.exp(spread**2 / 2),
        tool_sigma=spread,
        correlation=0.4,
        cap=CAP,
    )


AGENTS: Mapping[AgentName, TrajectoryLengths] = {
    "coding": _agent((6, 0.8), (600, 0.8), (150, 1.0), 0.41),
    "search": _agent((10, 0.7), (120, 0.6), (300, 0.8), 1.41),
    "math": _agent((3, 0.5), (2000, 0.9), (30, 0.5), 0.046),
}


def scaled(lengths: TrajectoryLengths, token_scale: float, scale: float = 1.0) -> TrajectoryLengths:
    """Of a paced rollout in which a token stands for `token_scale`, and a step lasts `scale` times as long: tools then
    take `scale / token_scale` of their time, so that they keep their share of it."""

    def short(one: LogNormalLengths) -> LogNormalLengths:
        return replace(one, median=one.median / token_scale, cap=max(1, round(one.cap / token_scale)))

    return replace(
        lengths,
        generated=short(lengths.generated),
        observed=short(lengths.observed),
        tool_median_s=lengths.tool_median_s * scale / token_scale,
        cap=max(1, round(lengths.cap / token_scale)),
    )


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What a predictor says of trajectories with known lengths."""

    kind: Literal["residuals", "oracle", "constant", "reversed", "nothing"] = "residuals"
    """residuals: a regression's, see `StatedPredictions`. constant: the mean for all. reversed: the long ones are said
    to be short. nothing: NaN."""
    seconds: NonNegative = 0.0
    """Until it answers."""
    residuals: Residuals = LOG_NORMAL
    correlation: Fraction = 0.5
    """Of the errors of one trajectory's predictions."""
    seed: WholeNumber = 0

    def __post_init__(self) -> None:
        check_fields(self)


class StatedPredictions:
    """A `LengthPredictor` of trajectories whose turns are known.

    A regression says the mean of what it cannot tell apart: its predictions vary less than the truth, and their errors
    are independent of what they say. So the logarithm of a prediction is that of the truth drawn towards the mean, by
    the share of the variance that the residuals are, plus a residual that is as much smaller.
    """

    source = "stated"

    def __init__(self, turns: Mapping[SequenceId, Sequence[Turn]], later: Later, errors: Errors) -> None:
        self._turns, self._later, self._errors = turns, later, errors
        totals = [self._left(one, 0) for one in turns.values()]
        self._mean, self._most = fmean(totals), min(totals) + max(totals)
        self._logs: dict[int, tuple[float, float]] = {}

    def ask(self, contexts: Sequence[Context], answer: Callable[[Sequence[float]], None]) -> None:
        said = [self._say(one.sequence_id, one.num_turns, one.num_generated) for one in contexts]
        self._later(self._errors.seconds, lambda: answer(said))

    def _say(self, sequence_id: SequenceId, num_turns: int, num_generated: int) -> float:
        left = self._left(self._turns[sequence_id], num_turns)
        match self._errors.kind:
            case "oracle":
                return left
            case "constant":
                return max(0.0, self._mean - num_generated)
            case "reversed":
                return max(0.0, self._most - left - 2 * num_generated)
            case "nothing":
                return math.nan
        mean, spread = self._spread(num_turns)
        quantiles = self._errors.residuals[min(num_turns, len(self._errors.residuals) - 1)]
        middle, variance = _moments(quantiles)
        kept = max(0.0, 1 - variance)
        residual = spread * (_quantile(quantiles, self._uniform(sequence_id, num_turns)) - middle)
        return max(0.0, math.expm1(mean + kept * (math.log1p(left) - mean) + math.sqrt(kept) * residual))

    def _left(self, turns: Sequence[Turn], num_turns: int) -> float:
        return float(sum(turn.num_generated for turn in turns[num_turns:]))

    def _spread(self, num_turns: int) -> tuple[float, float]:
        """Mean and deviation of the logarithms of what is left after these turns, of those that go on."""
        if num_turns not in self._logs:
            logs = [math.log1p(self._left(one, num_turns)) for one in self._turns.values() if len(one) > num_turns]
            self._logs[num_turns] = (fmean(logs), pstdev(logs)) if logs else (0.0, 0.0)
        return self._logs[num_turns]

    def _uniform(self, sequence_id: SequenceId, num_turns: int) -> float:
        """From 0 to 1, correlated within a trajectory."""
        seed, share = self._errors.seed, self._errors.correlation
        own = random.Random(f"{seed}/{sequence_id}/{num_turns}").gauss(0, 1)
        common = random.Random(f"{seed}/{sequence_id}").gauss(0, 1)
        return NormalDist().cdf(math.sqrt(share) * common + math.sqrt(1 - share) * own)


def _moments(quantiles: Sequence[float]) -> tuple[float, float]:
    """Mean and variance of what `_quantile` draws: it lies evenly between two neighbours."""
    pairs = [*pairwise(quantiles)] or [(quantiles[0], quantiles[0])]
    mean = fmean((low + high) / 2 for low, high in pairs)
    return mean, fmean((low**2 + low * high + high**2) / 3 for low, high in pairs) - mean**2


def _quantile(quantiles: Sequence[float], share: float) -> float:
    place = share * (len(quantiles) - 1)
    low = min(int(place), max(0, len(quantiles) - 2))
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (place - low) * (quantiles[high] - quantiles[low])
