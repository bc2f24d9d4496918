"""A small model as drafter: tokens stay the same, its KV is that of a fresh prefill, and draws agree as often as they
should."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import EngineConfig, ModelConfig
from engines.coordination.policies import OnDemand
from engines.fleet.fleet import Fleet
from engines.kvcache.paged import read_kv
from engines.models.loader import checkpoint_tensors
from engines.parallel.layout import nested_layout
from engines.replica.model_drafter import ModelDrafter
from engines.replica.schedule import Scheduled
from engines.sampling.sampler import make_sampling_batch, sample
from engines.sequence import Completion, SequenceId, SequenceState, Work
from engines.speculation.drafter import Ask, Draft, News
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import Prices
from engines.speculation.shared import SplitDrafter
from research.simulator.pace import ProfilePace
from tests.checkpoints import save_checkpoint
from tests.engines.test_drafts import (
    NUM_DRAFT_TOKENS,
    OPTIONS,
    PARAMS,
    PROMPTS,
    Watch,
    check,
    make_states,
    states_for,
    submitted,
)
from tests.engines.test_drafts import make_llm as make_plain_llm
from tests.engines.test_memory import capacity
from tests.engines.test_parity import engine_logits
from tests.engines.test_rollout_world import Flip
from tests.engines.test_token_equality import TIGHT_KV
from tests.holding import Held, check_tokens, held_params, tokens_of
from tests.interrupts import interrupts
from tests.states import asks, make_state
from tests.worlds import join, run_world


@pytest.fixture(scope="module")
def models(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The target itself; one that is like it; one of another family."""
    near, other = (tmp_path_factory.mktemp(name) for name in ("near", "other"))
    model = save_checkpoint(near, "qwen3")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(near)
    save_checkpoint(other, "llama3", seed=1)
    return {"same": qwen3, "near": str(near), "other": str(other)}


@pytest.fixture(scope="module")
def plain(qwen3: str) -> dict[SequenceId, Completion]:
    return submitted(make_plain_llm(qwen3), make_states()).finish()


def make_llm(model: str, draft: str, noise: str = "target", **options: Any) -> LLM:
    drafts = {"drafter": "model", "draft_model": draft, "draft_noise": noise, "max_draft_tokens": NUM_DRAFT_TOKENS}
    drafts["draft_lengths"] = "adaptive" if "draft_policy" in options else "fixed"
    return LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**22, **drafts, **options})


def drafter_of(llm: LLM) -> ModelDrafter:
    drafter = llm._engine._model_drafter
    assert drafter is not None
    return drafter


def check_forgotten(drafter: ModelDrafter) -> None:
    drafter._blocks.check_integrity()
    assert not drafter._copies and drafter._blocks.num_free_blocks == drafter._blocks.num_blocks
    assert len(drafter._free_slots) == drafter._config.max_num_seqs


