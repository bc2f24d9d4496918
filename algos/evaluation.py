"""Mean rewards, pass@1 and pass@k on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from algos.collect import sample_groups, score_groups
from algos.rewards.runner import RewardRunner
from algos.tasks.task import Problem
from engines import LLM, SamplingParams
from engines.parallel.collectives import Communicator
from engines.rollout.environment import Environments
from engines.rollout.prediction import LengthPredictor
from engines.sequence import Finished


def evaluate(
    llm: LLM,
    problems: Sequence[Problem],
    params: SamplingParams,
    reward: RewardRunner | None,
    group: Communicator,
    *,
    threshold: float = 1.0,
    own_reward: RewardRunner | None = None,
    on_finished: Callable[[Finished], None] | None = None,
    environment: Environments | None = None,
    in_rounds: bool = False,
    predictor: LengthPredictor | None = None,
) -> dict[str, float]:
    """Metrics under verl's `val-core/` and `val-aux/`, at the training's temperature, from `params.n` completions each.

    A completion is right, for pass@k, when its `reward` reaches `threshold`. `own_reward` is the one that is
    trained on, if it is another. The noise of a held-out problem has a key of its own, so an evaluation does not change
    what training samples.
    """
    groups, figures = sample_groups(
        llm,
        problems,
        params,
        reward,
        group,
        on_finished,
        environment=environment,
        in_rounds=in_rounds,
        predictor=predictor,
    )
    metrics = {"val-core/reward/mean": _mean([value for one in groups for value in one.rewards])}
    if own_reward is not None:
        metrics["val-core/own_reward/mean"] = _mean(score_groups(groups, own_reward, group))
    num_correct = [sum(value >= threshold for value in one.rewards) for one in groups]
    lengths = [completion.num_generated for one in groups for completion in one.completions]
    for k in (1 << exponent for exponent in range(params.n.bit_length())):
        metrics[f"val-core/pass@{k}"] = _mean([pass_at_k(params.n, count, k) for count in num_correct])
    metrics["val-aux/response_length/mean"] = _mean(lengths)
    metrics["timing_s/testing"] = figures["timing_s/gen"] + figures["timing_s/reward"]
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that `k` completions, drawn without replacement from `num_samples`, include at least one of the
    `num_correct` right ones: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
