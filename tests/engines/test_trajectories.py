"""Trajectories: the tokens of a plain engine that runs one turn at a time, whatever happens in and between turns."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand, Static
from engines.coordination.requests import RequestMove, RequestRegroup, SubmitSequences
from engines.coordination.views import Dispatch, Prefetch, ScheduleView, SequenceView
from engines.fleet.fleet import Fleet
from engines.parallel.groups import all_layouts
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.endings import Endings
from engines.rollout.coordinator import Coordinator
from engines.rollout.environment import Answer, Observation
from engines.rollout.generation import make_states
from engines.rollout.turns import Turns
from engines.sequence import Completion, Finished, SequenceId
from research.pat.controller import PatController
from research.pat.profile import deployment_of
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from tests.chat_models import save_chat_checkpoint
from tests.checkpoints import save_text_checkpoint
from tests.engines.test_model_drafter import Passes, drafter_of
from tests.environments import Echo, Local
from tests.worlds import join, run_world

pytestmark = pytest.mark.usefixtures("forked_replicas")

RNG = random.Random(3)
PROMPTS = ["".join(chr(RNG.randrange(97, 123)) for _ in range(RNG.randint(1, 30))) for _ in range(6)]
COLUMNS = [{"greeting": None if i % 3 else f"<{i}>", "most": 2 + i} for i in range(len(PROMPTS))]
STOPS = tuple(range(100, 124))
PARAMS = SamplingParams(max_tokens=90, n=3, stop_token_ids=STOPS, stop=("e", "zz"), max_turns=5)
TIGHT_KV = 10 * 16 * 2 * 1 * 1 * 16 * 8  # 10 blocks of float64


def make(model: str, **options: Any) -> LLM:
    return LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**22, **options})


def roll_out(llm: LLM, *, delay_s: float = 0.0, params: SamplingParams = PARAMS, **options: Any) -> Any:
    """Returns the completions and what each environment heard."""
    with Local(delay_s=delay_s) as environments:
        outputs = llm.generate(
            PROMPTS,
            params,
            environment=environments,
            columns=COLUMNS,
            prompt_uids=range(len(PROMPTS)),
            **options,
        )
        assert set(environments.ended.values()) == {1}
        return [output.outputs for output in outputs], environments.texts()


def one_turn_at_a_time(llm: LLM, params: SamplingParams = PARAMS) -> Any:
    """The oracle: each turn is a call of `generate` whose prompt is all that was generated and observed before."""
    completions: list[list[Any]] = []
    texts = {}
    for uid in range(len(PROMPTS)):
        completions.append([])
        for index in range(params.n):
            completion, texts[llm.policy_version, uid, index] = one_trajectory(llm, params, uid, index)
            completions[-1].append(completion)
    return completions, texts


def one_trajectory(llm: LLM, params: SamplingParams, uid: int, index: int) -> Any:
    """Returns tokens, log-probs, observed spans and finish reason, and what the environment heard."""
    environment, tokenizer = Echo(), llm.get_tokenizer()
    assert params.max_tokens is not None and params.max_turns is not None
    tokens: list[int] = tokenizer.encode(PROMPTS[uid])
    num_prompt, logprobs, observed = len(tokens), list[float](), list[tuple[int, int]]()
    text = environment.reset(**COLUMNS[uid]) or ""
    while True:
        new = tokenizer.encode(text, add_special_tokens=False)
        place = len(tokens) - num_prompt
        if place + len(new) >= params.max_tokens:
            reason = "length"
            break
        observed.append((place, place + len(new)))
        logprobs += [0.0] * len(new)
        tokens += new
        one = SamplingParams(
            max_tokens=params.max_tokens - (len(tokens) - num_prompt),
            n=index + 1,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
        )
        turn = llm.generate([tokens], one, prompt_uids=[uid])[0].outputs[index]
        tokens = tokens + turn.token_ids
        logprobs += turn.logprobs
        reason = turn.finish_reason
        if reason == "length" or (observation := environment.step(turn.text)) is None:
            break
        if len(environment.texts) >= params.max_turns:
            reason = "length"
            break
        text = observation.text
    return (tokens[num_prompt:], logprobs, observed, reason), environment.texts


def facts(completions: list[list[Completion]]) -> Any:
    return [[(one.token_ids, one.logprobs, one.observed, one.finish_reason) for one in group] for group in completions]


@pytest.fixture(scope="module")
def plain(text_model: str) -> Any:
    completions, texts = one_turn_at_a_time(make(text_model))
    ends = [one[3] for group in completions for one in group]
    turns = [len(one) for one in texts.values()]
    assert ends.count("stop") > 3 and ends.count("length") > 3 and max(turns) > 3 and len(set(turns)) > 2
    return completions, texts


def check(found: Any, plain: Any) -> None:
    completions, texts = found
    for group, expected in zip(facts(completions), plain[0], strict=True):
        for (tokens, logprobs, observed, reason), oracle in zip(group, expected, strict=True):
            assert tokens == oracle[0]
            assert logprobs == pytest.approx(oracle[1], abs=1e-9)
            assert (observed, reason) == (oracle[2], oracle[3])
    assert texts == plain[1]
    for group in completions:
        for one in group:
            assert one.reward == sum(map(len, texts[0, completions.index(group), one.index]))
            assert [version < 0 for version in one.versions] == [not kept for kept in one.loss_mask]
            assert one.num_generated == sum(one.loss_mask)


SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowd of 2": {"max_num_seqs": 2},
    "prefill chunks of 3": {"prefill_chunk_size": 3},
    "no prefix cache": {"prefix_caching": False},
    "preemption": {"kv_cache_bytes": TIGHT_KV, "max_model_len": 140},
    "preemption, swap": {"kv_cache_bytes": TIGHT_KV, "max_model_len": 140, "preemption": "swap"},
    "drafts": {"drafter": "ngram", "draft_lengths": "fixed"},
    "drafts of a group": {"drafter": "grouped_suffix", "draft_lengths": "fixed", "draft_paths": 2},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_tokens_as_one_turn_at_a_time(text_model: str, plain: Any, switch: str) -> None:
    llm = make(text_model, **SWITCHES[switch])
    preempts = "preemption" in switch
    check(roll_out(llm, delay_s=0.01, in_rounds=preempts), plain)  # in rounds, all compete for the KV at once
    assert bool(llm.replica.scheduler.num_preemptions) == preempts


@pytest.mark.parametrize(
    ("options", "fewest", "most"),
    [
        ({}, 1.0, 1.0),
        ({"prefix_caching": False, "preemption": "recompute"}, 0.0, 0.0),
        ({"prefix_caching": False, "preemption": "swap"}, 1.0, 1.0),
        ({**SWITCHES["preemption"], "preemption": "recompute"}, 0.01, 0.99),
    ],
)
def test_how_much_of_earlier_turns_is_not_computed_again(
    text_model: str, plain: Any, options: dict[str, Any], fewest: float, most: float
) -> None:
    llm = make(text_model, block_size=8, **options)
    completions, _ = roll_out(llm, in_rounds=True)
    returning = 0
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for one in group:
            # A block that the prompt begins belongs to the trajectory; the last token of a turn is not computed in it.
            begins = [start for start, end in one.observed if start > 0 and end < len(one.token_ids)]
            returning += sum((len(prompt) + start - 1) // 8 - len(prompt) // 8 for start in begins) * 8
    moves = llm.replica.kv_moves
    assert moves.returning_tokens == returning > 500
    assert fewest * returning <= moves.reused_tokens <= most * returning


def with_a_draft_model(model: str, is_coordinated: bool) -> Any:
    """Tokens; what the draft model has computed; what it need compute: each token once, and again where it was a guess
    that was rejected."""
    world: dict[str, Any] = {"world": join(), "schedule": OnDemand()} if is_coordinated else {}
    options = {"drafter": "model", "draft_model": model, "draft_lengths": "fixed", "max_draft_tokens": 3}
    llm = make(model, **options, **world)
    passes = Passes(drafter_of(llm))
    completions, _ = roll_out(llm)
    tokens = [[one.token_ids for one in group] for group in completions]
    num_known = sum(len(prompt) + len(one) for prompt, group in zip(PROMPTS, tokens, strict=True) for one in group)
    num_rejected = sum(step.num_drafted - step.num_accepted for step in llm.step_records)
    llm.close()
    return tokens, sum(map(sum, passes.tokens)), num_known + num_rejected


@pytest.mark.parametrize("is_coordinated", [False, True])
def test_a_draft_model_goes_on_after_a_turn(text_model: str, plain: Any, is_coordinated: bool) -> None:
    if is_coordinated:  # then a trajectory comes back as another object
        ((tokens, num_computed, most),) = run_world(with_a_draft_model, 1, text_model, True)
    else:
        tokens, num_computed, most = with_a_draft_model(text_model, False)
    assert tokens == [[one[0] for one in group] for group in plain[0]]
    assert 0 < num_computed <= most


def test_the_same_tokens_in_rounds(text_model: str, plain: Any) -> None:
    options = {"preemption": "recompute"}  # reading stored KV takes its time, too
    llm = make(text_model, **options)
    check(roll_out(llm, delay_s=0.01, in_rounds=True), plain)
    batches = [record.num_tokens for record in llm.step_records]
    check(roll_out(again := make(text_model, **options), delay_s=0.03, in_rounds=True), plain)
    assert [record.num_tokens for record in again.step_records] == batches


class Meddling(Local):
    """Between two turns, before the environment answers, something happens to the trajectory, which is parked."""

    def __init__(self, kind: str, layouts: Any = ()) -> None:
        super().__init__()
        self._kind, self._layouts, self._num_steps = kind, list(layouts), 0
        self._epoch = 0
        self.coordinator: Coordinator | None = None

    def step(self, sequence_id: SequenceId, text: str, answer: Any) -> None:
        assert self.coordinator is not None
        self._num_steps += 1
        replicas = [spec.id for spec in self.coordinator.core.layout.replicas]
        match self._kind:
            case "moves":
                target = replicas[self._num_steps % len(replicas)]
                self.coordinator.post(RequestMove(sequence_id=sequence_id, replica_id=target))
            case "moves to any":
                self.coordinator.post(RequestMove(sequence_id=sequence_id, replica_id=None))
            case "regroups" if self._layouts and self._is_settled():
                layout = self._layouts.pop(0)
                self._epoch = layout.epoch
                self.coordinator.post(RequestRegroup(layout=layout))
                answer = self._after_regroup(answer)
        super().step(sequence_id, text, answer)

    def _is_settled(self) -> bool:
        assert self.coordinator is not None
        core = self.coordinator.core
        return core.layout.epoch == self._epoch and not core.regrouping

    def _after_regroup(self, answer: Any) -> Any:
        """The environment answers when the layout has come: until then the rollout cannot end."""

        def wait(given: Any) -> None:
            deadline = time.monotonic() + 60
            while not self._is_settled() and time.monotonic() < deadline:
                time.sleep(0.001)
            answer(given)

        return wait


class Elsewhere(OnDemand):
    """Every turn, or chunk of one, goes to another replica than the last."""

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self._chunk = chunk

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.waiting.values():
            ids = [id_ for id_, one in view.replicas.items() if one.room_for(sequence, self._chunk)]
            others = [id_ for id_ in ids if id_ != sequence.last_replica_id]
            if others or (ids and sum(one.can_hold(sequence) for one in view.replicas.values()) == 1):
                chosen = (others or ids)[0]
                return Dispatch(sequence_id=sequence.sequence_id, replica_id=chosen, max_new_tokens=self._chunk)
        return None


class Ranked:
    """Every turn has a priority of its own and waits in the queue of its replica; the KV of each parked trajectory is
    read on another one, where it goes on, or, every third time, does not."""

    def __init__(self, *, moves: bool = False, chunk: int | None = None) -> None:
        self._moves, self._chunk = moves, chunk

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        for id_, sequence in view.parked.items():
            able = [one for one in view.replicas.values() if one.accepts and one.can_hold(sequence)]
            ids = sorted(one.spec.id for one in able)
            if self._moves and len(ids) > 1 and sequence.num_turns and sequence.expected_at is None:
                return Prefetch(sequence_id=id_, replica_id=self._next(ids, sequence))
        return None

    @staticmethod
    def _next(ids: list[int], sequence: SequenceView) -> int:
        others = [id_ for id_ in ids if id_ != sequence.last_replica_id]
        return others[sequence.num_turns % len(others)]

    def next(self, view: ScheduleView) -> Dispatch | None:
        ids = sorted(one for one in view.replicas if view.replicas[one].accepts)
        for id_, sequence in view.waiting.items() if ids else ():
            able = [one for one in ids if view.replicas[one].can_hold(sequence)]
            chosen = able[hash(id_) % len(able)]
            if sequence.expected_at in able and hash((id_, sequence.num_turns)) % 3:
                chosen = sequence.expected_at
            priority = float(hash((*id_, sequence.num_turns)) % 7)
            bound = self._chunk if sequence.index % 2 else None
            return Dispatch(sequence_id=id_, replica_id=chosen, queued=True, priority=priority, max_new_tokens=bound)
        return None


def pat() -> PatController:
    """Takes the ranks for A40, where few sequences are faster on wide replicas."""
    times = {size: profile(f"a40-8b-tp{size}") for size in (1, 2, 4)}
    pace = ProfilePace(device=times[1].device, shape=times[1].shape, restart_s=0.01)
    kv_tokens = {size: one.kv_tokens_capacity() for size, one in times.items()}
    return PatController(
        deployment_of(pace, num_ranks=4, num_kv_tokens=kv_tokens, max_num_seqs=256, max_model_len=2048)
    )


DRAFTING = Layout(
    epoch=0,
    replicas=(
        ReplicaSpec(id=0, ranks=(0,)), ReplicaSpec(id=1, ranks=(1, 2)), ReplicaSpec(id=3, ranks=(3,), role="draft"),
    ),
)  # fmt: skip

UNEQUAL = Layout(
    epoch=0,
    replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=2, ranks=(2,)), ReplicaSpec(id=3, ranks=(3,))),
)
WORLDS: dict[str, dict[str, Any]] = {
    "on demand": {"tp": 1},
    "static": {"tp": 1, "schedule": Static, "in_rounds": True},
    "tensor parallel": {"tp": 2},
    "moves": {"tp": 1, "meddling": "moves"},
    "moves to any": {"tp": 2, "meddling": "moves to any"},
    "moves without stored KV": {"tp": 1, "meddling": "moves", "kv_host_bytes": 0, "preemption": "recompute"},
    "elsewhere in each turn": {"tp": 1, "schedule": Elsewhere},
    "chunks": {"tp": 1, "schedule": lambda: Elsewhere(5)},
    "priorities, swap": {"tp": 2, "schedule": Ranked, "max_num_seqs": 2, "preemption": "swap"},
    "priorities, recompute": {"tp": 1, "schedule": Ranked, "max_num_seqs": 1, "preemption": "recompute"},
    "priorities, chunks, tight": {
        "tp": 2, "schedule": lambda: Ranked(chunk=5), "max_num_seqs": 3,
        "kv_cache_bytes": TIGHT_KV, "max_model_len": 140,
    },
    "priorities, drafts": {
        "tp": 2, "schedule": Ranked, "max_num_seqs": 2, "drafter": "grouped_suffix", "draft_lengths": "fixed",
    },
    "moves in each gap": {"tp": 1, "schedule": lambda: Ranked(moves=True), "max_num_seqs": 2},
    "moves in each gap, TP2": {"tp": 2, "schedule": lambda: Ranked(moves=True), "prefix_caching": False},
    "moves in each gap, regroups": {"tp": 1, "schedule": lambda: Ranked(moves=True), "meddling": "regroups"},
    "unequal replicas": {"layout": UNEQUAL, "schedule": lambda: Ranked(moves=True), "max_num_seqs": 2},
    "regroups": {"tp": 1, "meddling": "regroups"},
    "PAT regroups": {"tp": 1, "layout_policy": pat},
    "drafts of a group": {"tp": 1, "drafter": "grouped_suffix", "draft_lengths": "fixed"},
    "drafts by a server, moves": {
        "tp": 1, "meddling": "moves", "drafter": "grouped_suffix", "draft_lengths": "fixed", "draft_server": True,
    },
    "a rank that only drafts": {
        "layout": DRAFTING, "drafter": "suffix", "draft_lengths": "fixed", "draft_mode": "strict",
    },
    "a rank that only drafts, moves": {
        "layout": DRAFTING, "meddling": "moves", "drafter": "grouped_suffix", "draft_lengths": "fixed",
    },
    "preemption, regroups": {
        "tp": 1, "meddling": "regroups", "kv_cache_bytes": TIGHT_KV, "max_model_len": 140, "preemption": "swap",
    },
}  # fmt: skip


def in_a_world(model: str, names: list[str]) -> list[Any]:
    """On a rank: completions of each of these worlds as plain values, what environments heard, regroups."""
    found = []
    groups = join([*all_layouts(range(4)), DRAFTING, UNEQUAL])
    for name in names:
        options = dict(WORLDS[name])
        tp, in_rounds = options.pop("tp", 1), options.pop("in_rounds", False)
        schedule = options.pop("schedule", OnDemand)()
        if "layout_policy" in options:
            options["layout_policy"] = options["layout_policy"]()
        layouts = [nested_layout(range(4), size, epoch=epoch) for epoch, size in enumerate((2, 1, 4, 2, 1), start=1)]
        layout = options.pop("layout", nested_layout(range(4), tp))
        with Meddling(options.pop("meddling", ""), layouts) as environments:
            llm = make(model, world=groups, layout=layout, schedule=schedule, **options)
            assert llm.rollout is not None
            environments.coordinator = llm.rollout.coordinator
            outputs = llm.generate(
                PROMPTS,
                PARAMS,
                environment=environments,
                columns=COLUMNS,
                prompt_uids=range(len(PROMPTS)),
                in_rounds=in_rounds,
            )
            completions = [[list(fact) for fact in group] for group in facts([one.outputs for one in outputs])]
            rewards = [[one.reward for one in output.outputs] for output in outputs]
            texts = [[list(id_), heard] for id_, heard in environments.texts().items()]
            dispatches = [
                [list(id_), one.replica_id]
                for one in (environments.coordinator.core.decisions if environments.coordinator else ())
                for id_ in one.sequence_ids
                if one.action == "dispatch"
            ]
            counts = [llm.replica.scheduler.num_preemptions, llm.replica.kv_moves.fetched_tokens]
            found.append([completions, rewards, texts, llm.layout.epoch, dispatches, counts])
            llm.close()
    return found


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("four-heads")
    save_text_checkpoint(folder, num_heads=4)
    return str(folder)


@pytest.fixture(scope="module")
def worlds(four_heads: str) -> list[Any]:
    return run_world(in_a_world, 4, four_heads, list(WORLDS))


@pytest.fixture(scope="module")
def plain_four(four_heads: str) -> Any:
    return one_turn_at_a_time(make(four_heads))


@pytest.mark.parametrize("name", WORLDS)
def test_the_same_tokens_in_a_world(worlds: list[Any], plain_four: Any, name: str) -> None:
    index = list(WORLDS).index(name)
    for rank in worlds:
        completions, rewards, *_ = rank[index]
        for group, expected in zip(completions, plain_four[0], strict=True):
            for (tokens, logprobs, observed, reason), oracle in zip(group, expected, strict=True):
                assert tokens == oracle[0]
                assert logprobs == pytest.approx(oracle[1], abs=1e-9)
                assert ([tuple(span) for span in observed], reason) == (oracle[2], oracle[3])
        assert rewards == [
            [float(sum(map(len, plain_four[1][0, uid, index]))) for index in range(PARAMS.n)]
            for uid in range(len(PROMPTS))
        ]
    texts, epoch, dispatches, _ = worlds[0][index][2:]
    num_preemptions, num_fetched = (sum(rank[index][5][place] for rank in worlds) for place in (0, 1))
    assert num_preemptions > 3 or "priorities" not in name
    assert num_fetched > 50 or "in each gap" not in name
    assert {tuple(id_): heard for id_, heard in texts} == plain_four[1]
    assert epoch >= (1 if "PAT" in name else 2) if "regroups" in name else epoch == 0
    homes: dict[tuple[int, ...], list[int]] = {}
    for id_, replica_id in dispatches:
        homes.setdefault(tuple(id_), []).append(replica_id)
    changes = sum(a != b for home in homes.values() for a, b in itertools.pairwise(home))
    if name in ("moves", "moves without stored KV", "elsewhere in each turn", "chunks"):
        assert changes > 20
    if name in ("on demand", "static"):
        assert changes == 0, "a turn goes on where the last one ran, as there is room"


class Killing(Local):
    """After some turns a replica is killed, whatever it runs; its trajectories go on elsewhere. The environment answers
    when that is known: until then the rollout cannot end."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet, self._num_steps = fleet, 0
        self._killed: list[int] = []

    def step(self, sequence_id: SequenceId, text: str, answer: Any) -> None:
        self._num_steps += 1
        if self._num_steps in (5, 15):
            pid = next(pid for pid in self._fleet.launcher.pids().values() if pid not in self._killed)
            os.kill(pid, signal.SIGKILL)
            self._killed.append(pid)
            self._fleet.launch()
            answer = self._when_known(len(self._killed), answer)
        super().step(sequence_id, text, answer)

    def _when_known(self, num_lost: int, answer: Any) -> Any:
        def wait(given: Any) -> None:
            deadline = time.monotonic() + 60
            while len(self._fleet.coordinator.lost) < num_lost and time.monotonic() < deadline:
                time.sleep(0.001)
            answer(given)

        return wait


