"""Passes launched before the tokens of the last are read: the same tokens, step by step, whatever comes between."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import EngineConfig
from engines.kvcache.transfer import HostKVStore
from engines.replica import Replica, StepOutput
from engines.sequence import Completion, SequenceKey, SequenceState, Work
from tests.engines.test_graphs import poison
from tests.engines.test_token_equality import LONG, PARAMS, PROMPTS, SWITCHES, run, tokens_of
from tests.worlds import run_world


def ahead(model: str, **options) -> LLM:
    """An engine that runs ahead on a CPU, where a pass is done when it is launched."""
    llm = LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**24, **options})
    llm.replica._runner.pad_decodes(run_ahead=True)
    poison(llm)
    return llm


def count(owner: object, method: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows by what the method returns."""
    results: list[object] = []
    original = getattr(owner, method)

    def call(*args: object) -> object:
        results.append(original(*args))
        return results[-1]

    monkeypatch.setattr(owner, method, call)
    return results


@pytest.fixture(scope="module")
def plain(qwen3: str) -> list[list[Completion]]:
    return run(qwen3)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_tokens(
    qwen3: str, plain: list[list[Completion]], switch: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ahead(qwen3, **SWITCHES[switch], kernels=kernels)
    passes = count(llm.replica._runner, "_run_ahead", monkeypatch)
    outputs = [o.outputs for o in llm.generate(PROMPTS, PARAMS)]
    assert tokens_of(outputs) == tokens_of(plain)
    assert sum(one is not None for one in passes) > 20
    for group, expected in zip(outputs, plain, strict=True):
        for mine, theirs in zip(group, expected, strict=True):
            torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-9, atol=1e-9)
    llm.replica.scheduler.blocks.check_integrity()
    assert llm.replica.scheduler.blocks.num_free_blocks == llm.replica.scheduler.blocks.num_blocks


def ahead_on_two_ranks(model: str) -> list[list[list[int]]]:
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache
    from engines.parallel.layout import nested_layout

    dist.init_process_group("gloo")
    layout = nested_layout(range(2), 2)
    groups = GroupCache(TorchGroup(timeout_s=120), [layout], timeout_s=120)
    llm = ahead(model, world=groups, layout=layout)
    tokens = tokens_of([o.outputs for o in llm.generate(PROMPTS, PARAMS)])
    assert llm.replica._runner.num_shards == 2
    groups.close()
    dist.destroy_process_group()
    return tokens


def test_the_same_tokens_over_two_ranks(qwen3: str, plain: list[list[Completion]]) -> None:
    """Both shards run ahead, drop and go on alike: their sums would not meet otherwise."""
    assert run_world(ahead_on_two_ranks, 2, qwen3) == [tokens_of(plain)] * 2


