"""`specactor_sim.py` as users run it, with few sequences; what its settings are."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.parallel.layout import drafters_of
from experiments.specactor_sim import METHOD, NUM_GPUS, RUNGS, Rung, Traced, describe, layout_of
from tests.worlds import refused_by, run_main


def test_every_rung_rolls_out_and_is_compared_with_the_papers(tmp_path: Path) -> None:
    output, figure = tmp_path / "result.json", tmp_path / "figure.png"
    case = "GRPO-32B-20K"
    result = run_main(
        "specactor_sim",
        ["--cases", case, "--thin", "64", "--processes", "1", "--output", str(output), "--figure", str(figure)],
    )
    assert figure.stat().st_size > 10_000 and output.is_file() and result["tier"] == "sim"
    (row,) = result["rows"]
    rungs = row["rungs"]
    assert row["case"] == case and list(rungs) == [*RUNGS]
    assert rungs["plain"]["tokens_per_step"] == rungs["plain"]["speed"] == 1 and not rungs["plain"]["accepted"]
    for rung in RUNGS[1:]:
        assert rungs[rung]["tokens_per_step"] > 1.3 and 0.2 < rungs[rung]["accepted"] < 0.8, rung
    # With two sequences, memory is the bound, and guesses are nearly free to verify.
    assert rungs["coupled"]["speed"] > 1.3 and rungs["filled"]["speed"] > 1
    speeds = {one["name"]: one["ours"] for one in row["paper"]}
    expected = rungs["plain"]["seconds"] / rungs["coupled"]["seconds"]
    assert speeds["coupled over plain"] == pytest.approx(expected, rel=1e-3)
    assert {one["mode"] for one in row["planner"]} <= {"off", "coupled", "filled", "strict"}


def test_bands_are_the_papers_side_of_1() -> None:
    seconds: dict[Rung, float] = dict(zip(RUNGS, (10.0, 9.0, 9.5, 8.0, 8.5, 8.0, 8.0), strict=True))
    row = describe("DAPO-32B-20K", {rung: {"seconds": one} for rung, one in seconds.items()})
    assert [one["inside"] for one in row["paper"]] == [True, False, True, False]


def test_workers_have_drafters_of_their_own() -> None:
    layout = layout_of(3, 2)
    workers = [spec for spec in layout.replicas if spec.role == "rollout"]
    assert [spec.tp_size for spec in workers] == [4, 4, 4] and len(layout.replicas) == 9
    found = [rank for spec in workers for rank in drafters_of(layout, spec)]
    assert len(found) == len(set(found)) == 6
    settings = Traced("DAPO-32B-20K", 1).settings()
    for setting in settings.values():
        place = setting.plan.placement
        used = place.num_verifiers * place.verifier_gpus + place.num_drafters * place.draft_gpus
        assert used + setting.plan.leftover_gpus == NUM_GPUS and setting.plan.method == METHOD
        assert setting.plan.batch == -(-256 * 64 // place.num_verifiers) or setting.plan.batch == 256 * 64 * 5 // 256


def test_more_is_taken_away_than_there_is() -> None:
    assert "thin=200: a worker has 128 sequences" in refused_by("specactor_sim", ["--thin", "200"])
