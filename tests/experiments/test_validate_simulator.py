"""`validate_simulator.py` as users run it. How near the simulation comes is no test: it depends on the machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engines.rollout.telemetry import StepRecord
from experiments import validate_simulator
from experiments.comparison.results import MOST_LATE
from experiments.validation_cells import AsRecorded, Kind, Recorded, Run, cells, describe, score
from research.simulator.cluster import Overheads
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from tests.worlds import refused_by, run_main

SMALL = ["--batch", "24", "--scale", "1", "--rooms", "0.4"]


def test_moves_chunks_and_regroups() -> None:
    result = run_main("validate_simulator", [*SMALL, "--kinds", "moves", "chunks", "regroup", "pat"], num_ranks=2)
    assert result["replay_equal"] and result["num_replayed"] > 100
    assert result["log_equal"] and result["tokens_equal"]
    assert set(result["makespan_error"]) == set(result["a_a"]) == set(result["policies"])
    assert set(result["steps_longer_than_paced"]) == set(result["policies"])
    assert result["follows_pace"] == all(share <= MOST_LATE for share in result["steps_longer_than_paced"].values())
    assert result["policies"] == {
        "moves 0.4x": "InChunks of experiments/validation_cells.py",
        "chunks 0.4x": "ContextAware of research/seer/context_aware.py",
        "regroup 0.4x": "OnDemand of engines/coordination/policies.py",
        "pat 0.4x": "OnDemand of engines/coordination/policies.py",
    }
    # Replicas that change have no same dispatches.
    assert set(result["error_as_dispatched"]) == {"moves 0.4x", "chunks 0.4x"}
    for name in result["policies"]:
        assert result["finish_error"][name] > 0 and result["makespan_error"][name] > 0
        assert len(result["preempted"][name]["paced"]) == 2
        least, most = result["simulated_range"][name]
        assert 0 < least <= most


def a_run(makespan: float) -> Run:
    return Run(finish_times={(0, 0, 0): makespan}, num_preempted=0, busy=1.0, gap=0.0, idle=0.0, mean_gap=0.0)


def test_a_cell_with_several_outcomes_shows_their_range() -> None:
    """Of nine simulations three end where both paced rollouts do: neither their median nor A/A shows it."""
    simulated = [8.4, 8.6, 8.6, 8.6, 8.7, 9.2, 9.9, 9.9, 9.9]
    scored = score([a_run(seconds) for seconds in simulated], [a_run(9.9), a_run(9.9)], [a_run(9.9), a_run(10.89)])
    assert scored["simulated"] == 8.7 and scored["a_a"] == 0 and scored["as_dispatched"] == pytest.approx(0.1)
    assert (scored["simulated_least"], scored["simulated_most"]) == (8.4, 9.9)


@pytest.mark.parametrize(("gap", "mean"), [(0.4, 0.4), (0.6, math.nan)])
def test_a_gap_longer_than_half_a_step_is_idle_time(gap: float, mean: float) -> None:
    """A run may have no other gaps, on a machine that does not follow its pace."""
    starts = [number * (1 + gap) for number in range(3)]
    one = StepRecord(
        replica_id=0, epoch=0, tp_size=1, start=0, seconds=1.0, num_running=1, num_tokens=1, paced_seconds=1.0
    )
    run = describe([replace(one, start=start) for start in starts], {(0, 0, 0): starts[-1] + 1}, 1)
    assert run.mean_gap == pytest.approx(mean, nan_ok=True)
    assert (run.gap, run.idle) == pytest.approx((2 * gap, 0) if gap < 0.5 else (0, 2 * gap))


@pytest.mark.parametrize("kind", ["static", "on demand", "moves", "mixed", "chunks", "turns", "static turns"])
def test_the_same_dispatches_again(kind: Kind) -> None:
    """Whatever the gaps between steps are. With the same gaps all ends are the same, unless there are follow-ups, or
    dispatches that were held back for the sake of a longer sequence."""
    one = profile(validate_simulator.PROFILE)
    pace = ProfilePace(device=one.device, shape=one.shape, scale=3.0, token_scale=16)
    (cell,) = cells((kind,), (0.4,), 48)

    def simulate(policy: Recorded, gap_s: float) -> Run:
        return validate_simulator.simulate(cell, policy, pace, Overheads(message_s=0.0005, gap_s=gap_s), 2)[0]

    before = Recorded(cell.schedule_policy())
    first = simulate(before, 0.0004)
    for gap_s in (0.0004, 0.001, 0.0):
        again = Recorded(AsRecorded(before.dispatches))
        run = simulate(again, gap_s)
        assert run.finish_times.keys() == first.finish_times.keys() and len(first.finish_times) == 48
        assert (run.finish_times == first.finish_times) == (gap_s == 0.0004 and kind not in ("chunks", "turns"))
        for which in ("replica_id", "sequence_id"):
            orders = [
                sorted(some.dispatches, key=lambda one: getattr(one, which))  # stable
                for some in (before, again)
            ]
            assert orders[0] == orders[1]


def test_pat_s_cell_switches() -> None:
    one = profile(validate_simulator.PROFILE)
    pace = ProfilePace(device=one.device, shape=one.shape, scale=3.0, token_scale=16)
    (cell,) = cells(("pat",), (2.0,), 192)
    _, done = validate_simulator.simulate(cell, cell.schedule_policy(), pace, Overheads(), 4)
    (switch,) = [one for one in done.decisions if one.action == "regroup"]
    assert 0 < switch.num_unfinished < 192


def test_what_it_refuses() -> None:
    assert "batch=6: must be a multiple of 4" in refused_by("validate_simulator", ["--batch", "6"])
    assert "kinds=(): must be one or more" in refused_by("validate_simulator", ["--kinds"])
    assert "output='/nowhere/x': there is no folder" in refused_by("validate_simulator", ["--output", "/nowhere/x"])
    assert "turns=1: must be at least 2" in refused_by("validate_simulator", ["--turns", "1"])
    assert "ranks=3: must be even" in refused_by("validate_simulator", SMALL, num_ranks=3)
