"""A model by its name on the Hugging Face hub, from the local cache, and without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from engines import LLM, SamplingParams
from engines.models.hugging_face import checkpoint_folder

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
    message = rf"model='Own/model-0.6B': is no folder here, nor in the hub's cache {cache}, and could not be downloaded"
    with pytest.raises(FileNotFoundError, match=message):
        LLM("Own/model-0.6B")