def test_replicas_that_are_killed_cost_no_token_and_no_text(text_model: str, plain: Any) -> None:
    """Also between two turns, when a replica reads what the killed one has stored, or the killed one reads."""
    tokenizer = make(text_model).get_tokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    params = [PARAMS] * len(PROMPTS)
    states = make_states(prompts, params, range(len(PROMPTS)), run_seed=0, policy_step=0, in_turns=True)
    options: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**22, "max_num_seqs": 4}
    with Fleet(text_model, num_replicas=2, schedule_policy=Ranked(moves=True), **options) as fleet:
        with Killing(fleet) as environments:
            finished = fleet.roll_out(states, environment=environments, columns=dict(enumerate(COLUMNS)))
        assert len(fleet.coordinator.lost) == 2
    found = {one.state.sequence_id: one.completion for one in finished}
    completions = [[found[0, uid, index] for index in range(PARAMS.n)] for uid in range(len(PROMPTS))]
    check((completions, environments.texts()), plain)


class Ends(Echo):
    """Says a last word."""

    def __init__(self, last: str, role: Literal["user", "tool"] = "user") -> None:
        super().__init__()
        self._last, self._role = last, role

    def step(self, text: str) -> Observation | None:
        self.texts.append(text)
        return Observation(text=self._last, done=len(self.texts) > 1, role=self._role)


