"""`simulate.py` as users run it: figures, traces, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import simulate
from experiments.simulate import SimulateConfig
from tests.wandb_files import logged
from tests.worlds import ROOT, refused_by, run_main, run_python

SMALL = ["--gpus", "4", "--groups", "6", "--group-size", "4", "--median", "100", "--cap", "600", "--slots", "4"]
OFF = ["--wandb", "off"]


def test_trajectories(tmp_path: Path) -> None:
    """Under a policy of each paper, and with hindsight; slow tools are the floor."""
    turns = ["--turns.median", "4", "--turns.tool-s", "30", "--turns.observed", "20", "--median", "20"]
    policies = ["--policies", "on-demand", "seer", "on-demand+pat", "longest-first"]
    options = [*SMALL, *turns, *OFF, *policies, "--history", "32"]
    result = run_main("simulate", [*options, "--traces", str(tmp_path / "traces")])
    for name, policy in result["policies"].items():
        assert policy["queue_s"] >= 0 and (30 < result["floor"] < policy["makespan"] or name.endswith("+pat"))
        events = json.loads((tmp_path / "traces" / f"{name}.json").read_text())["traceEvents"]
        assert sum(event["pid"] == 1 and event["name"] == "tool" and event["dur"] > 0 for event in events) > 24
    assert "has no turns; leave it out, or --turns.median" in refused_by(
        "simulate", [*SMALL, *OFF, "--turns.median", "2", "--lengths", __file__]
    )
    refused = refused_by("simulate", [*SMALL, "--turns.median", "-1"])
    assert "--turns.median=-1.0: must be" in refused, "not --median, which SMALL has as well"
    wide = refused_by("simulate", [*SMALL, "--turns.median", "2", "--turns.tool-sigma", "1000"])
    assert "--turns.tool-sigma=1000.0: must be from 0 to 10" in wide


def test_one_workload_under_all_policies(tmp_path: Path) -> None:
    figure, traces = tmp_path / "timelines.png", tmp_path / "traces"
    result = run_main("simulate", [*SMALL, *OFF, "--figure", str(figure), "--traces", str(traces)])
    assert result["tier"] == "sim" and result["workload"]["groups"] == 6
    assert set(result["policies"]) == set(result["seconds"]) == {"static", "on-demand", "longest-first"}
    for policy in result["policies"].values():
        assert result["floor"] < policy["makespan"] and policy["of_floor"] < 1 and "queue_s" not in policy
        assert 0 < policy["tail"] < policy["makespan"] and 0 <= policy["idle_share"] < 1
    assert result["policies"]["longest-first"]["of_hindsight"] == 1
    assert figure.stat().st_size > 1000
    for name in result["policies"]:
        slices = [one for one in json.loads((traces / f"{name}.json").read_text())["traceEvents"] if one["ph"] == "X"]
        assert {one["tid"] for one in slices} == {0, 1, 2, 3}


OWN_POLICY = """
from engines.coordination.views import Dispatch

class Latest:
    def next(self, view):
        for sequence in reversed(view.waiting.values()):
            for replica in view.replicas.values():
                if replica.room_for(sequence):
                    return Dispatch(sequence_id=sequence.sequence_id, replica_id=replica.spec.id)
        return None

class Nothing:
    pass
