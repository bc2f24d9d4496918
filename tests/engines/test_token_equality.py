"""The same tokens: whatever runs beside a sequence, however it is cut, preempted, paused, moved or spread over ranks.

In float64, where no rounding flips a draw, one different token is a bug. In float32 and bfloat16 every token of
another run must be the winner, or a counted near tie, when that run's tokens are forced.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engines import LLM, SamplingParams
from engines.models.decoder import Decoder
from engines.models.loader import checkpoint_tensors
from engines.sampling.noise import gumbel
from engines.sequence import Completion, SequenceKey, SequenceState, Work
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import Prices
from research.seer.thresholds import Thresholds
from tests.engines.test_parity import engine_logits
from tests.states import make_state

RNG = random.Random(1)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 40))] for _ in range(24)]
PARAMS = SamplingParams(max_tokens=40, n=2)
TIGHT_KV = 14 * 16 * 2 * 2 * 2 * 16 * 8  # 14 blocks of float64
FIXED = {"draft_lengths": "fixed"}

SWITCHES = {
    "crowd of 3": {"max_num_seqs": 3},
    "crowd of 17": {"max_num_seqs": 17},
    "prefill chunks of 7": {"prefill_chunk_size": 7},
    "prefill chunks of 1": {"prefill_chunk_size": 1},
    "small token budget": {"max_num_seqs": 8, "max_num_batched_tokens": 8},
    "blocks of 3": {"block_size": 3},
    "no prefix cache": {"prefix_caching": False},
    "no prefix cache, preemption": {"prefix_caching": False, "kv_cache_bytes": TIGHT_KV, "max_model_len": 100},
    "drafts": {"drafter": "ngram", **FIXED},
    "drafts, preemption": {"drafter": "ngram", "kv_cache_bytes": TIGHT_KV, "max_model_len": 100, **FIXED},
    "drafts of a suffix tree": {"drafter": "suffix", "max_draft_tokens": 3, **FIXED},
    "several drafts of a suffix tree": {"drafter": "suffix", "draft_paths": 2, "max_draft_tokens": 4, **FIXED},
    "several drafts of a group": {
        **FIXED, "drafter": "grouped_suffix", "draft_paths": 4, "max_num_seqs": 5, "kv_cache_bytes": TIGHT_KV,
        "max_model_len": 100, "prefill_chunk_size": 7,
    },
    "adaptive drafts": {"drafter": "grouped_suffix", "draft_paths": 2, "max_num_seqs": 5},
    "drafts of a group": {
        "drafter": "grouped_suffix", "max_num_seqs": 5,
        "draft_policy": lambda _: MarginalGain(Prices(lambda rows: 9.0 + rows)),
    },
    "drafts of a group, preemption": {
        "drafter": "grouped_suffix", "draft_policy": lambda _: Thresholds(Prices(lambda rows: 9.0 + rows), slack=3.0),
        "kv_cache_bytes": TIGHT_KV, "max_model_len": 100,
    },
    "preemption": {"kv_cache_bytes": TIGHT_KV, "max_model_len": 100},
    "all at once": {
        "kv_cache_bytes": TIGHT_KV, "max_model_len": 100, "max_num_seqs": 9, "max_num_batched_tokens": 20,
        "prefill_chunk_size": 7,
    },
}  # fmt: skip


def run(model: str, prompts: list[list[int]] = PROMPTS, uids: range | None = None, **options) -> list[list[Completion]]:
    llm = LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**24, **options})
    outputs = [o.outputs for o in llm.generate(prompts, PARAMS, prompt_uids=uids)]
    if options.get("kv_cache_bytes") == TIGHT_KV:
        assert llm.replica.scheduler.num_preemptions > 5, "the KV cache was not small enough to test anything"
    return outputs


def tokens_of(outputs: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in outputs]


@pytest.fixture(scope="module")
def plain(qwen3: str) -> list[list[Completion]]:
    return run(qwen3)


def test_the_plain_run_is_worth_comparing(plain: list[list[Completion]]) -> None:
    everything = [tuple(c.token_ids) for group in plain for c in group]
    longer = [tokens for tokens in everything if len(tokens) > 3]  # a few may end at once, alike
    assert len(set(longer)) == len(longer) > len(everything) / 2
    assert {c.finish_reason for group in plain for c in group} == {"stop", "length"}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches(qwen3: str, plain: list[list[Completion]], switch: str) -> None:
    other = run(qwen3, **SWITCHES[switch])
    assert tokens_of(other) == tokens_of(plain)
    for group, expected in zip(other, plain, strict=True):
        for mine, theirs in zip(group, expected, strict=True):
            torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-9, atol=1e-9)


LONG = [[RNG.randrange(2, 131) for _ in range(100)] for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40, "max_num_seqs": 7}, {"prefill_chunk_size": 9}])
def test_a_group_shares_its_prompt(qwen3: str, options: dict[str, int]) -> None:
    params = SamplingParams(max_tokens=30, n=6)
    alone, sharing = (
        LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, prefix_caching=caching, **options)  # type: ignore[arg-type]
        for caching in (False, True)
    )
    prompts = [LONG[0], LONG[1], LONG[0][:50] + LONG[1][50:]]
    expected = [o.outputs for o in alone.generate(prompts, params)]
    assert tokens_of([o.outputs for o in sharing.generate(prompts, params)]) == tokens_of(expected)
    scheduler = sharing.replica.scheduler
    assert scheduler.num_shared_tokens >= 5 * (96 + 96 + 48) and alone.replica.scheduler.num_shared_tokens == 0
    scheduler.blocks.check_integrity()
    # The next turn begins with all of the turn before, and another branch with a part of it.
    before = scheduler.num_shared_tokens
    turn = [prompts[0] + expected[0][1].token_ids + [5] * 20, prompts[0][:64] + [9] * 30]
    again = [[o.outputs for o in llm.generate(turn, params, prompt_uids=[77, 78])] for llm in (alone, sharing)]
    assert tokens_of(again[0]) == tokens_of(again[1])
    assert scheduler.num_shared_tokens - before >= 6 * (96 + 64)


def test_other_weights_take_no_old_kv(qwen3: str) -> None:
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    weights = {name: tensor.double() for name, tensor in checkpoint_tensors(qwen3)}
    llm.generate(LONG, PARAMS)
    changed = {name: tensor * 1.1 for name, tensor in weights.items()}
    llm.update_weights(changed.items(), version=0)
    fresh = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, load=False)
    fresh.update_weights(changed.items(), version=0)
    outputs = [[o.outputs for o in one.generate(LONG, PARAMS, prompt_uids=range(2))] for one in (llm, fresh)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    llm.sleep()
    llm.wake_up()
    asleep = [o.outputs for o in llm.generate(LONG, PARAMS, prompt_uids=range(2))]
    assert tokens_of(asleep) == tokens_of(outputs[1])


def test_an_interrupted_pass_leaves_nothing_to_share(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    forward = Decoder.forward

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(LONG, PARAMS, prompt_uids=range(2))
    monkeypatch.setattr(Decoder, "forward", forward)
    outputs = [o.outputs for o in llm.generate(LONG, PARAMS, prompt_uids=range(2))]
    alone = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, prefix_caching=False)
    assert tokens_of(outputs) == tokens_of([o.outputs for o in alone.generate(LONG, PARAMS, prompt_uids=range(2))])


def test_what_an_interrupted_pass_shared_is_computed_by_those_who_are_left(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member whose prompt the others share in the pass that is interrupted leaves before the next one."""
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    states = [make_state(0, LONG[0], PARAMS, index=index) for index in range(3)]
    for state in states:
        llm.replica.submit(Work(state=state))
    forward = Decoder.forward

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.replica.step()
    monkeypatch.setattr(Decoder, "forward", forward)
    llm.replica.abort(states[0].sequence_id)
    done = {}
    while llm.replica.has_work:
        done |= {one.completion.index: one.completion.token_ids for one in llm.replica.step().finished}
    alone = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, prefix_caching=False)
    (expected,) = alone.generate(LONG[:1], dataclasses.replace(PARAMS, n=3), prompt_uids=[0])
    assert done == {index: expected.outputs[index].token_ids for index in (1, 2)}


