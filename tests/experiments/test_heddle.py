"""`heddle.py` and `heddle_sim.py` on small rollouts; what spans say of waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.rollout.telemetry import TurnSpan
from experiments.heddle_report import exposed_s
from experiments.policies import Logged
from research.heddle.policy import HeddlePolicy
from research.workloads.agents import Errors
from tests.research.test_heddle_policy import COSTS, drawn, rollout
from tests.worlds import refused_by, run_main

PACED = ["--parts", "paced", "--ranks", "2", "--shrink", "8", "--turns", "1", "--scale", "0.05"]


def test_paced_variants_draw_the_same_tokens(tmp_path: Path) -> None:
    options = [*PACED, "--workloads", "coding", "search", "--figure", str(tmp_path)]
    found = run_main("heddle", options, num_ranks=2)
    assert found["tokens_equal"] is True
    assert sorted(found["paced"]["priority"]["coding"]) == ["fcfs", "sjf"]
    assert sorted(found["paced"]["placement"]["search"]) == ["cache_aware", "hybrid", "least_load"]
    assert set(found["exposed_s"]["coding"]) == {"prediction", "migration"}
    assert found["reference"]["coding"] and found["num_migrations"]["coding"] >= 0
    assert (tmp_path / "heddle_coding.png").stat().st_size > 10_000


def test_live_ranks_draw_the_same_tokens() -> None:
    options = ["--parts", "live", "--shrink", "3", "--turns", "1", "--no-predicts", "--no-plans"]
    found = run_main("heddle", options, num_ranks=2)
    assert found["tokens_equal"] is True and set(found["live"]["ratios"]) == {"fcfs", "least_load"}


@pytest.mark.parametrize(("model", "sizes"), [("14b", (1, 2, 4, 8)), ("32b", (2, 4, 8))])
def test_simulated_systems_and_allocations(tmp_path: Path, model: str, sizes: tuple[int, ...]) -> None:
    """One GPU does not hold the longest trajectory of 32B."""
    options = [
        "--models",
        model,
        "--workloads",
        "search",
        "--gpus",
        "8",
        "--shrink",
        "25",
        "--processes",
        "1",
        "--seeds",
        "2",
    ]
    found = run_main("heddle_sim", [*options, "--figure", str(tmp_path / "figure.png")])
    allocation = found["allocation"][model]["search"]
    others = ["oracle", "oracle_equal", "oracle_unequal", "unequal"]
    assert sorted(allocation) == ["equal_placed", *(f"fix{size}" for size in sizes), *others]
    assert allocation["equal_placed"] == min(allocation[f"fix{size}"] for size in sizes)
    assert [sum(sizes) for sizes in found["tp_sizes"][model]["search"]] == [8, 8]
    cell = found["cells"][model]["search"]
    seconds = {name: np.array([one["seconds"] for one in seeds]) for name, seeds in cell["variants"].items()}
    for name, (mean, least, most) in cell["over_heddle"].items():
        ratios = seconds[name] / seconds["heddle"]
        np.testing.assert_allclose([mean, least, most], [ratios.mean(), ratios.min(), ratios.max()], rtol=2e-3)
    assert sorted(found["systems"][model]["search"]) == ["slime", "verl", "verl*"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_refusals() -> None:
    assert "gpus=12: hosts have 8; give a multiple" in refused_by("heddle_sim", ["--gpus", "12"])
    assert "--token-scale=513: a prompt has 512 tokens" in refused_by("heddle_sim", ["--token-scale", "513"])
    for script in ("heddle", "heddle_predicting"):
        error = refused_by(script, ["--gsm8k", "nowhere.jsonl", "--gsm8k-held-out", "nowhere.jsonl"])
        assert "--gsm8k='nowhere.jsonl': there is no such file" in error
    assert "--seed=-1: must be" in refused_by("heddle_predicting", ["--seed", "-1"])
    assert "give both files, or none" in refused_by("heddle_predicting", ["--gsm8k", __file__])
    assert "--scale=0.0: must be above 0" in refused_by("heddle", ["--scale", "0"])


def span(kind: str, start: float, seconds: float, replica_id: int | None = None) -> TurnSpan:
    return TurnSpan(sequence_id=(0, 0, 0), kind=kind, start=start, seconds=seconds, replica_id=replica_id)  # type: ignore[arg-type]


def test_what_shows_of_predictions_and_moves() -> None:
    """Tools of 1 s and 0.1 s; predictions of 0.3 s; moves of 0.4 s, the second of which begins with the tool."""
    spans = [
        span("tool", 0, 0), span("replica", 0, 1, 0), span("tool", 1, 1), span("queue", 2, 0), span("replica", 2, 1, 0),
        span("tool", 3, 0.1), span("queue", 3.1, 0.2), span("replica", 3.3, 2, 1), span("tool", 5.3, 0),
        span("prediction", 0, 0.1), span("prediction", 1, 0.3), span("prediction", 3, 0.3),
        span("move", 1.2, 0.4, 0), span("move", 3.0, 0.4, 1),
    ]  # fmt: skip
    found = exposed_s(spans)
    assert found["prediction"] == pytest.approx(0.2 / 2) and found["migration"] == pytest.approx(0.1 / 2)


def test_dispatches_are_logged_with_what_was_predicted() -> None:
    """With true lengths: the estimate is the trajectory's length, and the priority what is left of it."""
    logged = Logged(HeddlePolicy(lambda *_: None, COSTS))
    _, done = rollout(logged, drawn("coding", 32), Errors(kind="oracle"))
    assert len(logged.log) > 64
    for one in logged.log:
        assert one.estimate == done.lengths[one.sequence_id]
        assert one.priority == one.estimate - one.num_generated
