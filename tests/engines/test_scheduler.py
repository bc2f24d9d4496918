"""The scheduler's invariants under random workloads, and its rules one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager
from engines.replica.schedule import Scheduled, Sequence
from engines.replica.scheduler import Scheduler
from engines.sequence import KVHandle, KVPart
from engines.speculation.drafter import Ask, Draft, DraftPass
from tests.states import make_state


def make_sequence(uid: int, prompt_len: int, num_new: int) -> Sequence:
    return Sequence(
        state=make_state(uid, [uid] * prompt_len), max_len=prompt_len + num_new, release_len=prompt_len + num_new
    )


def make_scheduler(num_blocks: int, **options: Any) -> Scheduler:
    config = EngineConfig(block_size=4, **options)
    return Scheduler(config, BlockManager(num_blocks, 4))


def run_step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Runs one pass as a replica would; returns (prompt uid, tokens) of each scheduled sequence."""
    scheduled = scheduler.schedule().batch
    shape = [(item.sequence.state.key.prompt_uid, item.num_tokens) for item in scheduled]
    advance(scheduler, scheduled)
    return shape


def advance(scheduler: Scheduler, scheduled: list[Scheduled]) -> None:
    """What a replica does once a pass has run, each token drawn being 1."""
    for item in scheduled:
        samples = item.samples
        item.sequence.num_computed += item.num_tokens
        if samples:
            item.sequence.state.tokens.append(1)
            if len(item.sequence.state.tokens) >= item.sequence.max_len:
                scheduler.remove(item.sequence)


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_ends_and_every_pass_fits(seed: int) -> None:
    rng = random.Random(seed)
    max_seqs = rng.randint(1, 8)
    budget = rng.randint(max_seqs, 24)
    scheduler = make_scheduler(
        rng.randint(12, 30),
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        prefill_chunk_size=rng.choice([1, 3, 100]),
    )
    # Some begin alike.
    sequences = [make_sequence(uid % 8, rng.randint(1, 20), rng.randint(1, 25)) for uid in range(25)]
    for sequence in sequences if seed % 2 else []:
        sequence.priority = rng.choice([0.0, 1.0, 2.0])
    pending = list(sequences)
    steps = 0
    while pending or scheduler.has_work:
        if pending and rng.random() < 0.5:
            scheduler.add(pending.pop())
        if not scheduler.has_work:
            continue
        before = {id(s): s.num_computed for s in sequences}
        scheduled = scheduler.schedule().batch
        lengths = [item.num_tokens for item in scheduled]
        assert scheduled, "there is work, and nothing runs"
        assert sum(lengths) <= budget and len(scheduled) <= max_seqs
        assert lengths == sorted(lengths, key=lambda n: n > 1), "single tokens come first"
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= slot < max_seqs for slot in slots)
        for item in scheduled:
            assert item.num_tokens >= 1
            started = before[id(item.sequence)]
            assert item.sequence.num_computed == started or item.sequence.num_computed % 4 == 0
            end = item.sequence.num_computed + item.num_tokens
            assert len(scheduler.blocks.table(item.sequence)) * 4 >= end
        scheduler.blocks.check_integrity()
        advance(scheduler, scheduled)
        steps += 1
        assert steps < 5000, "no progress"
    assert all(len(s.state.tokens) == s.max_len for s in sequences)
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


def test_a_finished_sequence_leaves_and_a_waiting_one_enters_at_once() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2)
    for uid, num_new in enumerate([1, 3, 2]):
        scheduler.add(make_sequence(uid, 5, num_new))
    assert run_step(scheduler) == [(0, 5), (1, 5)]
    assert run_step(scheduler) == [(1, 1), (2, 5)]


def test_prefills_share_what_decodes_leave_of_the_budget() -> None:
    scheduler = make_scheduler(100, max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_sequence(0, 6, 9))
    scheduler.add(make_sequence(1, 10, 9))
    assert run_step(scheduler) == [(0, 6), (1, 2)]
    assert run_step(scheduler) == [(0, 1), (1, 7)]
    assert run_step(scheduler) == [(0, 1), (1, 1)]