def test_a_last_word_is_observed_where_there_is_room(text_model: str) -> None:
    llm, word = make(text_model), "the end\ufffd<eos>"
    params = SamplingParams(max_tokens=90, n=8, stop_token_ids=STOPS)
    with Local(lambda: Ends(word)) as environments:
        (output,) = llm.generate(["abc"], params, environment=environments)
    length = len(llm.get_tokenizer().encode(word, add_special_tokens=False))
    spoken = [one for one in output.outputs if len(one.observed) == 3]
    assert len(spoken) > 2
    for one in spoken:
        assert one.finish_reason == "stop" and len(one.turns) == 2
        assert one.observed[2] == (len(one.token_ids) - length, len(one.token_ids))
        assert one.token_ids[-length:] == one.token_ids[slice(*one.observed[1])]
    assert all(len(one.logprobs) == len(one.versions) == len(one.token_ids) <= 90 for one in output.outputs)


def test_no_room_for_an_observation_ends_the_trajectory(text_model: str) -> None:
    with Local(lambda: Ends("x" * 500)) as environments:
        (output,) = make(text_model).generate(["abc"], replace(PARAMS, stop=()), environment=environments)
    assert {one.finish_reason for one in output.outputs} == {"length"}
    assert all(one.observed == [(0, 0)] and one.num_generated == len(one.token_ids) for one in output.outputs)


