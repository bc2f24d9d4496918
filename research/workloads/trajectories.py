"""Agent trajectories: turns of generated tokens, and between them tool calls and what these return. Torch-free.

Every draw is a function of its seed. Heddle, §2.1, names what makes the tail: the number of turns, the tokens of a turn
and the seconds of a tool. The members of a group share their prompt's difficulty, which decides the number of turns.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from engines.constraints import Count, Fraction, NonNegative, check_fields
from engines.rollout.environment import Answer
from engines.sequence import SequenceId, SequenceState
from research.workloads.lengths import GroupedLengths, LogNormalLengths

Spread = Annotated[float, Meta(ge=0, le=10, description="from 0 to 10")]
"""Of the logarithm of seconds: beyond it, factors leave the range of a float."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens that the model generates, then a tool call: its seconds, and the tokens that it returns."""

    num_generated: int
    tool_s: float = 0.0
    num_observed: int = 0
    """0 after the last turn, which calls no tool."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryLengths:
    """How long trajectories are, turn by turn.

    A tool call lasts `tool_median_s` times a log-normal factor. Raises ValueError for values outside their types.
    """

    num_turns: LogNormalLengths
    generated: LogNormalLengths
    """Tokens of one turn."""
    observed: LogNormalLengths
    """Tokens that a tool returns."""
    tool_median_s: NonNegative
    tool_sigma: Spread = 0.0
    correlation: Fraction = 0.0
    """Of the numbers of turns within a group; see `GroupedLengths`."""
    cap: Count = 2**63 - 1
    """Most tokens of a trajectory after its prompt, observed ones included: the turn that reaches it is the last."""

    def __post_init__(self) -> None:
        check_fields(self)

    def draw(self, num_groups: int, group_size: int, seed: int) -> list[list[list[Turn]]]:
        """Turns [num_groups][group_size][...]. A trajectory does not depend on how many others are drawn."""
        counts = GroupedLengths(lengths=self.num_turns, correlation=self.correlation).draw(num_groups, group_size, seed)
        return [
            [self._draw_turns(count, random.Random(f"{seed}/{group}/{member}")) for member, count in enumerate(members)]
            for group, members in enumerate(counts)
        ]

    def _draw_turns(self, count: int, rng: random.Random) -> list[Turn]:
        turns: list[Turn] = []
        left = self.cap
        while True:
            num_generated = min(left, self.generated.at(rng.gauss(0, 1)))
            num_observed = min(left - num_generated, self.observed.at(rng.gauss(0, 1)))
            tool_s = self.tool_median_s * rng.lognormvariate(0, self.tool_sigma)
            left -= num_generated + num_observed
            if not left or len(turns) + 1 == count:
                return [*turns, Turn(num_generated=num_generated)]
            turns.append(Turn(num_generated=num_generated, tool_s=tool_s, num_observed=num_observed))


def turn_has_ended(state: SequenceState, turns: Sequence[Turn]) -> bool:
    """Whether the present turn of this trajectory has all of its tokens: a hidden stop."""
    return len(state.tokens) - state.turn_start >= turns[len(state.observed) - 1].num_generated


Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, real or virtual."""


class TimedTools:
    """The `Environments` of trajectories whose turns are known: a tool takes its time, and returns a character for each
    token that is observed. The last turn ends the trajectory."""

    def __init__(
        self,
        turns: Mapping[SequenceId, Sequence[Turn]],
        later: Later,
    ) -> None:
        self._turns = turns
        self._later = later
        self._num_ended: Counter[SequenceId] = Counter()

    def begin(self, sequence_id: SequenceId, columns: Mapping[str, Any], answer: Callable[[Answer], None]) -> None:
        answer(Answer())

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        turns = self._turns[sequence_id]
        turn = turns[self._num_ended[sequence_id]]
        self._num_ended[sequence_id] += 1
        if self._num_ended[sequence_id] == len(turns):
            answer(Answer(done=True))
        else:
            given = Answer(text="." * turn.num_observed, seconds=turn.tool_s)
            self._later(turn.tool_s, lambda: answer(given))

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        if reward is not None:
            reward(None)
