"""Two models on one device: turns, cuts and stalls, with passes that only count, in virtual time."""

from __future__ import annotations

import itertools
import random
from queue import SimpleQueue

import pytest

from engines.config import EngineConfig
from engines.kvcache.pages import PagePool, PageShare
from engines.replica.forecast import entry_blocks, growth_blocks, next_step
from engines.replica.replica import Replica, StepOutput
from engines.replica.scheduler import Scheduler
from engines.sequence import SamplingParams, SequenceKey, SequenceState, Work
from engines.serving.coserve import CoServing, CoServingLimits, Neighbour, Turn
from engines.serving.engine_thread import EngineThread, Event, Job, Left
from engines.serving.policies import MemoryView, ServingView
from research.rose.admission import QueueDebt
from research.rose.baselines import IdleFor
from research.rose.memory import ServingFirst, SharingOptions, StaticSplit
from research.simulator.runner import VOCAB_SIZE, KVPool, SimulatedMover, SimulatedRunner

NUM_PAGES, BLOCK_SIZE = 40, 4


class Anytime:
    """Admits every step of the rollout."""

    def admits(self, view: ServingView, seconds: float) -> bool:
        return True


class Never:
    def admits(self, view: ServingView, seconds: float) -> bool:
        return False


class Sometimes:
    """Admits a share of the steps."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share = rng, share

    def admits(self, view: ServingView, seconds: float) -> bool:
        return self._rng.random() < self._share


class RandomCuts(ServingFirst):
    """Cuts at random, too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(SharingOptions(window_s=5.0))
        self._rng = rng

    def cut(self, view: MemoryView) -> int | None:
        own = super().cut(view)
        return own if own is not None or self._rng.random() > 0.05 else self._rng.randrange(view.budget + 1)


class World:
    """A serving replica and one of a rollout on a pool, and the time."""

    def __init__(self, admission: object = None, memory: object = None, *, num_seqs: int = 8, **limits: float) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.now = 0.0
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_num_batched_tokens=64)
        self.serving, self.rollout = (
            self._neighbour(name, config, per_page) for name, per_page in (("serving", 2), ("rollout", 3))
        )
        self.coserving = CoServing(
            serving=self.serving,
            rollout=self.rollout,
            admission=admission or Anytime(),  # type: ignore[arg-type]
            memory=memory or ServingFirst(),  # type: ignore[arg-type]
            seconds=lambda output: 0.01,
            limits=CoServingLimits(**limits),
        )
        self._uids = itertools.count()
        self.lengths: dict[int, int] = {}
        self.done: dict[int, int] = {}
        """Tokens of the sequences that have ended, by uid."""

    def _neighbour(self, name: str, config: EngineConfig, per_page: int) -> Neighbour:
        share = PageShare(
            self.pool, name, budget=NUM_PAGES, block_size=BLOCK_SIZE, blocks_per_page=per_page, lease_s=1.0
        )
        mover = SimulatedMover(
            KVPool(capacity_tokens=0), "recompute", None, 0, now=lambda: self.now, transfer_s=lambda count, path: 0.0
        )
        replica = Replica(
            runner=SimulatedRunner(),
            scheduler=Scheduler(config, share.blocks),
            mover=mover,
            max_model_len=10_000,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            detokenize=None,
            hidden_stop=lambda state: state.num_generated >= self.lengths[state.key.prompt_uid],
        )
        return Neighbour(replica=replica, pages=share)

    def state(self, num_prompt: int, length: int) -> SequenceState:
        uid = next(self._uids)
        self.lengths[uid] = length
        key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0)
        tokens = [10 * uid + 10**6] * num_prompt
        return SequenceState(
            key=key, group_id=uid, tokens=tokens, num_prompt_tokens=num_prompt, params=SamplingParams(max_tokens=length)
        )

    def serve(self, num_prompt: int, length: int) -> None:
        state = self.state(num_prompt, length)
        self.serving.replica.submit(Work(state=state))
        self.coserving.times.arrived(state, self.now)

    def roll(self, num_prompt: int, length: int, bound: int | None = None) -> None:
        self.rollout.replica.submit(Work(state=self.state(num_prompt, length), max_new_tokens=bound))

    def step(self) -> str | None:
        turn = self.coserving.next(self.now)
        self.check()
        if turn is None:
            self.now += 0.005
            return None
        start, self.now = self.now, self.now + 0.01
        output: StepOutput = getattr(self, turn).replica.step()
        self.coserving.stepped(turn, output, start, self.now)
        for one in output.finished:
            self.done[one.state.key.prompt_uid] = one.state.num_generated
        for work in output.released:
            self.rollout.replica.submit(Work(state=work.state, max_new_tokens=work.max_new_tokens))
        return turn

    def check(self) -> None:
        self.check_times()
        for one in (self.serving, self.rollout):
            one.pages.check_integrity()

    def check_times(self) -> None:
        """What is kept of requests from step to step is what the replica says."""
        replica = self.serving.replica
        computed = {one.state.sequence_id: one.num_computed for one in replica.scheduler.running}
        states = sorted(replica.states(), key=lambda state: state.key.prompt_uid)  # by their arrival
        view = self.coserving.times.view(self.now, 0.0, 0.0)
        assert [one.num_tokens for one in view.queued] == [
            len(state.tokens) - computed.get(state.sequence_id, 0) for state in states if not state.num_generated
        ]
        assert view.num_context_tokens == sum(len(state.tokens) for state in states if state.num_generated)


