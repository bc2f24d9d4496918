"""Ranks that only draft, in real worlds: the same tokens in every mode, and what becomes of drafters that fail."""

from __future__ import annotations

import itertools
import json
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import DraftMode
from engines.control.sealing import new_token
from engines.control.transport import Client, Server
from engines.coordination.policies import OnDemand, Static
from engines.coordination.views import Dispatch, LayoutChange, LayoutView, ScheduleView
from engines.fleet.fleet import Fleet
from engines.parallel.layout import Layout, ReplicaSpec, Role, contiguous_layout, drafters_of
from engines.rollout.draft_ranks import DraftLoop, LiveLink
from engines.rollout.pace import ShortestStep
from engines.sequence import Work
from engines.speculation.desk import Desk
from engines.speculation.drafter import HELD, NO_DRAFT, Ask, Draft, DraftPass, News, Outcome
from engines.speculation.posts import Serves, decode_to_verifier
from engines.speculation.remote import RemoteDrafter
from tests.checkpoints import save_checkpoint
from tests.engines.speculation.test_remote import Channel
from tests.engines.test_token_equality import TIGHT_KV
from tests.holding import Held, check_tokens, held_params, tokens_of
from tests.serving import until
from tests.states import make_state
from tests.worlds import error_of, join, run_world