@pytest.mark.parametrize("form", ["qwen2.5", "qwen3", "llama3"])
@pytest.mark.parametrize("greeting", [None, "Ready?"])
def test_a_chat_model_s_trajectory_is_its_template_s_conversation(
    tmp_path: Path, greeting: str | None, form: str
) -> None:
    save_chat_checkpoint(tmp_path, form)
    llm = make(str(tmp_path))
    tokenizer, question = llm.get_tokenizer(), {"role": "user", "content": "Go."}
    params = SamplingParams(max_tokens=200, n=4, stop_token_ids=STOPS)
    with Local(lambda: Ends("a result", "tool")) as environments:
        (output,) = llm.generate(
            [[question]], params, environment=environments, columns=[{"greeting": greeting}], prompt_uids=[0]
        )
    first = [question, *([] if greeting is None else [{"role": "user", "content": greeting}])]
    opened = tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=True, return_dict=False)
    result = [{"role": "tool", "content": "a result"}]
    for one in output.outputs:
        tokens = output.prompt_token_ids + one.token_ids
        assert tokens[: len(output.prompt_token_ids) + one.observed[0][1]] == opened
        for (start, end), turn in zip(one.observed[1:], one.turns, strict=False):
            said = one.token_ids[slice(*turn)]
            assert one.token_ids[start:end] == llm.chat_template.render_next(result, after=said)
    assert max(len(one.observed) for one in output.outputs) > 1


