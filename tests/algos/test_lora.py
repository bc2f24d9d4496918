"""LoRA: adapters are trained at every ZeRO stage as peft trains them in a plain loop, and are peft's on disk."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from algos import deepspeed_engine
from algos.deepspeed_config import TrainerConfig
from algos.grpo import GRPO
from algos.trainer import Trainer
from engines import LLM, SamplingParams
from engines.models.checksums import checksum
from engines.models.loader import checkpoint_tensors
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache
from tests.algos.test_trainer import (
    GRPO_ARGS,
    STAGES,
    TEMPERATURE,
    assert_like_plain,
    plain_training,
    poisoned_rollout,
    rollout,
    tiny_model,
    trainer_config,
    weights_of,
)
from tests.worlds import error_of, run_world

__all__ = ["tiny_model"]
TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj")
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 12.0, "lora_targets": TARGETS}
SHAPES = {"q_proj": (64, 64), "v_proj": (32, 64), "gate_proj": (128, 64), "down_proj": (64, 128)}
PROMPTS = [[5, 6, 7], [2] * 20, list(range(3, 40))]
PARAMS = SamplingParams(max_tokens=24, n=2)
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22}


def make_trainer(model: str, folder: str, stage: int, **changes: Any) -> Trainer:
    config = trainer_config(stage, Path(folder), **LORA | changes)
    return Trainer(config, GRPO(**GRPO_ARGS), model, temperature=TEMPERATURE)


def adapter_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in deepspeed_engine.adapter_weights(trainer.engine)}


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]


def train_all_stages(model: str, folder: str) -> dict[str, Any]:
    """In a world: as `test_trainer.train_all_stages`, and the tokens of an engine that gets the weights."""
    results: dict[str, Any] = {}
    deepspeed_engine.start_deepspeed()
    groups = GroupCache(TorchGroup(), [])
    for stage in STAGES:
        trainer = make_trainer(model, folder, stage)
        begin, before = weights_of(trainer), adapter_of(trainer)
        trainer.save_pretrained(f"{folder}/begin_{stage}")
        poisoned = trainer.update(poisoned_rollout())
        after = adapter_of(trainer)
        metrics = []
        for step in range(4):
            metrics.append(trainer.update(rollout(step)))
            if step == 1:
                trainer.save_checkpoint(f"{folder}/checkpoint_{stage}")
        trainer.save_pretrained(f"{folder}/adapter_{stage}")
        llm = LLM(model, world=groups, load=False, **OPTIONS)
        llm.update_weights(trainer.named_weights(), version=0)
        results[str(stage)] = {
            "begin": begin,
            "poisoned": poisoned,
            "unchanged": all(torch.equal(before[name], after[name]) for name in before),
            "metrics": metrics,
            "weights": weights_of(trainer),
            "adapter": adapter_of(trainer),
            "tokens": tokens_of(llm),
            "num_parameters": trainer.num_parameters,
            "holds_no_second_model": trainer.reference is None,
        }
    deepspeed_engine.stop_deepspeed()
    return results


def resume_all_stages(model: str, folder: str) -> dict[str, Any]:
    """In a fresh world: at each stage the checkpoint, then the last two updates; and bf16 training."""
    results: dict[str, Any] = {}
    for stage in STAGES:
        trainer = make_trainer(model, folder, stage)
        trainer.load_checkpoint(f"{folder}/checkpoint_{stage}")
        metrics = [trainer.update(rollout(step)) for step in (2, 3)]
        results[str(stage)] = {"metrics": metrics, "adapter": adapter_of(trainer), "weights": weights_of(trainer)}
    for stage in STAGES:
        trainer = make_trainer(model, folder, stage, dtype="bfloat16")
        for step in range(3):
            trainer.update(rollout(step))
        results[f"bf16_{stage}"] = {"weights": weights_of(trainer), "adapter": adapter_of(trainer)}
    for name, other in {
        "rank": make_trainer(model, folder, 3, lora_rank=3),
        "off": make_trainer(model, folder, 3, lora_rank=0, lora_alpha=32.0, lora_targets=TrainerConfig.lora_targets),
        "base": make_trainer(f"{folder}/other", folder, 3),
    }.items():
        results[name] = error_of(lambda other=other: other.load_checkpoint(f"{folder}/checkpoint_3"))
    deepspeed_engine.stop_deepspeed()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> str:
    """Holds another base of the same shape: one number of it differs."""
    folder = tmp_path_factory.mktemp("run")
    path = Path(shutil.copytree(tiny_model, folder / "other")) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def trained(tiny_model: str, folder: str) -> list[dict[str, Any]]:
    return run_world(train_all_stages, 2, tiny_model, folder)


@pytest.fixture(scope="module")
def resumed(tiny_model: str, folder: str, trained: list[dict[str, Any]]) -> dict[str, Any]:
    return run_world(resume_all_stages, 2, tiny_model, folder)[0]


@pytest.fixture(scope="module")
def plain(tiny_model: str, folder: str, trained: list[dict[str, Any]]) -> tuple[list[dict[str, float]], Any, Any]:
    """Metrics of peft's model in a plain loop, which begins with the same adapter; its factors; it merged."""
    metrics, model = plain_training(tiny_model, f"{folder}/begin_0")
    factors = {
        name.replace(".default.", "."): factor.detach().clone()
        for name, factor in model.named_parameters()
        if "lora_" in name
    }
    return metrics, factors, model.merge_and_unload()


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_as_in_a_plain_loop(
    trained: list[dict[str, Any]], plain: tuple[list[dict[str, float]], Any, Any], stage: int
) -> None:
    """With a KL term, whose reference is the model without its adapters, clipping, a schedule and micro-batches."""
    metrics, factors, merged = plain
    result = trained[0][str(stage)]
    assert metrics[-1]["actor/kl_loss"] > 1e-4
    assert_like_plain(result, (metrics, merged))
    assert result["holds_no_second_model"]
    assert result["adapter"].keys() == factors.keys()
    for name, factor in result["adapter"].items():
        torch.testing.assert_close(factor, factors[name], rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_changes_adapters_by_rounding_only(trained: list[dict[str, Any]], folder: str, stage: int) -> None:
    """After 16 optimizer steps in float32; moved is by how much they have learned."""
    begin, whole = load_file(f"{folder}/begin_0/adapter_model.safetensors"), trained[0]["0"]["adapter"]
    for name, factor in trained[0][str(stage)]["adapter"].items():
        moved = (whole[name] - begin[name]).abs().max()
        assert (factor - whole[name]).abs().max() < 1e-3 * moved, name


@pytest.mark.parametrize("stage", STAGES)
def test_only_adapters_are_trained(trained: list[dict[str, Any]], tiny_model: str, stage: int) -> None:
    first, second = (result[str(stage)] for result in trained)
    base = load_file(f"{tiny_model}/model.safetensors")
    num_trained = 2 * sum(4 * (rows + columns) for rows, columns in SHAPES.values())
    assert first["num_parameters"] == (num_trained, sum(one.numel() for one in base.values()) + num_trained)
    for name, weight in first["begin"].items():
        assert torch.equal(weight, base[name]), name  # B begins as zeros
    changed = {name for name, weight in first["weights"].items() if not torch.equal(weight, base[name])}
    assert changed == {name for name in base if name.split(".")[-2] in TARGETS}
    assert first["unchanged"] and first["poisoned"]["actor/skipped_steps"] == 2
    assert checksum(first["weights"]) == checksum(second["weights"]) and first["metrics"] == second["metrics"]


@pytest.mark.parametrize("stage", STAGES)
def test_resuming_is_bit_exact_without_the_base(
    trained: list[dict[str, Any]], resumed: dict[str, Any], folder: str, stage: int
) -> None:
    want, got = trained[0][str(stage)], resumed[str(stage)]
    assert got["metrics"] == want["metrics"][2:]
    for part in ("adapter", "weights"):
        assert all(torch.equal(got[part][name], tensor) for name, tensor in want[part].items())
    num_bytes = sum(path.stat().st_size for path in Path(folder, f"checkpoint_{stage}/deepspeed").glob("*.pt"))
    assert num_bytes < want["num_parameters"][1] * 4  # the base alone would take more


def test_a_checkpoint_of_another_adapter_or_base_is_refused(resumed: dict[str, Any]) -> None:
    for name in ("rank", "off", "base"):
        assert "trainer.json: lora={" in resumed[name] and "resume with the same" in resumed[name], resumed[name]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_saved_is_pefts(
    trained: list[dict[str, Any]], folder: str, tiny_model: str, tmp_path: Path, stage: int
) -> None:
    """The engine draws the same tokens from the trainer's weights, the adapter, and what peft makes of it."""
    path, result = Path(folder, f"adapter_{stage}"), trained[0][str(stage)]
    assert {one.name for one in path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(Path(tiny_model).resolve()) and config["lora_dropout"] == 0
    saved = load_file(path / "adapter_model.safetensors")
    assert saved.keys() == result["adapter"].keys()
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), path).merge_and_unload()
    loaded = dict(checkpoint_tensors(path))
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=1e-6)
        assert torch.equal(result["weights"][name], loaded[name]), name
    merged.save_pretrained(tmp_path)
    shutil.copy(path / "tokenizer_config.json", tmp_path)  # it names no class: an adapter's base tells which
    assert result["tokens"] == tokens_of(LLM(path, **OPTIONS)) == tokens_of(LLM(tmp_path, **OPTIONS))


