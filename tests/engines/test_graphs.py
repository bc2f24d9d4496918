"""Padded decodes, run eagerly: what a CUDA graph replays. The same tokens, and no block touched but the scratch one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import EngineConfig
from engines.replica.graphs import LARGEST, ladder
from engines.sequence import Work
from tests.engines.test_token_equality import LONG, PARAMS, PROMPTS, SWITCHES, run, tokens_of
from tests.states import make_state


def padded(model: str, **options) -> LLM:
    """An engine whose decodes run padded, and whose scratch block is poison to whoever sees it."""
    llm = LLM(model, **{"device": "cpu", "dtype": "float64", "kv_cache_bytes": 2**24, **options})
    llm.replica._runner.pad_decodes()
    poison(llm)
    return llm


def poison(llm: LLM) -> None:
    for cache in (*llm._engine.kv.keys, *llm._engine.kv.values):
        cache[llm._engine.kv.scratch_block] = torch.nan


def test_the_ladder() -> None:
    assert ladder(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert ladder(3) == (1, 2, 3) and ladder(1) == (1,) and ladder(2) == (1, 2)
    for most in range(1, 1500):
        sizes = ladder(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        below = np.array([0, *sizes[:-1]])
        waste = np.array(sizes) - below - 1  # of the fewest rows that are padded to each size
        assert (waste < np.maximum(8, below / 8 + 1)).all()
    assert len(ladder(LARGEST)) < 40


@pytest.fixture(scope="module")
def plain(qwen3: str) -> list[list[list[int]]]:
    return tokens_of(run(qwen3))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("switch", ["crowd of 17", "blocks of 3", "preemption", "all at once"])
def test_the_same_tokens(qwen3: str, plain: list[list[list[int]]], switch: str, kernels: str) -> None:
    llm = padded(qwen3, **SWITCHES[switch], kernels=kernels)
    assert tokens_of([o.outputs for o in llm.generate(PROMPTS, PARAMS)]) == plain
    llm.replica.scheduler.blocks.check_integrity()


def test_more_rows_than_the_ladder_has(
    qwen3: str, plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.replica.graphs.LARGEST", 5)
    llm = padded(qwen3, max_num_seqs=6)
    sizes = []
    forward = llm.replica._runner._forward_padded
    monkeypatch.setattr(llm.replica._runner, "_forward_padded", lambda size: sizes.append(size) or forward(size))
    assert tokens_of([o.outputs for o in llm.generate(PROMPTS, PARAMS)]) == plain
    assert set(sizes) <= {1, 2, 4, 5} and 0 < len(sizes) < len(llm.step_records) / 2, "most passes have six rows"


def test_a_group_shares_its_prompt(qwen3: str) -> None:
    params = SamplingParams(max_tokens=30, n=6)
    sharing, alone = padded(qwen3), LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, prefix_caching=False)
    for prompts in (LONG, [LONG[0] + [5] * 20, LONG[1]]):
        outputs = [[o.outputs for o in llm.generate(prompts, params)] for llm in (sharing, alone)]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    assert sharing.replica.scheduler.num_shared_tokens > 1000


def test_every_number_of_rows_gives_the_unpadded_logits_and_writes_nothing_else(qwen3: str) -> None:
    """Both forms of the same pass, sequences leaving from the front, so that slots and rows differ."""
    llm = padded(qwen3, max_num_seqs=40, max_num_batched_tokens=4096)
    replica, runner, kv = llm.replica, llm.replica._runner, llm._engine.kv
    assert runner._padded is not None
    for uid in range(40):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        replica.submit(Work(state=make_state(uid, PROMPTS[uid % len(PROMPTS)], params)))
    replica.step()
    for num_rows in range(40, 0, -1):
        scheduled = replica.scheduler.schedule().batch
        assert len(scheduled) == num_rows
        poison(llm)
        before = [cache.clone() for cache in (*kv.keys, *kv.values)]
        static, runner._padded = runner._padded, None
        what = runner._build(scheduled, has_forks=False)
        assert what.batch is not None
        # A part of the batch is gone with the next pass's arrays.
        slots, positions, written = what.slots.copy(), what.positions.clone(), what.batch.slot_mapping.clone()
        expected = runner._forward(what)
        after = [cache.clone() for cache in (*kv.keys, *kv.values)]
        runner._padded = static
        what = runner._build(scheduled, has_forks=False)
        logits = runner._forward(what)
        assert what.batch is None and what.padded_size == min(size for size in static.sizes if size >= num_rows)
        assert what.slots.tolist() == slots.tolist() and what.positions.tolist() == positions.tolist()
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        for old, plain_one, cache in zip(before, after, (*kv.keys, *kv.values), strict=True):
            mine = cache[: kv.scratch_block].flatten(0, 1)
            torch.testing.assert_close(mine, plain_one[: kv.scratch_block].flatten(0, 1), rtol=1e-12, atol=1e-12)
            rest = torch.ones(len(mine), dtype=torch.bool)
            rest[written] = False
            assert torch.equal(mine[rest], old[: kv.scratch_block].flatten(0, 1)[rest])
            assert torch.isnan(cache[kv.scratch_block, 1:]).all()
        assert torch.equal(static._table[:-1], torch.from_numpy(runner._slots.block_table))
        replica.step()
        replica.abort(replica.states()[0].sequence_id)


def test_new_weights_lie_where_the_old_ones_did(qwen3: str) -> None:
    """So graphs outlive an update; `sleep` drops them, since what is taken again lies elsewhere."""
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    held = [*llm._engine.decoder.parameters.tensors(), *llm._engine.kv.keys, *llm._engine.kv.values]
    addresses = [tensor.data_ptr() for tensor in held]
    weights = {name: view * 1.1 for name, view in llm._engine.decoder.logical_views().items()}
    llm.update_weights(weights.items(), version=1)
    assert [tensor.data_ptr() for tensor in held] == addresses


def test_nothing_is_padded_without_graphs(qwen3: str) -> None:
    runner = LLM(qwen3, device="cpu", kv_cache_bytes=2**24).replica._runner
    assert runner._padded is None and runner._graphs is None
    with pytest.raises(ValueError, match=r"EngineConfig\.cuda_graphs='no': must be True or False"):
        EngineConfig(cuda_graphs="no")  # type: ignore[arg-type]