def test_what_cannot_have_an_environment_is_refused(text_model: str, qwen3: str) -> None:
    with Local() as environments:
        with pytest.raises(ValueError, match="environment: reads the text of turns"):
            make(qwen3).generate([[5]], environment=environments)
        llm = make(text_model)
        with pytest.raises(ValueError, match="environment: reads the text of turns"):
            llm.generate(["a"], SamplingParams(detokenize=False), environment=environments)
        with pytest.raises(ValueError, match="columns: 2 for 1 prompts"):
            llm.generate(["a"], environment=environments, columns=[{}, {}])
        with pytest.raises(ValueError, match=r"prompts\[0\]: SamplingParams.max_turns=5: is for trajectories"):
            llm.generate(["a"], PARAMS)
    assert not environments.objects


class LocalTools(Local):
    tools: ClassVar = [{"type": "function"}]


def test_tools_need_a_template_with_their_role(tmp_path: Path) -> None:
    refuses = "{%- if m.role == 'tool' %}{{ raise_exception('user and assistant only') }}{%- endif %}"
    template = "{%- for m in messages %}" + refuses + "{{ m.role }}: {{ m.content }}<|im_end|>{%- endfor %}"
    save_chat_checkpoint(tmp_path, "qwen2.5", template + "{%- if add_generation_prompt %}assistant: {%- endif %}")
    llm, question = make(str(tmp_path)), [{"role": "user", "content": "Go."}]
    with Local() as environments:
        llm.generate([question], PARAMS, environment=environments)
    with (
        LocalTools() as environments,
        pytest.raises(ValueError, match=r"role 'tool'.*user and assistant only.*chat_template.jinja"),
    ):
        llm.generate([question], PARAMS, environment=environments)
    assert not environments.objects


