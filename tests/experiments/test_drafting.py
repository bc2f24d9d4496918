"""`drafting.py` as users run it, with a random model in the place of the trained one. Speeds are no test."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
import tyro

from algos.publish import RECORD_FILE
from algos.warmstart_config import ModelSize, WarmStartConfig
from experiments import draft_drift, draft_epochs, launch
from experiments.drafting import PARTS, DraftingConfig
from tests.worlds import refused_by, run_main


@pytest.fixture
def models(text_model: str, tmp_path: Path) -> Path:
    """As if the warm starts had been made there."""
    for size in get_args(ModelSize):
        shutil.copytree(text_model, tmp_path / "models" / size)
        record = {"warm_start": asdict(WarmStartConfig(size=size))}
        (tmp_path / "models" / size / RECORD_FILE).write_text(json.dumps(record))
    return tmp_path / "models"


def test_parts(models: Path, tmp_path: Path) -> None:
    figure, output = tmp_path / "drafting.png", tmp_path / "result.json"
    small = ["--groups", "2", "--batches", "1", "--turns", "1", "--widen", "2", "--figure", str(figure)]
    small += ["--temperatures", "1"]
    parts = ["--parts", "equal", "acceptance", "speedup", "agreement"]
    result = run_main("drafting", ["--models", str(models), "--output", str(output), *small, *parts])
    assert result["tokens_equal"] is True and len(result["equal"]) >= 40 and min(result["drafted"].values()) > 0
    assert json.loads(output.read_text()) == result and figure.stat().st_size > 5000
    for table in result["acceptance_length"].values():
        assert list(table) == ["0", "1", "5", "15"] and all(list(row) == ["1", "2", "4"] for row in table.values())
        assert all(1 <= row["1"] <= row["2"] <= row["4"] for row in table.values())
        assert all(row["15"] >= row["0"] for row in zip_columns(table))
    assert set(result["speedup"]) >= {"grouped", "suffix", "ngram", "draft-2l"} and "rollout_speedup" not in result
    for by_noise in result["agreement"].values():
        assert by_noise["target"]["drawn"] == pytest.approx(1) == by_noise["target"]["expected"], "models are the same"
        own = by_noise["own"]
        assert abs(own["drawn"] - own["expected"]) < 5 * own["standard_error"] and own["expected"] < 0.9


def test_what_the_draft_server_gains(models: Path) -> None:
    small = ["--models", str(models), "--parts", "server", "--server-groups", "1"]
    found = run_main("drafting", small, num_ranks=2)["server"]
    assert found["tokens_equal"] is True
    assert {count: list(row) for count, row in found["acceptance_length"].items()} == {
        count: ["0.02", "0.1", "0.5"] for count in ("1", "16", "64")
    }
    assert all(length >= 1 for row in found["acceptance_length"].values() for length in row.values())
    finest, default = (found["acceptance_length"][count][fetch_s] for count, fetch_s in (("1", "0.02"), ("16", "0.1")))
    assert found["lost_at_default"] == pytest.approx(1 - default / finest, abs=1e-3)
    runs = ["with server", "server killed", "without server"]
    assert all(list(found[name]) == runs for name in ("longest_step_s", "median_step_s"))
    windows = found["acceptance_after_restart"]
    assert list(windows) == ["before", "gone", "after"] and all(list(row) == runs for row in windows.values())
    assert windows["before"]["server killed"] >= 1 and (found["seconds_until_back"] or 0) >= 0


def test_how_acceptance_drifts(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are forked here, which spares them their imports."""
    monkeypatch.setattr(launch, "result_of", lambda command: run_main("train", command[1:]))
    small = ("--rollout.prompts-per-step", "2", "--mini-batch-size", "32", "--rollout.max-tokens", "60")
    names = ("suffix", "grouped_suffix")
    drafters = {name: (*small, "--rollout.drafter", name, "--rollout.max-draft-tokens", "4") for name in names}
    found = draft_drift.measure(Path(text_model), 2, drafters)["drift"]
    acceptance = found["acceptance"]
    assert found["tokens_equal"] is True and list(acceptance) == ["suffix", "grouped_suffix"]
    for drafter, (first, second) in acceptance.items():
        assert min(first, second) >= 0 and max(first, second) <= 1
        change = found["change"][drafter]
        assert change["slope"] == pytest.approx(second - first, rel=1e-3)
        assert change["first"] == change["last"] == pytest.approx((first + second) / 2, rel=1e-3)
    assert acceptance["suffix"] != acceptance["grouped_suffix"]


def test_what_earlier_epochs_add(text_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "result_of", lambda command: run_main("train", command[1:]))
    small = ("--rollout.max-tokens", "30", "--rollout.temperature", "0.3", "--rollout.group-size", "4")
    found = draft_epochs.measure(Path(text_model), 1, num_prompts=4, per_step=2, options=small)["epochs"]
    variants = ["plain", "group", "history", "group again"]
    assert found["tokens_equal"] is True and list(found["rollout_seconds"]) == variants
    steps = found["tokens_per_step"]
    assert list(steps) == variants and all(len(one) == 3 for one in steps.values())
    assert steps["plain"] == [1, 1, 1] and steps["group"] == steps["group again"]
    assert steps["history"][0] == steps["group"][0] > 1 and steps["history"][1:] != steps["group"][1:]
    assert {"new", "age_1", "age_2"} >= {*found["by_age"]} > {"new"}
    for name, other in (("speedup", "history"), ("a_a", "group again")):
        ratios = [
            a / b for a, b in zip(found["rollout_seconds"]["group"], found["rollout_seconds"][other], strict=True)
        ]
        assert found[name] == pytest.approx(ratios, rel=1e-2)


def test_equal_tokens_without_drafts_are_refused_after_the_result(models: Path) -> None:
    """With a model whose every token ends its sequence, there is nothing to draft."""
    for folder in models.iterdir():
        config = json.loads((folder / "config.json").read_text())
        config["eos_token_id"] = list(range(config["vocab_size"]))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").unlink(missing_ok=True)
    told = refused_by("drafting", ["--models", str(models), "--parts", "equal", "--groups", "1"])
    assert '"tokens_equal": true' in told
    assert "error: parts: equal has drafted nothing with ['ngram, T=1', 'ngram, preempted, T=1'," in told


def test_help_names_the_default_parts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        tyro.cli(DraftingConfig, args=["--help"])
    assert f"by default {', '.join(PARTS[:-1])} and {PARTS[-1]}" in capsys.readouterr().out


def zip_columns(table: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    return [{count: row[paths] for count, row in table.items()} for paths in ("1", "2", "4")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "acceptance.foo"], "figure='acceptance.foo': must end in .png, .pdf or .svg"),
        (["--output", "/nowhere/x.json"], "output='/nowhere/x.json': there is no folder '/nowhere'"),
        (["--output", "/dev/full"], "output='/dev/full': is no file to write over; give another"),
        (["--temperatures", "-1"], "SamplingParams.temperature=-1.0: must be 0 (greedy), or in [1e-6, 1e6]"),
        (["--temperatures", "1e-9"], "SamplingParams.temperature=1e-09: must be 0 (greedy), or in [1e-6, 1e6]"),
        (["--parts"], "parts=(): must be one or more parts"),
        (["--batches"], "batches=(): must be one or more batch sizes"),
        (["--widen", "1"], "widen=1: must be"),
        (["--parts", "servers"], "invalid choice"),
        (["--server-groups", "0"], "--server-groups=0: must be"),
        (["--drift-steps", "1"], "--drift-steps=1: must be an integer of at least 2"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("drafting", options)