def test_a_pass_is_launched_before_the_last_is_read(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ahead(qwen3)
    runner = llm.replica._runner
    forwards = count(runner, "_forward", monkeypatch)
    read: list[int] = []
    original = runner._read
    monkeypatch.setattr(runner, "_read", lambda *args: read.append(len(forwards)) or original(*args))
    for uid in range(3):
        llm.replica.submit(Work(state=state(uid, max_tokens=10)))
    while llm.replica.has_work:
        llm.replica.step()
    # The last token of all is known to be the last: nothing is launched after its pass.
    assert read == [2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def state(uid: int, *, max_tokens: int = 30, prompt: list[int] | None = None, **params) -> SequenceState:
    tokens = prompt or PROMPTS[uid % len(PROMPTS)]
    return SequenceState(
        key=SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0),
        group_id=uid,
        tokens=list(tokens),
        num_prompt_tokens=len(tokens),
        params=SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params}),
    )


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def compare(outputs: tuple[StepOutput, StepOutput], replicas: tuple[Replica, Replica]) -> None:
    mine, theirs = ({**dataclasses.asdict(output), "released": None, "finished": None} for output in outputs)
    assert mine == theirs
    for told in zip(*([f.completion for f in output.finished] for output in outputs), strict=True):
        assert told[0].token_ids == told[1].token_ids and told[0].finish_reason == told[1].finish_reason
    for works in zip(*(output.released for output in outputs), strict=True):
        assert works[0].state.tokens == works[1].state.tokens
    for states in zip(*(replica.states() for replica in replicas), strict=True):
        assert states[0].tokens == states[1].tokens and states[0].versions == states[1].versions
        torch.testing.assert_close(states[0].logprobs, states[1].logprobs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_step_by_step_whatever_comes_between(
    qwen3: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas get the same calls: one runs ahead. Sequences come, stop, are released, aborted, paused with their
    KV and resumed; weights are changed under way, and changed back.
    """
    rng = random.Random(seed)
    options = {"max_num_seqs": 9, "block_size": rng.choice((1, 3, 16)), "max_num_batched_tokens": rng.choice((24, 256))}
    llms = ahead(qwen3, **options), LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, **options)
    replicas = llms[0].replica, llms[1].replica
    beside = count(replicas[0]._runner, "_beside", monkeypatch)
    passes = count(replicas[0]._runner, "_run_ahead", monkeypatch)
    weights = {name: view.clone() for name, view in llms[0]._engine.decoder.logical_views().items()}
    stores = [HostKVStore("0123456789abcdef", 2**28, [make(tmp_path / side)]) for side in "ab"]
    for replica, store in zip(replicas, stores, strict=True):
        replica.kv_store = store
    num_submitted, paused, version = 0, [], 0
    for _ in range(200):
        event = rng.random()
        if event < 0.2 and num_submitted < 60:
            stop = {"stop_token_ids": tuple(rng.sample(range(2, 131), 4))}
            budget = rng.choice((None, None, 3))
            for replica in replicas:
                new = state(num_submitted, max_tokens=40, **stop)
                replica.submit(Work(state=new, max_new_tokens=budget))
            num_submitted += 1
        elif event < 0.36 and replicas[0].states():
            victim = rng.choice(replicas[0].states()).sequence_id
            gone = [replica.abort(victim).completion.token_ids for replica in replicas]
            assert gone[0] == gone[1]
        elif event < 0.44 and replicas[0].states():
            chosen = rng.sample([s.sequence_id for s in replicas[0].states()], 1)
            keep = rng.random() < 0.5
            paused.append(
                [r.pause(chosen, store if keep else None)[0] for r, store in zip(replicas, stores, strict=True)]
            )
        elif event < 0.52 and paused:
            for replica, work in zip(replicas, paused.pop(), strict=True):
                replica.submit(work)
        elif event < 0.55:
            version += 1
            for llm in llms:
                works = llm.replica.pause()
                llm.update_weights(((name, w * (1 + 0.1 * (version % 2))) for name, w in weights.items()), version)
                for work in works:
                    llm.replica.submit(work)
        compare((replicas[0].step(), replicas[1].step()), replicas)
        replicas[0].scheduler.blocks.check_integrity()
    assert num_submitted > 20 and version and any(beside)
    assert sum(one is not None for one in passes) > 20
    for store in stores:
        store.close()


def test_groups_share_what_was_computed_ahead(qwen3: str) -> None:
    """A sequence that comes in the very step in which another fills a block, by a pass of before, shares that block."""
    replicas = [ahead(qwen3).replica, LLM(qwen3, dtype="float64", kv_cache_bytes=2**24).replica]
    sizes = []
    for replica in replicas:
        replica.submit(Work(state=state(0, prompt=LONG[0][:44], max_tokens=40)))
        for _ in range(4):
            replica.step()
        (first,) = replica.states()
        assert len(first.tokens) == 48
        replica.submit(Work(state=state(1, prompt=[*first.tokens, 7], max_tokens=20)))
        sizes.append(replica.step().num_tokens)
    assert sizes == [2, 2]
    while replicas[0].has_work:
        compare((replicas[0].step(), replicas[1].step()), (replicas[0], replicas[1]))


def finish(llm: LLM) -> list[list[int]]:
    finished = []
    while llm.replica.has_work:
        finished += llm.replica.step().finished
    return [f.state.tokens for f in sorted(finished, key=lambda f: f.state.sequence_id)]


def test_what_fails_is_computed_again(qwen3: str) -> None:
    llms = ahead(qwen3), LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    for llm in llms:
        for uid in range(4):
            llm.replica.submit(Work(state=state(uid)))
        for _ in range(5):
            llm.replica.step()
    llm = llms[0]
    norm = llm._engine.decoder.parameters.final_norm
    good = norm.clone()
    norm.fill_(torch.nan)
    llm.replica.step()  # was computed before
    with pytest.raises(FloatingPointError):
        llm.replica.step()
    norm.copy_(good)
    assert finish(llm) == finish(llms[1])
    llm.replica.scheduler.blocks.check_integrity()


def test_off_and_wrong(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**24)
    assert not llm.replica._runner._runs_ahead, "a CPU has nothing to wait for"
    with pytest.raises(ValueError, match=r"EngineConfig\.async_scheduling=1: must be True or False"):
        EngineConfig(async_scheduling=1)  # type: ignore[arg-type]
