"""Ranks that only draft, in the simulator: against closed forms, and with everything else that may happen beside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from engines.config import DraftMode, EngineConfig
from engines.coordination.policies import OnDemand, Static
from engines.coordination.views import LayoutChange, LayoutView
from engines.parallel.layout import Layout, ReplicaSpec, Role
from engines.replica.replica import StepOutput
from engines.speculation.desk import Desk
from engines.speculation.drafter import DraftPass
from engines.speculation.posts import Enter
from research.simulator.cluster import Cluster, ClusterConfig, Overheads, SimulatedRollout
from research.simulator.stated import StatedDrafter, simulated_token
from tests.research.test_simulator import FlatPace, Moving, check_after_every_event, long_tail, states

BATCH, LENGTH = 8, 700
MODES: tuple[DraftMode, ...] = ("filled", "strict", "naive")


@dataclass(frozen=True)
class PairPace(FlatPace):
    """Seconds of a pass of the verifier and of the drafter, and of a row of each."""

    verify: tuple[float, float] = (0.010, 0.0001)
    drafts: tuple[float, float] = (0.002, 0.00005)

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return self.verify[0] + self.verify[1] * output.num_tokens

    def draft(self, spec: ReplicaSpec, method: str, passes: Sequence[DraftPass]) -> float:  # type: ignore[override]
        assert method == "own" and (spec.role == "rollout" or spec.tp_size == 1)
        return sum(self.drafts[0] + self.drafts[1] * one.num_rows for one in passes)


def layout_of(*replicas: tuple[Role, tuple[int, ...]], epoch: int = 0) -> Layout:
    specs = [ReplicaSpec(id=ranks[0], ranks=ranks, role=role) for role, ranks in replicas]
    return Layout(epoch=epoch, replicas=tuple(specs))


PAIR = layout_of(("rollout", (0,)), ("draft", (1,)))
ALONE = layout_of(("rollout", (0,)))


def make(layout: Layout, p: float | None, lengths: Sequence[int], policy: Any = None, **options: Any) -> Cluster:
    drafts = {} if p is None else {"drafter": "own", "draft_lengths": "fixed"}
    engine = {"max_num_seqs": BATCH, "max_num_batched_tokens": 4096, **drafts, **options.pop("engine", {})}
    own = None if p is None else partial(StatedDrafter, simulated_token, lambda *_: p)
    config = ClusterConfig(
        layout=layout,
        engine=EngineConfig(**engine),
        pace=options.pop("pace", PairPace()),
        num_kv_tokens=options.pop("num_kv_tokens", {1: 100_000, 2: 200_000}),
        max_model_len=4096,
        own_drafter=own,
        overheads=options.pop("overheads", Overheads()),
    )
    known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
    return Cluster(config, schedule_policy=policy or Static(), lengths=known, **options)


def roll_out(layout: Layout, p: float | None, mode: DraftMode = "filled", w: int = 1, **options: Any) -> float:
    """Returns the tokens per second of each sequence."""
    drafts = {} if p is None else {"draft_mode": mode, "max_draft_tokens": w}
    done = make(layout, p, [LENGTH] * BATCH, engine=drafts | options.pop("engine", {}), **options)
    return LENGTH / done.roll_out(states(BATCH)).makespan


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("drafting", [0.001, 0.004])
def test_strict_with_a_drafter_that_is_always_right(window: int, drafting: float) -> None:
    """A window of w tokens every max(w D, V) seconds, whichever of the two is longer."""
    pace = PairPace(drafts=(drafting, 0.0))
    expected = window / max(window * drafting, pace.verify[0] + pace.verify[1] * BATCH * window)
    assert roll_out(PAIR, 1.0, "strict", window, pace=pace) == pytest.approx(expected, rel=0.03)


def test_a_drafter_twice_as_dear_is_slower() -> None:
    cheap, dear = (roll_out(PAIR, 0.8, "filled", 4, pace=PairPace(drafts=(one, 0.0))) for one in (0.004, 0.008))
    assert dear < 0.9 * cheap


def test_filled_with_a_drafter_that_is_always_wrong() -> None:
    """Plain decoding: a wrong guess is known to be wrong when it comes, as its place is drawn by then."""
    for lengths in ("fixed", "adaptive"):
        found = roll_out(PAIR, 0.0, w=4, engine={"draft_lengths": lengths})
        assert found == pytest.approx(roll_out(ALONE, None), rel=0.03)


@pytest.mark.parametrize("p", [0.6, 1.0])
def test_naive_is_coupled_and_two_messages(p: float) -> None:
    message_s = 0.001
    coupled = make(ALONE, p, [LENGTH] * BATCH, engine={"max_draft_tokens": 4}).roll_out(states(BATCH))
    slow = roll_out(PAIR, p, "naive", 4, overheads=Overheads(message_s=message_s))
    passes = len(coupled.steps)
    assert LENGTH / slow == pytest.approx(coupled.makespan + 2 * message_s * passes, rel=0.03)


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_filled_never_waits(p: float) -> None:
    """A verifier's passes follow each other at once, and gain more the more often guesses are right."""
    done = make(PAIR, p, [LENGTH] * BATCH, engine={"max_draft_tokens": 4}).roll_out(states(BATCH))
    ends = [one.start + one.seconds for one in done.steps]
    assert all(end == pytest.approx(step.start) for end, step in zip(ends, done.steps[1:], strict=False))
    tried = sum(one.num_drafted for one in done.steps)
    assert tried and sum(one.num_accepted for one in done.steps) <= tried


