"""The interface of a task: problems by index, held-out ones, the name of a reward; demonstrations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from engines.models.chat import Messages
from engines.rollout.environment import Role


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt, and the data that its reward needs."""

    uid: int
    """Identifies the draw, not the text: unique in a run, so that a text drawn twice gets fresh noise each time.

    Training problems carry their index, held-out ones count down from -1.
    """
    prompt: str | Messages
    """Text, which is encoded as it stands, or messages, which the model's chat template renders. The reward gets it as
    it is here."""
    tokens: list[int] | None = None
    """The prompt's token ids, where they were too many and have been cut."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to the reward by keyword, as lists over the batch: {"answer": "1112"}. The same names in all problems."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a demonstration: a turn of the model, or what it observes then."""

    text: str
    observed: bool = False
    role: Role = "user"
    """Whose message an observation is, where the model has a chat template."""


class Task(Protocol):
    """Problems and their reward. Tasks are frozen dataclasses; a field `seed` gets the run's.

    A task may also name what its problems talk to, as `environment`: a class or tools, as for --environment; and have
    `options`, words of train.py's command line for what a user does not give: ("--steps", "40").
    """

    @property
    def reward(self) -> str | None:
        """`module:function` or `file.py:function` of a reward `(prompts, completions, **columns) -> list[float]`; None
        if a run must name one."""

    def train_problem(self, index: int) -> Problem:
        """A pure function of `index` >= 0, so that one integer is a run's whole position in the data.

        A finite data set is repeated in epochs, each with its own seeded permutation.
        """

    def held_out_problems(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, which `train_problem` never returns; fewer if a data set has fewer."""


@runtime_checkable
class Demonstrated(Task, Protocol):
    """A task of which an embedded model can be warm-started."""

    def demonstration(self, problem: Problem) -> list[Part]:
        """A right trajectory of one of the task's problems, exactly as a rollout would have it, up to the last turn. An
        end-of-sequence token ends each turn, and stands in no text."""
