"""The options of environments' processes, and the messages between the pool and them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from engines.constraints import Count, Finite, Seconds, check_fields
from engines.rollout.environment import FailureKind, Role

METHODS = {"reset": ("reset",), "step": ("step",), "end": ("get_reward", "close")}
"""What a call asks of an object."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Limits on environments and tools."""

    workers: Annotated[int, Meta(ge=1, le=1024, description="an integer from 1 to 1024")] = 8
    """Processes of environments. Calls of sync methods run one after another in each, so give as many workers as
    tools shall run at the same time; async methods of one worker run together."""
    timeout_s: Seconds = 30.0
    """Wall-clock limit of one call. Where it does not end by itself, its process is killed."""
    start_timeout_s: Seconds = 120.0
    """Limit on the imports of the environment's module."""
    max_chars: Count = 32768
    """Longest text of an observation, in characters."""
    failed_reward: Finite = 0.0
    """Reward of a trajectory whose environment failed, or whose `get_reward` returned no number, or a too large one."""
    memory_mib: Count = 2048
    """Address space that a process may take, beyond that of its imports."""
    file_mib: Count = 256
    """Largest file that a process may write."""
    max_processes: Count = 256
    """Processes and threads that environments may start, all workers together. It does not bind the user root."""
    network: bool = False
    """Whether environments may use the network."""
    environ: tuple[str, ...] = ()
    """Environment variables that they get from the run, by name, beside PATH, LD_LIBRARY_PATH, LANG and PYTHONPATH."""
    writable: tuple[str, ...] = ()
    """Folders that environments may write to, beside the worker's own, which is empty at first and removed at the end.
    Locks of multiprocessing want /dev/shm."""

    def __post_init__(self) -> None:
        check_fields(self)
        if missing := [one for one in self.writable if not os.path.isdir(one)]:
            raise ValueError(f"EnvironmentConfig.writable={missing[0]!r}: must be a folder that exists")


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From the template, once: what the environment's class has, or why it could not be loaded."""

    error: str = ""
    accepted: list[str] | None = None
    """Columns that `reset` declares; None when it takes any (`**columns`)."""
    required: list[str] = field(default_factory=list)
    """Those of them without a default."""
    methods: dict[str, bool] = field(default_factory=dict)
    """The methods that the class has, and whether each is async."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas for the chat template, if the environment is made of tools."""
    notes: list[str] = field(default_factory=list)
    """What this kernel refuses to keep from environments."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """To a worker: a call of an object's method. An object has one call at a time."""

    object: int
    method: Literal["reset", "step", "end"]
    columns: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    wants_reward: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """From a worker: what came of the call of this object."""

    object: int
    text: str | None = None
    done: bool = False
    role: Role = "user"
    reward: float | None = None
    failure: FailureKind | None = None
    error: str = ""
    seconds: float = 0.0
    """What it took; the pool's measure."""
