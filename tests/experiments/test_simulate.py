"""`simulate.py` as users run it: figures, traces, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.worlds import refused_by, run_main

SMALL = ["--gpus", "4", "--groups", "6", "--group-size", "4", "--median", "100", "--cap", "600", "--slots", "4"]


def test_one_workload_under_all_policies(tmp_path: Path) -> None:
    figure, traces = tmp_path / "timelines.png", tmp_path / "traces"
    result = run_main("simulate", [*SMALL, "--figure", str(figure), "--traces", str(traces)])
    assert result["tier"] == "sim" and result["workload"]["groups"] == 6
    assert set(result["policies"]) == set(result["seconds"]) == {"static", "on-demand", "longest-first"}
    for policy in result["policies"].values():
        assert result["floor"] < policy["makespan"] and policy["of_floor"] < 1
        assert 0 < policy["tail"] < policy["makespan"] and 0 <= policy["idle_share"] < 1
    assert result["policies"]["longest-first"]["of_hindsight"] == 1
    assert figure.stat().st_size > 1000
    for name in result["policies"]:
        slices = [one for one in json.loads((traces / f"{name}.json").read_text())["traceEvents"] if one["ph"] == "X"]
        assert {one["tid"] for one in slices} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "32b"], "does not fit: weights take 65.5 GB per rank"),
        (["--device", "abacus"], "profile='abacus-8b-tp1': no such latency profile"),
        (["--tensor-parallel-size", "8"], "gpus=4: is no multiple of tensor_parallel_size=8"),
        (["--cap", "2000000"], "cap=2000000: with prompt=512 a sequence can need more than the"),
        (["--gap-s", "-1"], "gap_s=-1.0: must be at least 0"),
        (["--figure", "/nowhere/figure.png"], "figure='/nowhere/figure.png': there is no folder '/nowhere'"),
        (["--policies", "psychic"], "psychic"),
        (["--policies"], "policies=(): must be one or more policies"),
        (["--figure", "timelines.foo"], "figure='timelines.foo': must end in .png, .pdf or .svg"),
        (["--traces", "README.md"], "traces='README.md': is a file; give a folder"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    device = ["--device", "a40"] if options[0] == "--model" else []
    assert message in refused_by("simulate", [*SMALL, *device, *options])