class Passes:
    """Watches the drafter's passes."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._run, self._config, self.tokens = drafter._runner.run, drafter._config, list[list[int]]()
        drafter._runner.run = self._watch  # type: ignore[method-assign]

    def _watch(self, scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        self.tokens.append([item.num_tokens for item in scheduled])
        assert 0 < sum(self.tokens[-1]) <= self._config.max_num_batched_tokens
        assert len(scheduled) <= self._config.max_num_seqs
        return self._run(scheduled)


# -- the same tokens


@pytest.mark.parametrize(
    ("options", "draft", "noise"),
    [
        *((options, draft, "target") for options in OPTIONS for draft in ("same", "near")),
        *((options, "near", "own") for options in ("many", "one by one", "chunks", "recompute, small blocks")),
        *((options, "other", "target") for options in ("many", "no prefix cache", "swap")),
    ],
)
def test_the_same_tokens(
    models: dict[str, str], plain: dict[SequenceId, Completion], options: str, draft: str, noise: str
) -> None:
    """With its own model as drafter and its own noise, every guess is right, at any temperature."""
    llm = make_llm(models["same"], models[draft], noise, **OPTIONS[options])
    drafter = drafter_of(llm)
    Passes(drafter)
    watch = submitted(llm, states_for(options))
    check(watch.finish(), {state.sequence_id: plain[state.sequence_id] for state in states_for(options)})
    check_forgotten(drafter)
    if "preemption" in OPTIONS[options]:
        assert llm.replica.scheduler.num_preemptions > 3, "the KV cache was not small enough to test anything"
    share = watch.num_accepted / max(1, watch.num_drafted)
    assert watch.num_drafted > 100 or options == "budget for decodes only"
    assert share == (watch.num_drafted > 0) if draft == "same" else share < 1


def test_noise_of_its_own_agrees_less(models: dict[str, str]) -> None:
    shares = {}
    for noise in ("target", "own"):
        watch = submitted(make_llm(models["same"], models["near"], noise), make_states())
        watch.finish()
        shares[noise] = watch.num_accepted / watch.num_drafted
    assert shares["target"] > shares["own"] + 0.1


def test_a_request_s_own_seed(models: dict[str, str]) -> None:
    states = [make_state(uid, PROMPTS[uid], SamplingParams(max_tokens=30, seed=uid)) for uid in range(4)]
    watch = submitted(make_llm(models["same"], models["same"]), states)
    watch.finish()
    assert watch.num_accepted == watch.num_drafted > 50


class Sometimes:
    """A policy that drafts in some passes only, and shortens some drafts."""

    def __init__(self) -> None:
        self._rng = random.Random(3)
        self._left = 0

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        self._left = self._left - 1 if self._left > -5 else self._rng.randint(1, 4)
        return asks if self._left > 0 else []

    def shorten(self, states: Any, drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        return [draft.cut(self._rng.randint(0, NUM_DRAFT_TOKENS)) for draft in drafts]

    def observe(self, state: SequenceState, probabilities: list[float], num_accepted: int) -> None:
        assert all(0 < one <= 1 for one in probabilities) and probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize("draft", ["same", "near"])
@pytest.mark.parametrize("policy", [lambda _: Sometimes(), lambda _: MarginalGain(Prices(lambda rows: 200.0 + rows))])
def test_policies(models: dict[str, str], plain: dict[SequenceId, Completion], policy: Any, draft: str) -> None:
    """A drafter that was not asked for some steps catches up, and guesses behind a shortened draft stay."""
    llm = make_llm(models["same"], models[draft], draft_policy=policy)
    passes = Passes(drafter_of(llm))
    watch = submitted(llm, make_states())
    check(watch.finish(), plain)
    assert watch.num_drafted > 50
    if draft == "same":
        assert watch.num_accepted == watch.num_drafted
        assert max(max(one) for one in passes.tokens[3:]) > 2 or isinstance(policy(None), MarginalGain)
    check_forgotten(drafter_of(llm))


def test_paused_moved_and_released(models: dict[str, str], plain: dict[SequenceId, Completion]) -> None:
    llms = [make_llm(models["same"], models["near"], max_num_seqs=size, kv_host_bytes=2**24) for size in (5, 9)]
    watches = [Watch(llm.replica, llm.config) for llm in llms]
    rng = random.Random(5)
    for state in make_states():
        rng.choice(llms).replica.submit(Work(state=state, max_new_tokens=7))
    while any(llm.replica.has_work for llm in llms):
        for watch in watches:
            for work in watch.step().released:
                rng.choice(llms).replica.submit(replace(work, max_new_tokens=7, kv=None))
        if rng.random() < 0.3:
            one = rng.choice(llms)
            works = one.replica.pause()
            check_forgotten(drafter_of(one))
            for work in works:
                rng.choice(llms).replica.submit(work)
    check(watches[0].done | watches[1].done, plain)
    assert min(watch.num_accepted for watch in watches) > 20


def over_two_ranks(target: str, draft: str) -> list[Any]:
    layout = nested_layout(range(2), 2)
    groups = join([layout], timeout_s=120)
    llm = make_llm(target, draft, world=groups, layout=layout, kv_cache_bytes=TIGHT_KV, max_model_len=100)
    assert isinstance(llm.replica.drafter, SplitDrafter)
    seen: set[str] = set()
    run = drafter_of(llm)._runner.run

    def watched(scheduled: list[Scheduled]) -> Any:
        seen.update(str(item.sequence.state.sequence_id) for item in scheduled)
        return run(scheduled)

    drafter_of(llm)._runner.run = watched  # type: ignore[method-assign]
    watch = submitted(llm, make_states())
    tokens = {str(sequence_id): one.token_ids for sequence_id, one in watch.finish().items()}
    assert llm.memory.drafter is not None
    groups.close()
    return [tokens, [watch.num_drafted, watch.num_accepted], sorted(seen)]


@pytest.mark.parametrize("draft", ["same", "near"])
def test_over_two_ranks(models: dict[str, str], plain: dict[SequenceId, Completion], draft: str) -> None:
    """Each shard has the small model, and drafts for its share of the sequences."""
    first, second = run_world(over_two_ranks, 2, models["same"], models[draft])
    assert first[:2] == second[:2]
    assert first[0] == {str(sequence_id): one.token_ids for sequence_id, one in plain.items()}
    assert first[1][1] > 50 and (first[1][0] == first[1][1]) == (draft == "same")
    assert min(len(first[2]), len(second[2])) > 4 and not {*first[2]} & {*second[2]}


HELD = (0, 1)
"""One on each rank. They have tokens before the regroup, and go on behind it."""


def regrouping_params() -> list[SamplingParams]:
    return [held_params(one) if uid in HELD else one for uid, one in enumerate(PARAMS)]


def regroup(target: str) -> list[Any]:
    groups = join(timeout_s=120)
    held = Held(HELD, num_tokens=40, num_more=40)
    options: dict[str, Any] = {"schedule": OnDemand(), "layout_policy": Flip(), "max_num_seqs": 6, "hidden_stop": held}
    llm = make_llm(target, target, world=groups, kv_cache_bytes=2**21, **options)
    held.until_epoch(llm, 1)
    outputs = llm.generate(PROMPTS, regrouping_params())
    counts = [(one.epoch, one.num_drafted, one.num_accepted) for one in llm.step_records]
    result = [tokens_of(outputs), counts, llm.layout.epoch]
    llm.close()
    return result


def test_after_a_regroup(qwen3: str) -> None:
    """The first shard of the new replica reads the small model, which catches up."""
    results = run_world(regroup, 2, qwen3)
    plain = LLM(qwen3, dtype="float64", kv_cache_bytes=2**21).generate(PROMPTS, regrouping_params())
    for tokens, steps, epoch in results:
        check_tokens(tokens, tokens_of(plain), HELD)
        # A hidden stop, which no drafter foresees, may cut the last draft of a held sequence; no other token is wrong.
        cut = [drafted - accepted for _, drafted, accepted in steps if drafted != accepted]
        assert len(cut) <= len(HELD) and all(0 < one < len(HELD) * NUM_DRAFT_TOKENS for one in cut)
        behind = [accepted for at, drafted, accepted in steps if at == 1 and drafted == accepted]
        assert epoch == 1 and sum(behind) >= 40


def test_padded_passes_of_the_small_model(models: dict[str, str], plain: dict[SequenceId, Completion]) -> None:
    llm = make_llm(models["same"], models["same"], block_size=4)
    drafter_of(llm)._runner.pad_decodes()
    watch = submitted(llm, make_states())
    check(watch.finish(), plain)
    assert watch.num_accepted == watch.num_drafted > 100


# -- its KV, and what a step costs


@pytest.mark.parametrize("options", ["many", "chunks", "recompute, small blocks", "no prefix cache"])
@pytest.mark.parametrize("noise", ["target", "own"])
def test_kv_is_that_of_a_fresh_prefill(models: dict[str, str], noise: str, options: str) -> None:
    llm, fresh = make_llm(models["same"], models["near"], noise, **OPTIONS[options]), make_plain_llm(models["near"])
    drafter = drafter_of(llm)
    watch, compared = submitted(llm, make_states()), 0
    for step in itertools.count():
        if not llm.replica.has_work:
            break
        watch.step()
        for copy in drafter._copies.values() if step % 7 == 3 else ():
            sequence = copy.sequence
            tokens = sequence.state.tokens[: sequence.num_computed]
            if not tokens:
                continue
            prompt_blocks = sequence.state.num_prompt_tokens // llm.config.block_size
            assert not drafter._blocks._key_of.keys() & {*sequence.blocks[prompt_blocks:]}, "guesses may be there"
            engine_logits(fresh, tokens, len(tokens))
            blocks = list(range(-(-len(tokens) // 16)))
            mine = read_kv(drafter.hosted.kv, sequence.blocks, len(tokens))
            for layer, expected in zip(mine, read_kv(fresh._engine.kv, blocks, len(tokens)), strict=True):
                torch.testing.assert_close(layer, expected, rtol=1e-9, atol=1e-9)
            compared += 1
    assert compared > 15 and 20 < watch.num_accepted < watch.num_drafted


def test_a_group_computes_its_prompt_once(models: dict[str, str]) -> None:
    prompt = [3 + place % 120 for place in range(100)]
    states = [make_state(0, prompt, SamplingParams(max_tokens=40, ignore_eos=True), index=index) for index in range(6)]
    computed = {}
    for caching in (True, False):
        llm = make_llm(models["same"], models["same"], prefix_caching=caching)
        passes = Passes(drafter_of(llm))
        submitted(llm, [SequenceState.from_bytes(state.to_bytes()) for state in states]).finish()
        computed[caching] = passes.tokens
    assert sum(computed[True][0]) == 101 + 5 * 5 and sum(computed[False][0]) == 6 * 101
    # From then on a step computes the target's last guess and the token that it drew behind it; then each guess.
    assert all(set(one) <= {1, 2} for one in computed[True][1:])
    assert sum(map(sum, computed[True][1:])) <= 6 * 40


def test_a_long_prompt_is_computed_in_several_steps(models: dict[str, str]) -> None:
    """The target brings its KV; the small model has none, and computes at most ten tokens in a step."""
    llm = make_llm(models["same"], models["same"], max_num_batched_tokens=10, max_num_seqs=2)
    passes = Passes(drafter_of(llm))
    watch = submitted(llm, [make_state(0, [7] * 45, SamplingParams(max_tokens=30, ignore_eos=True))])
    watch.finish()
    assert passes.tokens[:4] == [[10]] * 4
    assert watch.num_accepted == watch.num_drafted > 10


def test_without_blocks_there_is_no_draft(models: dict[str, str], plain: dict[SequenceId, Completion]) -> None:
    """Blocks of sequences that are not asked for are taken first."""
    llm = make_llm(models["same"], models["same"])
    drafter = drafter_of(llm)
    drafter._blocks._num_ids = 12
    drafter._reset()
    watch = submitted(llm, make_states())
    check(watch.finish(), plain)
    assert watch.num_accepted == watch.num_drafted > 50
    states = [make_state(uid, [5 + uid] * 50) for uid in range(4)]
    assert [bool(one.tokens) for one in drafter.propose(asks(states, 5), 4, 4)] == [
        True,
        True,
        True,
        False,
    ]
    assert [bool(one.tokens) for one in drafter.propose(asks(states[2:], 5), 2, 2)] == [True, True]
    drafter._blocks.check_integrity()


# -- sleep, failures and interrupts


def test_another_sequence_of_the_same_name(models: dict[str, str]) -> None:
    """As after an interrupt, when nobody has said that the first one has left."""
    drafters = [drafter_of(make_llm(models["same"], models["same"])) for _ in range(2)]
    drafters[0].propose([Ask(make_state(0, PROMPTS[0]), 5)], 1, 1)
    again = [drafter.propose([Ask(make_state(0, [9] * 20), 5)], 1, 1) for drafter in drafters]
    assert again[0][0].tokens == again[1][0].tokens
    assert again[0][0].probabilities == pytest.approx(again[1][0].probabilities, rel=1e-9)


def test_sleep_releases_the_kv_and_keeps_the_weights(models: dict[str, str]) -> None:
    llm = make_llm(models["same"], models["same"])
    drafter, params = drafter_of(llm), SamplingParams(max_tokens=30)

    def generate() -> tuple[list[list[int]], float]:
        tokens = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, prompt_uids=range(12))]
        drafted = sum(record.num_drafted for record in llm.step_records)
        return tokens, sum(record.num_accepted for record in llm.step_records) / drafted

    expected = generate()
    assert expected[1] == 1
    llm.sleep()
    llm.sleep()
    assert not drafter.hosted.kv.keys[0].untyped_storage().size()
    assert drafter.hosted.decoder.parameters.embedding.untyped_storage().size()
    llm.wake_up()
    assert generate() == expected
    llm.sleep(weights=True)
    assert not drafter.hosted.decoder.parameters.embedding.untyped_storage().size()
    llm.wake_up()
    llm.update_weights(checkpoint_tensors(models["same"]), version=0)
    assert generate() == expected
    llm.update_weights(((name, 1.3 * one) for name, one in checkpoint_tensors(models["same"])), version=0)
    assert generate()[1] < 1, "the small model is still the old one"


def test_passes_that_fail(models: dict[str, str], plain: dict[SequenceId, Completion]) -> None:
    """Before, or after they have written KV: the step raises, and nothing of it is left."""
    llm = make_llm(models["same"], models["same"], block_size=4)
    drafter = drafter_of(llm)
    run, calls, errors = drafter._runner.run, itertools.count(1), 0

    def failing(scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        count = next(calls)
        if count % 9 == 0:
            raise RuntimeError("before")
        drawn = run(scheduled)
        if count % 14 == 0:
            raise RuntimeError("after")
        return drawn

    drafter._runner.run = failing  # type: ignore[method-assign]
    watch = submitted(llm, make_states())
    while llm.replica.has_work:
        try:
            watch.step()
        except RuntimeError:
            errors += 1
            check_forgotten(drafter)
    check(watch.done, plain)
    assert errors > 3 and watch.num_accepted == watch.num_drafted > 50


def test_a_small_model_of_nan_is_named(models: dict[str, str]) -> None:
    llm = make_llm(models["same"], models["same"])
    drafter_of(llm).hosted.decoder.parameters.final_norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"EngineConfig\.draft_model='.*': the model's logits are not finite"):
        llm.generate(PROMPTS, PARAMS)
    check_forgotten(drafter_of(llm))


def test_guesses_end_with_the_context(models: dict[str, str]) -> None:
    """A drafter that runs ahead is asked for more than the model's context holds."""
    drafter = drafter_of(make_llm(models["same"], models["same"], max_model_len=60))
    state = make_state(0, [5, 6, 7] * 18)
    (draft,) = drafter.propose([Ask(state, 20)], 1, 1)
    assert 0 < len(draft.tokens) <= 6
    drafter._blocks.check_integrity()