def test_one_that_brings_kv_starts_behind_it() -> None:
    scheduler = make_scheduler(6, max_num_seqs=4, max_num_batched_tokens=8)
    lengths = {0: 6, 1: 9, 2: 5}
    sequences = [make_sequence(uid, length, 9) for uid, length in lengths.items()]
    for sequence, num_tokens in zip(sequences[1:], (7, 4), strict=True):
        part = KVPart(first_token=0, num_tokens=num_tokens, first_head=0, num_heads=1, location="", num_bytes=0)
        sequence.kv = KVHandle(policy_version=0, dtype="float32", parts=(part,))
    for sequence in sequences:
        scheduler.add(sequence)

    def schedule() -> list[Scheduled]:
        """As a replica that loads all KV that is brought."""
        step = scheduler.schedule()
        for sequence in step.arriving:
            assert sequence.kv is not None and len(sequence.blocks) * 4 >= len(sequence.state.tokens)
            asked.append(sequence.state.key.prompt_uid)
            sequence.num_computed, sequence.kv = sequence.kv.num_tokens, None
        scheduler.add_loaded(step)
        return step.batch

    asked: list[int] = []
    scheduled = schedule()
    assert asked == [1]  # the first brings none, and there are no blocks for the third
    assert [(item.sequence.state.key.prompt_uid, item.num_tokens) for item in scheduled] == [(0, 6), (1, 2)]
    assert sequences[2].kv is not None
    advance(scheduler, scheduled)
    scheduler.remove(sequences[0])
    # One token left is a decode.
    assert [(item.num_tokens, item.samples) for item in schedule()] == [(1, True), (1, True)]
    assert asked == [1, 2]
    scheduler.restart(sequences[1:])
    assert [sequence.num_computed for sequence in sequences[1:]] == [0, 0]
    assert not scheduler.running and scheduler.blocks.num_free_blocks == 6


def test_the_latest_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(4, max_num_seqs=4)
    first, second, third = make_sequence(0, 4, 12), make_sequence(1, 3, 12), make_sequence(2, 4, 1)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.running == [first, second]  # the third would leave no block to grow into
    while scheduler.num_preemptions == 0 and len(first.state.tokens) < 16:
        run_step(scheduler)
    assert scheduler.running == [first]
    assert scheduler.waiting[0] is second
    assert second.num_computed == 0 and second.slot == -1


def test_removing_a_waiting_sequence() -> None:
    scheduler = make_scheduler(4, max_num_seqs=1)
    sequences = [make_sequence(uid, 3, 3) for uid in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_step(scheduler)
    scheduler.remove(sequences[1])
    assert not scheduler.waiting and scheduler.running == [sequences[0]]


def make_group(size: int, prompt_len: int, num_new: int) -> list[Sequence]:
    return [make_sequence(3, prompt_len, num_new) for _ in range(size)]


def test_a_group_computes_its_prompt_once_in_one_pass() -> None:
    scheduler = make_scheduler(100, max_num_seqs=16)
    for sequence in make_group(5, 14, 4):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(3, 14)] + [(3, 2)] * 4
    assert scheduler.num_shared_tokens == 4 * 12
    assert scheduler.blocks.num_blocks - scheduler.blocks.num_free_blocks == 3 + 5  # the last block is everyone's own
    assert run_step(scheduler) == [(3, 1)] * 5


def test_the_last_token_is_computed_by_everyone() -> None:
    scheduler = make_scheduler(100, max_num_seqs=16)
    for sequence in make_group(3, 12, 4):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(3, 12), (3, 4), (3, 4)]


def test_members_wait_for_a_prompt_that_the_budget_cuts() -> None:
    scheduler = make_scheduler(100, max_num_seqs=16, max_num_batched_tokens=16)
    for sequence in make_group(3, 41, 4):
        scheduler.add(sequence)
    passes = [sorted(run_step(scheduler), reverse=True) for _ in range(4)]
    assert passes == [[(3, 16)], [(3, 16)], [(3, 9), (3, 1), (3, 1)], [(3, 1)] * 3]


