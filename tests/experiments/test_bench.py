"""The benches: their variants take turns and pairs its ratios, and each of them runs at its smallest size."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import launch
from experiments.bench import harness
from experiments.comparison.results import report
from experiments.comparison.turns import interleave, make_row, table
from tests.worlds import ROOT, run_python, run_world

SMALLEST = {
    "engine": ["--models", "0.8m", "--batches", "1", "--length", "4", "--tail", "3", "--cap", "8"],
    "step": [
        *("--shape", "0.8m", "--batches", "1", "2", "--contexts", "8", "--finished", "3"),
        *("--attentions", "auto", "sdpa", "--without-graphs"),
    ],
    "kv_pool": ["--shape", "0.8m", "--chunk", "3", "--chunks", "4"],
    "page_pool": ["--shape", "0.8m", "--batches", "1", "3", "--prompt", "20", "--steps", "2"],
    "core": ["--waiting", "1", "3", "--replicas", "2", "--slots", "2", "--events", "3"],
    "weight_sync": ["--ranks", "2", "--hidden", "128", "--layers", "1", "--stages", "1"],
    "switch": ["--hidden", "256", "--layers", "1", "--sequences", "3", "--kv-mib", "1", "--figure", "ways.png"],
    "tools": [
        *("--trajectories", "2", "--others", "1", "--tool-s", "0.1", "--turn-tokens", "2"),
        *("--long-tokens", "40", "--single-calls", "3"),
    ],
    "relay_codec": ["--elements", "20000"],
}
OF_TWO_RANKS = ("weight_sync", "switch")
VARIANTS = {
    "engine": [{"ours"}, {"ours", "hf", "hf_cb"}],
    "step": [{"bfloat16", "sdpa", "no graphs", "after finished"}] * 3,
    "kv_pool": [
        *[{"copy in memory", "plain file", "write", "read"}] * 2,
        {"in the step", "by a thread"},
        {"ranges", "anew"},
        {"one entry", "ranges"},
    ],
    "page_pool": [{"own", "pool"}] * 4,
    "core": [{f"{name}, {count} waiting" for name in ("on demand", "context-aware") for count in (1, 3)}] * 4,
    "weight_sync": [{"TP 1", "TP 2"}],
    "switch": [{"all_to_all", "all_gather", "rebuild", "restart"}] * 2,
    "tools": [{"at once", "takes its time"}, {"call"}],
    "relay_codec": [
        {
            "copy",
            *(f"{way} {what}" for way in ("encode", "decode") for what in ("0.1 %", "1 %", "4 %", "50 %", "dense")),
        }
    ],
}


def test_variants_take_turns_and_ratios_are_those_of_one_turn() -> None:
    heard: list[str] = []
    clock = {
        "base": iter([9.0, 1.0, 1.0, 4.0, 2.0, 5.0, 5.0]),
        "other": iter([9.0, 3.0, 8.0, 35.0]),
        "slow": iter([9.0, 2.0]),
    }

    def variant(name: str) -> float:
        heard.append(name)
        return next(clock[name])

    variants = {name: (lambda name=name: variant(name)) for name in clock}
    seconds = interleave({**variants, "slow": [variants["slow"]]}, 3)
    assert heard[:3] == ["base", "other", "slow"], "the warm-up"
    assert heard[3:] == ["base", "other", "slow", "base", "base", "other", "base", "base", "other", "base"]
    # Every second turn is in the reverse order, and so the second run of the baseline comes first in it.
    assert seconds == {"base": [1.0, 2.0, 5.0], "base again": [1.0, 4.0, 5.0], "other": [3.0, 8.0, 35.0], "slow": [2.0]}
    row = make_row("name", seconds, tokens=7)
    assert row["ms"] == {"base": 2000.0, "other": 8000.0, "slow": 2000.0}
    assert row["ratios"] == {"other": 4.0, "slow": 2.0} and row["a_a"] == 1.0
    assert [line.split() for line in table([row]).splitlines()] == [
        ["name", "base", "2000", "ms", "A/A", "1"],
        ["name", "other", "8000", "ms", "4", "x", "the", "time"],
        ["name", "slow", "2000", "ms", "2", "x", "the", "time"],
        ["name", "tokens", "7"],
    ]


def run_bench(bench: str, arguments: list[str], folder: str) -> dict[str, Any] | None:
    """Runs it as a command; returns what rank 0 printed and wrote."""
    os.chdir(folder)
    sys.argv = [str(ROOT / f"experiments/bench/{bench}.py"), *arguments, "--turns", "1", "--output", "result.json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    if launch.rank() > 0:
        return None
    result = json.loads(printed.getvalue().splitlines()[-1])
    assert json.loads(Path("result.json").read_text()) == result
    return dict(result)


@pytest.mark.parametrize("bench", SMALLEST)
def test_runs_at_its_smallest(bench: str, tmp_path: Path) -> None:
    num_ranks = 2 if bench in OF_TWO_RANKS else 1
    result = run_world(run_bench, num_ranks, bench, SMALLEST[bench], str(tmp_path), as_torchrun=num_ranks > 1)[0]
    assert result["experiment"] == f"bench/{bench}" and result["machine"]["cores"] >= 1
    assert [set(row["ms"]) for row in result["rows"]] == VARIANTS[bench]
    assert all(value > 0 for row in result["rows"] for value in (row["a_a"], *row["ms"].values()))
    if bench == "switch":  # which has compared the tokens that all ways drew
        assert all(row[f"made_{kind}"] == 0 for row in result["rows"] for kind in ("processes", "files", "groups"))
        assert [row["weight_bytes"] > 0 for row in result["rows"]] == [False, True]
        assert all(row["kv_bytes"] > 0 for row in result["rows"])
        assert (tmp_path / "ways.png").stat().st_size > 10_000


def test_a_step_beside_busy_processes(tmp_path: Path) -> None:
    command = [str(ROOT / "experiments/bench/step.py"), "--shape", "0.8m", "--batches", "1"]
    done = run_python([*command, "--neighbours", "1", "--turns", "1", "--output", "result.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [set(row["ms"]) for row in result["rows"]] == [{"bfloat16", "busy"}]


def documented() -> Iterator[str]:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")):
        yield from re.findall(r"experiments/bench/(\w+)\.py", path.read_text())


def test_docs_name_benches_that_are_there() -> None:
    assert set(SMALLEST) <= set(documented())
    assert all((ROOT / f"experiments/bench/{name}.py").is_file() for name in documented())


def test_a_disk_that_fills_up_loses_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = harness.BenchConfig(output=tmp_path / "result.json")
    (tmp_path / "result.json").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"output='.*result\.json': No space left on device; the result is on stdout"):
        report("full", config, {"rows": [1.5]})
    assert json.loads(capsys.readouterr().out)["rows"] == [1.5]