@pytest.mark.parametrize("call", ["step", "pause", "clear"])
def test_interrupts_at_every_few_lines(models: dict[str, str], call: str) -> None:
    llm = make_llm(models["same"], models["same"], kv_cache_bytes=2**19, max_model_len=90)
    drafter = drafter_of(llm)
    works = [Work(state=make_state(uid, [5, 6, uid] * 8, SamplingParams(max_tokens=16))) for uid in range(3)]
    expected = submitted(llm, [SequenceState.from_bytes(work.state.to_bytes()) for work in works]).finish()
    files = ["engines/replica/model_drafter.py", "engines/kvcache/block_manager.py"]
    for interrupter in interrupts(*files, step=13 if call == "step" else 3):
        for work in works:
            llm.replica.submit(Work(state=SequenceState.from_bytes(work.state.to_bytes())))
        llm.replica.step()
        llm.replica.step()
        interrupter.run(getattr(llm.replica, call))
        if interrupter.has_fired and call != "clear":
            watch = Watch(llm.replica, llm.config)
            done = watch.finish()
            assert {one: done[one].token_ids for one in done} == {one: expected[one].token_ids for one in done}
            assert watch.num_accepted == watch.num_drafted > 0
        llm.replica.clear()
        drafter.propose([Ask(make_state(9, [4, 5]), 3)], 1, 1)  # after an interrupt the first call forgets everything
        drafter.follow(News(ended=[make_state(9, [4, 5])]))
        if call == "clear":  # an interrupt of the replica's own part leaves sequences that nobody will finish
            drafter._blocks.check_integrity()
        else:
            check_forgotten(drafter)


