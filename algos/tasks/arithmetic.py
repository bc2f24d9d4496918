"""Worked additions of many-digit numbers: a task that a 0.8 M model learns, with a long tail of lengths. Torch-free.

    prompt      123+989=
    completion  3+9+0=12;2+8+1=11;1+9+1=11;#1112

One step per digit, lowest first (`digit+digit+carry=sum;`), then `#` and the whole sum. A completion takes about
9.5 tokens per digit, and digit counts are log-normal: most problems are short, a few very long.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from algos.tasks.task import Part, Problem
from engines.constraints import Count, NonNegative, Positive, check_fields

# One pair of operands in eight is held out.
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """Additions of two operands with the same number of digits, which is log-normal."""

    reward: ClassVar[str] = "algos.rewards.arithmetic:exact_answer"

    seed: int = 0
    """Which problems are drawn. Whether a problem is held out does not depend on it."""
    median_digits: Positive = 2.5
    """Median number of digits of an operand."""
    sigma: NonNegative = 0.884
    """Spread of the logarithm of the digit count; 0.884 is the spread of real response lengths (PAT §2)."""
    max_digits: Count = 32
    """Longer problems are cut to this many digits; 32 take about 310 tokens."""

    def __post_init__(self) -> None:
        check_fields(self)

    def train_problem(self, index: int) -> Problem:
        return self._draw(index, held_out=False)

    def held_out_problems(self, count: int) -> list[Problem]:
        return [self._draw(index, held_out=True) for index in range(count)]

    def demonstration(self, problem: Problem) -> list[Part]:
        return [Part(text=solution(problem))]

    def _draw(self, index: int, *, held_out: bool) -> Problem:
        random = Random(f"{self.seed}/{held_out}/{index}")
        digits = math.ceil(random.lognormvariate(math.log(self.median_digits), self.sigma) - 0.5)
        digits = min(max(digits, 1), self.max_digits)
        # The length is drawn first and kept, so that both splits have the same lengths; every length has
        # operands in both splits.
        while True:
            a, b = (random.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
            if _is_held_out(a, b) == held_out:
                break
        uid = -1 - index if held_out else index
        return Problem(uid=uid, prompt=f"{a}+{b}=", columns={"answer": str(a + b)})


def _is_held_out(a: int, b: int) -> bool:
    """Depends only on the operands, in either order, so that no seed's draws put a held-out sum into training."""
    digest = hashlib.blake2b(f"{min(a, b)}+{max(a, b)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0


def solution(problem: Problem) -> str:
    """The worked completion of an `ArithmeticTask`'s problem, without the end-of-sequence token."""
    assert isinstance(problem.prompt, str)
    a, b = problem.prompt.removesuffix("=").split("+")
    steps, carry = [], 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total};")
        carry = total // 10
    return "".join(steps) + "#" + problem.columns["answer"]
