"""The engine on CUDA: the CPU's tokens in float64, transformers' logits, low precision, memory, graphs, draw, bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import LLM, SamplingParams
from engines.attention import sdpa
from engines.sampler import make_draw, make_sampling_batch, process_logits, sample
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES
from tests.checkpoints import FAMILIES, save_checkpoint
from tests.engines.test_batch_invariant import alone, beside_others, make_states
from tests.engines.test_token_equality import PARAMS, PROMPTS, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_same_tokens_as_on_the_cpu(qwen3: str) -> None:
    options = {"dtype": "float64", "kv_cache_bytes": 2**24}
    outputs = [LLM(qwen3, device=device, **options).generate(PROMPTS, PARAMS) for device in ("cpu", "cuda")]
    cpu, cuda = ([o.outputs for o in side] for side in outputs)
    assert tokens_of(cuda) == tokens_of(cpu)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_model_s(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family).cuda()
    llm = LLM(tmp_path, device="cuda", kv_cache_bytes=2**22)
    for output in llm.generate(PROMPTS[:4], SamplingParams(max_tokens=20, ignore_eos=True)):
        completion = output.outputs[0]
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, len(output.prompt_token_ids) :, None])[:, 0]
        assert (torch.tensor(completion.logprobs) - chosen.cpu()).abs().max() < 1e-3


def test_bfloat16_and_memory(qwen3: str) -> None:
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", kv_cache_bytes=2**28)
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)
    before = torch.cuda.memory_allocated()
    llm.sleep()
    assert before - torch.cuda.memory_allocated() > 2**27
    llm.wake_up()
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("max_num_seqs", [7, 48])
def test_graphs_replay_the_same_tokens(
    qwen3: str, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, async_scheduling: bool
) -> None:
    monkeypatch.setattr(sdpa, "capturable", True)  # wasteful, but right: its plan of decodes asks nothing of the host
    options = {"device": "cuda", "dtype": "float64", "kv_cache_bytes": 2**24, "max_num_seqs": max_num_seqs}
    options["async_scheduling"] = async_scheduling
    eager, llm = (LLM(qwen3, cuda_graphs=graphs, **options) for graphs in (False, True))
    graphs = llm.replica._runner._graphs
    assert graphs is not None and eager.replica._runner._graphs is None

    def same_tokens() -> None:
        outputs = [[o.outputs for o in one.generate(PROMPTS, PARAMS)] for one in (eager, llm)]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])

    same_tokens()
    captured = dict(graphs._captured)
    assert len(captured) > 3
    weights = {name: view * 1.1 for name, view in llm._engine.decoder.logical_views().items()}
    for one in (eager, llm):
        one.update_weights(weights.items(), version=1)
    same_tokens()
    assert captured.items() <= graphs._captured.items(), "new weights lie where the old ones did"
    llm.sleep(weights=True)
    assert not graphs._captured
    moved = torch.empty(2**22, device="cuda")  # so that what is taken again lies elsewhere
    llm.wake_up()
    llm.update_weights(weights.items(), version=1)
    same_tokens()
    del moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_draw_of_a_large_vocabulary(dtype: torch.dtype, scale: float) -> None:
    rows, vocab = 64, 151_936
    logits = (scale * torch.randn(rows, vocab, device="cuda")).to(dtype)
    temperatures, rng = np.resize([1.0, 0.6, 0.0, 5.0], rows), np.random.default_rng(0)
    off = {"top_k": np.full(rows, -1), "top_p": np.ones(rows), "min_p": np.zeros(rows)}
    keys, positions = rng.integers(-(2**62), 2**62, rows), rng.integers(0, 10**5, rows)
    named = {"keys": keys, "positions": positions, "temperature": temperatures, **off}
    batch = make_sampling_batch(**named, device=torch.device("cuda"))
    draw = make_draw("triton", None)
    drawn, torch_s = sample(logits, batch, draw), sample(logits, batch)
    assert torch.equal(drawn.tokens, torch_s.tokens)
    exact = process_logits(logits, batch).double().log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), exact, rtol=1e-6, atol=2e-6)
    for row in (0, 1, 2, 63):
        alone = sample(logits[row : row + 1], batch.rows(slice(row, row + 1)), draw)
        assert torch.equal(alone.logprobs, drawn.logprobs[row : row + 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3-odd", "llama-biases", "25m"])
def test_the_same_bits_in_twenty_batches(model: str, dtype: str, tmp_path: Path) -> None:
    """`batch_invariant`: each sequence alone, without graphs, against 20 random batches, every other with graphs."""
    if model in SHAPES:
        save_random_model(tmp_path, SHAPES[model], max_positions=1024)
    else:
        save_checkpoint(tmp_path, model)
    # Contexts of more than one part where the model takes them.
    states = make_states(longest=700 if model in SHAPES else 100, max_tokens=32)
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    expected = alone(str(tmp_path), states, cuda_graphs=False, **options)
    num_compared = 0
    for seed in range(20):
        options |= {"cuda_graphs": seed % 2 == 0, "kv_cache_bytes": 2**25}
        done, _ = beside_others(str(tmp_path), states, seed, **options)
        assert done == {sequence_id: expected[sequence_id] for sequence_id in done}
        num_compared += len(done)
    assert num_compared > 100


def test_the_same_bits_are_not_to_be_had_in_float64(qwen3: str) -> None:
    with pytest.raises(ValueError, match="batch_invariant=True: attention='triton' computes in float32, so dtype="):
        LLM(qwen3, device="cuda", dtype="float64", batch_invariant=True)