# -- how often draws agree


def closed_forms(p: torch.Tensor, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Probabilities [N, V] -> [N]: that draws of p and of q are the same token, by the noise."""
    ratios = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])  # [N, i, j]
    return {"target": (1 / ratios.sum(-1)).sum(-1), "own": (p * q).sum(-1)}


@pytest.mark.parametrize("noise", ["target", "own"])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_draws_agree_as_often_as_the_closed_form_says(models: dict[str, str], noise: str, spread: float) -> None:
    count, vocab_size = 40_000, 17
    generator = torch.Generator().manual_seed(0)
    p = 2 * torch.randn((count, vocab_size), dtype=torch.float64, generator=generator)
    q = p + spread * torch.randn((count, vocab_size), dtype=torch.float64, generator=generator)
    state = make_state(3, [5] * 4)
    copy = drafter_of(make_llm(models["same"], models["same"], noise))._enter(state).sequence.state

    def draw(logits: torch.Tensor, one: SequenceState) -> torch.Tensor:
        columns = {"temperature": np.ones(count), "top_p": np.ones(count), "min_p": np.zeros(count)}
        batch = make_sampling_batch(
            keys=np.full(count, one.key.noise_key(one.params.seed)), positions=np.arange(count),
            top_k=np.full(count, -1), device=logits.device, **columns,
        )  # fmt: skip
        return sample(logits, batch).tokens

    expected = closed_forms(p.softmax(-1), q.softmax(-1))[noise]
    agreed = (draw(p, state) == draw(q, copy)).double().mean().item()
    error = (expected * (1 - expected)).sum().sqrt().item() / count
    assert abs(agreed - expected.mean().item()) < 4 * error < 0.01


# -- memory and refusals


def test_memory_is_planned_for(models: dict[str, str]) -> None:
    llm = make_llm(models["same"], models["near"], max_num_seqs=8, kv_cache_bytes=2**20)
    drafter, plan = drafter_of(llm), llm.memory.drafter
    assert plan is not None
    assert plan.weights == sum(tensor.nbytes for tensor in drafter.hosted.decoder.parameters.tensors())
    caches = (*drafter.hosted.kv.keys, *drafter.hosted.kv.values)
    assert plan.kv_cache == sum(cache[: drafter.hosted.kv.scratch_block].nbytes for cache in caches)
    assert drafter.hosted.kv.scratch_block == llm._engine.kv.scratch_block + 8 * 2
    without = make_plain_llm(models["same"], max_num_seqs=8, kv_cache_bytes=2**20).memory
    assert llm.memory.total >= without.total + plan.weights + plan.kv_cache
    assert "draft model" in llm.memory.summary() and "draft model" not in without.summary()


def test_too_little_memory_is_refused(models: dict[str, str]) -> None:
    model = ModelConfig.from_pretrained(models["same"])
    options = {"drafter": "model", "draft_model": models["near"], "kv_cache_bytes": 2**24}
    total = capacity(model, {"h": None}, ("h",), **options).plan(1).total
    alone = nested_layout(range(1), 1)
    capacity(model, {"h": total}, ("h",), **options).check(alone)
    with pytest.raises(ValueError, match=r"draft model \d+ \(its KV cache 20\).*Lower .*draft_model \(a smaller"):
        capacity(model, {"h": total - 1}, ("h",), **options).check(alone)
    auto = capacity(model, {"h": total}, ("h",), **options | {"kv_cache_bytes": "auto"}).with_kv_bytes([1])
    assert 0.88 * total < auto.plan(1).total <= 0.9 * total


def bad_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"drafter": "model"}, r"EngineConfig\.draft_model=None, drafter='model': .*give both, or neither"
    yield {"draft_model": "x"}, r"EngineConfig\.draft_model='.*/x', drafter='none': .*give both, or neither"
    yield {"drafter": "model", "draft_model": ""}, r"EngineConfig\.draft_model='': must be a path"
    yield {"draft_noise": "own"}, r"EngineConfig\.draft_noise='own': is for drafter='model', not 'none'"
    yield {"draft_noise": "pink"}, r"EngineConfig\.draft_noise='pink': must be one of"
    yield {"drafter": "model", "draft_model": "x", "draft_paths": 2}, r"EngineConfig\.draft_paths=2: is for"


@pytest.mark.parametrize(("options", "message"), bad_options())
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def bad_checkpoints() -> Iterator[tuple[dict[str, Any] | None, str]]:
    yield None, r"EngineConfig\.draft_model='.*': no config.json there; give a Hugging Face checkpoint"
    yield {"architectures": ["GPT2LMHeadModel"]}, r"architectures='GPT2LMHeadModel' is not supported"
    yield {"vocab_size": 140}, r"EngineConfig\.draft_model=.* vocabulary of 140 tokens, the model has 131; give"
    yield {"max_position_embeddings": 100}, r"draft_model=.*: its context is 100 tokens, max_model_len=256; lower"


@pytest.mark.parametrize(("changes", "message"), bad_checkpoints())
def test_bad_checkpoints(qwen3: str, tmp_path: Path, changes: dict[str, Any] | None, message: str) -> None:
    """Refused from config.json alone, before anything is loaded; a Fleet refuses before it starts a process."""
    if changes is not None:
        config = json.loads((Path(qwen3) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
    for make in (LLM, lambda *one, **more: Fleet(*one, num_replicas=1, **more)):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            make(qwen3, drafter="model", draft_model=tmp_path, kv_cache_bytes=2**20)


def paced(target: str, draft: str) -> str:
    groups = join(timeout_s=60)
    with pytest.raises(ValueError) as caught:
        make_llm(target, draft, world=groups, schedule=OnDemand(), pace=ProfilePace.of("h100-8b-tp1"))
    groups.close()
    return str(caught.value)


def test_a_pace_that_has_no_price_of_the_small_model_is_refused(models: dict[str, str]) -> None:
    for message in run_world(paced, 2, models["same"], models["near"]):
        assert "ProfilePace.draft_shapes=[]: has no shape of draft model" in message and models["near"] in message


def test_another_tokenizer_is_refused(text_model: str, tmp_path: Path) -> None:
    for file in Path(text_model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options = {"drafter": "model", "draft_model": str(tmp_path), "kv_cache_bytes": 2**20}
    LLM(text_model, **options)
    tokenizer = tmp_path / "tokenizer.json"
    data = json.loads(tokenizer.read_text())
    vocab = data["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    tokenizer.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"EngineConfig\.draft_model=.*its tokenizer has other tokens"):
        LLM(text_model, **options)


def test_a_damaged_checkpoint_is_told(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(models["near"]) / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"model.safetensors missing; give a Hugging Face checkpoint"):
        make_llm(models["same"], str(tmp_path))


def update_with_a_damaged_draft_model(target: str, damaged: str) -> list[str]:
    """The ranks meet for each tensor of the stream, as they do under ZeRO-3."""
    layout = nested_layout(range(2), 2)
    groups = join([layout], timeout_s=60)
    llm = make_llm(target, damaged, world=groups, layout=layout, load=False)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for one in checkpoint_tensors(target):
            groups.world.barrier()
            yield one

    with pytest.raises((FileNotFoundError, RuntimeError)) as caught:
        llm.update_weights(stream(), 1)
    groups.close()
    return [str(caught.value)]


def test_a_damaged_draft_model_ends_an_update_on_all_ranks(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(models["near"]) / "config.json").read_bytes())
    results = run_world(update_with_a_damaged_draft_model, 2, models["same"], str(tmp_path))
    assert all("safetensors" in message for (message,) in results)


def test_a_fleet_s_replicas_draft(models: dict[str, str], plain: dict[SequenceId, Completion]) -> None:
    options: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22, "max_num_seqs": 8, "draft_lengths": "fixed"}
    with Fleet(models["same"], num_replicas=1, drafter="model", draft_model=models["same"], **options) as fleet:
        done = fleet.roll_out(make_states(), policy_version=0)
    assert {one.state.sequence_id: one.completion.token_ids for one in done} == {
        sequence_id: one.token_ids for sequence_id, one in plain.items()
    }