def test_alone(qwen3: str, plain: list[list[Completion]]) -> None:
    for uid in (0, 5, 23):
        assert tokens_of(run(qwen3, [PROMPTS[uid]], range(uid, uid + 1)))[0] == tokens_of(plain)[uid]


def test_another_order(qwen3: str, plain: list[list[Completion]]) -> None:
    backwards = run(qwen3, PROMPTS[::-1], range(len(PROMPTS) - 1, -1, -1))
    assert tokens_of(backwards) == tokens_of(plain)[::-1]


@pytest.mark.parametrize("option", [{"seed": 1}, {"prompt_uids": range(100, 124)}])
def test_another_key_is_another_sample(qwen3: str, plain: list[list[Completion]], option: dict) -> None:
    uids = option.get("prompt_uids")
    other = run(qwen3, uids=uids, seed=option.get("seed", 0))
    same = sum(a == b for a, b in zip(tokens_of(other), tokens_of(plain), strict=True))
    assert same == 0


def test_a_request_s_own_seed_fixes_its_tokens(qwen3: str) -> None:
    params = SamplingParams(max_tokens=30, seed=7)
    first = LLM(qwen3, seed=1, kv_cache_bytes=2**23).generate([PROMPTS[0]], params)[0].outputs[0]
    llm = LLM(qwen3, seed=2, kv_cache_bytes=2**23)
    again = llm.generate([PROMPTS[1], PROMPTS[0]], params)[1].outputs[0]
    once_more = llm.generate([PROMPTS[0]], params)[0].outputs[0]
    assert first.token_ids == again.token_ids == once_more.token_ids