def test_an_abort_and_an_interrupt_end_the_environments(text_model: str) -> None:
    llm = make(text_model)
    with Local() as environments:

        def interrupt(_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, environment=environments, on_finished=interrupt)
        assert environments.ended.keys() == environments.objects.keys() and not llm.replica.num_sequences


def test_more_may_be_submitted_when_the_last_one_has_ended(text_model: str) -> None:
    """Its reward comes after the core has delivered it; the phase must not end in between."""
    tokens = make(text_model).get_tokenizer().encode("abc")
    first, later = (
        tuple(make_states([tokens], [PARAMS], [uid], run_seed=0, policy_step=0, in_turns=True)) for uid in (0, 1)
    )
    with Fleet(text_model, num_replicas=1, dtype="float64", kv_cache_bytes=2**22) as fleet, Local() as environments:
        heard: list[SequenceId] = []

        def hear(finished: Finished) -> None:
            heard.append(finished.state.sequence_id)
            if len(heard) == len(first):
                fleet.coordinator.post(SubmitSequences(states=later))

        finished = fleet.roll_out(list(first), environment=environments, on_finished=hear)
    assert (
        sorted(heard)
        == sorted(one.state.sequence_id for one in finished)
        == [(0, u, i) for u in (0, 1) for i in range(3)]
    )