PROMPTS = [[7, 8, 9, 10, uid] * 3 for uid in range(8)]
PARAMS = SamplingParams(max_tokens=30, n=2)
HOLDABLE = [held_params(PARAMS), *([PARAMS] * 7)]
"""The first prompt's sequences may be held."""
PACE = ShortestStep(step_s=0.008)
"""So that drafts come in time."""
BASE: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**24}


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is like the target."""
    folder = tmp_path_factory.mktemp("near")
    model = save_checkpoint(folder, "qwen3")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


def layout_of(*replicas: tuple[Role, tuple[int, ...]], epoch: int = 0) -> Layout:
    specs = [ReplicaSpec(id=ranks[0], ranks=ranks, role=role) for role, ranks in replicas]
    return Layout(epoch=epoch, replicas=tuple(specs))


ONE_EACH = layout_of(("rollout", (0,)), ("draft", (1,)))
WIDE = layout_of(("rollout", (0, 1)), ("draft", (2,)), ("rollout", (3,)))
SHARED = layout_of(("draft", (0, 3)), ("rollout", (1,)), ("rollout", (2,)))


class InChunks(OnDemand):
    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = super().next(view)
        return None if dispatch is None else replace(dispatch, max_new_tokens=7)


def plain_tokens(model: str, params: Any = PARAMS) -> list[list[list[int]]]:
    return tokens_of(LLM(model, **BASE).generate(PROMPTS, params, prompt_uids=range(8)))


MODES = ("filled", "strict", "naive", "filled", "strict", "strict", "filled", "strict")
CASES: dict[str, list[dict[str, Any]]] = {
    "modes": [
        {"layout": ONE_EACH, "draft_mode": mode, "max_draft_tokens": window}
        for window, mode in enumerate(MODES, start=1)
    ],
    "others": [  # in the fourth, four blocks are for at least two of eight sequences, which need three each
        {"layout": WIDE, "draft_mode": "strict", "max_draft_tokens": 4},
        {"layout": WIDE, "draft_mode": "filled", "max_draft_tokens": 3, "schedule": InChunks()},
        {"layout": SHARED, "draft_mode": "strict", "max_draft_tokens": 3},
        {
            "layout": SHARED, "draft_mode": "naive", "kv_cache_bytes": TIGHT_KV // 3, "max_model_len": 48,
            "schedule": Static(),
        },
        {"layout": SHARED, "draft_lengths": "adaptive"},
        {"layout": SHARED, "drafter": "ngram", "draft_mode": "strict", "max_draft_tokens": 2},
    ],
}  # fmt: skip


LEAST = {"modes": (10, 60), "others": (20, 20)}
"""More tokens than these are accepted, and drafted by each rank that drafts, in a case that proves something."""
NUM_WITH_DRAFTS = {"modes": 8, "others": 4}
"""The first cases are such ones."""
MOST_ROLLOUTS = 20

Counts = dict[str, float]
Rollouts = list[tuple[list[list[list[int]]], Counts]]


def is_enough(name: str, number: int, ranks: list[Counts]) -> bool:
    num_accepted, num_drafted = LEAST[name]
    replicas = CASES[name][number]["layout"].replicas
    drafters = [rank for spec in replicas if spec.role == "draft" for rank in spec.ranks]
    return sum(rank["accepted"] for rank in ranks) > num_accepted and all(
        ranks[rank].get("num_drafted", 0) > num_drafted for rank in drafters
    )


def roll_out(name: str, model: str, near: str) -> list[Rollouts]:
    """Returns for each case, and each of its rollouts, the tokens, and what was drafted and accepted. On a busy machine
    drafts may be late in all of a rollout: then it is done again."""
    cases = CASES[name]
    layouts = [case["layout"] for case in cases]
    groups, found = join(layouts), []
    for number, case in enumerate(cases):
        options = {"drafter": "model", "draft_model": near, "draft_lengths": "fixed", "schedule": OnDemand(), **case}
        if options["drafter"] != "model":
            del options["draft_model"]
        llm = LLM(model, world=groups, pace=PACE, **BASE | options)
        rollouts: Rollouts = []
        ends = number >= NUM_WITH_DRAFTS[name]
        while not rollouts or (not ends and len(rollouts) < MOST_ROLLOUTS):
            tokens = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(8)))
            assert llm.rollout is not None and llm._draft_ranks is not None
            steps = llm.rollout.step_records
            counts: Counts = {"drafted": sum(one.num_drafted for one in steps)}
            counts |= {"accepted": sum(one.num_accepted for one in steps), **llm._draft_ranks.counts}
            counts["preempted"] = sum(one.num_preempted for one in steps)
            rollouts.append((tokens, counts))
            ranks = groups.world.all_gather_bytes(json.dumps(counts).encode())
            ends = ends or is_enough(name, number, [json.loads(rank) for rank in ranks])
        found.append(rollouts)
        llm.close()
    groups.close()
    return found


def check(name: str, model: str, near: str, num_ranks: int) -> list[list[Counts]]:
    """Checks the tokens; returns the counts of the last rollout by case and rank."""
    plain, ranks = plain_tokens(model), run_world(roll_out, num_ranks, name, model, near)
    for found in ranks:
        for rollouts in found:
            for tokens, counts in rollouts:
                assert tokens == plain and counts.get("most_over", 0) <= 0
    return [[rank[number][-1][1] for rank in ranks] for number in range(len(CASES[name]))]


def test_the_same_tokens_in_every_mode(qwen3: str, near: str) -> None:
    for case, (verifier, drafter) in zip(CASES["modes"], check("modes", qwen3, near, 2), strict=True):
        assert drafter["num_drafted"] > 60 and drafter["most_over"] <= 0 and drafter["drafted"] == 0
        assert verifier["accepted"] > 10, case


def test_beside_everything_else(qwen3: str, near: str) -> None:
    """Two verifiers, of one rank and of two; chunks, preemption, adaptive lengths; two drafters of one replica, which
    share their sequences; a lookup on a draft rank."""
    counts = check("others", qwen3, near, 4)
    assert all(sum(rank["accepted"] for rank in ranks) > 20 for ranks in counts[:4])
    assert sum(rank["preempted"] for rank in counts[3]) > 0
    assert all(counts[2][rank]["num_drafted"] > 20 for rank in (0, 3)), "both share the sequences"


@pytest.mark.parametrize("mode", ["filled", "strict", "naive"])
def test_the_same_tokens_over_a_hostile_channel(qwen3: str, near: str, mode: DraftMode) -> None:
    """Messages are lost, doubled, late and in another order, and the drafter dies and comes back; windows of 1 to 8."""
    small = LLM(qwen3, drafter="model", draft_model=near, draft_lengths="fixed", **BASE)._engine._model_drafter
    assert small is not None
    llm, plain = LLM(qwen3, max_num_seqs=5, **BASE), plain_tokens(qwen3)
    num_accepted = 0
    for window in range(1, 9):
        rng = random.Random(window)
        channel = Channel(rng, lost=0.2, doubled=0.3, late=0.4)
        desk, clock = Desk(small, max_num_seqs=4), itertools.count()
        replica = llm.replica
        remote = RemoteDrafter([channel], mode, window=window, clock=lambda clock=clock: next(clock) / 20)  # type: ignore[misc]
        replica.drafter, replica.scheduler._config = remote, replace(llm.config, max_draft_tokens=window)
        for uid, prompt in enumerate(PROMPTS):
            for index in range(2):
                replica.submit(Work(state=make_state(uid, prompt, replace(PARAMS, n=1), index=index)))
        done = {}
        while replica.has_work:
            channel.is_up = rng.random() < 0.95
            if not channel.is_up:
                desk.clear()
            for _ in range(rng.randint(0, 2 * window)):
                channel.answer(desk.hear("verifier", channel.heard()))
                for posts in desk.draft().values():
                    channel.answer(posts)
            output = replica.step()
            num_accepted += output.num_accepted
            done |= {one.state.sequence_id: one.completion.token_ids for one in output.finished}
        assert [[done[0, uid, index] for index in range(2)] for uid in range(8)] == plain
        assert desk.most_over <= 0
        desk.clear()
    assert num_accepted > 100


class Holding:
    """Holds the first sequence while `is_on`."""

    passes: tuple[DraftPass, ...] = ()
    is_on = False

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        return [HELD if self.is_on and ask.state.key.prompt_uid == 0 else NO_DRAFT for ask in asks]

    def follow(self, news: News) -> None: ...


@pytest.mark.parametrize("others", [0, 1])
def test_a_held_sequence_leaves_no_unfilled_block_that_others_share(qwen3: str, others: int) -> None:
    """Its next pass would fill a block, whose content is known from the moment in which the pass is scheduled."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options = {**BASE, "block_size": 4}
    whole = LLM(qwen3, **options).generate([PROMPTS[0][:8]], params)[0].outputs[0].token_ids
    longer = [*PROMPTS[0][:8], *whole[:4], 5, 6]
    plain = LLM(qwen3, **options).generate([longer], params)[0].outputs[0].token_ids
    llm = LLM(qwen3, **options)
    drafter = Holding()
    llm.replica.drafter = drafter
    first = make_state(0, PROMPTS[0][:8], params)
    llm.replica.submit(Work(state=first))
    while len(first.tokens) < 12:
        llm.replica.step()
    drafter.is_on = True
    done = {}
    for uid in range(1, 1 + others):
        llm.replica.submit(Work(state=make_state(uid, longer, params)))
    for _ in range(3):
        done |= {one.state.sequence_id: one.completion.token_ids for one in llm.replica.step().finished}
    llm.replica.submit(Work(state=make_state(9, longer, params)))
    llm.replica.step()
    drafter.is_on = False
    while llm.replica.has_work:
        done |= {one.state.sequence_id: one.completion.token_ids for one in llm.replica.step().finished}
    assert done.pop((0, 0, 0)) == whole
    assert len(done) == 1 + others and all(tokens == plain for tokens in done.values())


