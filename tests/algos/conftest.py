"""What tests of rewards share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from algos.rewards.runner import RewardConfig, RewardRunner

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


@pytest.fixture
def make() -> Iterator[Callable[..., RewardRunner]]:
    runners = []

    def make(function: str, **config: float) -> RewardRunner:
        runners.append(RewardRunner(f"{FUNCTIONS}:{function}", RewardConfig(**config)))  # type: ignore[arg-type]
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
