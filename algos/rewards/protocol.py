"""The messages between a reward runner and its worker process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Worker to runner, once: the reward function's arguments, or why it could not be loaded."""

    error: str = ""
    is_async: bool = False
    accepted: list[str] | None = None
    """Keyword arguments that the function declares; None when it takes any (`**kwargs`)."""
    required: list[str] = field(default_factory=list)
    """Declared arguments without a default."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The keyword arguments of one call of the reward function: a list per name, all of length `num_items`."""

    num_items: int
    arguments: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Runner to worker: calls to make, all at the same time if the function is async."""

    parts: dict[int, Part]
    """Parts by a unique number, which the part's result repeats."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Worker to runner, one per part, in the order in which they finish."""

    part: int
    kind: Literal["ok", "raised", "timed_out"]
    values: list[float | None] = field(default_factory=list)
    """One per item when `kind` is "ok"; None stands for what is no number, or too large."""
    error: str = ""
    """What was raised, or the first value that is no reward."""
