"""`pat_sim.py` at its smallest: one cell of a figure. What PAT gains there is no test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from engines.parallel.layout import nested_layout
from experiments import pat_sim
from experiments.comparison.rollouts import Variant
from experiments.pat_cases import Batch, changing
from research.pat.deployment import Deployment
from research.pat.hindsight import PlayedPlan
from research.pat.lookahead import Plan
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from tests.worlds import refused_by


def test_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short responses, of which the longest reach the limit, on two hosts."""
    monkeypatch.setitem(pat_sim.CASE, "batch", 24)
    monkeypatch.setitem(pat_sim.CASE, "median", 40)
    (tmp_path / "own.py").write_text("from research.pat.controller import PatController as Own\n")
    own = f"{tmp_path}/own.py:Own"
    row = pat_sim.simulate(pat_sim.Cell(figure="10b", gpus="a40-8b", cap=96, hosts=2, claim=1.01), 2, (own,))
    speeds = row["tokens_per_second"]
    assert set(speeds) == {"TP1", "TP2", "TP4", "TP8", "pat", "paper", "hindsight", own}
    assert speeds[own] == speeds["pat"] and row["vs_best_static"][own] == row["vs_best_static"]["pat"]
    assert row["best_static"] == max(list(speeds)[:4], key=speeds.__getitem__)
    assert row["vs_best_static"]["pat"] == row["pat_over"][row["best_static"]]
    assert row["true_over"] == [name for name, over in row["pat_over"].items() if over >= 1.01] != []
    assert speeds["hindsight"] > 0 and row["switches"] >= 0
    assert not any(name.startswith("TP") for name in row["way_back_s"])
    pat_sim.print_table([row])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split()[:2] == ["figure", "limit"] and lines[1].split()[:2] == ["10b", "0K"]


def test_the_way_back_is_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a variant that begins in TP1 and goes to TP8, on one host; the others stay."""
    monkeypatch.setitem(pat_sim.CASE, "batch", 24)
    monkeypatch.setitem(pat_sim.CASE, "median", 40)
    made = []
    variants_of = pat_sim._variants

    def widening(deployment: Deployment, host: Deployment, batch: Batch, also: tuple[str, ...]) -> dict[str, Variant]:
        plan = Plan(stages=((len(batch.lengths), 1), (4, 8)), seconds=0.0, kept_seconds=0.0)
        play = partial(PlayedPlan, plan, deployment)
        made.append((deployment, batch, changing(deployment, play().layout(), play)))
        stays = {name: one for name, one in variants_of(deployment, host, batch).items() if name.startswith("TP")}
        return stays | dict.fromkeys(("pat", "paper"), made[-1][-1]) | {"hindsight": stays["TP2"]}

    monkeypatch.setattr(pat_sim, "_variants", widening)
    row = pat_sim.simulate(pat_sim.Cell(figure="10a", gpus="a40-8b", cap=96), 1)
    ((deployment, batch, variant),) = made
    pace = ProfilePace(device=profile("a40-8b-tp1").device, shape=profile("a40-8b-tp1").shape)
    back_s = pace.switch(nested_layout(range(8), 8), nested_layout(range(8), 1), 0)
    assert row["switches"] == 1 and row["way_back_s"] == pytest.approx(
        dict.fromkeys(("pat", "paper"), back_s), rel=1e-3
    )
    seconds = pat_sim.world(pace, deployment).roll_out(batch.workload(), variant).makespan_s + back_s
    assert row["tokens_per_second"]["pat"] == pytest.approx(sum(batch.lengths) / seconds, rel=1e-3)


def test_what_it_refuses() -> None:
    assert "cells: '10a' is none of 10a-6K, 10a-8K," in refused_by("pat_sim", ["--cells", "10a"])
    assert "also='x.py:Own': there is no file 'x.py'" in refused_by("pat_sim", ["--also", "x.py:Own"])
    told = refused_by("pat_sim", ["--also", "pat"])
    assert "also='pat': give pat, paper and hindsight, which are always there, or" in told
    assert "figure='/nowhere/x.png': there is no folder" in refused_by("pat_sim", ["--figure", "/nowhere/x.png"])
    assert "figure='x.txt': must end in .png" in refused_by("pat_sim", ["--figure", "x.txt"])
    assert "output='/tmp': is a folder; give a file in it" in refused_by("pat_sim", ["--output", "/tmp"])