def test_bf16_trains_alike_at_every_stage(resumed: dict[str, Any], tiny_model: str) -> None:
    """A matrix with an adapter is merged in float32: in bf16 most of what was learned would be rounded away."""
    base = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).named_parameters())
    moved = {}
    for stage in STAGES:
        weights, adapter = resumed[f"bf16_{stage}"]["weights"], resumed[f"bf16_{stage}"]["adapter"]
        assert {factor.dtype for factor in adapter.values()} == {torch.bfloat16}
        for name, weight in weights.items():
            module, kind = name.rsplit(".", 1)
            is_target = kind == "weight" and module.split(".")[-1] in TARGETS
            assert weight.dtype == (torch.float32 if is_target else torch.bfloat16)
            if is_target:
                a, b = (adapter[f"base_model.model.{module}.lora_{factor}.weight"].float() for factor in "AB")
                torch.testing.assert_close(weight, base[name].float() + 3 * b @ a, rtol=0, atol=1e-6)
        moved[stage] = torch.cat([(weights[name].float() - base[name].float()).flatten() for name in base])
    assert moved[3].norm() > 0.01
    for stage in (0, 1, 2):
        assert (moved[stage] - moved[3]).norm() < 0.1 * moved[3].norm(), stage


@pytest.mark.parametrize(
    "changes", [{"lora_rank": -1}, {"lora_alpha": 0.0}, {"lora_targets": ()}, {"lora_targets": ("lm_head",)}]
)
def test_options_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.lora_\w+=.*: must be"):
        TrainerConfig(**changes)


@pytest.mark.parametrize("changes", [{"lora_alpha": 16.0}, {"lora_targets": ("q_proj",)}])
def test_options_of_lora_without_a_rank_are_refused(changes: dict[str, Any]) -> None:
    message = rf"TrainerConfig\.{next(iter(changes))}=.*give lora_rank \(--lora-rank\), too, or leave it out"
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**changes)


def test_a_missing_peft_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as Python marks what cannot be imported
    TrainerConfig()
    with pytest.raises(ValueError, match=r"TrainerConfig\.lora_rank=4: needs peft; pip install peft, or leave it out"):
        TrainerConfig(lora_rank=4)


def test_an_adapter_is_not_trained_on(trained: list[dict[str, Any]], folder: str) -> None:
    with pytest.raises(ValueError, match=r"adapter_0': is an adapter, which training does not go on from; merge it"):
        Trainer(TrainerConfig(), GRPO(), f"{folder}/adapter_0")