def test_a_burst_of_serving_takes_its_pages_back_within_the_step() -> None:
    world = World()
    for _ in range(4):
        world.roll(40, 400)
    world.coserving.begin(world.now)
    while world.rollout.pages.num_pages < 20:
        world.step()
    held = world.rollout.pages.num_pages
    for _ in range(8):
        world.serve(30, 5)  # 8 x 4 pages: more than are free beside the rollout
    world.coserving.next(world.now)
    assert world.rollout.pages.num_pages < held
    released = world.coserving.take_released()
    assert released and all(work.kv is None for work in released), "whole sequences leave, without KV"
    assert world.coserving.lent.num_taken_back == len(released)
    fewest = max(len(work.state.tokens) for work in released)
    assert all(len(one.state.tokens) >= fewest for one in world.rollout.replica.scheduler.running)
    output = world.serving.replica.step()
    assert output.num_running == 8 or output.num_tokens == 64, "the whole burst enters as far as the pass is large"
    assert growth_blocks(world.serving.replica.scheduler) + entry_blocks(world.serving.replica.scheduler) <= (
        world.serving.pages.blocks.num_free_blocks
    )


def test_an_idle_rollout_gives_its_pages_back_when_their_lease_ends() -> None:
    world = World()
    world.roll(40, 3)
    world.coserving.begin(world.now)
    while not world.done:
        world.step()
    assert world.rollout.pages.num_pages > 0 == world.rollout.pages.num_used_pages
    world.now += 0.9
    world.coserving.next(world.now)
    assert world.rollout.pages.num_pages > 0
    world.now += 0.2
    world.coserving.next(world.now)
    assert world.rollout.pages.num_pages == 0


def test_the_budget_falls_within_a_phase_and_is_made_anew_by_the_next() -> None:
    world = World(memory=ServingFirst(SharingOptions(window_s=0.1)))
    world.coserving.begin(world.now)
    assert world.coserving.budget == 32, "all but the headroom of a fifth"
    for _ in range(7):
        world.serve(60, 4)
    budgets = [world.coserving.budget]
    while world.serving.replica.has_work:
        world.step()
        budgets.append(world.coserving.budget)
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] < 32
    world.now += 1.0
    world.coserving.begin(world.now)
    assert world.coserving.budget == 32


def test_an_idle_rollout_learns_what_is_left_of_a_budget_that_was_cut() -> None:
    world = World(memory=ServingFirst(SharingOptions(window_s=0.1)))
    world.coserving.begin(world.now)
    world.roll(40, 400)
    for _ in range(10):
        world.serve(60, 4)
    least = world.rollout.pages.blocks.num_allowed_blocks
    while world.rollout.replica.num_sequences or world.serving.replica.has_work:
        world.step()
        least = min(least, world.rollout.pages.blocks.num_allowed_blocks)
        world.coserving.take_released()
    budget, cuts = world.coserving.budget, world.coserving.lent.num_cuts
    assert least == 0 < budget and cuts
    world.now += 1.0
    assert world.coserving.renew(world.now)
    assert world.rollout.pages.blocks.num_allowed_blocks == 3 * budget == 3 * world.coserving.budget
    assert not world.coserving.renew(world.now + 0.5)