"""


def test_every_policy_ours_and_a_user_s_on_one_workload(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_POLICY)
    names = ["static", "group-static", "on-demand", "divided", "divided-in-turns", "seer", "oracle", "longest-first"]
    names += [f"{own}:Latest"]
    found = run_main("simulate", [*SMALL, *OFF, "--policies", *names, "--traces", str(tmp_path / "traces")])
    policies = found["policies"]
    assert list(policies) == names and found["tokens"] > 0
    assert policies["longest-first"]["of_hindsight"] == 1 and min(one["makespan"] for one in policies.values()) > 0
    assert len({one["makespan"] for one in policies.values()}) > 6, "policies decide otherwise"
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"{name.replace('/', '_')}.json" for name in names
    }
    refused = [*SMALL, *OFF, "--policies", f"{own}:Nothing"]
    assert "has no method 'next'" in refused_by("simulate", refused)
    own.write_text("class Taking:\n    def __init__(self, one): ...\n    def next(self, view): ...\n")
    taking = [*SMALL, *OFF, "--policies", "static", f"{own}:Taking"]
    assert "cannot be made without arguments: TypeError" in refused_by("simulate", taking)
    own.write_text("raise SystemExit")
    assert "SystemExit" in refused_by("simulate", taking)


def test_with_pat_each_host_changes_its_tp_size(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_POLICY)
    names = ["on-demand", "on-demand+pat", f"{own}:Latest+pat"]
    sizes = ["--gpus", "8", "--gpus-per-host", "4", "--slots", "64", "--device", "a40", "--prompt", "16"]
    lengths = ["--groups", "96", "--median", "400", "--cap", "4000"]
    policies = run_main("simulate", [*SMALL, *OFF, *sizes, *lengths, "--policies", *names])["policies"]
    assert {name for name, one in policies.items() if one["switches"]} == {*names[1:]}
    assert policies["on-demand+pat"]["makespan"] < policies["on-demand"]["makespan"]
    stays = run_main("simulate", [*SMALL, *OFF, *sizes, *lengths, "--pat.margin", "1", "--policies", "on-demand+pat"])
    assert stays["policies"]["on-demand+pat"]["switches"] == 0


def test_the_lengths_of_a_run_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    rows = [{"lengths": [500, 600, 700] * 99}, {"lengths": [10, 20, 30, 40, 50, 60, 700, 800]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replay = [*SMALL, *OFF, "--policies", "on-demand", "--lengths", str(path), "--length-scale", "2"]
    assert run_main("simulate", replay)["tokens"] == 2 * 210 + 600 + 600, "capped at 600"
    config = SimulateConfig(lengths=path, cap=600, history=4, group_size=4, median=9.0)
    assert simulate._earlier(config) == [600, 500, 600, 600], "the last ones before, whatever the median"
    assert simulate._earlier(replace(config, history=0)) == []
    assert "--group-size=3: does not divide the 8 lengths of" in refused_by("simulate", [*replay, "--group-size", "3"])
    for lengths in ("[]", "[3, 0]", "[1, true]", "[1e999]", "{}"):
        path.write_text(f'{{"lengths": {lengths}}}')
        assert "is no lengths.jsonl of train.py" in refused_by("simulate", replay), lengths
    assert "--lengths='nowhere': is no file" in refused_by("simulate", [*SMALL, *OFF, "--lengths", "nowhere"])


def test_replicas_of_several_gpus_lie_within_a_host() -> None:
    sizes = ["--gpus", "16", "--tensor-parallel-size", "4", "--policies", "on-demand"]
    assert run_main("simulate", [*SMALL, *OFF, *sizes])["policies"]["on-demand"]["makespan"] > 0


def test_drafts_shorten_the_rollout(tmp_path: Path) -> None:
    once = [*SMALL, *OFF, "--policies", "on-demand"]
    plain = run_main("simulate", once)["policies"]["on-demand"]
    table, figure = ["--draft-tokens-per-step", "0", "1.5", "3", "3.5"], ["--figure", str(tmp_path / "lines.png")]
    drafted = run_main("simulate", [*once, "--max-draft-tokens", "8", *table, *figure])["policies"]["on-demand"]
    assert drafted["makespan"] < 0.8 * plain["makespan"]
    assert 1.3 < drafted["tokens_per_step"] < 3.5 and 1 < drafted["draft_length"] <= 8
    assert "tokens_per_step" not in plain
    assert {path.name for path in tmp_path.iterdir()} == {"lines.png", "lines_drafts.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "32b"], "does not fit: weights take 65.5 GB per rank"),
        (["--device", "abacus"], "as in 'h100-8b-tp1'; these are --device, --model and --tensor-parallel-size"),
        (["--tensor-parallel-size", "8"], "gpus=4: is no multiple of tensor_parallel_size=8"),
        (["--cap", "2000000"], "cap=2000000: with prompt=512 a sequence can need more than the"),
        (["--gap-s", "-1"], "--gap-s=-1.0: must be at least 0"),
        (["--figure", "/nowhere/figure.png"], "figure='/nowhere/figure.png': there is no folder '/nowhere'"),
        (["--policies", "psychic"], "policies='psychic': give static, on-demand, group-static, divided,"),
        (["--policies", "static", "static"], "names one twice"),
        (
            ["--policies", "heddle+pat"],
            "policies='heddle+pat': needs predictions of lengths; use experiments/heddle_sim.py",
        ),
        (["--policies", "psychic+pat"], "policies='psychic': give static,"),
        (["--policies", "nowhere.py:Policy"], "policies='nowhere.py:Policy': there is no file 'nowhere.py'"),
        (["--chunk-tokens", "4000"], "--chunk-tokens=4000: must be at least a block of KV"),
        (["--pat.margin", "-1"], "--pat.margin=-1.0: must be"),
        (["--gpus", "12", "--gpus-per-host", "8", "--policies", "on-demand+pat"], "and +pat needs whole hosts"),
        (["--policies"], "policies=(): must be one or more policies"),
        (["--figure", "timelines.foo"], "figure='timelines.foo': must end in .png, .pdf or .svg"),
        (["--figure", "/sys/figure.png"], "figure='/sys/figure.png': cannot be written ("),
        (["--traces", "README.md"], "traces='README.md': is a file; give a folder"),
        (["--traces", "/sys/traces"], "traces='/sys/traces': cannot be written ("),
        (["--traces", "/sys"], "traces='/sys': cannot be written ("),
        (["--gpus-per-host", "3", "--tensor-parallel-size", "2"], "a replica would be on two hosts"),
        (["--wandb", "on"], "--wandb"),
        (["--draft-server"], "--draft-server=True: is for drafter='grouped_suffix', not 'none'"),
        (
            ["--pat.margin", "0.3"],
            "pat: has no effect with policies=('static', 'on-demand', 'longest-first'); add +pat",
        ),
        (["--max-draft-tokens", "2000"], "--max-draft-tokens=2000: must be an integer of 1 to 1024"),
        (["--draft-tokens-per-step", "0", "15"], "DraftAcceptance.table={0: 15.0}: give numbers of references"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    device = ["--device", "a40"] if options[0] == "--model" else []
    assert message in refused_by("simulate", [*SMALL, *OFF, *device, *options])


def test_each_policy_is_a_run_of_wandb(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    command = [str(ROOT / "experiments/simulate.py"), *SMALL, "--policies", "static", "on-demand"]
    run_python(command, env=env, cwd=tmp_path).check_returncode()
    runs = [*map(logged, tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(runs) == 2
    for name in (b"simulate-static", b"simulate-on-demand"):
        (mine,) = [run for run in runs if name in run]
        assert all(key in mine for key in (b"makespan", b"tail", b"idle_share", b"preempted", b"of_floor"))
