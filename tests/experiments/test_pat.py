"""`pat.py` as users run it. What it gains is no test: it depends on the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.comparison.rollouts import Rollout
from experiments.pat import describe
from tests.worlds import refused_by, run_main

SMALL = ["--shrink", "8", "--hidden", "256", "--scale", "0.1"]


def test_both_parts(tmp_path: Path) -> None:
    """The paced one on ranks that rank 0 starts: without a tail nobody switches."""
    more = ["--ranks", "2", "--turns", "1", "--cases", "uniform"]
    files = ["--figure", str(tmp_path), "--output", str(tmp_path / "result.json")]
    result = run_main("pat", [*SMALL, *more, *files], num_ranks=2)
    live, paced = result["live"], result["paced"]
    assert (live["tier"], paced["tier"]) == ("live", "paced")
    assert live["tokens_equal"] and live["workload"] and result["predictor_error"] > 0
    for seconds in live["switch_s_by_tokens"].values():
        assert len(seconds) == 2, "the price of a token of KV is that between few and many"
    assert len(live["switch_s_by_tokens"]) == 2
    check_paced(paced, "uniform", num_turns=1)
    assert paced["switches"]["uniform"] == [] and paced["switch_share"]["uniform"] == 0
    assert set(paced["row"]["uniform"]["ms"]) == variants(1, 2)
    assert {"tp_size", "chosen", "seconds", "kept_seconds", "stages"} <= paced["decisions"]["uniform"][0].keys()
    assert {path.stem for path in tmp_path.glob("*.png")} == {"uniform", "live"}
    assert (tmp_path / "result.json").is_file()


def test_a_tail_is_switched_for() -> None:
    more = ["--parts", "paced", "--ranks", "4", "--turns", "2", "--cases", "a40-8b-2048"]
    paced = run_main("pat", [*SMALL, *more], num_ranks=4)["paced"]
    check_paced(paced, "a40-8b-2048", num_turns=2)
    ways_back = paced["way_back_s"]["a40-8b-2048"]
    assert ways_back.keys() == paced["row"]["a40-8b-2048"]["ms"].keys()
    assert {name for name, took in ways_back.items() if took} >= {"pat", "hindsight"}, "they switch"
    assert not any(took for name, took in ways_back.items() if "static" in name or name == "rebalanced")
    assert set(paced["row"]["a40-8b-2048"]["ms"]) == variants(1, 2, 4) | {"hindsight", "rebalanced"}


def variants(*sizes: int) -> set[str]:
    return {f"static TP{size}" for size in sizes} | {"pat", "paper", "no history"}


def check_paced(paced: dict[str, Any], case: str, num_turns: int) -> None:
    assert paced["tokens_equal"] and paced["workload"] == {case: "no workload of the paper's"}
    figures = ("no_history_vs_best_static", "regret", "vs_best_static", "vs_rebalanced")
    for name in (*figures, "switch_share", "a_a", "steps_longer_than_paced"):
        assert paced[name].keys() == {case} and isinstance(paced[name][case], float), name
    row = paced["row"][case]
    assert "distribution" in row["history"]
    turns = {name: len(some) for name, some in row["turns_ms"].items() if name in ("pat", "no history", "paper")}
    assert turns == dict.fromkeys(("pat", "no history", "paper"), num_turns)
    assert len(paced["vs_best_static_by_batch"][case]) == num_turns


def test_a_static_size_that_was_run_once_is_not_the_best_one() -> None:
    """Its only turn may have been a lucky one, or the baseline's an unlucky one."""
    seconds = {"static TP1": [4.0, 2.0], "pat": [2.0, 1.0], "no history": [2.0, 1.0], "static TP2": [2.5]}
    seconds["static TP1 again"] = [4.0, 2.0]
    policy = SimpleNamespace(log=[])
    one = Rollout(steps=[], makespan_s=0.0, finish_times={}, lengths={}, num_preempted=0, layout_policy=policy)
    runs = {name: [replace(one, makespan_s=took) for took in some] for name, some in seconds.items()}
    found = describe("a case", runs, {})
    assert found["vs_best_static_by_batch"] == [2.0, 2.0] and found["regret"] == -0.5


def test_what_it_refuses() -> None:
    assert "cases=(): must be one or more cases" in refused_by("pat", ["--cases"])
    assert "invalid choice 'a40-8b-9'" in refused_by("pat", ["--cases", "a40-8b-9"])
    assert "turns=0: must be an integer of at least 1" in refused_by("pat", ["--turns", "0"])
    assert "hidden=100: must be a multiple of 256" in refused_by("pat", ["--hidden", "100"])
    assert "figure='/nowhere': there is no such folder; make it" in refused_by("pat", ["--figure", "/nowhere"])
    assert "ranks=3: the paced part needs several TP sizes for all of them" in refused_by("pat", ["--ranks", "3"])
    assert "output='/nowhere/x': there is no folder" in refused_by("pat", ["--output", "/nowhere/x"])