def test_what_has_ended_is_found_again_until_its_blocks_are_needed() -> None:
    scheduler = make_scheduler(8, max_num_seqs=4)
    scheduler.add(make_sequence(3, 14, 1))
    assert run_step(scheduler) == [(3, 14)]
    scheduler.add(make_sequence(3, 14, 1))
    assert run_step(scheduler) == [(3, 2)]
    scheduler.add(make_sequence(4, 24, 1))  # 6 of the 8 blocks: of the three known ones the last goes
    assert run_step(scheduler) == [(4, 24)]
    scheduler.add(make_sequence(3, 14, 1))
    assert run_step(scheduler) == [(3, 6)]
    scheduler.blocks.forget()
    scheduler.add(make_sequence(3, 14, 1))
    assert run_step(scheduler) == [(3, 14)]


def test_without_the_switch_nothing_is_shared() -> None:
    scheduler = make_scheduler(100, max_num_seqs=16, prefix_caching=False)
    for sequence in make_group(3, 14, 4):
        scheduler.add(sequence)
    assert run_step(scheduler) == [(3, 14)] * 3
    assert scheduler.num_shared_tokens == 0


def test_what_others_hold_is_found_again() -> None:
    """Two of 14 tokens share three full blocks; two of 16 have a last block each, and find the other's."""
    for prompt_len, num_common in ((14, 12), (16, 16)):
        scheduler = make_scheduler(100, max_num_seqs=4)
        for sequence in make_group(2, prompt_len, 9):
            scheduler.add(sequence)
        run_step(scheduler)
        _, cached = scheduler._preempt(scheduler._lowest())
        assert (cached.num_common, cached.num_tokens) == (num_common, prompt_len)
        assert len(cached.blocks) == -(-prompt_len // 4), "its blocks are still named"
        assert run_step(scheduler) == [(3, 1), (3, prompt_len + 1 - num_common)]


def test_a_preempted_sequence_finds_what_is_left_of_its_blocks() -> None:
    scheduler = make_scheduler(100, max_num_seqs=4)
    scheduler.add(make_sequence(3, 14, 9))
    run_step(scheduler)
    run_step(scheduler)
    scheduler._preempt(scheduler._lowest())
    assert run_step(scheduler) == [(3, 4)]  # of 16 tokens the first 12 are there


def test_no_block_is_kept_for_who_cannot_grow() -> None:
    scheduler = make_scheduler(5, max_num_seqs=8)
    for uid in range(5):
        scheduler.add(make_sequence(uid, 2, 3))  # 4 of 5 tokens are computed: one block
    assert [uid for uid, _ in run_step(scheduler)] == [0, 1, 2, 3, 4]
    scheduler = make_scheduler(5, max_num_seqs=8)
    for uid in range(5):
        scheduler.add(make_sequence(uid, 2, 4))
    assert [uid for uid, _ in run_step(scheduler)] == [0, 1, 2], "two may each need another"


class Guesses:
    """Drafts of random lengths."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    passes: tuple[DraftPass, ...] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        lengths = [self.rng.randint(0, ask.limit) for ask in asks]
        return [Draft([1] * length, [1.0] * length) for length in lengths]


def test_bounded_work_is_never_preempted() -> None:
    """Beside sequences without a bound, of which some are; with prefixes that members share, and with drafts."""
    num_preempted, num_packed = zip(*map(run_bounded, range(240)), strict=True)
    assert sum(num > 0 for num in num_preempted) > 40 and not any(num_preempted[::3])
    for first in (0, 3):  # without drafts, and with
        assert sum(num > 0 for num in num_packed[first::6]) > 20, "bounded ones that leave in time let others in"


def run_bounded(seed: int) -> tuple[int, int]:
    """Returns the preemptions, and the passes in which bounded sequences might need more blocks in sum than are
    free."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        rng.randint(14, 30),
        max_num_seqs=rng.randint(2, 8),
        max_draft_tokens=5,
        max_num_batched_tokens=rng.choice([10, 2048]),
        prefill_chunk_size=rng.choice([3, 2048]),
    )
    num_packed, num_kept_free = 0, scheduler.admission.num_kept_free
    pending = [make_sequence(uid % 5, rng.randint(1, 20), rng.randint(1, 25)) for uid in range(30)]
    for sequence in pending:
        sequence.is_bounded = not seed % 3 or rng.random() < 0.5
        if sequence.is_bounded:
            sequence.release_len = rng.randint(len(sequence.state.tokens) + 1, sequence.max_len)
    while pending or scheduler.has_work:
        while pending and rng.random() < 0.5:
            scheduler.add(pending.pop())
        schedule = scheduler.schedule(with_drafts=seed % 2 == 1)
        assert schedule.batch or not scheduler.has_work, "there is work, and nothing runs"
        assert not any(sequence.is_bounded for sequence, _ in schedule.preempted)
        kept = {True: 0, False: 0}
        for one in scheduler.running:
            num_left = scheduler.blocks.blocks_for(one.release_len - 1) - len(scheduler.blocks.table(one))
            assert num_left >= 0
            kept[one.is_bounded] += num_left if one.is_bounded else min(1, num_left)
        assert kept == {key: num_kept_free[key] for key in kept}
        if kept[True] > scheduler.blocks.num_free_blocks:
            num_packed += 1
            assert not kept[False], "those without a bound find their blocks"
        if seed % 2:
            scheduler.add_drafts(schedule, Guesses(rng))  # type: ignore[arg-type]
        assert not {id(one) for one, _ in schedule.preempted} & {id(item.sequence) for item in schedule.batch}
        for item in schedule.batch:
            tokens, samples = item.sequence.state.tokens, item.samples
            item.sequence.num_computed += item.num_tokens
            if samples:
                tokens += [1] * (1 + rng.randint(0, len(item.draft)))
            if item.draft:
                item.sequence.num_computed = len(tokens) - 1
                scheduler.settle(item)
            if len(tokens) >= item.sequence.release_len:
                scheduler.remove(item.sequence)
        if not all(one.is_bounded for one in scheduler.running):
            assert num_kept_free[True] <= scheduler.blocks.num_free_blocks, "drafts have taken what is kept"
        scheduler.blocks.check_integrity()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    assert not any(num_kept_free.values())
    return scheduler.num_preemptions, num_packed


