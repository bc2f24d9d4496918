"""Continuous batching: which sequences run in the next forward pass, and with how many tokens each. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager, content_key
from engines.replica.admission import Admission
from engines.replica.schedule import CachedKV, Fork, Schedule, Scheduled, Sequence
from engines.speculation.drafter import Ask, Draft, Drafter, DraftPass
from engines.speculation.verify import num_accepted


class Scheduler:
    """Schedules running sequences first, then admits waiting ones while slots, blocks and the token budget last.

    A waiting sequence shares blocks of known content; `Admission` says whether it may enter. Sequences wait in the
    order of their priority. When a running sequence cannot grow, or one of higher priority waits and lacks a slot or
    blocks, one without a bound is preempted: that of the lowest priority, among equals the one that was admitted last.
    Its blocks are released, and KV that is not stored is recomputed when the sequence is admitted again. Bounded ones
    are never preempted: their priority orders only their admission.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        """No sequence holds any of the blocks; the contents of some may be known."""
        self._config = config
        self.blocks = blocks
        self._queue(())
        self.num_preemptions = 0
        self.draft_passes: Items[DraftPass] = ()
        """What the drafter has run for this step, also where a policy then dropped the drafts."""
        self.num_shared_tokens = 0
        """Tokens of admitted sequences that were not computed, since the prefix cache had their KV."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def max_num_batched_tokens(self) -> int:
        return self._config.max_num_batched_tokens

    @property
    def prefill_chunk_size(self) -> int | None:
        return self._config.prefill_chunk_size

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those of its priority."""
        self._wait(sequence, bisect_right)

    def _wait(self, sequence: Sequence, place: Callable[..., int]) -> None:
        waiting, rank = self.waiting, -sequence.priority
        if not waiting or rank > -waiting[-1].priority:
            waiting.append(sequence)
        else:
            waiting.insert(place(waiting, rank, key=lambda one: -one.priority), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a finished, paused or aborted sequence at once."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence)

    def schedule(self, *, with_drafts: bool = False) -> Schedule:
        """Plans the next step; the caller advances `num_computed` after the pass.

        `with_drafts`: whether sequences may get several tokens in a pass. Bounded ones are then admitted so that each
        may get half a draft before drafts have to wait for blocks.

        Blocks that the pass will fill are published before it: a pass writes KV before it reads any, so that the
        members of a group can share what one of them computes in the same pass. When the pass fails, these contents
        are missing, and the caller must `restart` all sequences.
        """
        budget = self._config.max_num_batched_tokens
        decodes: list[Scheduled] = []
        filling: list[Scheduled] = []
        unfinished: list[Sequence] = []
        preempted: list[tuple[Sequence, CachedKV]] = []
        block_size = self.blocks.block_size
        outranked = self._preempt_outranked(preempted) if self.waiting else 0
        for sequence in tuple(self.running):
            if sequence.slot < 0:
                continue  # one of higher priority has needed its blocks
            num_tokens = len(sequence.state.tokens)
            # The sequence has all blocks that the runner has copied: most steps need no further check.
            if num_tokens > sequence.num_table_blocks * block_size and not self._make_room(sequence, preempted):
                continue  # it is preempted itself
            if num_tokens - sequence.num_computed == 1:
                decodes.append(item := Scheduled(sequence, 1))
                if not num_tokens % block_size:
                    filling.append(item)
            else:
                unfinished.append(sequence)
        if len(preempted) > outranked:
            decodes = [item for item in decodes if item.sequence.slot >= 0]
            filling = [item for item in filling if item.sequence.slot >= 0]
            unfinished = [sequence for sequence in unfinished if sequence.slot >= 0]
        budget -= len(decodes)
        for item in filling:
            self._publish(item)
        chunks: list[Scheduled] = []
        for sequence in unfinished:
            budget -= self._chunk(sequence, budget, chunks)
        schedule = Schedule(batch=[], preempted=preempted, admitted=[], arriving=[], returning=[], budget=budget)
        if self.waiting and len(preempted) == outranked:
            num_ahead = self._config.max_draft_tokens // 2 if with_drafts else 0
            self._admit(schedule, chunks, [item.sequence for item in decodes], num_ahead)
        schedule.batch = decodes + _in_order(chunks)
        return schedule

    def add_loaded(self, schedule: Schedule) -> None:
        """Adds the arriving sequences to the batch, from their present `num_computed` on."""
        for sequence in schedule.arriving:
            schedule.budget -= self._chunk(sequence, schedule.budget, schedule.batch)
        schedule.batch = _in_order(schedule.batch)

    def add_drafts(self, schedule: Schedule, drafter: Drafter) -> None:
        """Adds drafts to decodes, as far as the token budget and free blocks last. While a sequence waits, drafts leave
        blocks of known content alone, since it may find its first tokens there.

        So drafts take nothing from other sequences. Other paths come after the first paths of all sequences. A sequence
        whose draft is on its way leaves the batch. `settle` must follow for each sequence that got a draft.
        """
        decodes = [item.sequence for item in schedule.batch if item.num_tokens == 1 and item.samples]
        most = self.admission.most_ahead(self.running, decodes, min(self._config.max_draft_tokens, schedule.budget))
        asks: dict[int, Ask] = {}
        for place, item in enumerate(schedule.batch):
            state = item.sequence.state
            # The row of the last draft token draws the last token that may be appended here.
            limit = min(most, item.sequence.release_len - 1 - len(state.tokens))
            if item.num_tokens == 1 and item.samples and limit > 0:
                asks[place] = Ask(state, limit)
        self.draft_passes = ()
        if not asks:
            return
        num_tokens = sum(item.num_tokens for item in schedule.batch)
        num_draws = sum(item.samples for item in schedule.batch)
        drafts = drafter.propose(list(asks.values()), num_tokens, num_draws)
        self.draft_passes = drafter.passes
        if not drafts:
            return
        others: list[tuple[int, Draft, int]] = []
        held: set[int] = set()
        for (place, (state, limit, _)), draft in zip(asks.items(), drafts, strict=True):
            if draft.holds and self._may_wait(schedule.batch[place].sequence):
                held.add(place)
            num_known = len(state.tokens)
            if not draft.tokens or draft.start not in (None, num_known):
                continue
            sequence = schedule.batch[place].sequence
            wanted = num_known + min(len(draft.tokens), limit, schedule.budget)
            left = self.admission.num_left_free(sequence)
            covered = self.blocks.stretch(sequence, wanted, even_known=not self.waiting, num_left_free=left)
            if num_drafted := covered - num_known:
                schedule.batch[place] = Scheduled(sequence, 1 + num_drafted, tuple(draft.tokens[:num_drafted]))
                schedule.budget -= num_drafted
                others += [(place, path, limit) for path in draft.others]
        for place, path, limit in others:
            item = schedule.batch[place]
            if fork := self._fork(item, tuple(path.tokens[:limit]), schedule.budget):
                schedule.batch[place] = item._replace(forks=(*item.forks, fork))
                schedule.budget -= len(item.sequence.state.tokens) + len(fork.draft) - fork.start
        if held:
            schedule.batch = [item for place, item in enumerate(schedule.batch) if place not in held]
        schedule.batch = _in_order(schedule.batch)

    def _may_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence may leave the batch. A block that this pass would have filled is not known then; it must
        be filled where a sequence that was admitted to the pass shares it."""
        num_full, rest = divmod(len(sequence.state.tokens), self.blocks.block_size)
        if rest or sequence.num_published < num_full:
            return True
        if not self.blocks.retract(sequence, num_full - 1):
            return False
        sequence.num_published = num_full - 1
        return True

    def _fork(self, item: Scheduled, path: tuple[int, ...], budget: int) -> Fork | None:
        """Returns another path of the item's draft, as far as budget and free blocks last; None if it adds nothing."""
        sequence, size = item.sequence, self.blocks.block_size
        num_known, num_common = len(sequence.state.tokens), num_accepted(path, item.draft)
        num_shared = (num_known + num_common) // size
        if num_known + len(path) - num_shared * size == 1:
            num_shared -= 1  # several tokens: attention takes the sequences with one new token first
        start = max(num_shared * size, num_known - 1)
        path = path[: max(0, start + budget - num_known)]
        fork = Fork(draft=path, num_common=num_common, num_shared=num_shared, start=start)
        offset = num_shared * size - num_known
        left = self.admission.num_left_free(sequence)
        covered = self.blocks.stretch(fork, max(0, len(path) - offset), even_known=False, num_left_free=left)
        fork.draft = path[: max(0, covered + offset)]
        if len(fork.draft) <= num_common or num_known + len(fork.draft) - start < 2:
            self.blocks.release(fork)
            return None
        fork.blocks = self.blocks.table(fork)
        return fork

    def settle(self, item: Scheduled, taken: Fork | None = None) -> None:
        """Gives the sequence the blocks of the path that was `taken`, None for the first; publishes the blocks that
        accepted draft tokens have filled; releases those that only rejected ones needed.

        Must be called after a pass with a draft, when `num_computed` counts the accepted tokens.
        """
        sequence = item.sequence
        if taken is not None:
            self.blocks.take_over(sequence, taken, taken.num_shared)
            sequence.num_table_blocks = min(sequence.num_table_blocks, taken.num_shared)
        for fork in item.forks:
            if fork is not taken:
                self.blocks.release(fork)
        self._publish(Scheduled(sequence, 0))
        self.blocks.shrink(sequence, sequence.num_computed)
        self.admission.keep_free(sequence)
        sequence.num_table_blocks = min(sequence.num_table_blocks, len(sequence.blocks))

    def _admit(self, schedule: Schedule, chunks: list[Scheduled], decodes: list[Sequence], num_ahead: int) -> None:
        """Adds to `chunks`, and to what the schedule says of those that enter."""
        gone = {one for one, _ in schedule.preempted}
        while self.waiting and self._free_slots and schedule.budget > 0:
            sequence = self.waiting[0]
            if sequence in gone:
                break  # its KV is about to be stored
            if self._config.prefix_caching and any(
                not item.samples and item.sequence.state.group_id == sequence.state.group_id for item in chunks
            ):
                break  # another member of the group is still computing the prompt that they share
            num_tokens = len(sequence.state.tokens)
            shared, num_found = self._find_prefix(sequence)
            if not self.admission.admits(sequence, shared, self.running, decodes, num_ahead):
                break
            self.waiting.popleft()
            self.blocks.share(sequence, shared)
            if num_found % self.blocks.block_size:
                self.blocks.unpublish(sequence)
            self.blocks.grow(sequence, num_tokens)
            sequence.blocks = self.blocks.table(sequence)
            sequence.num_computed = num_found
            self.num_shared_tokens += sequence.num_computed
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            schedule.admitted.append(sequence)
            self.admission.keep_free(sequence)
            if sequence.num_returning:
                schedule.returning.append(sequence)
            if sequence.kv is not None:
                schedule.arriving.append(sequence)
            else:
                schedule.budget -= self._chunk(sequence, schedule.budget, chunks)

    def first_may_enter(self) -> bool:
        """Whether the first waiting sequence would have the blocks to enter while nothing runs."""
        return bool(self.waiting) and self.admission.admits(
            self.waiting[0], self._find_prefix(self.waiting[0])[0], self.running, (), 0
        )

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Returns how many of a waiting sequence's first tokens the prefix cache has now."""
        return self._find_prefix(sequence)[1]

    def _find_prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """Returns cached blocks with the KV of the sequence's first tokens, and their number of tokens; its last token
        is always computed. The last block is partly filled where `keep` has published it so."""
        is_off = not self._config.prefix_caching and not self.blocks.knows_any
        if is_off or sequence.state.lacks_prompt_logprobs:
            return [], 0
        size, num_known = self.blocks.block_size, len(sequence.state.tokens) - 1
        keys = self._content_keys(sequence, num_known)
        found = self.blocks.find(keys)
        if len(found) == len(keys) and num_known % size:
            tail = self.blocks.find([self._tail_key(sequence, num_known)])
            if self.blocks.num_free_of(tail):
                return found + tail, num_known
        return found, len(found) * size

    def _tail_key(self, sequence: Sequence, num_tokens: int) -> bytes:
        """Returns the key of the partly filled block that ends with token number `num_tokens`."""
        keys = self._content_keys(sequence, num_tokens)
        first = len(keys) * self.blocks.block_size
        return content_key(keys[-1] if keys else b"", sequence.state.tokens[first:num_tokens])

    def keep(self, sequence: Sequence) -> list[bytes]:
        """Publishes all blocks of a sequence that is about to leave, the partly filled one, too, so that they can be
        found while nothing runs. Returns their contents."""
        num_tokens = sequence.num_computed
        keys = self._content_keys(sequence, num_tokens)
        if num_tokens % self.blocks.block_size:
            keys.append(self._tail_key(sequence, num_tokens))
        for index, key in enumerate(keys):
            self.blocks.publish(sequence, index, key)
        return keys

    def _content_keys(self, sequence: Sequence, num_tokens: int, first: int = 0) -> list[bytes]:
        """Returns the keys of the blocks, from number `first` on, that the first `num_tokens` tokens fill; each is
        computed once."""
        keys, size = sequence.content_keys, self.blocks.block_size
        for start in range(len(keys) * size, num_tokens // size * size, size):
            keys.append(content_key(keys[-1] if keys else b"", sequence.state.tokens[start : start + size]))
        return keys[first : num_tokens // size]

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[Scheduled]) -> int:
        """Schedules as much of the sequence's prefill as chunk size and budget allow; returns the number of tokens."""
        remaining = len(sequence.state.tokens) - sequence.num_computed
        num_tokens = min(remaining, self._config.prefill_chunk_size or budget, budget)
        if num_tokens <= 0:
            return 0
        chunks.append(Scheduled(sequence=sequence, num_tokens=num_tokens))
        self._publish(chunks[-1])
        return num_tokens

    def _publish(self, item: Scheduled) -> None:
        """Publishes the blocks that are full after the pass."""
        sequence = item.sequence
        num_tokens, num_published = sequence.num_computed + item.num_tokens, sequence.num_published
        num_full = num_tokens // self.blocks.block_size
        if not self._config.prefix_caching or num_full == num_published:
            return
        for index, key in enumerate(self._content_keys(sequence, num_tokens, num_published), num_published):
            self.blocks.publish(sequence, index, key)
        sequence.num_published = num_full

    def _make_room(self, sequence: Sequence, preempted: list[tuple[Sequence, CachedKV]]) -> bool:
        """Allocates blocks for all tokens of the sequence, and preempts the latest admitted without a bound while too
        few are free beside those that are kept free for bounded ones.

        Returns False when the sequence itself was preempted.
        """
        num_missing = self.blocks.blocks_for(len(sequence.state.tokens)) - len(sequence.blocks)
        num_left_free = self.admission.num_left_free(sequence)
        while num_missing > self.blocks.num_free_blocks - num_left_free:
            preempted.append(self._preempt(self._lowest()))
            if preempted[-1][0] is sequence:
                return False
        if self.blocks.grow(sequence, len(sequence.state.tokens)):
            self.admission.keep_free(sequence)
        return True

    def _num_common_tokens(self, sequence: Sequence) -> int:
        if not self._config.prefix_caching:
            return 0
        keys = self._content_keys(sequence, sequence.num_computed)
        return self.blocks.num_common(sequence, keys) * self.blocks.block_size

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Makes exactly these sequences wait to be recomputed. Safe after an interrupt at any point."""
        self.blocks.reset()
        self._queue(sequences)

    def _queue(self, sequences: Iterable[Sequence]) -> None:
        self._free_slots = list(range(self._config.max_num_seqs - 1, -1, -1))
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque(sorted(sequences, key=lambda one: -one.priority))
        self.admission = Admission(self.blocks)
        for sequence in self.waiting:
            sequence.leave_slot()
            sequence.content_keys = []  # some may name tokens that a failed step took back

    def _lowest(self) -> Sequence:
        """The running sequence to preempt first: of the lowest priority without a bound, the latest admitted one."""
        return min((one for one in reversed(self.running) if not one.is_bounded), key=lambda one: one.priority)

    def _preempt_outranked(self, preempted: list[tuple[Sequence, CachedKV]]) -> int:
        """Preempts running sequences that the first waiting one outranks by more than the margin, as many as it needs
        to enter, or none if that would not suffice; returns how many (Heddle, §4.2, Algorithm 1)."""
        first, margin = self.waiting[0], self._config.priority_margin
        if all(first.priority <= one.priority for one in self.running):
            return 0
        lower = [
            one
            for one in reversed(self.running)
            if not one.is_bounded and first.priority - one.priority > margin * abs(one.priority)
        ]
        lower.sort(key=lambda one: one.priority)
        shared, _ = self._find_prefix(first)
        num_tokens = first.release_len - 1 if first.is_bounded else len(first.state.tokens)
        num_wanted = self.blocks.blocks_for(num_tokens) - len(shared) + self.blocks.num_free_of(shared)
        num_lacking = num_wanted + self.admission.num_kept_free.total() - self.blocks.num_free_blocks
        needs_slot, victims = not self._free_slots, list[Sequence]()
        for one in lower:
            if num_lacking <= 0 and not needs_slot:
                break
            victims.append(one)
            num_lacking -= self.blocks.num_held_alone(one) + one.num_kept_free
            needs_slot = False
        if num_lacking > 0 or needs_slot:
            return 0
        preempted += [self._preempt(one) for one in victims]
        return len(victims)

    def _preempt(self, victim: Sequence) -> tuple[Sequence, CachedKV]:
        self.running.remove(victim)
        cached = victim.cached._replace(num_common=self._num_common_tokens(victim))
        self._vacate(victim)
        self._wait(victim, bisect_left)
        self.num_preemptions += 1
        return victim, cached

    def _vacate(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self._free_slots.append(sequence.slot)
        self.admission.forget(sequence)
        sequence.leave_slot()


def _in_order(batch: list[Scheduled]) -> list[Scheduled]:
    """Returns the items of one token first: plain decodes, last chunks, and what loaded KV leaves of a sequence."""
    return sorted(batch, key=lambda item: item.num_tokens > 1)
