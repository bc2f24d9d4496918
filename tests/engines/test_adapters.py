"""LoRA adapters, merged while they are read: the tokens of peft's merged model; what is refused, and how."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines import LLM, SamplingParams
from engines.fleet.fleet import Fleet
from engines.models.loader import checkpoint_tensors
from tests.checkpoints import save_checkpoint, save_text_checkpoint
from tests.states import make_state
from tests.worlds import run_world

PROMPTS = [[5, 6, 7], [2] * 20, list(range(3, 40))]
PARAMS = SamplingParams(max_tokens=24, n=2)
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22}
KINDS: dict[str, dict[str, Any]] = {
    "llama-biases": {"target_modules": "all-linear", "rank_pattern": {"down_proj": 7}},
    "llama2": {"target_modules": ["q_proj", "up_proj", "lm_head"], "use_rslora": True},
    "qwen2": {"target_modules": ["k_proj"], "layers_to_transform": [1]},
    "qwen3-odd": {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
}


def make_adapter(base: Path, adapter: Path, merged: Path | None = None, **options: Any) -> None:
    """Writes a random adapter of `base`, and its merged model, both by peft."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    given: dict[str, Any] = {"r": 3, "lora_alpha": 10, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    adapted = get_peft_model(model, LoraConfig(**given | options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(adapter, save_embedding_layers=False)  # else a head's base comes along, which is refused
    if merged is not None:
        adapted.merge_and_unload().save_pretrained(merged)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for family, options in KINDS.items():
        save_checkpoint(folder / family, family, shard_size="30KB")
        make_adapter(folder / family, folder / f"{family}-adapter", folder / f"{family}-merged", **options)
    return folder


def tokens_of(model: Path | str, **options: Any) -> list[list[list[int]]]:
    llm = LLM(model, **OPTIONS | options)
    tokens = [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, PARAMS)]
    llm.close()
    return tokens


@pytest.mark.parametrize("family", KINDS)
def test_an_adapter_is_pefts_merged_model(folder: Path, family: str) -> None:
    base, adapter, merged = (folder / f"{family}{suffix}" for suffix in ("", "-adapter", "-merged"))
    assert not (adapter / "config.json").exists()
    got, want, before = (dict(checkpoint_tensors(path)) for path in (adapter, merged, base))
    assert got.keys() == want.keys() == before.keys()
    changed = {name for name in got if not torch.equal(got[name], before[name])}
    assert changed == {name for name in want if not torch.equal(want[name], before[name])} != set()
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-6)
    assert tokens_of(adapter) == tokens_of(merged) != tokens_of(base)


def tokens_in_shards(adapter: str) -> list[list[list[int]]]:
    return tokens_of(adapter, tensor_parallel_size=2)


def test_in_shards_and_in_a_fleet(folder: Path) -> None:
    adapter = folder / "llama-biases-adapter"
    want = tokens_of(folder / "llama-biases-merged")
    assert run_world(tokens_in_shards, 2, str(adapter)) == [want, want]
    states = [make_state(uid, prompt, PARAMS) for uid, prompt in enumerate(PROMPTS)]
    with Fleet(adapter, num_replicas=1, **OPTIONS) as fleet:
        first = fleet.roll_out(states)
        fleet.publish(checkpoint_tensors(adapter), version=1)  # its config.json is the base's
        assert {one.state.key.prompt_uid: one.completion.token_ids for one in first} == {
            uid: of_prompt[0] for uid, of_prompt in enumerate(want)
        }


def test_a_base_of_bfloat16_is_merged_in_float32(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder / "qwen2", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    name, adapter = "model.layers.1.self_attn.k_proj", folder / "qwen2-adapter"
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
    before = dict(checkpoint_tensors(tmp_path / "base"))[f"{name}.weight"]
    got = dict(checkpoint_tensors(adapter, tmp_path / "base"))[f"{name}.weight"]
    assert before.dtype == torch.bfloat16 and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), before.double() + 10 / 3 * b @ a, rtol=1e-6, atol=1e-6)


