"""`reproduce.py` on results of the shape that experiments write, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import launch, reproduce
from tests.worlds import ROOT, refused_by, run_main, run_python

GAINS = {"gain": 4.0, "break_even": 0.14}
RESULTS: dict[str, Any] = {
    "seer_sim.json": {
        "rows": [
            {
                "case": "moonlight",
                "paper": [
                    {"task": "moonlight", "figure": "Table 6", "name": "divided", "ours": 1.2, "inside": True},
                    {"task": "moonlight", "figure": "Fig. 10", "name": "context, tail", "ours": 0.5, "inside": False},
                    {"task": "moonlight", "figure": "Fig. 11", "name": "drafts over none", "ours": 1.3, "inside": True},
                ],
            }
        ]
    },
    "drafting.json": {
        "acceptance_length": {
            "1": {"0": {"1": 1.5, "4": 1.6}, "1": {"1": 2.0, "4": 2.0}, "15": {"1": 1.9, "2": 2.0, "4": 2.2}}
        }
    },
    "pat_sim.json": {
        "rows": [
            {
                "figure": "11a",
                "pat_over": {"TP1": 1.6, "TP2": 2.0},
                "best_static": "TP8",
                "vs_best_static": {"pat": 0.99},
            }
        ]
    },
    "specactor_sim.json": {
        "rows": [
            {"case": f"{name}-32B-20K", "paper": [{"name": "naive over plain", "ours": 0.9, "inside": True}]}
            for name in ("DAPO", "GRPO")
        ]
    },
    "relay_sim.json": {
        "cells": {
            "8b": {
                "200": {"codecs": {"ours": GAINS | {"gain": 2.4}, "paper": GAINS | {"break_even": 0.3334}}},
                "1": {"codecs": {"ours": GAINS | {"break_even": None}, "paper": GAINS | {"break_even": 0.35}}},
            }
        }
    },
    "rose_sim.json": {
        "workload": {"dedicated": 4},
        "limits": {"code": {"ttft_slo_ms": 100.0, "tpot_slo_ms": 20.0}},
        "sharing": {
            "code": {
                "static": {"rollout_s": 60.0, "ttft_p99": 90.0, "tpot_p99": 30.0, "ok": False},
                "preempt": {"rollout_s": 48.0, "ttft_p99": 90.0, "tpot_p99": 19.0, "ok": True},
                "prefix": {"rollout_s": 50.0, "ttft_p99": 200.0, "tpot_p99": 30.0, "ok": False},
            }
        },
        "engines": {
            "code": {
                "rose": {"rollout_s": 40.0, "ttft_p99": 101.0, "tpot_p99": 10.0, "ok": True},
                "swap": {"rollout_s": 60.0, "ttft_p99": 300.0, "tpot_p99": 10.0, "ok": False},
                "multiplex": {"rollout_s": 48.0, "ttft_p99": 90.0, "tpot_p99": 19.0, "ok": True},
            }
        },
        "replicas": {"code": {str(count): {"speedup": speed} for count, speed in ((2, 1.2), (4, 1.19), (8, 1.9))}},
        "lease": {"10": {"rollout_s": 50.0}, "100": {"rollout_s": 53.0}},
        "density": {
            "1": {"rollout_s": 50.0, "ttft_p99": 100.0},
            "2": {"rollout_s": 55.0, "ttft_p99": 90.0},
            "1, alone": {"rollout_s": 80.0, "ttft_p99": 60.0},
            "2, alone": {"rollout_s": 80.0, "ttft_p99": 70.0},
        },
    },
    "switch.json": {
        "rows": [{"name": "TP1 -> TP2", "ms": {"all_to_all": 1000.0, "restart": 50_000.0}, "ratios": {"restart": 25.0}}]
    },
    "heddle_sim.json": {
        "schedulers": {},
        "placement": {},
        "allocation": {"14b": {"math": {"fix1": 1.5, "fix8": 0.99, "unequal": 1.2}}},
        "systems": {"14b": {"math": {"verl": 2.0}}},
    },
    "pat_profile.json": {"predictor_error": [{"tp_size": 1, "what": "held out", "error": 0.12, "a_a": 0.01}]},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, result in RESULTS.items():
        (tmp_path / name).write_text(json.dumps(result))
    return tmp_path


def test_each_row_says_what_was_measured_and_whether_it_is_inside(results: Path) -> None:
    rows = run_main("reproduce", ["--results", str(results)])["rows"]
    assert list(rows) == [str(row.number) for row in reproduce.ROWS]
    assert rows["1"] == {"moonlight, divided": {"ours": 1.2, "inside": True}}
    assert rows["2"]["moonlight, context, tail"]["inside"] is False
    assert [one["inside"] for one in rows["3"].values()] == [True, True, True, False, False, True]
    assert rows["3"]["1 references, 4 paths"] == {"ours": 2.0, "inside": False}, "no more than one path"
    assert rows["4"]["moonlight, drafts over none"]["ours"] == 1.3
    assert rows["5"] is None and rows["11"] is None
    assert rows["6"] == {
        "11a, over TP1": {"ours": 0.375, "inside": True},
        "11a, over TP2": {"ours": 0.5, "inside": False},
        "11a, over the best (TP8)": {"ours": pytest.approx(-0.0101), "inside": None},
    }
    # New processes are timed once, in the first turn, whose switch is a cold one.
    assert rows["7"] == {"TP1 -> TP2": {"ours": 50.0, "inside": None}}
    assert rows["8"] == {"TP1, held out": {"ours": 0.12, "inside": False}}
    assert rows["9"] == {
        "DAPO, naive over plain": {"ours": 0.9, "inside": True},
        "GRPO, naive over plain": {"ours": 0.9, "inside": None},
    }
    assert rows["12"] == {
        "Fig. 16, math, fix1": {"ours": 1.5, "inside": True},
        "Fig. 16, math, fix8": {"ours": 0.99, "inside": False},
        "Fig. 16, math, Algorithm 2 alone": {"ours": 1.2, "inside": None},
        "Fig. 12, 14b, math, verl": {"ours": 2.0, "inside": None},
    }
    assert rows["14"] == {
        "code, seconds of static over preempt": {"ours": 1.25, "inside": True},
        "code, seconds of preempt over prefix": {"ours": 0.96, "inside": False},
        "code, seconds of swap over ROSE": {"ours": 1.5, "inside": None},
        "code, seconds of multiplex over ROSE": {"ours": 1.2, "inside": None},
        "code, P99 over SLO, static": {"ours": 1.5, "inside": True},
        "code, P99 over SLO, preempt": {"ours": 0.95, "inside": False},
        "code, P99 over SLO, prefix": {"ours": 2.0, "inside": True},
        "code, P99 over SLO, swap": {"ours": 3.0, "inside": None},
        "code, P99 over SLO, ROSE": {"ours": 1.01, "inside": True},
    }
    assert [one["inside"] for one in rows["15"].values()] == [True, False, False]
    assert rows["17"] == {
        "lease 10 s, seconds": {"ours": 1.0, "inside": True},
        "lease 100 s, seconds": {"ours": 1.06, "inside": False},
        "density 1, TTFT P99": {"ours": 1.0, "inside": True},
        "density 1, TTFT P99 of serving alone": {"ours": 0.6, "inside": None},
        "density 1, seconds": {"ours": 1.0, "inside": None},
        "density 2, TTFT P99": {"ours": 0.9, "inside": False},
        "density 2, TTFT P99 of serving alone": {"ours": 0.7, "inside": None},
        "density 2, seconds": {"ours": 1.1, "inside": None},
    }
    assert rows["16"] == {
        "8b, 200 Gb/s, codec ours, gain": {"ours": 2.4, "inside": False},
        "8b, 200 Gb/s, codec ours, break-even": {"ours": 0.14, "inside": False},
        "8b, 200 Gb/s, codec paper, gain": {"ours": 4.0, "inside": True},
        "8b, 200 Gb/s, codec paper, break-even": {"ours": 0.3334, "inside": True},
        "8b, 1 Gb/s, codec ours, gain": {"ours": 4.0, "inside": True},
        "8b, 1 Gb/s, codec ours, break-even": {"ours": 1.0, "inside": None},
        "8b, 1 Gb/s, codec paper, gain": {"ours": 4.0, "inside": True},
        "8b, 1 Gb/s, codec paper, break-even": {"ours": 0.35, "inside": None},
    }
    assert list(run_main("reproduce", ["3", "8", "--results", str(results)])["rows"]) == ["3", "8"]


def test_a_row_is_measured_anew(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command whose result is the last line of its output; one that fails leaves the old result."""
    (row,) = (one for one in reproduce.ROWS if one.number == 8)
    path = results / row.result
    before = path.read_text()
    works = "print('a table'); print('{}')"
    for code in (4, launch.TOKENS_DIFFER):
        with pytest.raises(ValueError, match=rf"its processes ended with code {code}"):
            reproduce._measure(replace(row, command=f'-c "{works}; raise SystemExit({code})"'), path)
        assert path.read_text() == before
    reproduce._measure(replace(row, command=f'-c "{works}"'), path)
    assert path.read_text() == "{}\n"


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    done = run_python([str(ROOT / "experiments/reproduce.py"), "--markdown"])
    assert done.returncode == 0 and done.stdout == (ROOT / "docs/reproduction.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["10"], "rows: there is no row 10; give some of [1, 2, 3"),
        (["--results", "/nowhere"], "results='/nowhere': there is no such folder; make it"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("reproduce", options)


def test_a_damaged_result_is_named(results: Path) -> None:
    for text in ("[", "{}"):
        (results / "pat_sim.json").write_text(text)
        assert "pat_sim.json: is no result of experiments/pat_sim.py" in refused_by(
            "reproduce", ["6", "--results", str(results)]
        )
