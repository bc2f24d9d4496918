"""`pat_sim.py` at its smallest: one cell of a figure. What PAT gains there is no test."""

from __future__ import annotations

import pytest

from experiments import pat_sim
from tests.worlds import refused_by


def test_a_cell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short responses, of which the longest reach the limit, on two hosts."""
    monkeypatch.setitem(pat_sim.CASE, "batch", 24)
    monkeypatch.setitem(pat_sim.CASE, "median", 40)
    row = pat_sim.simulate(pat_sim.Cell(figure="10b", gpus="a40-8b", cap=96, hosts=2, claim=1.01), 2)
    speeds = row["tokens_per_second"]
    assert set(speeds) == {"TP1", "TP2", "TP4", "TP8", "pat", "paper", "hindsight"}
    assert row["best_static"] == max(list(speeds)[:4], key=speeds.__getitem__)
    assert row["vs_best_static"]["pat"] == row["pat_over"][row["best_static"]]
    assert row["true_over"] == [name for name, over in row["pat_over"].items() if over >= 1.01] != []
    assert speeds["hindsight"] > 0 and row["switches"] >= 0
    assert not any(name.startswith("TP") for name in row["way_back_s"])
    pat_sim.print_table([row])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split()[:2] == ["figure", "limit"] and lines[1].split()[:2] == ["10b", "0K"]


def test_what_it_refuses() -> None:
    assert "cells=0: must be from 1 to 14" in refused_by("pat_sim", ["--cells", "0"])
    assert "figure='/nowhere/x.png': there is no folder" in refused_by("pat_sim", ["--figure", "/nowhere/x.png"])
    assert "figure='x.txt': must end in .png" in refused_by("pat_sim", ["--figure", "x.txt"])
    assert "output='/tmp': is a folder; give a file in it" in refused_by("pat_sim", ["--output", "/tmp"])
    assert "cells=100: must be from 1 to 14" in refused_by("pat_sim", ["--cells", "100"])
