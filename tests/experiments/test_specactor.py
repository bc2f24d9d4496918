"""`specactor.py` on small rollouts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.specactor import SpecActorConfig
from tests.worlds import refused_by, run_main

SMALL = ["--parts", "paced", "--ranks", "3", "--shrink", "8", "--turns", "1", "--scale", "0.1", "--cases", "even"]
SMALL += ["--processes", "1"]


def test_all_modes_draw_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    found = run_main("specactor", [*SMALL, "--figure", str(tmp_path)], num_ranks=3)
    assert found["tokens_equal"] is True and found["plan_equal"] is True and found["waste_max"] <= 0
    modes = found["cases"]["even"]
    assert sorted(modes) == ["coupled", "filled", "naive", "planner", "reconfigured", "strict"]
    assert modes["coupled"] == {"speedup": 1.0, "tail": 1.0}
    assert all(one["speedup"] > 0 and one["tail"] > 0 for one in modes.values())
    case, steady = found["paced"]["cases"]["even"], found["paced"]["steady"]
    assert abs(case["acceptance"]["0.5B"] - 0.88) < 0.05, "it is learnt from outcomes"
    assert found["renewal_error"] < 0.03 and found["plan_ms"] > 0
    assert list(steady["rates"]) == [
        "oracle, w=4", "oracle, w=8", "always wrong, reconfigured", "always wrong", "drafter of twice the price",
        "printed tau's window",
    ]  # fmt: skip
    assert (tmp_path / "specactor_even.png").stat().st_size > 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ranks=1: one drafts, and one verifies; give 2 or more"):
        SpecActorConfig(ranks=1)
    with pytest.raises(ValueError, match="live_ranks=3: one drafts, and one verifies; give 2"):
        SpecActorConfig(live_ranks=3)
    assert "cases" in refused_by("specactor", ["--cases", "odd"])