def make_states() -> list[SequenceState]:
    each = [(uid, prompt, index) for uid, prompt in enumerate(PROMPTS) for index in range(PARAMS.n)]
    return [make_state(uid, prompt, PARAMS, index=index) for uid, prompt, index in each]


_RESUME = """
import sys
from engines import LLM
from engines.sequence import SequenceState, Work
import msgspec
llm = LLM(sys.argv[1], dtype="float64", max_num_seqs=5, kv_cache_bytes=2**23)
for state in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[SequenceState]):
    llm.replica.submit(Work(state=state))
done = []
while llm.replica.has_work:
    done += [(f.state.key.prompt_uid, f.completion) for f in llm.replica.step().finished]
sys.stdout.buffer.write(msgspec.msgpack.encode(done))
"""


def test_paused_serialised_and_resumed_in_another_process(qwen3: str, plain: list[list[Completion]]) -> None:
    import msgspec

    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**23)
    for state in make_states():
        llm.replica.submit(Work(state=state))
    done = []
    for _ in range(13):
        done += [(f.state.key.prompt_uid, f.completion) for f in llm.replica.step().finished]
    states = [work.state for work in llm.replica.pause()]
    assert len(states) + len(done) == len(PROMPTS) * PARAMS.n and len(states) > 20
    assert not llm.replica.has_work
    assert [SequenceState.from_bytes(state.to_bytes()) for state in states] == states
    sent = msgspec.msgpack.encode(states)
    result = subprocess.run(
        [sys.executable, "-c", _RESUME, qwen3], input=sent, capture_output=True, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    done += msgspec.msgpack.decode(result.stdout, type=list[tuple[int, Completion]])
    by_key = {(uid, c.index): c for uid, c in done}
    assert len(by_key) == len(done) == len(PROMPTS) * PARAMS.n
    for uid, group in enumerate(plain):
        for completion in group:
            assert by_key[uid, completion.index].token_ids == completion.token_ids
            torch.testing.assert_close(by_key[uid, completion.index].logprobs, completion.logprobs)


def test_moved_between_replicas_every_few_steps(qwen3: str, plain: list[list[Completion]]) -> None:
    replicas = [LLM(qwen3, dtype="float64", max_num_seqs=size, kv_cache_bytes=2**23).replica for size in (4, 9)]
    rng = random.Random(3)
    for state in make_states():
        rng.choice(replicas).submit(Work(state=state))
    done: dict[tuple[int, int], list[int]] = {}
    while any(replica.has_work for replica in replicas):
        for replica in replicas:
            for _ in range(rng.randint(1, 6)):
                for finished in replica.step().finished:
                    done[finished.state.key.prompt_uid, finished.completion.index] = finished.completion.token_ids
        if rng.random() < 0.5:
            for work in rng.choice(replicas).pause():
                rng.choice(replicas).submit(work)
    assert done == {(uid, c.index): c.token_ids for uid, group in enumerate(plain) for c in group}


def test_versions_name_the_policy_of_each_token(qwen3: str) -> None:
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**23)
    state = make_states()[0]
    state.params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm.replica.submit(Work(state=state))
    for _ in range(5):
        llm.replica.step()
    (paused,) = llm.replica.pause()
    llm.update_weights(((name, view.clone()) for name, view in llm._engine.decoder.logical_views().items()), version=4)
    llm.replica.submit(paused)
    while not (finished := llm.replica.step().finished):
        pass
    assert finished[0].completion.versions == [0] * 5 + [4] * 7


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_low_precision_differs_by_near_ties_only(qwen3: str, dtype: str, near: float) -> None:
    options = {**SWITCHES["all at once"], "kv_cache_bytes": TIGHT_KV // (2 if dtype == "float32" else 4)}
    other = LLM(qwen3, dtype=dtype, **options)
    outputs = other.generate(PROMPTS, PARAMS)
    assert other.replica.scheduler.num_preemptions > 5
    near_ties = total = 0
    scorer = LLM(qwen3, dtype=dtype, kv_cache_bytes=2**23)
    for uid, output in enumerate(outputs):
        for completion in output.outputs:
            scores = _forced_scores(scorer, uid, output.prompt_token_ids, completion)
            chosen = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gap = scores.amax(-1) - chosen
            assert gap.max() < near
            near_ties += int((gap > 0).sum())
            total += len(gap)
    assert total > 1000
    assert near_ties <= (2 if dtype == "float32" else total // 20)


def _forced_scores(scorer: LLM, uid: int, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Log-probs plus noise at every generated position, all positions in one pass."""
    tokens = prompt + completion.token_ids
    logits = engine_logits(scorer, tokens, len(tokens))[len(prompt) - 1 : -1].float()
    key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=completion.index).noise_key()
    positions = torch.arange(len(prompt), len(tokens))
    return logits + gumbel(torch.full_like(positions, key), positions, logits.shape[1])
