"""Response-length distributions, named once. Torch-free; every draw is a function of its seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from engines.constraints import Count, Fraction, NonNegative, Positive, check_fields


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Long-tailed response lengths in tokens: log-normal, rounded up, at least 1 and at most `cap`."""

    median: Positive
    sigma: NonNegative
    cap: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def draw(self, count: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [self.at(rng.normalvariate(0, 1)) for _ in range(count)]

    def at(self, deviations: float) -> int:
        """The length that lies this many standard deviations above the median, in logarithms."""
        if math.log(self.median) + self.sigma * deviations >= math.log(self.cap):  # before it is too large for a float
            return self.cap
        return min(self.cap, max(1, math.ceil(self.median * math.exp(self.sigma * deviations))))

    def share_beyond(self, length: float) -> float:
        """Probability that a response is longer than `length`, in closed form; 0 from the cap on."""
        if length >= self.cap:
            return 0.0
        return 0.5 * math.erfc((math.log(length) - math.log(self.median)) / (self.sigma * math.sqrt(2)))


@dataclass(frozen=True, kw_only=True)
class GroupedLengths:
    """Lengths of groups: the responses to one prompt are alike, since some prompts are harder than others.

    Each length alone is distributed as `lengths`. `correlation` is that of the logarithms of two members of a group,
    before the cap: 0 makes them independent, 1 makes them equal.
    """

    lengths: LogNormalLengths
    correlation: Fraction

    def __post_init__(self) -> None:
        check_fields(self)

    def draw(self, num_groups: int, group_size: int, seed: int) -> list[list[int]]:
        """Lengths [num_groups][group_size]. A group's do not depend on how many others are drawn."""
        return [self._draw_group(group_size, random.Random(f"{seed}/{group}")) for group in range(num_groups)]

    def _draw_group(self, group_size: int, rng: random.Random) -> list[int]:
        shared, own = math.sqrt(self.correlation), math.sqrt(1 - self.correlation)
        prompt = shared * rng.gauss(0, 1)
        return [self.lengths.at(prompt + own * rng.gauss(0, 1)) for _ in range(group_size)]
