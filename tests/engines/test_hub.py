"""A model by its name on the Hugging Face hub, from the local cache, and without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from engines import LLM, EngineConfig, SamplingParams
from engines.adapter_config import base_folder, checkpoint_folder
from tests.worlds import ROOT

SNAPSHOT = "models--Own--model-0.6B/snapshots/0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty; this folder is the current one, too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put_model(cache: Path, source: str) -> Path:
    folder = cache / SNAPSHOT
    shutil.copytree(source, folder)
    (cache / "models--Own--model-0.6B/refs").mkdir()
    (cache / "models--Own--model-0.6B/refs/main").write_text(folder.name)
    return folder


def test_a_name_of_the_hub_is_its_snapshot_in_the_cache(cache: Path, text_model: str) -> None:
    folder = put_model(cache, text_model)
    assert checkpoint_folder("Own/model-0.6B") == folder
    params = SamplingParams(max_tokens=8)
    (named,), (given,) = (LLM(model, kv_cache_bytes=2**22).generate(["1+2="], params) for model in (
        "Own/model-0.6B", text_model,
    ))  # fmt: skip
    assert named.outputs[0].token_ids == given.outputs[0].token_ids


def test_a_folder_of_that_name_comes_first(cache: Path, text_model: str) -> None:
    put_model(cache, text_model)
    Path("Own/model-0.6B").mkdir(parents=True)
    assert checkpoint_folder("Own/model-0.6B") == Path("Own/model-0.6B")


@pytest.mark.parametrize("name", ["/nowhere/model", "runs/models/tiny", "tiny", "../model"])
def test_what_is_no_name_of_the_hub_stays_a_path(cache: Path, name: str) -> None:
    assert checkpoint_folder(name) == Path(name)


@pytest.mark.parametrize("has_config", [False, True])
def test_without_a_network_the_error_names_the_cache(cache: Path, text_model: str, has_config: bool) -> None:
    if has_config:  # as transformers' AutoConfig leaves it: no weights yet
        (put_model(cache, text_model) / "model.safetensors").unlink()
    told = f"='Own/model-0.6B': there is no folder '{cache.parent}/Own/model-0.6B'; as a name of the hub it is not in "
    told += f"the cache {cache}, and could not be downloaded"
    with pytest.raises(FileNotFoundError, match=f"^model{told}"):
        LLM("Own/model-0.6B")
    with pytest.raises(FileNotFoundError, match=rf"^EngineConfig\.draft_model{told}"):
        EngineConfig(drafter="model", draft_model="Own/model-0.6B")
    adapter = make_adapter(cache.parent / "adapter")
    with pytest.raises(FileNotFoundError, match=f"is an adapter of base_model_name_or_path{told}"):
        LLM(adapter)


def make_adapter(folder: Path) -> Path:
    """Writes an adapter's description, without weights."""
    folder.mkdir()
    named = {"peft_type": "LORA", "lora_alpha": 1, "base_model_name_or_path": "Own/model-0.6B"}
    (folder / "adapter_config.json").write_text(json.dumps(named))
    return folder


def test_a_draft_model_and_an_adapters_base_may_be_names_of_the_hub(cache: Path, text_model: str) -> None:
    folder = put_model(cache, text_model)
    config = EngineConfig(drafter="model", draft_model="Own/model-0.6B")
    assert config.draft_model == str(folder)
    assert base_folder(make_adapter(cache.parent / "adapter")) == folder
    assert base_folder(cache.parent / "adapter", "Own/model-0.6B") == folder


def test_generate_takes_a_name_of_the_hub(cache: Path, text_model: str) -> None:
    put_model(cache, text_model)
    command = [sys.executable, str(ROOT / "experiments/generate.py"), "Own/model-0.6B", "1+2=", "--max-tokens", "4"]
    draft = ["--drafter", "model", "--draft-model", "Own/model-0.6B", "--kv-cache-mib", "4"]
    options: dict[str, Any] = {"env": {**os.environ, "HF_HUB_CACHE": str(cache)}, "cwd": cache.parent, "timeout": 120}
    done = subprocess.run([*command, *draft], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] > 0
