"""Agents whose lengths are stated, and predictors whose errors are."""

from __future__ import annotations

import math
from statistics import correlation, fmean, median

import numpy
import pytest

from engines.rollout.prediction import Context
from engines.sequence import SequenceId
from research.workloads.agents import AGENTS, CAP, LOG_NORMAL, Errors, StatedPredictions, scaled
from research.workloads.trajectories import Turn


def drawn(name: str, count: int = 1600) -> dict[SequenceId, list[Turn]]:
    groups = AGENTS[name].draw(count // 16, 16, seed=0)  # type: ignore[index]
    return {(0, uid, place): turns for uid, group in enumerate(groups) for place, turns in enumerate(group)}


def left(turns: list[Turn], num_turns: int = 0) -> int:
    return sum(turn.num_generated for turn in turns[num_turns:])


def said(errors: Errors, turns: dict[SequenceId, list[Turn]], num_turns: int = 0) -> tuple[list[float], list[float]]:
    """The delays of the answers, and what is said of all that have more turns."""
    delays, answers = list[float](), list[float]()

    def later(seconds: float, act) -> None:
        delays.append(seconds)
        act()

    predictor = StatedPredictions(turns, later, errors)
    for id_, some in turns.items():
        if len(some) > num_turns:
            done = left(some) - left(some, num_turns)
            asked = Context(sequence_id=id_, num_turns=num_turns, tokens=(), num_prompt_tokens=0, num_generated=done)
            predictor.ask([asked], answers.extend)
    return delays, answers


@pytest.mark.parametrize("name", ["coding", "search", "math"])
def test_agents_have_the_paper_s_shape(name: str) -> None:
    """A tail of above 4 times the median (Fig. 4), tools of Table 1, no trajectory above the cap."""
    turns = drawn(name)
    totals = [left(some) for some in turns.values()]
    assert max(totals) > 4 * median(totals)
    assert all(sum(one.num_generated + one.num_observed for one in some) <= CAP for some in turns.values())
    tools = [one.tool_s for some in turns.values() for one in some[:-1]]
    assert fmean(tools) == pytest.approx({"coding": 0.41, "search": 1.41, "math": 0.046}[name], rel=0.05)
    short = scaled(AGENTS[name], 64, 4.0).draw(20, 16, seed=0)  # type: ignore[index]
    share = sum(left(one) for group in short for one in group) * 64 / sum(totals[:320])
    assert share == pytest.approx(1, rel=0.3) and max(left(one) for group in short for one in group) <= CAP / 64


def test_what_predictors_say() -> None:
    turns = drawn("coding", 160)
    totals = [left(some) for some in turns.values()]
    assert said(Errors(kind="oracle", seconds=0.3), turns) == ([0.3] * 160, totals)
    assert set(said(Errors(kind="constant"), turns)[1]) == {fmean(totals)}
    assert said(Errors(kind="reversed"), turns)[1] == [min(totals) + max(totals) - total for total in totals]
    assert all(map(math.isnan, said(Errors(kind="nothing"), turns)[1]))
    assert said(Errors(), turns) == said(Errors(), turns) != said(Errors(seed=1), turns)


@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_residuals_are_a_regression_s(num_turns: int) -> None:
    """The logarithms correlate with the truth as the residuals say, and errors do not with what is predicted."""
    turns = drawn("coding")
    logs = [math.log1p(one) for one in said(Errors(), turns, num_turns)[1]]
    truth = [math.log1p(left(some, num_turns)) for some in turns.values() if len(some) > num_turns]
    fine = [numpy.interp(place / 2000, numpy.linspace(0, 1, 21), LOG_NORMAL[num_turns]) for place in range(2001)]
    unexplained = fmean(one**2 for one in fine)
    assert correlation(logs, truth) == pytest.approx(math.sqrt(1 - unexplained), abs=0.04)
    assert abs(correlation(logs, [a - b for a, b in zip(truth, logs, strict=True)])) < 0.12
