"""The environments of a training run: processes on rank 0, and what the other ranks must know of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from algos.environments.pool import EnvironmentPool
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
    tools, has_reward = launch.on_rank_0(group, lambda: pool and (pool.tools, pool.has_reward))
    return RunEnvironment(environments=pool or OnRankZero(), tools=tools, has_reward=has_reward)