# --- Priorities (Heddle, §4.2)


def ranked(uid: int, priority: float, prompt_len: int = 3, num_new: int = 9, *, bounded: bool = False) -> Sequence:
    sequence = make_sequence(uid, prompt_len, num_new)
    sequence.priority, sequence.is_bounded = priority, bounded
    return sequence


def uids(sequences: Iterable[Sequence]) -> list[int]:
    return [sequence.state.key.prompt_uid for sequence in sequences]


def test_those_of_higher_priority_enter_first_and_equals_in_their_order() -> None:
    scheduler = make_scheduler(100, max_num_seqs=1)
    for uid, priority in enumerate([1.0, 2.0, 1.0, 3.0, 2.0]):
        scheduler.add(ranked(uid, priority))
    assert uids(scheduler.waiting) == [3, 1, 4, 0, 2]
    run_step(scheduler)
    assert uids(scheduler.running) == [3]


def test_a_slot_is_taken_from_the_lowest_and_it_comes_back_before_its_equals() -> None:
    scheduler = make_scheduler(100, max_num_seqs=3)
    for uid, priority in enumerate([5.0, 1.0, 1.0, 1.0]):
        scheduler.add(ranked(uid, priority))
    run_step(scheduler)
    assert uids(scheduler.running) == [0, 1, 2]
    scheduler.add(ranked(4, 3.0))
    schedule = scheduler.schedule()
    assert uids(one for one, _ in schedule.preempted) == [2] and uids(schedule.admitted) == [4]
    assert uids(item.sequence for item in schedule.batch) == [0, 1, 4]
    advance(scheduler, schedule.batch)
    assert uids(scheduler.waiting) == [2, 3], "the preempted one before one that has not run"
    scheduler.blocks.check_integrity()


