"""What a trajectory talks to between its turns: the protocol of a user's environment, and what the engine asks of those
who run environments. Torch-free.

The engine runs no user code: it gives a text, and is called back with an `Answer`. `algos/environments/pool.py` runs
the environments in processes of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engines.constraints import NonNegative, check_fields
from engines.sequence import SequenceId

Role = Literal["user", "tool"]
"""Whose message an observation is, where the model has a chat template."""
FailureKind = Literal["raised", "timed_out", "invalid", "lost"]
"""raised: the environment raised. timed_out: a call took longer than its limit. invalid: what it returned is no
observation, or too long. lost: its process ended during the call, twice."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What `Environment.step` returns. It is checked where the process that made it hands it on."""

    text: str
    done: bool = False
    """Whether the trajectory is over; the text is then observed, and no turn follows."""
    role: Role = "user"


class Environment(Protocol):
    """A user's class, named by import path. One object serves one trajectory; its methods may be async.

    The class may also have `get_reward(self) -> float`, called once when the trajectory is over, and `close(self)`.
    """

    def reset(self, **columns: Any) -> str | None:
        """Begins the trajectory of a problem with these columns. Returns what is observed before the first turn."""
        ...

    def step(self, text: str) -> Observation | str | None:
        """Gets the text of a turn, and returns what is observed next. None ends the trajectory."""
        ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a call."""

    text: str | None = None
    """What is observed; None: nothing."""
    done: bool = False
    """Whether the trajectory is over."""
    role: Role = "user"
    seconds: NonNegative = 0.0
    """What the call took, without the time in which it waited for other calls of its process."""
    failure: FailureKind | None = None
    """Set if the call failed; the trajectory is then over."""
    error: str = ""
    """Says what failed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.failure is not None and not self.done:
            raise ValueError(f"Answer.failure={self.failure!r}: a trajectory whose call failed is over; set done=True")


@dataclass(kw_only=True)
class CallCounts:
    """What the calls of a rollout's environments came to."""

    num_calls: int = 0
    seconds: float = 0.0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    """Trajectories whose environment failed, by kind."""

    def note(self, answer: Answer) -> None:
        self.num_calls += 1
        self.seconds += answer.seconds
        if answer.failure is not None:
            self.failures[answer.failure] += 1


class Environments(Protocol):
    """Runs one environment per trajectory. No method waits: another thread calls `answer`, once, with what came of it.

    A trajectory has one call at a time: `begin`, then `step` after each answer, then `end`.
    """

    def begin(self, sequence_id: SequenceId, columns: Mapping[str, Any], answer: Callable[[Answer], None]) -> None:
        """Makes the trajectory's environment and resets it."""
        ...

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        """Gives the environment the text of a turn."""
        ...

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        """The trajectory is over: closes its environment. `reward` is called, once, by another thread, with what
        `get_reward` returns first, or None without one. Without `reward` the trajectory was aborted: nothing is asked,
        and the answer to a call that still runs is dropped."""
        ...


class OnRankZero:
    """In place of the environments on the other ranks, which never call them."""

    def begin(self, sequence_id: SequenceId, columns: Mapping[str, Any], answer: Callable[[Answer], None]) -> None:
        raise RuntimeError("only rank 0 has environments")

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        raise RuntimeError("only rank 0 has environments")

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        raise RuntimeError("only rank 0 has environments")