def test_nobody_waits_for_what_can_be_taken() -> None:
    """Answers that were noted with others of another kind are taken at once."""

    class Now:
        def begin(self, sequence_id: SequenceId, columns: Any, answer: Any) -> None:
            answer(Answer())

        def end(self, sequence_id: SequenceId, reward: Any) -> None:
            reward(1.0)

        step: Any = None

    class Empty:
        def empty(self) -> bool:
            return True

        def get(self, timeout: float) -> None:
            raise AssertionError("it waits")

    endings = Endings(eos_token_ids=(), detokenize=None)
    turns = Turns(Now(), columns={}, encode=lambda *_: [], endings=endings, max_model_len=100)
    states = make_states([[5], [6]], [PARAMS] * 2, range(2), run_seed=0, policy_step=0, in_turns=True)
    turns.begin(states[0])
    assert turns.take_finished() == [], "which notes the answer, too"
    answered, turns._answered = turns._answered, Empty()  # type: ignore[assignment]
    turns.wait(10.0)
    assert [one.sequence_id for one in turns.take(is_running=False)] == [states[0].sequence_id]
    turns._answered = answered
    turns.end(Finished(state=states[0], completion=Completion.of(states[0], "stop")))
    assert turns.take(is_running=False) == (), "which notes the reward, too"
    turns._answered = Empty()  # type: ignore[assignment]
    turns.wait(10.0)
    assert [one.completion.reward for one in turns.take_finished()] == [1.0]


def test_a_trajectory_that_has_begun_elsewhere_is_refused(text_model: str) -> None:
    (state,) = make_states([[5]], [SamplingParams()], [0], run_seed=0, policy_step=0, in_turns=True)
    state.observe([7])
    with Fleet(text_model, num_replicas=0) as fleet, Local() as environments:
        with pytest.raises(ValueError, match=r"states\[0\]: is a trajectory that has begun elsewhere"):
            fleet.roll_out([state], environment=environments)
        with pytest.raises(ValueError, match=r"states\[0\]: is a trajectory \(in_turns\), and nothing answers it"):
            fleet.roll_out([replace(state, observed=[])])