@pytest.mark.parametrize(("margin", "preempts"), [(0.0, True), (0.4, True), (0.5, False), (math.inf, False)])
def test_the_margin_is_a_share_of_the_running_one_s_priority(margin: float, preempts: bool) -> None:
    scheduler = make_scheduler(100, max_num_seqs=1, priority_margin=margin)
    scheduler.add(ranked(0, 2.0))
    run_step(scheduler)
    scheduler.add(ranked(1, 3.0))
    run_step(scheduler)
    assert uids(scheduler.running) == [int(preempts)]


def test_equals_and_bounded_ones_are_not_preempted() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2)
    for one in (ranked(0, 1.0), ranked(1, 0.0, bounded=True)):
        scheduler.add(one)
    run_step(scheduler)
    scheduler.add(ranked(2, 1.0))
    run_step(scheduler)
    assert uids(scheduler.running) == [0, 1] and not scheduler.num_preemptions
    scheduler.add(ranked(3, 4.0, bounded=True))
    run_step(scheduler)
    assert uids(scheduler.running) == [1, 3], "bounded work enters by its priority, too"


def test_blocks_are_taken_only_where_they_suffice() -> None:
    scheduler = make_scheduler(6, max_num_seqs=8)
    for one in (ranked(0, 9.0, 7), ranked(1, 1.0, 3)):
        scheduler.add(one)
    run_step(scheduler)
    assert uids(scheduler.running) == [0, 1]
    scheduler.add(ranked(3, 5.0, 15, 1))  # 4 blocks: two are held by one that it does not outrank
    run_step(scheduler)
    assert uids(scheduler.running) == [0, 1] and not scheduler.num_preemptions
    scheduler.remove(scheduler.waiting[0])
    scheduler.add(ranked(4, 5.0, 7, 3))
    run_step(scheduler)
    assert uids(scheduler.running) == [0, 4] and scheduler.num_preemptions == 1
    scheduler.blocks.check_integrity()


def test_growth_preempts_the_lowest_and_not_the_latest() -> None:
    scheduler = make_scheduler(4, max_num_seqs=4)
    for one in (ranked(0, 1.0, 4, 12), ranked(1, 2.0, 3, 12)):
        scheduler.add(one)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert uids(scheduler.running) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_priorities_run_as_algorithm_1_would_have_it(seed: int) -> None:
    """With room for all KV and one arrival at a time: a scalar copy of Algorithm 1, with promotion to free slots."""
    rng = random.Random(seed)
    num_slots = rng.randint(1, 5)
    scheduler = make_scheduler(1000, max_num_seqs=num_slots, max_num_batched_tokens=4000)
    queue: list[tuple[float, int]] = []
    active: list[tuple[float, int]] = []
    for uid in range(40):
        priority = float(rng.randint(0, 9))
        scheduler.add(ranked(uid, priority, rng.randint(1, 9), 3000))
        queue.append((priority, uid))
        if rng.random() < 0.3 and active:
            gone = rng.choice(active)
            active.remove(gone)
            scheduler.remove(next(one for one in scheduler.running if one.state.key.prompt_uid == gone[1]))
        while queue and (len(active) < num_slots or max(queue)[0] > min(active)[0]):
            top = max(queue, key=lambda one: (one[0], -queue.index(one)))
            if len(active) == num_slots:
                lowest = min(active, key=lambda one: (one[0], -active.index(one)))
                active.remove(lowest)
                queue.insert(0, lowest)
            queue.remove(top)
            active.append(top)
        for _ in range(num_slots + 1):  # one is preempted in each pass
            run_step(scheduler)
        assert uids(scheduler.running) == [uid for _, uid in active]
    assert scheduler.num_preemptions or num_slots > 2
