"""Speculative decoding: with any drafts the tokens and log-probs are those of a plain run, and drafts harm no one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import LLM, SamplingParams
from engines.config import EngineConfig
from engines.native.library import choose_library
from engines.parallel.layout import nested_layout
from engines.replica.replica import Replica, StepOutput
from engines.replica.schedule import Fork, Scheduled
from engines.rollout.telemetry import chrome_trace, guesses
from engines.sequence import Completion, Finished, SequenceId, SequenceState, Work
from engines.speculation.drafter import Ask, Draft, DraftPass, News
from engines.speculation.ngram import NGramDrafter
from engines.speculation.verify import num_accepted
from research.seer.thresholds import Thresholds
from tests.engines import test_batch_invariant
from tests.engines.test_graphs import poison
from tests.engines.test_kv_mover import make_replica
from tests.engines.test_kv_store import make_store
from tests.engines.test_token_equality import TIGHT_KV
from tests.states import make_state
from tests.worlds import join, run_world

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 12))] * RNG.randint(1, 3) for _ in range(12)]
KINDS_OF_SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"temperature": 0.6, "top_k": 20}]
PARAMS = [SamplingParams(max_tokens=40, **KINDS_OF_SAMPLING[uid % 4]) for uid in range(len(PROMPTS))]
NUM_DRAFT_TOKENS = 5
NUM_PATHS = 4
FAR = 60
"""Tokens that the truth has more than a sequence may generate: drafts run past every end."""
Truth = dict[SequenceId, list[int]]


def make_states(params: Callable[[SamplingParams], SamplingParams] = lambda one: one) -> list[SequenceState]:
    return [
        make_state(uid, prompt, params(PARAMS[uid]), index=index)
        for uid, prompt in enumerate(PROMPTS)
        for index in range(2)
    ]


class ScriptedDrafter:
    """Knows all tokens, and proposes what its kind makes of them. Checks that it is called as its protocol says."""

    def __init__(self, kind: str, truth: Truth, most: int = NUM_DRAFT_TOKENS) -> None:
        self._kind, self._truth, self._most = kind, truth, most
        self.known: set[SequenceId] = set()
        self.passes: list[DraftPass] = []
        self.num_drafted = self.num_accepted = 0
        self.asked: tuple[int, int] | None = None
        """Tokens and draws of the next pass without drafts."""

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        states, limits = [ask.state for ask in asks], [ask.limit for ask in asks]
        assert num_tokens >= num_draws >= len(states)
        self.asked = num_tokens, num_draws
        assert states and all(1 <= limit <= self._most for limit in limits)
        ids = [state.sequence_id for state in states]
        assert len({*ids}) == len(ids)
        self.known |= {*ids}
        self._lengths = {state.sequence_id: len(state.tokens) for state in states}
        pairs = list(zip(states, limits, strict=True))
        if self._kind in ("paths", "wrong paths"):
            return [self._propose_paths(state, limit) for state, limit in pairs]
        drafts = [self._propose(state, limit) for state, limit in pairs]
        return [Draft(draft, [0.5] * len(draft)) for draft in drafts]

    def _propose_paths(self, state: SequenceState, limit: int) -> Draft:
        """Up to four, each right up to some place and wrong from there on: also equal ones, and empty ones."""
        known = len(state.tokens)
        right = self._truth[state.sequence_id][known:][:limit]
        rng = random.Random(1000 * known + state.key.prompt_uid)
        paths = []
        for _ in range(rng.randint(1, NUM_PATHS)):
            count, length = rng.randint(0, limit), rng.randint(0, limit)
            count *= self._kind == "paths"
            path = right[:count] + [(token + rng.randint(1, 3)) % 131 for token in right[count:]]
            paths.append(Draft(path[:length], [0.5] * length))
        return paths[0]._replace(others=tuple(paths[1:]))

    def _propose(self, state: SequenceState, limit: int) -> list[int]:
        known = len(state.tokens)
        right = self._truth[state.sequence_id][known:][:limit]
        assert len(right) == limit and self._truth[state.sequence_id][:known] == state.tokens
        rng = random.Random(1000 * known + state.key.prompt_uid)
        wrong = [(token + rng.randint(1, 130)) % 131 for token in right]
        if self._kind == "mixed":
            right = [rng.choice([one, one, one, other]) for one, other in zip(right, wrong, strict=True)]
            return right[: rng.randint(0, limit)]
        if self._kind == "random":
            return [rng.randrange(131) for _ in right]
        return right if self._kind == "truth" else wrong

    def follow(self, news: News) -> None:
        for state in news.ended:
            self.known.discard(state.sequence_id)
        for state, draft, count in news.drawn:
            if not draft:
                continue
            drawn = state.tokens[self._lengths[state.sequence_id] :]
            right = [guess == token for guess, token in zip(draft, drawn, strict=False)]
            assert count == (right.index(False) if False in right else len(right))
            self.num_drafted += len(draft)
            self.num_accepted += count


KINDS = ("ngram", "truth", "wrong", "random", "mixed", "paths")
DIVERSE_KINDS = ("truth", "mixed", "paths")
"""Of these drafts any number of tokens is accepted: they run with all options."""


def options_of(kind: str) -> dict[str, Any]:
    paths = {"drafter": "suffix", "draft_paths": NUM_PATHS} if kind == "paths" else {"drafter": "ngram"}
    return {"max_draft_tokens": NUM_DRAFT_TOKENS, "draft_lengths": "fixed", **paths}


def drafting(llm: LLM, kind: str, truth: Truth) -> LLM:
    if kind != "ngram":
        llm.replica.drafter = ScriptedDrafter(kind, truth)
    return llm


def make_llm(model: str, kind: str = "none", truth: Truth | None = None, **options: Any) -> LLM:
    drafts = {} if kind == "none" else options_of(kind)
    llm = LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**22, **drafts, **options})
    return llm if kind == "none" else drafting(llm, kind, truth or {})


class Watch:
    """Steps a replica and checks each step: the batch's order and size, what it counts, and that blocks add up."""

    def __init__(self, replica: Replica, config: EngineConfig) -> None:
        self._replica, self._config = replica, config
        self._run, self._settle = replica._runner.run, replica.scheduler.settle
        replica.scheduler.settle = self._watch_settle  # type: ignore[method-assign]
        replica._runner.run = self._watch  # type: ignore[method-assign]
        self.done: dict[SequenceId, Completion] = {}
        self.outputs: list[StepOutput] = []
        self.num_drafted = self.num_accepted = self.num_forks = self.num_taken = 0
        self._expected: tuple[int, ...] = (0, 0, 0, 0)
        self._paths: list[tuple[SequenceState, int, list[list[int]]]] = []
        """Of the last pass: sequences with drafts, their lengths, and the drafts."""

    def _watch(self, scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        lengths = [item.num_tokens for item in scheduled]
        if isinstance(drafter := self._replica.drafter, ScriptedDrafter) and drafter.asked is not None:
            num_drafted = sum(len(item.draft) for item in scheduled)
            assert drafter.asked == (sum(lengths) - num_drafted, sum(item.samples for item in scheduled))
            drafter.asked = None
        assert lengths == sorted(lengths, key=lambda length: length > 1) and len(lengths) <= self._config.max_num_seqs
        block_size = self._config.block_size
        ends = [item.sequence.num_computed + item.num_tokens for item in scheduled]
        assert all(len(item.draft) <= NUM_DRAFT_TOKENS for item in scheduled)
        assert all(end < item.sequence.release_len for item, end in zip(scheduled, ends, strict=True))
        pairs = [sum(range(item.sequence.num_computed + 1, end + 1)) for item, end in zip(scheduled, ends, strict=True)]
        num_sampled = sum(1 + len(item.draft) for item in scheduled if item.samples)
        self._expected = (sum(lengths), sum(pairs), num_sampled, sum(len(item.draft) for item in scheduled))
        for item in scheduled:
            known, last = len(item.sequence.state.tokens), item.sequence.num_computed
            if item.draft:
                paths = [[*item.draft], *([*fork.draft] for fork in item.forks)]
                self._paths.append((item.sequence.state, known, paths))
            for fork in item.forks:
                self.num_forks += 1
                end = known + len(fork.draft)
                assert item.draft and len(item.draft) <= len(item.sequence.blocks) * self._config.block_size - known
                assert last <= fork.start <= end - 2 and end < item.sequence.release_len
                assert fork.num_common == num_accepted(fork.draft, item.draft) < len(fork.draft) <= NUM_DRAFT_TOKENS
                shared = fork.num_shared
                assert shared <= len(item.sequence.blocks) and fork.start >= shared * block_size
                assert len(fork.blocks) == -(-end // block_size) - shared
                assert not set(fork.blocks) & set(item.sequence.blocks)
                rows = end - fork.start
                of_forks = [rows, sum(range(fork.start + 1, end + 1)), rows, len(fork.draft) - fork.num_common]
                self._expected = tuple(map(sum, zip(self._expected, of_forks, strict=True)))
        assert self._expected[0] <= self._config.max_num_batched_tokens
        assert self._expected[2] <= self._config.most_draws
        return self._run(scheduled)

    def _watch_settle(self, item: Scheduled, taken: Fork | None = None) -> None:
        self.num_taken += taken is not None
        self._settle(item, taken)

    def step(self) -> StepOutput:
        self._expected, self._paths = (0, 0, 0, 0), []
        output = self._replica.step()
        assert (output.num_tokens, output.num_pairs, output.num_sampled, output.num_drafted) == self._expected
        assert 0 <= output.num_accepted <= output.num_drafted
        assert output.num_compared == sum(
            max(sum(path[:place] == drawn[:place] for place in range(min(len(path), len(drawn)))) for path in paths)
            for state, known, paths in self._paths
            if (drawn := state.tokens[known:])
        )
        self.num_drafted += output.num_drafted
        self.num_accepted += output.num_accepted
        for one in output.finished:
            assert one.state.sequence_id not in self.done
            self.done[one.state.sequence_id] = one.completion
        scheduler = self._replica.scheduler
        scheduler.blocks.check_integrity()
        for sequence in scheduler.running:
            known = len(sequence.state.tokens)
            assert sequence.num_computed < known < sequence.release_len
            assert sequence.num_table_blocks <= len(sequence.blocks) <= scheduler.blocks.blocks_for(known)
            assert sequence.num_published * scheduler.blocks.block_size <= sequence.num_computed
        self.outputs.append(output)
        return output

    def finish(self) -> dict[SequenceId, Completion]:
        while self._replica.has_work:
            self.step()
        return self.done


def submitted(llm: LLM, states: Iterable[SequenceState]) -> Watch:
    for state in states:
        llm.replica.submit(Work(state=state))
    return Watch(llm.replica, llm.config)


def check(done: dict[SequenceId, Completion], plain: dict[SequenceId, Completion]) -> None:
    assert done.keys() == plain.keys()
    for sequence_id, mine in done.items():
        expected = plain[sequence_id]
        assert mine.token_ids == expected.token_ids
        assert (mine.finish_reason, mine.versions, mine.text) == (
            expected.finish_reason, expected.versions, expected.text,
        )  # fmt: skip
        assert mine.logprobs == pytest.approx(expected.logprobs, rel=1e-9, abs=1e-9)


def check_all_left(llm: LLM) -> None:
    drafter, blocks = llm.replica.drafter, llm.replica.scheduler.blocks
    assert not (drafter._indices if isinstance(drafter, NGramDrafter) else drafter.known)  # type: ignore[union-attr]
    assert blocks.num_free_blocks == blocks.num_blocks


@pytest.fixture(scope="module")
def plain(qwen3: str) -> dict[SequenceId, Completion]:
    done = submitted(make_llm(qwen3), make_states()).finish()
    assert {one.finish_reason for one in done.values()} == {"stop", "length"}
    return done


def truth_of(llm: LLM, states: list[SequenceState]) -> Truth:
    """What these sequences would go on with if nothing ended them."""
    copies = [SequenceState.from_bytes(state.to_bytes()) for state in states]
    for state in copies:
        longer = state.params.max_tokens + FAR
        state.params = replace(state.params, max_tokens=longer, ignore_eos=True, stop=(), stop_token_ids=())
        llm.replica.submit(Work(state=state))
    while llm.replica.has_work:
        llm.replica.step()
    return {state.sequence_id: state.tokens for state in copies}


@pytest.fixture(scope="module")
def truth(qwen3: str) -> Truth:
    return truth_of(make_llm(qwen3), make_states())


TIGHT = {"kv_cache_bytes": TIGHT_KV * 9 // 14, "max_model_len": 100, "block_size": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "many": {},
    "one by one": {"max_num_seqs": 1},
    "crowd of 3": {"max_num_seqs": 3},
    "blocks of 3": {"block_size": 3},
    "no prefix cache": {"prefix_caching": False},
    "chunks": {"prefill_chunk_size": 7, "max_num_seqs": 9, "max_num_batched_tokens": 20},
    "budget for decodes only": {"max_num_seqs": 4, "max_num_batched_tokens": 4},
    "recompute": {**TIGHT, "preemption": "recompute"},
    "swap": {**TIGHT, "preemption": "swap"},
    "swap, no prefix cache": {**TIGHT, "preemption": "swap", "prefix_caching": False},
    "recompute, small blocks": {**TIGHT, "preemption": "recompute", "block_size": 3, "prefill_chunk_size": 9},
}
BASIC_OPTIONS = ("many", "chunks", "budget for decodes only", "swap", "recompute, small blocks")
"""Those that the other kinds of drafts run with."""


def states_for(options: str) -> list[SequenceState]:
    """One by one, a few sequences show what all of them would."""
    return make_states()[: 8 if options == "one by one" else None]


@pytest.mark.parametrize(
    ("options", "kind"),
    [(one, kind) for one in OPTIONS for kind in KINDS if kind in DIVERSE_KINDS or one in BASIC_OPTIONS],
)
def test_the_same_tokens(
    qwen3: str, plain: dict[SequenceId, Completion], truth: Truth, options: str, kind: str
) -> None:
    llm = make_llm(qwen3, kind, truth, **OPTIONS[options])
    watch = submitted(llm, states_for(options))
    check(watch.finish(), {state.sequence_id: plain[state.sequence_id] for state in states_for(options)})
    check_all_left(llm)
    if "preemption" in OPTIONS[options]:
        assert llm.replica.scheduler.num_preemptions > 3, "the KV cache was not small enough to test anything"
    if options != "budget for decodes only":
        assert watch.num_drafted > 10
    if isinstance(llm.replica.drafter, ScriptedDrafter) and kind != "paths":
        observed = llm.replica.drafter.num_drafted, llm.replica.drafter.num_accepted
        assert observed == (watch.num_drafted, watch.num_accepted)
    assert {
        "ngram": watch.num_accepted > 5 or options == "budget for decodes only",
        "truth": watch.num_accepted > 0.8 * watch.num_drafted,
        "wrong": watch.num_accepted == 0,
        "random": watch.num_accepted < 0.2 * watch.num_drafted,
        "mixed": watch.num_drafted < 20 or 0.2 < watch.num_accepted / watch.num_drafted < 0.9,
        "paths": watch.num_taken > 2 or options == "budget for decodes only",
    }[kind]


@pytest.mark.parametrize(
    ("options", "num_paths"), [*((one, 1) for one in BASIC_OPTIONS), *((one, NUM_PATHS) for one in OPTIONS)]
)
def test_rejected_drafts_change_nothing_for_anyone(qwen3: str, truth: Truth, options: str, num_paths: int) -> None:
    """Step for step the same sequences run, with as many blocks, and the same ones are preempted."""
    llms = [make_llm(qwen3, kind, truth, **OPTIONS[options]) for kind in ("none", "wrong")]
    if num_paths > 1:
        llms[1] = make_llm(qwen3, "paths", truth, **OPTIONS[options])
        llms[1].replica.drafter = ScriptedDrafter("wrong paths", truth)
    for llm in llms:
        for state in states_for(options):
            llm.replica.submit(Work(state=state))
    have_waited = True
    while llms[0].replica.has_work:
        outputs = [llm.replica.step() for llm in llms]
        have_waited = have_waited and bool(llms[0].replica.scheduler.waiting)
        if num_paths == 1:
            assert outputs[0].num_tokens == outputs[1].num_tokens - outputs[1].num_drafted
        plain, drafted = (llm.replica.scheduler for llm in llms)
        assert plain.num_preemptions == drafted.num_preemptions
        assert plain.num_shared_tokens == drafted.num_shared_tokens
        tables = [
            [(one.state.sequence_id, len(one.blocks), one.num_computed) for one in scheduler.running]
            for scheduler in (plain, drafted)
        ]
        assert tables[0] == tables[1]
        if have_waited:  # otherwise drafts may take blocks of known content
            assert plain.blocks._block_of.keys() == drafted.blocks._block_of.keys(), "other contents are known"
    assert not llms[1].replica.has_work


@pytest.mark.parametrize("kind", ["ngram", "truth", "mixed", "paths"])
def test_the_prefix_cache_learns_the_same(qwen3: str, truth: Truth, kind: str) -> None:
    llms = [make_llm(qwen3, one, truth, block_size=3) for one in ("none", kind)]
    for llm in llms:
        submitted(llm, make_states()).finish()
    known = [llm.replica.scheduler.blocks._block_of.keys() for llm in llms]
    assert known[0] == known[1] and len(known[0]) > 100


def test_steps_are_recorded_with_their_drafts(qwen3: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain, drafted = (make_llm(qwen3, kind) for kind in ("none", "ngram"))
    outputs = [[one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)] for llm in (plain, drafted)]
    assert outputs[0] == outputs[1]
    assert sum(record.num_drafted + record.num_accepted for record in plain.step_records) == 0
    drawn = sum(record.num_accepted for record in drafted.step_records)
    assert 20 < drawn <= sum(record.num_drafted for record in drafted.step_records)
    first = next(record for record in drafted.step_records if record.num_accepted)
    (arguments,) = (event["args"] for event in chrome_trace([first])["traceEvents"] if event["ph"] == "X")
    assert (arguments["drafted"], arguments["accepted"]) == (first.num_drafted, first.num_accepted)
    assert guesses(drafted.step_records) == (drawn, sum(record.num_compared for record in drafted.step_records))
    assert guesses([first]) == (first.num_accepted, first.num_compared)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_right_drafts_save_steps(qwen3: str, num_draft_tokens: int) -> None:
    states = [make_state(uid, PROMPTS[uid], SamplingParams(max_tokens=40, ignore_eos=True)) for uid in range(6)]
    llm = LLM(
        qwen3, dtype="float64", kv_cache_bytes=2**22, drafter="ngram", max_draft_tokens=num_draft_tokens,
    )  # fmt: skip
    drafter = ScriptedDrafter("truth", truth_of(make_llm(qwen3), states), num_draft_tokens)
    llm.replica.drafter = drafter
    for state in states:
        llm.replica.submit(Work(state=state))
    outputs = []
    while llm.replica.has_work:
        outputs.append(llm.replica.step())
    # One pass computes the prompts and draws once; each other draws a token more than it has drafts.
    assert len(outputs) == 1 + math.ceil(39 / (1 + num_draft_tokens))
    last = 39 - (len(outputs) - 2) * (1 + num_draft_tokens)
    drafted = [6 * num_draft_tokens] * (len(outputs) - 2) + [6 * (last - 1)]
    assert [output.num_accepted for output in outputs] == [output.num_drafted for output in outputs] == [0, *drafted]


@pytest.mark.parametrize("kind", ["ngram", "truth", "mixed", "paths"])
def test_released_in_the_middle_of_a_draft(
    qwen3: str, plain: dict[SequenceId, Completion], truth: Truth, tmp_path: Path, kind: str
) -> None:
    """After three tokens each, with KV; half of the sequences go on elsewhere."""
    options = options_of(kind)
    store = make_store(tmp_path)
    replicas = [make_replica(qwen3, store, max_num_seqs=size, **options) for size in (4, 9)]
    for replica in replicas:
        if kind != "ngram":
            replica.drafter = ScriptedDrafter(kind, truth)
    watches = [Watch(replica, EngineConfig(max_num_seqs=9, **options)) for replica in replicas]
    places = itertools.cycle(replicas)
    for state in make_states():
        next(places).submit(Work(state=state, max_new_tokens=3))
    while any(replica.has_work for replica in replicas):
        for watch in watches:
            for work in watch.step().released:
                assert work.state.num_generated % 3 == 0 and work.kv is not None
                assert work.kv.num_tokens == len(work.state.tokens) - 1
                next(places).submit(replace(work, max_new_tokens=3))
    check(watches[0].done | watches[1].done, plain)
    if kind != "ngram":
        assert sum(watch.num_accepted for watch in watches) > 100
    assert sum(replica.kv_moves.num_imported for replica in replicas) > 100


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("kind", ["ngram", "truth", "mixed", "paths"])
def test_paused_and_resumed_between_steps(
    qwen3: str, plain: dict[SequenceId, Completion], truth: Truth, tmp_path: Path, kind: str, with_kv: bool
) -> None:
    options = options_of(kind)
    replicas = [make_replica(qwen3, make_store(tmp_path), max_num_seqs=size, **options) for size in (5, 9)]
    for replica in replicas:
        if kind != "ngram":
            replica.drafter = ScriptedDrafter(kind, truth)
    watches = [Watch(replica, EngineConfig(max_num_seqs=9, **options)) for replica in replicas]
    rng = random.Random(5)
    for state in make_states():
        rng.choice(replicas).submit(Work(state=state))
    while any(replica.has_work for replica in replicas):
        for watch in watches:
            watch.step()
        if rng.random() < 0.5:
            replica = rng.choice(replicas)
            works = replica.pause(with_kv=with_kv)
            drafter = replica.drafter
            assert not (drafter._indices if isinstance(drafter, NGramDrafter) else drafter.known)  # type: ignore[union-attr]
            for work in works:
                rng.choice(replicas).submit(work)
    check(watches[0].done | watches[1].done, plain)


@pytest.mark.parametrize("kind", ["ngram", "truth", "mixed", "paths"])
def test_a_failed_step_takes_all_of_its_tokens_back(
    qwen3: str, plain: dict[SequenceId, Completion], truth: Truth, kind: str
) -> None:
    """The runner fails after its pass, and `hidden_stop` fails at a token in the middle of drafts."""
    seen: dict[SequenceId, int] = {}

    def stop(state: SequenceState) -> bool:
        fails = state.num_generated in (7, 19) and seen.get(state.sequence_id, 0) < state.num_generated
        if fails and state.key.prompt_uid % 3 == 0:
            seen[state.sequence_id] = state.num_generated
            raise RuntimeError("of the hidden stop")
        return False

    llm = make_llm(qwen3, kind, truth, hidden_stop=stop, block_size=4)
    watch = submitted(llm, make_states())
    run, calls = llm.replica._runner.run, itertools.count()

    def failing(scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        drawn = run(scheduled)
        if next(calls) % 5 == 3:
            raise RuntimeError("of the runner")
        return drawn

    llm.replica._runner.run = failing  # type: ignore[method-assign]
    errors = []
    while llm.replica.has_work:
        before = {state.sequence_id: state.to_bytes() for state in llm.replica.states()}
        try:
            watch.step()
        except RuntimeError as error:
            errors.append(str(error))
            assert {state.sequence_id: state.to_bytes() for state in llm.replica.states()} == before
            check_all_left(llm)
            assert not any(sequence.content_keys for sequence in llm.replica.scheduler.waiting)
    check(watch.done, plain)
    assert errors.count("of the runner") > 2 and errors.count("of the hidden stop") > 5


@pytest.mark.parametrize("kind", ["truth", "mixed", "paths"])
def test_what_ends_a_sequence_ends_it_in_the_middle_of_a_draft(text_model: str, kind: str) -> None:
    """Stop strings, stop ids, `hidden_stop`, the longest sequence: drafts run on behind each of them."""
    free = [make_state(uid, [50 + uid, 60], SamplingParams(max_tokens=60, ignore_eos=True)) for uid in range(8)]
    options: dict[str, Any] = {"max_model_len": 60}
    known = truth_of(make_llm(text_model), free)
    tokenizer = make_llm(text_model).tokenizer
    params = []
    for state in free:
        generated = known[state.sequence_id][2:]
        text = tokenizer.decode(generated[20:23])
        stop = next((character for character in text if character.isascii()), "e")
        params += [{"stop": (stop,)}, {"stop_token_ids": (generated[17],)}, {}, {}]
    ends: list[dict[str, Any]] = params[: len(free)]

    def run(kind: str) -> tuple[dict[SequenceId, Completion], Watch]:
        llm = make_llm(
            text_model, kind, known, hidden_stop=lambda state: state.key.prompt_uid == 2 and state.num_generated == 12,
            **options,
        )  # fmt: skip
        watch = submitted(
            llm,
            [
                make_state(uid, [50 + uid, 60], SamplingParams(max_tokens=60, ignore_eos=True, **ends[uid]))
                for uid in range(8)
            ],
        )
        return watch.finish(), watch

    expected, _ = run("none")
    assert {one.finish_reason for one in expected.values()} == {"stop", "length"}
    assert len({len(one.token_ids) for one in expected.values()}) > 3
    done, watch = run(kind)
    check(done, expected)
    assert watch.num_accepted > 50
    drafted = {len(expected[0, uid, 0].token_ids) % (1 + NUM_DRAFT_TOKENS) for uid in range(8)}
    assert len(drafted) > 1, "all end at the end of a draft"


@pytest.mark.parametrize("kind", ["ngram", "truth", "mixed"])
@pytest.mark.parametrize("options", ["many", "swap", "blocks of 3"])
def test_padded(qwen3: str, plain: dict[SequenceId, Completion], truth: Truth, options: str, kind: str) -> None:
    llm = make_llm(qwen3, kind, truth, **OPTIONS[options])
    runner, sizes = llm.replica._runner, []
    runner.pad_decodes()
    poison(llm)
    forward = runner._forward_padded
    runner._forward_padded = lambda size: sizes.append(size) or forward(size)  # type: ignore[method-assign]
    watch = submitted(llm, make_states())
    check(watch.finish(), plain)
    decodes = [one for one in watch.outputs if one.num_tokens == one.num_sampled]
    assert len(sizes) >= sum(one.num_drafted > 0 for one in decodes) > 5
    assert sum(one.num_drafted > 0 and one.num_running < one.num_tokens for one in decodes) > 5


def over_two_ranks(model: str, truth: dict[str, list[int]]) -> dict[str, Any]:
    layout = nested_layout(range(2), 2)
    groups = join([layout], timeout_s=120)
    results: dict[str, Any] = {}
    for kind in ("ngram", "mixed", "paths"):
        known = {_id(name): tokens for name, tokens in truth.items()}
        llm = make_llm(model, kind, known, world=groups, layout=layout, kv_cache_bytes=TIGHT_KV, max_model_len=100)
        watch = submitted(llm, make_states())
        done = watch.finish()
        results[kind] = {
            "tokens": {str(sequence_id): one.token_ids for sequence_id, one in done.items()},
            "counts": [watch.num_drafted, watch.num_accepted, len(watch.outputs)],
        }
    groups.close()
    return results


def _id(name: str) -> SequenceId:
    first, second, third = (int(part) for part in name.strip("()").split(","))
    return first, second, third


def test_over_two_ranks(qwen3: str, plain: dict[SequenceId, Completion], truth: Truth) -> None:
    results = run_world(over_two_ranks, 2, qwen3, {str(one): tokens for one, tokens in truth.items()})
    assert results[0] == results[1]
    expected = {str(sequence_id): one.token_ids for sequence_id, one in plain.items()}
    for kind in ("ngram", "mixed", "paths"):
        assert results[0][kind]["tokens"] == expected
        assert results[0][kind]["counts"][1] > 5


@pytest.mark.skipif(choose_library("auto", torch.float32, torch.device("cpu")) is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits(qwen3: str, dtype: str) -> None:
    def states() -> list[SequenceState]:
        return test_batch_invariant.make_states(longest=30, max_tokens=32, count=10)

    options = {"dtype": dtype, "kv_cache_bytes": 2**22, "device": "cpu"}
    expected = test_batch_invariant.alone(qwen3, states(), **options)
    options["batch_invariant"] = True
    known = truth_of(make_llm(qwen3, **options), states())
    for kind in KINDS:
        for tight in (False, True):
            bytes_per_token = {"float32": 512, "bfloat16": 256}[dtype]
            llm = make_llm(
                qwen3, kind, known, **{**options, "kv_cache_bytes": bytes_per_token * (96 if tight else 4000)}
            )
            for state in states():
                llm.replica.submit(Work(state=state))
            assert test_batch_invariant.finish(llm.replica) == expected
            assert llm.replica.scheduler.num_preemptions > 0 or not tight


# -- the parts


def continuations(tokens: list[int], limit: int, min_n: int, max_n: int) -> list[int]:
    """By brute force: what follows the latest earlier occurrence of the longest n-gram, repeated with its period."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[len(tokens) - n :]:
                extended = list(tokens)
                for place in range(start, start + limit):
                    extended.append(extended[place])
                return extended[len(tokens) :]
    return []


def propose(drafter: NGramDrafter, states: list[SequenceState], limits: list[int]) -> list[list[int]]:
    return [draft.tokens for draft in drafter.propose([*map(Ask, states, limits)], len(states), len(states))]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 5), min_n=st.integers(1, 3), more=st.integers(0, 3))
def test_ngrams_against_brute_force(data: st.DataObject, alphabet: int, min_n: int, more: int) -> None:
    drafter = NGramDrafter(max_n=min_n + more, min_n=min_n)
    states = [make_state(uid, [0]) for uid in range(2)]
    for _ in range(data.draw(st.integers(1, 12))):
        for state in states:
            if data.draw(st.integers(0, 9)) == 0:
                del state.tokens[data.draw(st.integers(1, len(state.tokens))) :]
                drafter.follow(News(ended=[state]))
            state.tokens += data.draw(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=8))
        limits = [data.draw(st.integers(1, 9)) for _ in states]
        expected = [
            continuations(state.tokens, limit, min_n, min_n + more) for state, limit in zip(states, limits, strict=True)
        ]
        assert propose(drafter, states, limits) == expected
        assert propose(drafter, states, limits) == expected
        assert all(len(drafter._indices[state.sequence_id]._places) < len(state.tokens) for state in states)


def test_ngrams_survive_that_tokens_are_cut() -> None:
    drafter, state = NGramDrafter(), make_state(0, [1, 2, 3, 4, 5, 1, 2, 3])
    assert propose(drafter, [state], [3]) == [[4, 5, 1]]
    del state.tokens[5:]
    assert propose(drafter, [state], [3]) == [[]]
    state.tokens += [2, 3]
    assert propose(drafter, [state], [3]) == [[4, 5, 2]]


def test_the_work_of_ngrams_does_not_grow_with_the_history() -> None:
    """Counted in reads of the tokens, by a list that counts them."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, where: Any) -> Any:
            got = super().__getitem__(where)
            Counting.reads += len(got) if isinstance(where, slice) else 1
            return got

    def reads(length: int) -> int:
        state = make_state(0, [1])
        state.tokens = Counting([1, 2, 3, 4] * (length // 4))
        drafter = NGramDrafter()
        propose(drafter, [state], [8])
        state.tokens += [1, 2, 3]
        Counting.reads = 0
        assert propose(drafter, [state], [8]) == [[4, 1, 2, 3, 4, 1, 2, 3]]
        return Counting.reads

    assert reads(4000) == reads(40) < 100


@pytest.mark.parametrize(
    ("draft", "drawn", "expected"),
    [((), [5], 0), ((5,), [5, 6], 1), ((5, 6), [5, 7, 6], 1), ((4, 5), [5, 5, 5], 0), ((1, 2, 3), [1, 2], 2)],
)
def test_what_is_accepted(draft: tuple[int, ...], drawn: list[int], expected: int) -> None:
    assert num_accepted(draft, drawn) == expected


def bad_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"drafter": "psychic"}, r"EngineConfig\.drafter='psychic': must be one of \['none', 'ngram', 'suffix',"
    yield {"drafter": "suffix", "draft_tree_bytes": 1}, r"EngineConfig\.draft_tree_bytes=1: must be at least 65536"
    yield {"drafter": "ngram", "draft_paths": 2}, r"EngineConfig\.draft_paths=2: is for drafter='suffix' and"
    yield {"drafter": "suffix", "draft_paths": 17}, r"EngineConfig\.draft_paths=17: must be an integer of 1 to 16"
    yield {"draft_lengths": "fixed"}, r"EngineConfig\.draft_lengths='fixed': drafter='none' drafts nothing; give a"
    yield {"drafter": "ngram", "draft_lengths": "long"}, r"EngineConfig\.draft_lengths='long': must be one of \['adap"
    yield {"max_draft_tokens": 0}, r"EngineConfig\.max_draft_tokens=0: must be an integer of 1 to 1024"


@pytest.mark.parametrize(("options", "message"), bad_options())
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_the_rows_that_draw_are_planned_for(qwen3: str) -> None:
    options: dict[str, Any] = {"kv_cache_bytes": 2**24, "max_num_batched_tokens": 1000}
    several = LLM(qwen3, max_num_seqs=8, drafter="ngram", max_draft_tokens=3, **options)
    many = LLM(qwen3, max_num_seqs=32, **options)
    assert several.memory.logits == many.memory.logits > LLM(qwen3, max_num_seqs=8, **options).memory.logits
    assert several.config.most_draws == 32
    assert LLM(qwen3, max_num_seqs=4, drafter="suffix", max_draft_tokens=3, draft_paths=2, **options).memory.logits == (
        many.memory.logits
    )
    assert (
        LLM(
            qwen3, max_num_seqs=8, drafter="ngram", max_draft_tokens=3, **{**options, "max_num_batched_tokens": 20}
        ).config.most_draws
        == 20
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_policy": Thresholds}, r"draft_policy: EngineConfig\.drafter='none' drafts nothing"),
        ({"drafter": "ngram", "draft_policy": 7}, r"draft_policy=7: give a function"),
        ({"drafter": "ngram", "draft_policy": None}, r"draft_policy=None: give a function"),
        (
            {"drafter": "ngram", "draft_policy": Thresholds, "draft_lengths": "fixed"},
            r"draft_policy: EngineConfig\.draft_lengths='fixed' asks no policy; leave one of them out",
        ),
    ],
)
def test_policies_that_are_refused(qwen3: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, **options)


def test_with_group_drafts_sample_0_of_all_prompts_comes_first(qwen3: str) -> None:
    """Outputs keep the order of the prompts and of the samples."""
    order: dict[str, list[tuple[int, int]]] = {}
    tokens = {}
    params = SamplingParams(max_tokens=6, n=3)
    for drafter in ("none", "grouped_suffix"):
        llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, max_num_seqs=1, drafter=drafter)
        ended: list[tuple[int, int]] = []

        def hear(one: Finished, ended: list[tuple[int, int]] = ended) -> None:
            ended.append((one.state.key.prompt_uid, one.state.key.sample_index))

        outputs = llm.generate(PROMPTS[:4], params, on_finished=hear)
        assert [[one.index for one in output.outputs] for output in outputs] == [[0, 1, 2]] * 4
        tokens[drafter] = [[one.token_ids for one in output.outputs] for output in outputs]
        order[drafter] = ended
    assert tokens["none"] == tokens["grouped_suffix"]
    assert order["none"] == [(uid, index) for uid in range(4) for index in range(3)]
    assert order["grouped_suffix"] == [(uid, index) for index in range(3) for uid in range(4)]


def test_a_drafter_that_fails_in_follow_too(qwen3: str) -> None:
    """As a tree without memory does. The LLM holds no sequence afterwards, and goes on with another drafter."""

    class Failing(ScriptedDrafter):
        def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
            raise MemoryError("no memory for a tree")

        def follow(self, news: News) -> None:
            raise MemoryError("no memory for a tree")

    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24)
    params = SamplingParams(max_tokens=8)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, prompt_uids=range(12))]
    llm.replica.drafter = Failing("truth", {})
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS, params, prompt_uids=range(12))
    llm.replica.drafter = None
    again = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, prompt_uids=range(12))]
    assert again == expected
