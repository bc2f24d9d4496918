"""What a length predictor learns from, and how far it is right. Torch-free. Heddle, §4.1 and §7.2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engines.rollout.prediction import Context
from engines.sequence import Completion, SequenceId, Span

MOST_TURNS = 8
"""Contexts with more ended turns count as those with so many, where the number of turns is a category."""
LONG_TAIL = 0.1
"""Heddle's long-tailed trajectories: this share of them, the longest. The paper gives none; Seer's is 10 % (§6.2.2)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A context of a trajectory, its first `num_tokens` tokens, and what was generated behind it."""

    num_tokens: int
    num_generated: int
    num_turns: int
    remaining: int


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A finished trajectory as (context, remaining length) tuples, which share its tokens."""

    sequence_id: SequenceId
    tokens: list[int]
    """Up to the last place."""
    num_prompt_tokens: int
    places: list[Place]

    @staticmethod
    def of(sequence_id: SequenceId, prompt: Sequence[int], completion: Completion) -> Trajectory:
        """One place before the first turn, and one at the end of each turn behind which another one followed: there the
        tool's answer is not in the context yet. Nobody needs to know what is generated behind the last turn."""
        places = [
            Place(num_tokens=len(prompt), num_generated=0, num_turns=0, remaining=completion.num_generated),
            *_ends_of_turns(len(prompt), completion),
        ]
        tokens = [*prompt, *completion.token_ids][: places[-1].num_tokens]
        return Trajectory(sequence_id=sequence_id, tokens=tokens, num_prompt_tokens=len(prompt), places=places)

    @property
    def contexts(self) -> list[Context]:
        return [
            Context(
                sequence_id=self.sequence_id,
                num_turns=place.num_turns,
                tokens=tuple(self.tokens[: place.num_tokens]),
                num_prompt_tokens=self.num_prompt_tokens,
                num_generated=place.num_generated,
            )
            for place in self.places
        ]


def _ends_of_turns(num_prompt_tokens: int, completion: Completion) -> Iterable[Place]:
    turns: list[Span] = completion.turns
    num_generated = 0
    for number, (start, end) in enumerate(turns[:-1], 1):
        num_generated += end - start
        yield Place(
            num_tokens=num_prompt_tokens + end,
            num_generated=num_generated,
            num_turns=number,
            remaining=completion.num_generated - num_generated,
        )


def plain_counts(contexts: Sequence[Context]) -> np.ndarray:
    """Returns [contexts, 5]: tokens of the prompt, generated, observed and all, and ended turns."""
    rows = [
        (one.num_prompt_tokens, one.num_generated, len(one.tokens) - one.num_prompt_tokens - one.num_generated)
        for one in contexts
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    turns = np.array([one.num_turns for one in contexts], dtype=np.float64)
    return np.column_stack([table, table.sum(1), turns])


def count_features(contexts: Sequence[Context]) -> np.ndarray:
    """Returns the plain counts, their logarithms, the tokens per turn, and the number of turns as categories."""
    counts = plain_counts(contexts)
    turns = counts[:, 4]
    classes = np.eye(MOST_TURNS + 1)[np.minimum(turns, MOST_TURNS).astype(int)]
    return np.column_stack([counts, np.log1p(counts), counts[:, 1] / np.maximum(turns, 1), classes])


def pearson(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Returns the correlation; 0 where one of them is constant, NaN of fewer than two."""
    if len(true) < 2:
        return math.nan
    a, b = (np.asarray(one, dtype=np.float64) - np.mean(one) for one in (predicted, true))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-9 * (1 + len(a)) else 0.0


def recall(predicted: Sequence[float], true: Sequence[float], share: float = LONG_TAIL) -> float:
    """Returns the part of the truly longest `share` that is among the longest predicted. Equal predictions are in no
    order: those at the edge count as far as a random choice among them would find them."""
    if not len(true):
        return math.nan
    count = max(1, round(share * len(true)))
    longest = np.argsort(-np.asarray(true), kind="stable")[:count]
    guess = np.asarray(predicted, dtype=np.float64)
    edge = np.sort(guess)[-count]
    surely, maybe = guess > edge, guess == edge
    chance = (count - surely.sum()) / maybe.sum()
    return float(surely[longest].sum() + chance * maybe[longest].sum()) / count
