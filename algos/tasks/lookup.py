"""Chains of keys in a SQLite table, which are followed by queries: trajectories with a long tail of turns. Torch-free.

    prompt       key 416
    turn         SELECT v FROM t WHERE k=416
    observation  short 238              the first one guesses how long the chain is
    turn         SELECT v FROM t WHERE k=238
    observation  qzt
    turn         =qzt

The number of queries (hops) is log-normal, and the prompt does not tell it. The guess is right in 80 % of the problems:
so a scheduler that wants to know lengths can learn something from the first turn on, and not before.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase
from typing import Annotated, ClassVar

from msgspec import Meta

from algos.environments.builtin import run_query
from algos.tasks.task import Part, Problem
from engines.constraints import NonNegative, Positive, check_fields

LENGTH_CLASSES = {"short": 2, "medium": 4, "long": math.inf}
"""The most hops of each."""
NumKeys = Annotated[int, Meta(ge=1, le=900, description="from 1 to 900, since keys have three digits")]
_RIGHT_GUESSES = 0.8
# One word in eight is held out.
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, kw_only=True)
class LookupTask:
    """Chains of keys in a table, to be followed by SQL to the word at their end."""

    reward: ClassVar[str | None] = None
    environment: ClassVar[str] = "algos.tasks.lookup:Lookup"
    options: ClassVar[tuple[str, ...]] = (
        *("--steps", "45", "--learning-rate", "5e-4"),
        *("--rollout.prompts-per-step", "16", "--rollout.group-size", "16"),
    )

    seed: int = 0
    """Which problems are drawn. Whether a problem is held out does not depend on it."""
    median_hops: Positive = 2.0
    """Median number of queries that lead to the word."""
    sigma: NonNegative = 0.8
    """Spread of the logarithm of that number."""
    max_hops: NumKeys = 9
    """Longer chains are cut to this many hops; 9 take about 310 tokens."""
    num_rows: NumKeys = 24
    """Rows of the table, or as many as the chain has, if those are more; the others lead elsewhere."""

    def __post_init__(self) -> None:
        check_fields(self)

    def train_problem(self, index: int) -> Problem:
        return self._draw(index, held_out=False)

    def held_out_problems(self, count: int) -> list[Problem]:
        return [self._draw(index, held_out=True) for index in range(count)]

    def demonstration(self, problem: Problem) -> list[Part]:
        assert isinstance(problem.prompt, str)
        environment, links = Lookup(), dict(problem.columns["rows"])
        environment.reset(**problem.columns)
        found, parts = problem.prompt.split()[-1], list[Part]()
        while found.isdecimal():
            query = f"SELECT v FROM t WHERE k={found}"
            parts += [Part(text=query), Part(text=environment.step(query) or "", observed=True)]
            found = links[int(found)]
        return [*parts, Part(text=f"={found}")]

    def _draw(self, index: int, *, held_out: bool) -> Problem:
        random = Random(f"{self.seed}/{held_out}/{index}")
        hops = math.ceil(random.lognormvariate(math.log(self.median_hops), self.sigma) - 0.5)
        hops = min(max(hops, 1), self.max_hops)
        word = _word(random)
        while _is_held_out(word) != held_out:
            word = _word(random)
        keys = random.sample(range(100, 1000), max(self.num_rows, hops))
        chain, others = keys[:hops], keys[hops:]
        rows = [(key, str(following)) for key, following in pairwise(chain)] + [(chain[-1], word)]
        rows += [(key, random.choice([str(random.choice(keys)), _word(random)])) for key in others]
        right = next(name for name, most in LENGTH_CLASSES.items() if hops <= most)
        wrong = random.choice([name for name in LENGTH_CLASSES if name != right])
        guess = right if random.random() < _RIGHT_GUESSES else wrong
        return Problem(
            uid=-1 - index if held_out else index,
            prompt=f"key {chain[0]}\n",
            columns={"rows": sorted(rows), "answer": word, "guess": guess},
        )


def _word(random: Random) -> str:
    return "".join(random.choices(ascii_lowercase, k=3))


def _is_held_out(word: str) -> bool:
    """Depends only on the word, so that no seed's draws put a held-out one into training."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0


class Lookup:
    """The environment: a turn is a query, or the answer behind `=`, which ends the trajectory. 1 for the right one."""

    def reset(self, rows: Sequence[tuple[int, str]], answer: str, guess: str) -> None:
        self._answer, self._guess, self._reward = answer, f"{guess} ", 0.0
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)")
        self._database.executemany("INSERT INTO t VALUES (?, ?)", rows)

    def step(self, text: str) -> str | None:
        if text.startswith("="):
            self._reward = float(text[1:] == self._answer)
            return None
        try:
            found = run_query(self._database, text)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # a Warning: several statements
            found = f"error: {error}"
        guess, self._guess = self._guess, ""
        return f"\n{guess}{found}\n"

    def get_reward(self) -> float:
        return self._reward

    def close(self) -> None:
        self._database.close()