class ToOneReplica:
    """The rollout ranks 0 and 1 become one replica; rank 2 goes on drafting."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if view.layout.epoch or view.num_delivered < 2:
            return None
        return LayoutChange(layout=layout_of(("rollout", (0, 1)), ("draft", (2,)), epoch=1))


def through_a_switch(model: str, near: str) -> Any:
    apart = layout_of(("rollout", (0,)), ("rollout", (1,)), ("draft", (2,)))
    together = layout_of(("rollout", (0, 1)), ("draft", (2,)), epoch=1)
    all_verify = replace(contiguous_layout(range(3), 1), epoch=2)
    groups = join([apart, together, all_verify])
    held = Held({0}, 20, 20)
    llm = LLM(
        model, world=groups, layout=apart, schedule=OnDemand(), layout_policy=ToOneReplica(), hidden_stop=held,
        drafter="model", draft_model=near, draft_lengths="fixed", draft_mode="strict", max_draft_tokens=3, **BASE,
    )  # fmt: skip

    def has_drafted() -> bool:
        """The same on both ranks of the replica that comes by the switch."""
        assert llm.rollout is not None
        steps = [one for one in llm.rollout.step_records if one.epoch == 1]
        return sum(one.num_accepted for one in steps) > 5 and sum(one.num_drafted for one in steps) > 50

    held.happened = has_drafted
    tokens = tokens_of(llm.generate(PROMPTS, HOLDABLE, prompt_uids=range(8)))
    assert llm.rollout is not None and llm._draft_ranks is not None
    accepted = sum(one.num_accepted for one in llm.rollout.step_records if one.epoch == 1)
    drafted = llm._draft_ranks.counts.get("num_drafted", 0)
    groups.close()
    return tokens, accepted, drafted


def test_a_switch_in_mid_rollout(qwen3: str, near: str) -> None:
    plain = plain_tokens(qwen3, HOLDABLE)
    for rank, (tokens, accepted, drafted) in enumerate(run_world(through_a_switch, 3, qwen3, near)):
        check_tokens(tokens, plain, uids=[0])
        assert accepted > 5 if rank < 2 else drafted > 50


def change_roles(model: str, near: str) -> Any:
    groups = join([ONE_EACH])
    llm = LLM(
        model, world=groups, layout=ONE_EACH, schedule=OnDemand(), drafter="model", draft_model=near,
        draft_lengths="fixed", draft_mode="strict", max_draft_tokens=3, **BASE,
    )  # fmt: skip
    found = [tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(8)))]
    drafts = [bool(llm.draft_counts)]
    moved = []
    for epoch, role in enumerate(("rollout", "draft"), start=1):
        llm.regroup(layout_of(("rollout", (0,)), (role, (1,)), epoch=epoch))  # type: ignore[arg-type]
        moved.append(llm._engine.switch and llm._engine.switch.weight_bytes)
        found.append(tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(8))))
        drafts.append(bool(llm.draft_counts))
    llm.close()
    groups.close()
    return found, moved, drafts


def test_a_draft_rank_becomes_a_verifier_and_back_without_weights_that_move(qwen3: str, near: str) -> None:
    plain = plain_tokens(qwen3)
    (verifier, unmoved, none), (drafter, moved, drafts) = run_world(change_roles, 2, qwen3, near)
    assert (none, drafts) == ([False] * 3, [True, False, True])
    assert verifier == drafter == [plain] * 3
    assert unmoved == [None, None] and moved == [0, 0]


class LastAgain:
    """A drafter that guesses the last token again."""

    passes: tuple[DraftPass, ...] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        return [Draft([ask.state.tokens[-1]] * ask.limit, [0.5] * ask.limit) for ask in asks]

    def follow(self, news: News) -> None: ...


class Failing(LastAgain):
    """Fails after some passes."""

    def __init__(self, mark: Path) -> None:
        self._mark, self._num_passes = mark, 0

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self._num_passes += 1
        if self._num_passes > 20:
            self._mark.touch()
            raise RuntimeError("no memory")
        return super().propose(asks, num_tokens, num_draws)


def lose_the_drafter(model: str, mark: str) -> Any:
    """The rollout ends some tokens after the drafter has failed."""
    groups = join([ONE_EACH])
    has_failed = Path(mark)
    held = Held({0}, 20, 10)
    held.happened = has_failed.exists
    llm = LLM(
        model, world=groups, layout=ONE_EACH, schedule=OnDemand(), drafter="own",
        own_drafter=lambda: Failing(has_failed), draft_lengths="fixed", draft_mode="strict", max_draft_tokens=2,
        hidden_stop=held, **BASE,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="draft rank has failed .no memory.") if groups.world.rank else nullcontext():
        tokens = tokens_of(llm.generate(PROMPTS, HOLDABLE, prompt_uids=range(8)))
        llm.close()  # waits for the drafter's thread, which warns
    groups.close()
    return tokens


def test_a_drafter_that_fails_leaves_plain_decoding(qwen3: str, tmp_path: Path) -> None:
    plain = plain_tokens(qwen3, HOLDABLE)
    for tokens in run_world(lose_the_drafter, 2, qwen3, str(tmp_path / "failed")):
        check_tokens(tokens, plain, uids=[0])


class FailsOnce(LastAgain):
    """Fails in its first pass."""

    num_passes = 0

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.num_passes += 1
        if self.num_passes == 1:
            raise MemoryError("no memory")
        return super().propose(asks, num_tokens, num_draws)


def test_a_drafter_that_has_failed_drafts_again_in_the_next_rollout() -> None:
    token, drafter = new_token(), FailsOnce()
    server = Server(token)
    link = LiveLink("verifier-0", server.address, token)
    remote = RemoteDrafter([link], "strict", window=2, clock=lambda: 0.0)  # would wait for ever

    def enter(uid: int) -> list[Ask]:
        until(lambda: link.take(waits=True) or link.is_up, "the rank drafts")
        state = make_state(uid, [7])
        remote.follow(News(drawn=[Outcome(state)]))
        link.flush()
        return [Ask(state, 2)]

    with pytest.warns(UserWarning, match="draft rank has failed .no memory.; its verifiers decode plainly"):
        loop = DraftLoop(server, Desk(drafter, max_num_seqs=4), None)
        waiting = enter(0)
        until(lambda: remote.propose(waiting, 1, 1) == [NO_DRAFT], "the verifier decodes plainly")
        late = Client("verifier-1", server.address, token)
        assert decode_to_verifier(late.receive(60.0) or b"") == [Serves(is_so=False)]
        loop.stop()
    loop = DraftLoop(server, Desk(drafter, max_num_seqs=4), None)
    waiting = enter(1)
    until(lambda: remote.propose(waiting, 1, 1)[0].tokens, "drafts come again")
    assert remote.propose(waiting, 1, 1)[0].tokens == [7]
    loop.stop()
    for one in (link, late, server):
        one.close()


def refused(model: str, near: str) -> list[str]:
    groups = join([ONE_EACH])
    found = []
    for options in ({"drafter": "ngram"}, {"schedule": OnDemand()}, {"schedule": OnDemand(), "drafter": "own"}):
        given = {"layout": ONE_EACH, "world": groups, **BASE, **options}
        found.append(error_of(lambda given=given: LLM(model, **given)))
    groups.close()
    return found


def test_refusals(qwen3: str, near: str) -> None:
    for found in run_world(refused, 2, qwen3, near):
        assert "role='draft', which needs a coordinated rollout; give a schedule" in found[0]
        assert "role='draft', and EngineConfig.drafter='none'; give a drafter" in found[1]
        assert "own_drafter=None, EngineConfig.drafter='own'" in found[2]
    with pytest.raises(ValueError, match=r"EngineConfig\.drafter='own': is of LLM's own_drafter"):
        Fleet(qwen3, num_replicas=1, drafter="own")
    with pytest.raises(ValueError, match="all have role='draft'; at least one must have 'rollout'"):
        layout_of(("draft", (0,)))


def test_verifiers_share_drafters_evenly() -> None:
    many = layout_of(*(("rollout", (rank,)) for rank in range(5)), ("draft", (5,)), ("draft", (6, 7)))
    assert [drafters_of(many, spec) for spec in many.replicas] == [(5,), (6, 7), (5,), (6, 7), (5,), (), ()]
    few = layout_of(("rollout", (0,)), ("rollout", (1,)), ("draft", (2,)), ("draft", (3,)), ("draft", (4,)))
    assert [drafters_of(few, spec) for spec in few.replicas[:2]] == [(2, 4), (3,)]
    assert drafters_of(contiguous_layout(range(2), 1), contiguous_layout(range(2), 1).replicas[0]) == ()


class Listening(LastAgain):
    """Notes when it first knows how many tokens a sequence has."""

    heard: ClassVar[dict[int, float]] = {}

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        for ask in asks:
            self.heard.setdefault(len(ask.state.tokens), time.monotonic())
        return super().propose(asks, num_tokens, num_draws)


def listen(model: str) -> Any:
    groups = join([ONE_EACH])
    llm = LLM(
        model, world=groups, layout=ONE_EACH, schedule=OnDemand(), drafter="own", own_drafter=Listening,
        draft_lengths="fixed", max_draft_tokens=2, pace=ShortestStep(step_s=0.1), **BASE,
    )  # fmt: skip
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=24), prompt_uids=[0])
    assert llm.rollout is not None
    steps = [(one.num_accepted, one.start + one.paced_seconds) for one in llm.rollout.step_records]
    groups.close()
    return steps, Listening.heard


def test_a_drafter_hears_of_tokens_when_their_step_has_passed(qwen3: str) -> None:
    (steps, _), (_, heard) = run_world(listen, 2, qwen3)
    length, known = len(PROMPTS[0]), 0
    for num_accepted, end in steps:
        length += 1 + num_accepted
        if length in heard:
            known += 1
            assert heard[length] >= end, length
    assert known
