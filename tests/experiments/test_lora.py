"""train.py with LoRA, and generate.py with what it publishes: resumed, merged by the documented command, refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engines.config import ModelConfig
from tests.experiments.test_train import metrics_of, small
from tests.worlds import ROOT, refused_by, run_main, run_python

LORA = ["--lora-rank", "4", "--deterministic", "--learning-rate", "1e-2"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, text_model: str) -> list[str]:
    """A command line, whose model and runs are in a folder of its own."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(text_model, folder / "model")
    body = "return [float(sum(map(ord, c)) % 3 > 0) for c in completions]"
    (folder / "reward.py").write_text(f"def score(prompts, completions):\n    {body}\n")
    return small(folder / "model", folder / "runs", *LORA, "--reward", f"{folder / 'reward.py'}:score")


def train(arguments: list[str], *more: str) -> dict[str, Any]:
    return run_main("train", [*arguments, *more], num_ranks=2)


@pytest.fixture(scope="module")
def adapter(arguments: list[str]) -> Path:
    return Path(train(arguments, "--name", "whole")["model"])


def complete(model: Path, output: Path, *more: str, num_ranks: int = 1) -> list[dict[str, Any]]:
    options = ["--dtype", "float64", "--n", "3", "--max-tokens", "40", "--output", str(output)]
    run_main("generate", [str(model), "1+2=", "12+34=", "5+6=", *options, *more], num_ranks)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_resumed_run_is_the_whole_run(arguments: list[str], adapter: Path) -> None:
    train(arguments, "--name", "parts", "--steps", "4")  # where the whole run is evaluated, too
    train(arguments, "--name", "parts", "--resume")
    runs = adapter.parents[3]
    assert metrics_of(runs / "parts") == metrics_of(runs / "whole")
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(adapter.glob("model*"))


def test_generate_gives_the_tokens_of_the_merged_model(adapter: Path, tmp_path: Path) -> None:
    found = re.search(
        r"python - ADAPTER MERGED <<'END'\n(.*?)END\n", (ROOT / "docs/training.md").read_text(), re.DOTALL
    )
    assert found
    run_python(["-c", found[1], str(adapter), str(tmp_path / "merged")]).check_returncode()
    assert ModelConfig.from_pretrained(adapter) == ModelConfig.from_pretrained(tmp_path / "merged")
    want = complete(tmp_path / "merged", tmp_path / "merged.jsonl")
    assert complete(adapter, tmp_path / "adapter.jsonl") == want
    shards = complete(adapter, tmp_path / "tp.jsonl", "--tensor-parallel-size", "2", num_ranks=2)
    assert [row["token_ids"] for row in shards] == [row["token_ids"] for row in want]
    moved = Path(shutil.copytree(adapter, tmp_path / "moved")) / "adapter_config.json"
    base = json.loads(moved.read_text())["base_model_name_or_path"]
    moved.write_text(json.dumps({**json.loads(moved.read_text()), "base_model_name_or_path": "/nowhere"}))
    assert complete(moved.parent, tmp_path / "given.jsonl", "--base-model", base) == want
    assert [row["token_ids"] for row in complete(Path(base), tmp_path / "base.jsonl")] != [
        row["token_ids"] for row in want
    ]


def test_what_does_not_go_with_an_adapter_is_refused(arguments: list[str], adapter: Path, tmp_path: Path) -> None:
    said = refused_by("train", [*arguments, "--model", str(adapter)], 2)
    assert f"--model='{adapter}': is an adapter, which training does not go on from; merge it" in said
    said = refused_by("generate", [str(adapter), "1+2=", "--base-model", str(tmp_path)], 1)
    assert f"is an adapter of base_model_name_or_path='{tmp_path}', where there is no checkpoint" in said


def test_another_base_is_not_resumed(arguments: list[str], adapter: Path) -> None:
    path = adapter.parents[4] / "model/model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    try:
        said = refused_by("train", [*arguments, "--name", "whole", "--resume", "--steps", "6"], 2)
    finally:
        path.write_bytes(before)
    assert "trainer.json: lora={" in said and "resume with the same" in said
