"""Arrivals and trajectories: functions of a seed, with the means that they were asked for."""

import itertools
import statistics
from pathlib import Path

import pytest

from research.workloads.arrivals import PoissonArrivals, read_trace
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import TrajectoryLengths

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FEW = LogNormalLengths(median=4, sigma=0.5, cap=16)
TOKENS = LogNormalLengths(median=100, sigma=1.0, cap=1000)


def _trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def test_a_trace_is_read_from_a_window(tmp_path: Path) -> None:
    path = _trace(
        tmp_path,
        "2023-11-16 23:59:59.5000000,374,44",
        "2023-11-17 00:00:01.2500000,396,109",
        "2023-11-17 00:00:04,55,1",
    )
    arrivals = read_trace(path)
    assert [one.time_s for one in arrivals] == [0.0, 1.75, 4.5]
    assert [(one.num_prompt_tokens, one.num_generated_tokens) for one in arrivals] == [(374, 44), (396, 109), (55, 1)]
    assert [one.time_s for one in read_trace(path, start_s=1.0, seconds=3.5)] == [0.75]
    with pytest.raises(ValueError, match="no request from 9 s on"):
        read_trace(path, start_s=9.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:00:00.5,12", "is no request"),
        ("yesterday,12,13", "is no request"),
        ("2023-11-16 18:00:02,12.5,13", "is no request"),
        ("2023-11-16 18:00:02,12,0", "has no tokens"),
        ("2023-11-16 18:00:00,12,13", "sort the trace by TIMESTAMP"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = _trace(tmp_path, "2023-11-16 18:00:01,1,1", line)
    with pytest.raises(ValueError, match=rf"trace\.csv:3: '{line}': .*{says}"):
        read_trace(path)


def test_a_file_of_other_columns_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv:1: 'a,b': the first line must be TIMESTAMP"):
        read_trace(path)


def test_arrivals_come_at_the_rate() -> None:
    arrivals = PoissonArrivals(rate=20.0, prompt=TOKENS, generated=FEW)
    drawn = arrivals.draw(500.0, seed=1)
    assert len(drawn) == pytest.approx(20 * 500, rel=0.04)
    times = [one.time_s for one in drawn]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.04)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.04)  # of an exponential it is the mean
    assert arrivals.draw(100.0, seed=1) == [one for one in drawn if one.time_s < 100]


def test_trajectories_are_what_they_were_asked_to_be() -> None:
    lengths = TrajectoryLengths(
        num_turns=FEW, generated=TOKENS, observed=TOKENS, tool_median_s=0.4, tool_sigma=0.5, correlation=0.9
    )
    groups = lengths.draw(1500, 4, seed=5)
    assert groups[:2] == lengths.draw(2, 4, seed=5)
    turns = [turn for group in groups for trajectory in group for turn in trajectory]
    assert statistics.median(turn.num_generated for turn in turns) == pytest.approx(100, rel=0.05)
    calls = [turn for group in groups for trajectory in group for turn in trajectory[:-1]]
    assert statistics.median(turn.tool_s for turn in calls) == pytest.approx(0.4, rel=0.05)
    assert min(turn.num_observed for turn in calls) >= 1
    for group in groups:
        assert all(trajectory[-1].num_observed == trajectory[-1].tool_s == 0 for trajectory in group)
    first, second = ([float(len(group[member])) for group in groups] for member in (0, 1))
    assert statistics.median(first) == 4
    assert statistics.correlation(first, second) > 0.75


def test_a_trajectory_ends_at_the_cap() -> None:
    lengths = TrajectoryLengths(num_turns=FEW, generated=TOKENS, observed=TOKENS, tool_median_s=0.4, cap=250)
    totals = [
        sum(turn.num_generated + turn.num_observed for turn in trajectory)
        for group in lengths.draw(100, 2, seed=5)
        for trajectory in group
    ]
    assert max(totals) == 250 and totals.count(250) > 50
    with pytest.raises(ValueError, match=r"TrajectoryLengths\.tool_median_s=-1"):
        TrajectoryLengths(num_turns=FEW, generated=TOKENS, observed=TOKENS, tool_median_s=-1)
