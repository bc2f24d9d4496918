"""What `train.py --dispatch heddle` says of each step, with the real predictor, policy and simulated rollouts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from algos.collect import Group
from algos.tasks.task import Problem
from engines import LLM, Completion
from engines.parallel.layout import nested_layout
from experiments.heddle_options import HeddleConfig
from experiments.heddle_training import HeddleRollouts
from experiments.length_predictions import LengthPredictions
from research.heddle.policy import HeddleOptions, HeddlePolicy
from research.workloads.agents import Errors
from tests.research.test_heddle_policy import COSTS, drawn, rollout, thirds
from tests.worlds import join, run_world


def group(uid: int) -> Group:
    """Another prompt, and one turn of another length."""
    tokens = [65] * (5 + uid)
    zeros = [0.0] * len(tokens)
    done = Completion(
        index=0, token_ids=tokens, logprobs=zeros, versions=[0] * len(zeros), finish_reason="stop", observed=[(0, 0)]
    )
    problem = Problem(uid=uid, prompt="")
    return Group(problem=problem, prompt_token_ids=[66, 67 + uid], completions=[done], rewards=[0.0])


def measured_sizes(model: str) -> list[int]:
    """After a rollout on two replicas, and on the one that they then are."""
    groups = join()
    rollouts = HeddleRollouts(HeddleConfig(), 4, LengthPredictions(HeddleConfig()))
    llm = LLM(model, world=groups, layout=nested_layout(range(2), 1), kv_cache_bytes=2**23)
    rollouts.begin(llm)
    llm.regroup(nested_layout(range(2), 2, epoch=1))
    before = [*rollouts.times.steps]
    rollouts.begin(llm)
    times = [rollouts.times.costs.token_s(spec, 4) > 0 for spec in llm.layout.replicas]
    llm.close()
    groups.close()
    return [*before, *rollouts.times.steps, *times]


def test_what_passes_take_is_measured_for_each_size(text_model: str) -> None:
    assert run_world(measured_sizes, 2, text_model) == [[1, 1, 2, True]] * 2


def test_metrics_are_of_one_step(text_model: str, tmp_path: Path) -> None:
    """Two steps with an evaluation between them; an answer takes 0.1 s, the tools 0.05 s and less."""
    predictions = LengthPredictions(HeddleConfig())
    rollouts = HeddleRollouts(HeddleConfig(), 1, predictions)
    rollouts.policy = policy = HeddlePolicy(thirds, COSTS, HeddleOptions(waits_s=1.0))
    predictions.start(Path(text_model), tmp_path / "predictor")
    try:
        llm, groups, rows, counts = LLM(text_model, device="cpu"), [*map(group, range(8))], [], [0]
        for step in range(3):
            if step != 1:
                rollouts.begin(llm)
                predictions.begin()
            _, done = rollout(policy, drawn("math", 48, seed=step), Errors(seconds=0.1))
            counts.append(policy.counters.num_migrations)
            if step != 1:
                rows.append(rollouts.metrics() | predictions.end(groups, step, done.turns))
    finally:
        predictions.close()
    assert min(b - a for a, b in pairwise(counts)) > 0, "each rollout moves some"
    assert [row["rollout/num_migrations"] for row in rows] == [counts[1], counts[3] - counts[2]]
    for row in rows:
        assert row["timing_s/predictor/answer/mean"] == pytest.approx(0.1, abs=0.002)
        assert 0.04 < row["timing_s/predictor/exposed/mean"] < 0.1
    assert rows[0]["timing_s/predictor/fit"] == 0 < rows[1]["timing_s/predictor/fit"]
