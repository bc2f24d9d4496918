"""The environments of a training run: processes on rank 0, and what the other ranks must know of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from algos.environments.pool import EnvironmentPool
from algos.own_code import source_of
from engines.parallel.collectives import Communicator
from engines.rollout.environment import Environments, OnRankZero
from experiments import launch
from experiments.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunEnvironment:
    """What trajectories of a run talk to; equal on all ranks but for `environments`."""

    environments: Environments
    tools: list[dict[str, Any]]
    """JSON schemas for the chat template."""
    has_reward: bool
    """Whether trajectories bring their own rewards."""
    digest: str
    """Of its source: a resumed run takes over no trajectory of another environment."""


def start_environment(
    config: TrainConfig, columns: Iterable[Iterable[str]], stack: contextlib.ExitStack
) -> EnvironmentPool | None:
    """Starts the processes on rank 0, which `stack` ends. Raises ValueError for an environment that cannot be used, or
    that does not go with the run's rewards."""
    if config.environment is None or launch.rank() > 0:
        return None
    pool = stack.enter_context(EnvironmentPool(config.environment, config.environment_limits))
    for names in columns:
        pool.check(names)
    if pool.has_reward and config.reward is not None:
        raise ValueError(
            f"reward={config.reward!r}: the environment {config.environment} has a get_reward of its own; leave one out"
        )
    if not pool.has_reward and config.reward is None and config.task_options.reward is None:
        raise ValueError(
            f"environment={config.environment!r}: has no get_reward, and the task no reward; write one, or give "
            "--reward FILE.py:function"
        )
    return pool


def share_environment(config: TrainConfig, pool: EnvironmentPool | None, group: Communicator) -> RunEnvironment | None:
    """All ranks call it together."""
    if config.environment is None:
        return None
    spec = config.environment

    def describe() -> tuple[Any, ...]:
        assert pool is not None
        source = source_of(spec)
        data = spec.encode() + (b"" if source is None else source.read_bytes())
        return pool.tools, pool.has_reward, hashlib.blake2b(data, digest_size=16).hexdigest()

    tools, has_reward, digest = launch.on_rank_0(group, describe)
    return RunEnvironment(environments=pool or OnRankZero(), tools=tools, has_reward=has_reward, digest=digest)