def test_the_base_and_its_tokenizer_may_be_given(tmp_path: Path) -> None:
    save_text_checkpoint(tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter")
    want = tokens_of(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"base'.*no checkpoint; give the folder of its base as base_model"):
        LLM(tmp_path / "adapter", **OPTIONS)
    assert tokens_of(tmp_path / "adapter", base_model=tmp_path / "moved") == want
    assert LLM(tmp_path / "adapter", base_model=tmp_path / "moved", **OPTIONS).tokenizer is not None
    with pytest.raises(ValueError, match=r"base_model=.*moved' is no adapter; leave it out"):
        LLM(tmp_path / "moved", base_model=tmp_path / "moved", **OPTIONS)


def change_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove_one(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(dict(list(load_file(path).items())[1:]), path)


def empty(adapter: Path, shape: Callable[[list[int]], list[int]] | None = None) -> None:
    """Leaves no tensors, or tensors of another shape."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path) if shape else {}
    save_file({name: torch.ones(shape([*one.shape])) for name, one in tensors.items() if shape}, path)


def cast(adapter: Path, dtype: torch.dtype) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)


def cut(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: change_config(path, peft_type="IA3"), r"peft_type='IA3' is not supported; merge it .* by peft"),
        (lambda path: change_config(path, init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
        (lambda path: change_config(path, alpha_pattern={"q": 3}), "alpha_pattern={'q': 3} is not supported"),
        (lambda path: change_config(path, fan_in_fan_out=True), "fan_in_fan_out=True is not supported"),
        (
            lambda path: change_config(path, alora_invocation_tokens=[3]),
            r"alora_invocation_tokens=\[3\] is not supported",
        ),
        (lambda path: change_config(path, lora_alpha="x"), r"adapter_config\.json: Expected `float"),
        (remove_one, r"adapts 'model\.layers\.0\..*by A None and B \["),
        (empty, r"adapter_model\.safetensors: has no tensors, so it adapts nothing; save the adapter again"),
        # What ZeRO-3 leaves of a tensor that nobody has gathered, a scalar, and factors of rank 0.
        (lambda path: empty(path, lambda shape: [0]), r"adapts 'model\.layers\.0\..*by A \[0\] and B \[0\]"),
        (lambda path: empty(path, lambda shape: []), r"adapts 'model\.layers\.0\..*by A \[\] and B \[\]"),
        (lambda path: empty(path, lambda shape: [0 if n == 3 else n for n in shape]), r"by A \[0, .* and B \[.*, 0\]"),
        (lambda path: cast(path, torch.int8), r"lora_A\.weight' holds I8; save the adapter in float32, float16 or bf"),
        (lambda path: cast(path, torch.bool), r"lora_A\.weight' holds BOOL; save the adapter in float32"),
        (
            lambda path: change_config(path, base_model_name_or_path="long" * 2000),
            "base_model_name_or_path='longlong.*'...: File name too long; give the folder of its base as base_model",
        ),
        (cut, r"adapter_model\.safetensors: not a whole safetensors file"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors: missing"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    adapter = shutil.copytree(folder / "qwen3-odd-adapter", tmp_path / "adapter")
    spoil(adapter)
    kind = FileNotFoundError if message.endswith("missing") else ValueError
    with pytest.raises(kind, match=message):
        LLM(adapter, load=False, **OPTIONS)  # before memory is allocated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"lora_magnitude_vector.*is no factor A or B of LoRA"),
        ({"bias": "all", "target_modules": ["q_proj"]}, r"bias' is no factor A or B"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, r"lm_head.*is no factor A or B"),
        ({"target_modules": ["embed_tokens"]}, r"lora_embedding_A' is no factor A or B"),
    ],
)
def test_what_is_more_than_two_factors_is_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    make_adapter(folder / "llama-biases", tmp_path / "adapter", **options)
    with pytest.raises(ValueError, match=f"{message}.*merge it with its base by peft"):
        LLM(tmp_path / "adapter", load=False, **OPTIONS)


@pytest.mark.parametrize("other", ["llama2", "qwen3-odd"])
def test_an_adapter_of_another_base_is_refused(folder: Path, other: str) -> None:
    with pytest.raises(ValueError, match=r"adapts 'model\.layers\..*give the adapter's own base as base_model"):
        LLM(folder / "llama-biases-adapter", base_model=folder / other, load=False, **OPTIONS)


def test_an_adapter_of_a_tied_head_is_refused(folder: Path) -> None:
    """It would change the embedding as well, or get lost: a tied checkpoint has no head of its own."""
    save_checkpoint(folder / "tied", "llama2", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"adapts 'lm_head\.weight'.*has no such matrix"):
        LLM(folder / "llama2-adapter", base_model=folder / "tied", load=False, **OPTIONS)