def check_run(simulated: Cluster, lengths: Sequence[int]) -> SimulatedRollout:
    check_after_every_event(simulated)
    desks = {**simulated.desks}
    done = simulated.roll_out(states(len(lengths)))
    desks |= simulated.desks
    assert done.lengths == {(0, uid, 0): length for uid, length in enumerate(lengths)}
    while simulated.queue.run_next():
        pass
    assert all(one.desk.most_over <= 0 and not one.desk._entries for one in desks.values())
    assert sum(one.num_accepted for one in done.steps) > 100
    return done


SHARED = layout_of(("draft", (0,)), ("rollout", (1,)), ("rollout", (2, 3)))
MANY = layout_of(("rollout", (0,)), ("draft", (1, 2)), ("draft", (3,)), ("rollout", (4,)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [SHARED, MANY], ids=["shared", "many"])
@pytest.mark.parametrize("seed", range(2))
def test_every_sequence_ends_at_its_length(mode: DraftMode, layout: Layout, seed: int) -> None:
    """Sequences that move, messages that are late, adaptive lengths; two verifiers of a drafter, three drafters."""
    rng = random.Random(seed)
    lengths = long_tail(9, seed)
    engine = {"draft_mode": mode, "max_draft_tokens": rng.randint(2, 6), "draft_lengths": "fixed"}
    if seed:
        engine["draft_lengths"] = "adaptive"
    overheads = Overheads(message_s=0.002, gap_s=0.001, jitter=0.5, seed=seed)
    policy = Moving() if seed else OnDemand()
    tight = {1: 1600, 2: 2400}
    check_run(make(layout, 0.8, lengths, policy, engine=engine, overheads=overheads, num_kv_tokens=tight), lengths)


class DraftersToRollout:
    """The draft rank generates, too, once a part of the sequences has ended."""

    def __init__(self, after: Layout) -> None:
        self._after = after

    def decide(self, view: LayoutView) -> LayoutChange | None:
        return LayoutChange(layout=self._after) if not view.layout.epoch and view.num_delivered > 2 else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts_before", [True, False])
def test_a_rank_changes_its_role(mode: DraftMode, drafts_before: bool) -> None:
    """The only drafter leaves, for which all sequences may be waiting; a second one comes."""
    others: list[tuple[Role, tuple[int, ...]]] = [] if drafts_before else [("draft", (1,))]
    before, after = (
        layout_of(("rollout", (0,)), *others, ("draft" if one else "rollout", (2,)), epoch=epoch)
        for epoch, one in enumerate((drafts_before, not drafts_before))
    )
    lengths = long_tail(24, 1)
    options = {"engine": {"draft_mode": mode, "max_draft_tokens": 3}, "layout_policy": DraftersToRollout(after)}
    slow = drafts_before and mode != "filled"  # so that all sequences wait for drafts most of the time
    pace = PairPace(drafts=(0.02 if slow else 0.002, 0.0))
    options |= {"num_kv_tokens": {1: 1600}, "pace": pace}
    done = check_run(make(before, 0.9, lengths, OnDemand(), **options), lengths)
    ranks = [{step.replica_id for step in done.steps if step.epoch == epoch} for epoch in (0, 1)]
    assert (2 in ranks[0], 2 in ranks[1]) == (not drafts_before, drafts_before)


def test_a_desk_without_work_runs_no_pass() -> None:
    state = states(1)[0]
    desk = Desk(StatedDrafter(simulated_token, lambda *_: 1.0), max_num_seqs=4)
    fields = {name: getattr(state, name) for name in ("key", "group_id", "params", "num_prompt_tokens")}
    desk.hear("verifier", [Enter(**fields, number=1, tokens=[*state.tokens], window=1, ahead=False)])
    assert desk.draft() and desk.passes == [DraftPass(16, 16)]
    assert not desk.draft() and not desk.passes


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"own_drafter=None: with drafter='own'.* give"):
        make(PAIR, None, [1], engine={"drafter": "own"})
    with pytest.raises(ValueError, match=r"layout: a replica has role='draft', and EngineConfig\.drafter='none'"):
        make(PAIR, None, [1])
