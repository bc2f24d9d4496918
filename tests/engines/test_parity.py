"""Logits and greedy tokens against transformers, for every family and odd shape."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import LLM, SamplingParams
from engines.config import EngineConfig, ModelConfig
from engines.sequence import Work
from tests.checkpoints import EOS, FAMILIES, save_checkpoint
from tests.states import make_state

VOCAB = 131
NEAR_TIE = 1e-4


def mixed_prompts(count: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def engine_logits(llm: LLM, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position: teacher-forced, `chunk` tokens at a time through the paged cache."""
    from engines.attention.batch import ForwardBatch

    block = llm.config.block_size
    num_blocks = -(-len(tokens) // block)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    rows = []
    for start in range(0, len(tokens), chunk):
        positions = torch.arange(start, min(start + chunk, len(tokens)))
        batch = ForwardBatch(
            tokens=torch.tensor(tokens)[positions],
            positions=positions,
            cu_seqlens_q=torch.tensor([0, len(positions)], dtype=torch.int32),
            context_lens=torch.tensor([int(positions[-1]) + 1], dtype=torch.int32),
            block_table=table,
            slot_mapping=positions,
            logit_rows=torch.arange(len(positions)),
            seqlens_q=[len(positions)],
        )
        rows.append(llm._engine.decoder.forward(batch, llm._engine.kv))
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family)
    llm = LLM(tmp_path, kv_cache_bytes=8 * 2**20)
    long = mixed_prompts(1, 10)[0] * 40
    with torch.no_grad():
        reference = model(torch.tensor([long[:200]])).logits[0]
    for chunk in (200, 7, 1):
        assert (engine_logits(llm, long[:200], chunk) - reference).abs().max() < 1e-4

    prompts = mixed_prompts(64)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    near_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        assert len(ours) == (ours.index(EOS) + 1 if EOS in ours else 20)
        # One pass over our tokens: where each is the most likely one behind those before it, all are the greedy ones.
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
        differ = (logits.argmax(-1) != torch.tensor(ours)).nonzero()
        if len(differ):
            first = int(differ[0])
            assert logits[first].max() - logits[first, ours[first]] < NEAR_TIE
            near_ties += 1
    assert near_ties <= 2, "near ties are rare"


def test_many_safetensors_files(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen3", shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    llm = LLM(tmp_path, kv_cache_bytes=2**20)
    tokens = mixed_prompts(1)[0]
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0]
    assert (engine_logits(llm, tokens, 100) - reference).abs().max() < 1e-4


def test_a_tied_head_is_the_embedding_or_refused(tmp_path: Path) -> None:
    """transformers ties nothing where a checkpoint has two that differ."""
    save_checkpoint(tmp_path, "llama2", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    for difference in (0.0, 0.5):
        head = weights["model.embed_tokens.weight"] + difference
        save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if not difference:
            LLM(tmp_path, kv_cache_bytes=2**20)
            continue
        with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but 'lm_head\.weight' is not the embedding"):
            LLM(tmp_path, kv_cache_bytes=2**20)


def test_earlier_releases_rope_fields(tmp_path: Path) -> None:
    """transformers 4 wrote `rope_theta` and `rope_scaling`; Hub checkpoints still carry them."""
    import json

    save_checkpoint(tmp_path, "llama3")
    new = ModelConfig.from_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    raw["rope_scaling"] = parameters
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_pretrained(tmp_path) == new


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logprobs_are_the_model_s(dtype: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen2").to(getattr(torch, dtype))
    llm = LLM(tmp_path, dtype=dtype, kv_cache_bytes=2**21)
    for output in llm.generate(mixed_prompts(8), SamplingParams(temperature=0.7, max_tokens=12)):
        completion = output.outputs[0]
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids + completion.token_ids])).logits[0]
        start = len(output.prompt_token_ids) - 1
        expected = (logits[start:-1] / 0.7).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (torch.tensor(completion.logprobs) - chosen).abs().max() < 1e-4


def test_config_defaults_are_consistent() -> None:
    assert EngineConfig().max_num_batched_tokens >= EngineConfig().max_num_seqs


def test_work_limits_the_tokens_of_one_stay(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**20)
    state = make_state(0, [5, 6], SamplingParams(max_tokens=11, ignore_eos=True))
    work, stays = Work(state=state, max_new_tokens=4), []
    while True:
        llm.replica.submit(work)
        while not (output := llm.replica.step()).finished and not output.released:
            pass
        stays.append(state.num_generated)
        if output.finished:
            break
        (released,) = output.released
        assert replace(released, kv=None) == Work(state=state)
        assert released.kv is not None and released.kv.num_tokens == len(state.tokens) - 1
        work = replace(released, max_new_tokens=4)
    assert stays == [4, 8, 11] and llm.replica.kv_moves.num_imported == 2
    assert output.finished[0].completion.finish_reason == "length"
