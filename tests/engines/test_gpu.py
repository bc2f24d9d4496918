"""The engine on CUDA: the CPU's tokens in float64, transformers' logits, low precision, memory, graphs."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from engines import LLM, SamplingParams
from engines.attention import sdpa
from engines.replica.graphs import Graphs
from tests.checkpoints import FAMILIES, save_checkpoint
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


@pytest.mark.parametrize("max_num_seqs", [7, 48])
def test_graphs_replay_the_same_tokens(qwen3: str, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    monkeypatch.setattr(sdpa, "capturable", True)  # wasteful, but right: its plan of decodes asks nothing of the host
    options = {"device": "cuda", "dtype": "float64", "kv_cache_bytes": 2**24, "max_num_seqs": max_num_seqs}
    eager, llm = (LLM(qwen3, cuda_graphs=graphs, **options) for graphs in (False, True))
    graphs = llm.replica._runner._graphs
    assert graphs is not None and eager.replica._runner._graphs is None
    params = [SamplingParams(max_tokens=2 + 2 * index, n=2) for index in range(len(PROMPTS))]

    def same_tokens() -> None:
        outputs = [[o.outputs for o in one.generate(PROMPTS, params)] for one in (eager, llm)]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])

    same_tokens()
    captured = dict(graphs._captured)
    assert len(captured) > 2
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


def test_a_capture_while_other_graphs_are_garbage() -> None:
    device, dropped, alive = torch.device("cuda"), [], []

    def drop_graphs() -> None:
        gc.collect()  # so that Python does not look for garbage before the capture
        graphs = Graphs(lambda size: torch.ones(size, device=device) + 1, device)
        graphs(1)
        cycle: list[object] = [graphs]
        cycle.append(cycle)
        dropped.append(weakref.ref(graphs))

    def forward(size: int) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            assert len([[] for _ in range(10_000)]) == 10_000  # enough for Python to look for garbage
            alive.append(dropped[-1]() is not None)
        else:
            drop_graphs()
        return torch.ones(size, device=device) * 3

    assert Graphs(forward, device)(2).tolist() == [3, 3]
    assert alive == [True] and gc.isenabled()


def test_the_same_bits_in_any_batch_are_for_cpus(qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=True: .* a CPU, not on cuda; set batch_invariant=False"):
        LLM(qwen3, device="cuda", batch_invariant=True)