def test_a_static_split_leaves_the_rollout_its_half() -> None:
    """Although requests wait that would find no room beside it."""
    world = World(memory=StaticSplit())
    world.serving.pages.set_budget(NUM_PAGES // 2)
    world.coserving.begin(world.now)
    for _ in range(6):  # 3 pages each
        world.roll(10, 20)
        world.serve(40, 10)
    while world.serving.replica.has_work:
        world.step()
        assert world.rollout.pages.num_pages <= NUM_PAGES // 2 >= world.serving.pages.num_pages
    assert world.coserving.lent.num_taken_back == 0


class Fixed(StaticSplit):
    """Lends a number of pages, and keeps no headroom."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(share=num_pages / NUM_PAGES)


def test_a_time_without_sequences_is_no_stall() -> None:
    """Nobody asks who is next while there is no work."""
    world = World(stall_s=2.0)
    world.coserving.begin(world.now)
    for bound in (None, 1):  # one ends, and one enters and is released in its first step
        world.roll(10, 3, bound)
        while world.rollout.replica.num_sequences:
            turn = world.coserving.next(world.now)
            world.now += 0.01
            output = world.rollout.replica.step()
            world.coserving.stepped("rollout", output, world.now, world.now)
            assert turn == "rollout"
        world.now += 10.0
    world.rollout.replica.submit(output.released[0])
    assert world.coserving.next(world.now) == "rollout" and not world.coserving.lent.num_stalled
    world.now += 10.0
    world.coserving.begin(world.now)
    assert world.coserving.next(world.now) == "rollout" and not world.coserving.lent.num_stalled


class InTurns:
    """Admits every second step, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def admits(self, view: ServingView, seconds: float) -> bool:
        self.seen.append((view.now, view.delayed_s))
        return len(self.seen) % 2 == 0


def test_serving_is_delayed_while_it_has_work_and_does_not_step() -> None:
    turns = InTurns()
    world = World(turns)
    world.coserving.begin(world.now)
    world.roll(10, 200)
    for _ in range(4):  # no request yet; a step of the rollout takes 0.01 s, a look 0.005 s
        world.step()
    assert [delayed for _, delayed in turns.seen] == [0.0] * 4
    world.coserving.times.arrived(state := world.state(10, 5), world.now - 0.003)  # in the last step
    world.serving.replica.submit(Work(state=state))
    start, lent = world.now, world.coserving.lent.num_steps
    while world.serving.replica.has_work:
        world.now += 0.001  # between two steps
        world.step()
    rolled, gaps = world.coserving.lent.num_steps - lent, len(turns.seen) - 4
    assert rolled == 4 and gaps == 9
    assert turns.seen[4] == pytest.approx((start + 0.001, 0.004))
    assert turns.seen[-1][1] == pytest.approx(0.003 + 0.01 * rolled + 0.001 * gaps)
    world.step()
    world.now += 1.0
    world.step()
    assert turns.seen[-1][1] == pytest.approx(0.003 + 0.01 * rolled + 0.001 * gaps), "nothing is delayed without work"


def test_what_happens_while_no_step_of_the_rollout_waits_counts_for_policies() -> None:
    """They are not asked then, and see it in the next view all the same."""

    def served_between_two_rollouts(admission: object) -> World:
        world = World(admission)
        world.coserving.begin(world.now)
        world.roll(10, 3)
        while world.rollout.replica.has_work:
            world.step()
        world.now += 5.0
        world.serve(10, 30)
        while world.serving.replica.has_work:
            world.now += 0.005  # a gap before each step
            world.step()
        return world

    world = served_between_two_rollouts(IdleFor(1.0))
    left, world.now = world.now, world.now + 0.9
    world.roll(10, 20)
    assert world.step() is None, "a request was there 0.9 s ago"
    while (turn := world.step()) is None:
        pass
    assert turn == "rollout" and left + 1.0 <= world.now - 0.01 < left + 1.006

    world = served_between_two_rollouts(QueueDebt(Anytime(), 0.105))
    world.roll(10, 20)
    world.serve(10, 5)
    assert [world.step() for _ in range(11)] == ["rollout"] * 10 + ["serving"], "only what delays this queue counts"


def test_a_request_that_loses_its_place_must_be_computed_anew() -> None:
    world = World(Never())
    world.serve(100, 5)
    world.step()  # of 64 tokens
    times = world.coserving.times
    assert [one.num_tokens for one in times.view(world.now, 0.0, 0.0).queued] == [36]
    times.stepped([], world.now)
    assert [one.num_tokens for one in times.view(world.now, 0.0, 0.0).queued] == [100]


def test_serving_steps_while_the_rollout_waits_for_pages_to_its_bound() -> None:
    world = World(memory=Fixed(3))
    world.coserving.begin(world.now)
    world.roll(10, 400, bound=200)
    world.serve(10, 20)
    assert [world.step() for _ in range(20)] == ["serving"] * 20 and world.done == {1: 20}


def test_serving_steps_where_a_step_of_the_rollout_did_nothing() -> None:
    class Stuck:
        has_work = True

        def next(self) -> Turn:
            return "rollout"

        def step(self) -> bool:
            return False

        def ignore(self, *_: object) -> None:
            pass

        attach = arrived = left = served = stop = ignore

    world, events = World(), SimpleQueue[list[tuple[Job, Event]]]()
    world.lengths[0] = 3
    thread = EngineThread(world.serving.replica, run_seed=0, tell=events.put, beside=Stuck())
    thread.submit(Job(prompts=[[1, 2]], params=[SamplingParams(max_tokens=9)], streams=False))
    thread.start()
    try:
        while not any(isinstance(event, Left) for _, event in events.get(timeout=30)):
            pass
    finally:
        thread.stop()


def test_work_with_a_bound_gets_the_idle_pages_of_serving() -> None:
    world = World(memory=ServingFirst(SharingOptions(window_s=0.1)))
    while world.pool.num_free:
        world.serve(30, 2)
        while world.serving.replica.has_work:
            world.step()
    world.now += 1.0
    world.coserving.begin(world.now)
    world.roll(10, 100, bound=90)
    assert world.step() == "rollout" and world.rollout.replica.scheduler.running


def test_a_request_enters_beside_the_blocks_that_others_may_need() -> None:
    world = World(memory=Fixed(NUM_PAGES))
    world.coserving.begin(world.now)
    for _ in range(6):
        world.serve(5, 60)
    assert world.step() == "serving"
    for _ in range(8):
        world.roll(20, 400)
    while world.pool.num_free:
        assert world.step() == "rollout"
    world.coserving._admission = Never()  # type: ignore[assignment]
    world.serve(3, 5)
    assert world.step() == "serving" and not world.serving.replica.scheduler.waiting


def test_sequences_without_progress_leave_after_the_stall_time() -> None:
    world = World(admission=Never(), stall_s=2.0)
    world.roll(10, 5)
    world.roll(10, 5)
    world.coserving.begin(world.now)
    while world.now <= 2.0:
        assert world.step() is None
        assert not world.coserving.take_released()
    world.now += 0.1
    world.step()
    assert len(world.coserving.take_released()) == 2 == world.coserving.lent.num_stalled
    assert not world.rollout.replica.has_work


def test_one_that_finds_no_room_leaves_while_the_others_go_on() -> None:
    world = World(num_seqs=2, stall_s=0.5)
    for _ in range(3):
        world.roll(10, 300)
    world.coserving.begin(world.now)
    while world.now < 1.0:
        world.step()
    assert [work.state.key.prompt_uid for work in world.coserving.take_released()] == [2]
    assert world.rollout.replica.num_sequences == 2


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_lose_no_sequence_and_serving_never_waits_for_the_rollout(seed: int) -> None:
    """Arrivals, bounded and unbounded work, cuts, leases that end, stalls: what leaves comes back, and all end."""
    rng = random.Random(seed)
    world = World(Sometimes(rng, rng.choice([0.2, 0.6, 1.0])), RandomCuts(rng), stall_s=0.3)
    world.coserving.begin(world.now)
    num_served = num_rolled = 0
    for _ in range(3000):
        if rng.random() < 0.03 and num_served < 40:
            num_served += 1
            world.serve(rng.randint(1, 60), rng.randint(1, 30))
        if rng.random() < 0.05 and num_rolled < 40:
            num_rolled += 1
            world.roll(rng.randint(1, 50), rng.randint(1, 60), rng.choice([None, 7, 30]))
        if rng.random() < 0.01:
            world.coserving.begin(world.now)
        for work in world.coserving.take_released():
            assert world.lengths[work.state.key.prompt_uid] > work.state.num_generated
            world.rollout.replica.submit(Work(state=work.state, max_new_tokens=work.max_new_tokens))
        turn = world.step()
        scheduler = world.serving.replica.scheduler
        if turn == "serving" and scheduler.waiting and scheduler.num_free_slots:
            assert not world.rollout.pages.num_pages or next_step(scheduler).num_tokens >= 32, "it waits for pages"
    world.coserving._memory = ServingFirst()  # type: ignore[assignment]
    for _ in range(20_000):
        if len(world.done) == num_served + num_rolled:
            break
        for work in world.coserving.take_released():
            world.rollout.replica.submit(Work(state=work.state, max_new_tokens=work.max_new_tokens))
        if not rng.randrange(50):
            world.coserving.begin(world.now)
        world.step()
    assert world.done == world.lengths
