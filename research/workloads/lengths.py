"""Response-length distributions, named once. Torch-free; every draw is a function of its seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from engines.constraints import Count, NonNegative, Positive, check_fields


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
        mu = math.log(self.median)
        return [min(self.cap, max(1, math.ceil(rng.lognormvariate(mu, self.sigma)))) for _ in range(count)]

    def share_beyond(self, length: float) -> float:
        """Probability that a response is longer than `length`, in closed form; 0 from the cap on."""
        if length >= self.cap:
            return 0.0
        return 0.5 * math.erfc((math.log(length) - math.log(self.median)) / (self.sigma * math.sqrt(2)))
