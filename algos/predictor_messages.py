"""What a run and the process of its length predictor say to each other: msgpack. Torch-free."""

from __future__ import annotations

from msgspec import Struct

from algos.trajectory_lengths import Trajectory
from engines.rollout.prediction import Context


class Ready(Struct, frozen=True, kw_only=True):
    """The process's first message."""

    error: str = ""
    """Why it cannot predict for this model."""
    is_fitted: bool = False
    pid: int = 0


class Ask(Struct, frozen=True, kw_only=True, tag=True):
    number: int
    contexts: list[Context]


class Fit(Struct, frozen=True, kw_only=True, tag=True):
    number: int
    trajectories: list[Trajectory]
    seed: int


class Answers(Struct, frozen=True, kw_only=True, tag=True):
    number: int
    remaining: list[float]
    """Tokens that each context will still generate; NaN where there is no estimate."""


class Fitted(Struct, frozen=True, kw_only=True, tag=True):
    number: int
    error: str = ""
    """Why the fit failed; then the process predicts as before."""
    seconds: float = 0.0
    ridge: float = 0.0
    held_out_mae: float = 0.0
    """Mean absolute error in tokens, on the prompts that were held out to choose the ridge."""
