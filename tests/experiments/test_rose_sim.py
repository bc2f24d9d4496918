"""`rose_sim.py` as users run it, what its cases mean, and a policy that ignores SLOs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.rose_policies import latencies, slo_of
from experiments.rose_sim import RoseSimConfig, cases_of
from experiments.rose_sim_cases import Case, simulate
from tests.worlds import refused_by, run_main

SMALL = ["--dedicated", "1", "--serving", "1", "--groups", "8", "--processes", "1", "--wandb", "off"]


def test_a_first_look_has_all_that_the_whole_has(tmp_path: Path) -> None:
    figure, output = tmp_path / "figure.png", tmp_path / "result.json"
    found = run_main("rose_sim", ["--quick", *SMALL, "--figure", str(figure), "--output", str(output)])
    assert found == json.loads(output.read_text()) and figure.stat().st_size > 10_000
    assert found["tier"] == "sim" and found["tokens_equal"] is True
    (cell,) = found["slo"]
    policies = found["slo"][cell]
    assert {*policies} == {"alone", "none", "dual"} and policies["alone"]["ok"] and policies["dual"]["ok"]
    assert {*policies["dual"]} == {"ttft_p99", "tpot_p99", "ttft_mean", "tpot_mean", "ok"}
    assert found["rollout_s"][cell].keys() == policies.keys() == found["speedup"][cell].keys()
    for name in ("harvest", "lent_s"):
        assert {*found[name][cell]} == {"none", "dual"}
    assert 0 < found["harvest"][cell]["dual"] < 1.5 and sum(found["lent_s"][cell]["dual"]) > 0
    assert {*found["sharing"][cell]} == {"static", "preempt", "prefix"}
    assert found["sharing"][cell]["prefix"]["rollout_s"] == found["rollout_s"][cell]["none"]
    assert {*found["engines"][cell]} == {"rose", "swap", "multiplex"}
    assert {*found["lease"]} == {"10", "20"} and {*found["density"]} == {"1", "1.5", "1, alone", "1.5, alone"}
    assert found["density"]["1.5, alone"]["ttft_mean"] > policies["alone"]["ttft_mean"]
    assert found["unused"]["speedup"] > 1.2, "a GPU more that serves nothing"
    assert found["replicas"][cell]["1"]["speedup"] == found["speedup"][cell]["dual"]


def test_turns_without_slos_break_one_that_dual_holds() -> None:
    config = RoseSimConfig(dedicated=1, serving=1, groups=3)
    alone = Case(cell="code", admission="alone", num_serving=1)
    slo = slo_of([simulate(config, {}, alone)])
    ok = {}
    for admission in ("none", "dual"):
        done = simulate(config, {"code": slo}, replace(alone, admission=admission))
        assert done.is_whole and sum(done.lent_s) > 10
        ok[admission] = latencies([done], *slo)["ok"]
    assert ok == {"none": False, "dual": True}


def test_each_case_is_simulated_once_where_it_is_in_several_places() -> None:
    config = RoseSimConfig()
    places = cases_of(config)
    assert places["policies", "code", "dual"] == places["engines", "code", "rose"] == places["replicas", "code", "4"]
    assert places["policies", "conversation", "dual"] == places["lease", "10"] == places["density", "1"]
    assert places["sharing", "code", "preempt"] == places["engines", "code", "multiplex"]
    assert len(places) > len({*places.values()}) > 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "4"], "--groups=4: the dedicated=4 replicas run all of them at once, and borrow nothing"),
        (["--traces", "/nowhere"], "has no AzureLLMInferenceTrace_conv.csv; name the folder of the traces"),
        (["--densities", "5"], "densities"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("rose_sim", options)
