"""Ranks that only draft, in real worlds: the same tokens in every mode, and what becomes of drafters that fail."""

from __future__ import annotations

import itertools
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
from engines.coordination.policies import OnDemand, Static
from engines.coordination.views import Dispatch, LayoutChange, LayoutView, ScheduleView
from engines.fleet.fleet import Fleet
from engines.parallel.layout import Layout, ReplicaSpec, Role, contiguous_layout, drafters_of
from engines.rollout.pace import ShortestStep
from engines.sequence import Work
from engines.speculation.desk import Desk
from engines.speculation.drafter import HELD, NO_DRAFT, Ask, Draft, DraftPass, News
from engines.speculation.remote import RemoteDrafter
from tests.checkpoints import save_checkpoint
from tests.engines.speculation.test_remote import Channel
from tests.engines.test_token_equality import TIGHT_KV
from tests.holding import Held, check_tokens, held_params, tokens_of
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


def roll_out(name: str, model: str, near: str) -> list[tuple[list[list[list[int]]], dict[str, float]]]:
    """Returns for each case the tokens, and what was drafted and accepted."""
    cases = CASES[name]
    layouts = [case["layout"] for case in cases]
    groups, found = join(layouts), []
    for case in cases:
        options = {"drafter": "model", "draft_model": near, "draft_lengths": "fixed", "schedule": OnDemand(), **case}
        if options["drafter"] != "model":
            del options["draft_model"]
        llm = LLM(model, world=groups, pace=PACE, **BASE | options)
        tokens = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(8)))
        assert llm.rollout is not None and llm._draft_ranks is not None
        steps = llm.rollout.step_records
        counts = {"drafted": sum(one.num_drafted for one in steps), "accepted": sum(one.num_accepted for one in steps)}
        counts |= llm._draft_ranks.counts
        counts["preempted"] = sum(one.num_preempted for one in steps)
        found.append((tokens, counts))
        llm.close()
    groups.close()
    return found


def check(name: str, model: str, near: str, num_ranks: int) -> list[list[dict[str, float]]]:
    """Checks the tokens; returns the counts by case and rank."""
    plain, ranks = plain_tokens(model), run_world(roll_out, num_ranks, name, model, near)
    for found in ranks:
        for tokens, _ in found:
            assert tokens == plain
    return [[rank[number][1] for rank in ranks] for number in range(len(CASES[name]))]


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
    assert all(rank.get("most_over", 0) <= 0 for ranks in counts for rank in ranks)


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
    held.until_epoch(llm, 1)
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
    moved = []
    for epoch, role in enumerate(("rollout", "draft"), start=1):
        llm.regroup(layout_of(("rollout", (0,)), (role, (1,)), epoch=epoch))  # type: ignore[arg-type]
        moved.append(llm._engine.switch and llm._engine.switch.weight_bytes)
        found.append(tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(8))))
    llm.close()
    groups.close()
    return found, moved


def test_a_draft_rank_becomes_a_verifier_and_back_without_weights_that_move(qwen3: str, near: str) -> None:
    plain = plain_tokens(qwen3)
    (verifier, unmoved), (drafter, moved) = run_world(change_roles, 2, qwen3, near)
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
