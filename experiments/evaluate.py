"""pass@1 and pass@k on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from algos.collect import sample_groups
from algos.evaluation import mean_pass_at_k
from algos.rewards.runner import RewardRunner
from algos.tasks.task import Problem
from engines import LLM, SamplingParams
from engines.parallel.collectives import Communicator

SOLVED = 1.0
"""A completion is right when its reward reaches this."""


def evaluate(
    llm: LLM,
    problems: Sequence[Problem],
    params: SamplingParams,
    reward: RewardRunner,
    group: Communicator,
    num_samples: int,
) -> dict[str, float]:
    """Metrics under verl's `val-core/` and `val-aux/`, at the training's temperature.

    The key of a held-out problem's noise is its own, so an evaluation neither sees nor disturbs training's draws.
    """
    groups, _, seconds = sample_groups(llm, problems, replace(params, n=num_samples), reward, group)
    correct = [[value >= SOLVED for value in one.rewards] for one in groups]
    lengths = [len(completion.token_ids) for one in groups for completion in one.completions]
    metrics = {f"val-core/pass@{k}": mean_pass_at_k(correct, k) for k in _powers_of_two(num_samples)}
    metrics["val-aux/response_length/mean"] = sum(lengths) / len(lengths)
    metrics["timing_s/testing"] = seconds["gen"] + seconds["reward"]
    return metrics


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]
