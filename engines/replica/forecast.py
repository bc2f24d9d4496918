"""What a replica's next step does and takes at most, known before it runs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from engines.replica.replica import StepOutput
from engines.replica.schedule import Sequence
from engines.replica.scheduler import Scheduler


def growth_blocks(scheduler: Scheduler) -> int:
    """Returns the blocks that running sequences take in the next step."""
    blocks_for = scheduler.blocks.blocks_for
    return sum(max(0, blocks_for(len(one.state.tokens)) - len(one.blocks)) for one in scheduler.running)


def entry_blocks(scheduler: Scheduler) -> int:
    """Returns the blocks that must be free, beside those of `growth_blocks`, for the waiting sequences that find a slot
    to enter: their own, prefixes that are known not deducted, and those that `Admission` keeps free for all others."""
    blocks_for, wanted = scheduler.blocks.blocks_for, 0
    for one in _entering(scheduler):
        wanted += blocks_for(one.release_len - 1) if one.is_bounded else blocks_for(len(one.state.tokens)) + 1
    return wanted + scheduler.admission.num_kept_free.total() if wanted else 0


def can_step(scheduler: Scheduler) -> bool:
    """Returns whether a sequence runs, or the first waiting one may enter."""
    return bool(scheduler.running) or scheduler.first_may_enter()


def next_step(scheduler: Scheduler) -> StepOutput:
    """Returns the next step, as far as its time depends on it: all waiting sequences enter that find a slot. Drafts are
    not counted."""
    budget, chunk = scheduler.max_num_batched_tokens, scheduler.prefill_chunk_size
    output = StepOutput(num_running=0, num_tokens=0, num_context_tokens=0)
    unfinished = []
    for one in scheduler.running:
        if len(one.state.tokens) - one.num_computed == 1:
            budget -= 1
            _count(output, one, 1)
        else:
            unfinished.append(one)
    for one in (*unfinished, *_entering(scheduler)):
        if budget <= 0:
            break
        count = min(len(one.state.tokens) - one.num_computed, chunk or budget, budget)
        budget -= count
        _count(output, one, count)
    return output


def _entering(scheduler: Scheduler) -> Iterator[Sequence]:
    return islice(scheduler.waiting, scheduler.num_free_slots)


def _count(output: StepOutput, one: Sequence, count: int) -> None:
    context = one.num_computed + count
    output.num_running += 1
    output.num_tokens += count
    output.num_context_tokens += context
    output.num_pairs += count * context - count * (count - 1) // 2
    output.num_sampled += context >= len(one.state.tokens)
