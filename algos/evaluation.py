"""pass@1 and pass@k on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from algos.collect import sample_groups
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

    The noise of a held-out problem has a key of its own, so an evaluation does not change what training samples.
    """
    groups, figures = sample_groups(llm, problems, replace(params, n=num_samples), reward, group)
    num_correct = [sum(value >= SOLVED for value in one.rewards) for one in groups]
    lengths = [len(completion.token_ids) for one in groups for completion in one.completions]
    metrics = {}
    for k in (1 << exponent for exponent in range(num_samples.bit_length())):
        metrics[f"val-core/pass@{k}"] = math.fsum(pass_at_k(num_samples, c, k) for c in num_correct) / len(groups)
    metrics["val-aux/response_length/mean"] = sum(lengths) / len(lengths)
    metrics["timing_s/testing"] = figures["timing_s/gen"] + figures["timing_s/reward"]
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that `k` completions, drawn without replacement from `num_samples`, include at least one of the
    `num_correct` right ones: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
