"""One replica: schedule, forward, sample, emit. A sequence enters as a state and leaves as a completion or a state.

Torch-free: only the runner and the mover handle tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from engines.replica.endings import Endings, HiddenStop
from engines.replica.kv_moves import KVMoves, Mover
from engines.replica.schedule import Drawn, Schedule, Scheduled, Sequence
from engines.replica.scheduler import Scheduler
from engines.replica.sequence_limits import SequenceLimits
from engines.sequence import (
    Finished,
    FinishReason,
    SamplingParams,
    SequenceId,
    SequenceState,
    Tokenizer,
    Work,
)
from engines.speculation.drafter import Drafter, DraftPass, News, Outcome
from engines.speculation.verify import num_accepted


@dataclass(kw_only=True)
class StepOutput:
    """What one step did."""

    num_running: int
    """Sequences in the forward pass."""
    num_tokens: int
    """Tokens in the forward pass."""
    num_context_tokens: int
    """Sum of the sequences' context lengths in tokens, this pass's tokens included."""
    num_pairs: int = 0
    """Pairs of a token of this pass and a token that it attends to, itself included."""
    num_sampled: int = 0
    """Tokens drawn: one for each sequence that decodes, and one for each draft token."""
    draft_passes: Items[DraftPass] = ()
    """What this replica's drafter has run; nothing where the policy wanted no draft, or other ranks draft."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens in the forward pass, by their place in the draft; those that two paths begin with count once."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens that are now tokens of their sequences, by their place in the draft."""
    num_compared: int = 0
    """Draft tokens that a draw was compared with: those behind right ones only; of several paths, on the one that was
    right for longest."""
    admitted: list[SequenceId] = field(default_factory=list)
    """Trajectories that have entered the forward pass from the replica's queue."""
    fetched: list[SequenceId] = field(default_factory=list)
    """Trajectories, here or expected, whose stored KV has been read since the last step."""
    preempted: list[SequenceId] = field(default_factory=list)
    """Trajectories that went back to it before the forward pass."""
    num_preempted: int = 0
    """Sequences that lost their blocks before the forward pass."""
    num_swapped_out: int = 0
    """Preempted sequences whose KV was stored."""
    num_swapped_in: int = 0
    """Preempted sequences that were admitted again and whose stored KV was loaded."""
    kv_use: float = 0.0
    """Share of the KV blocks that sequences held after the forward pass."""
    finished: list[Finished] = field(default_factory=list)
    released: list[Work] = field(default_factory=list)
    """Unfinished sequences that used up their `max_new_tokens` or the KV cache here, or whose turn has ended; with
    their KV where the replica has a store."""

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


class Runner(Protocol):
    """`ModelRunner` is one."""

    def run(self, scheduled: list[Scheduled]) -> list[Drawn]:
        """One forward pass; returns the drawn tokens with their log-probs: see `ModelRunner.run`."""
        ...


class Replica:
    """Holds sequences between steps. `submit`, `pause` and `abort` may be called between any two steps.

    All ranks of a tensor-parallel replica make the same calls in the same order.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        mover: Mover,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        detokenize: Tokenizer | None,
        hidden_stop: HiddenStop | None = None,
        max_kv_tokens: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """A sequence ends with "stop" when `hidden_stop` returns True: benchmarks set lengths so, unseen by policies.

        `max_kv_tokens` limits the length of a sequence, by default to what the blocks hold. It is lower where the
        layout may change to one whose largest replica holds less. Where it is higher, a sequence that outgrows this
        cache is released, since another replica can hold it.
        """
        self._runner = runner
        self.scheduler = scheduler
        self.mover = mover
        self._max_kv_tokens = max_kv_tokens
        self._own_limits = SequenceLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_kv_tokens=self._num_kv_tokens,
            eos_token_ids=eos_token_ids,
            has_tokenizer=detokenize is not None,
        )
        self.endings = Endings(eos_token_ids=eos_token_ids, detokenize=detokenize, hidden_stop=hidden_stop)
        self.drafter = drafter
        """May be exchanged while there are no sequences; a pass has memory for the drafts of the engine's options."""
        self.kept: dict[SequenceId, list[bytes]] = {}
        """Paused sequences whose KV stays in the cache until the next step: the contents of their blocks."""
        self._sequences: dict[SequenceId, Sequence] = {}
        self._fetching: dict[Sequence, None] = {}
        """Sequences whose stored KV is being read; then they wait in the scheduler's queue."""
        self._leaving: dict[Sequence, None] = {}
        """Sequences that have used up their tokens or ended a turn here; they leave when their KV has been stored."""
        self._expected: dict[SequenceId, Sequence] = {}
        """Sequences that are not here yet, whose stored KV is being read, or has been."""
        self._read_ahead: set[Sequence] = set()
        """Of these, those whose KV has been read."""
        self.policy_version = 0

    @property
    def _num_kv_tokens(self) -> int:
        """Tokens that the blocks hold, or held when they were most."""
        return self.scheduler.blocks.most_blocks * self.scheduler.blocks.block_size

    @property
    def _limits(self) -> SequenceLimits:
        return replace(self._own_limits, num_kv_tokens=self._max_kv_tokens or self._num_kv_tokens)

    @property
    def kv_moves(self) -> KVMoves:
        return self.mover.moves

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._fetching or self._leaving)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._fetching)

    @property
    def num_sequences(self) -> int:
        """Sequences here, running or waiting."""
        return len(self._sequences)

    def check(self, tokens: list[int], params: SamplingParams, name: str = "prompt") -> int:
        """See `SequenceLimits.check`."""
        return self._limits.check(tokens, params, name)

    def limit(self, max_kv_tokens: int | None) -> None:
        """Sets `max_kv_tokens`, while there are no sequences."""
        self._max_kv_tokens = max_kv_tokens

    def submit(self, work: Work) -> None:
        """Adds a sequence to the waiting ones. Stored KV that it brings is read first, while others step.

        Raises ValueError when the sequence can never run here, has more tokens than the KV cache holds, or is here
        already.
        """
        state = work.state
        max_len = self._limits.check_state(state)
        if len(state.tokens) > self._num_kv_tokens:
            raise ValueError(
                f"sequence {state.sequence_id}: has {len(state.tokens)} tokens, and the KV cache of this replica holds "
                f"{self._num_kv_tokens}; submit it to a larger one"
            )
        if state.sequence_id in self._sequences:
            raise ValueError(f"sequence {state.sequence_id}: is on this replica already")
        release_len = min(max_len, self._num_kv_tokens + 1)  # of the last token no KV is needed
        if work.max_new_tokens is not None:
            if work.max_new_tokens < 1:
                raise ValueError(f"Work.max_new_tokens={work.max_new_tokens}: must be at least 1")
            release_len = min(release_len, len(state.tokens) + work.max_new_tokens)
        is_bounded = work.max_new_tokens is not None
        sequence = Sequence(
            state=state,
            max_len=max_len,
            release_len=release_len,
            is_bounded=is_bounded,
            kv=work.kv,
            num_returning=state.num_returning,
            priority=work.priority,
        )
        expected = self._expected.pop(state.sequence_id, None)
        try:
            self._sequences[state.sequence_id] = sequence
            if expected is not None and expected.kv == work.kv:
                self.mover.hand_over(expected, sequence)
                is_read = expected in self._read_ahead
                self._read_ahead.discard(expected)
            else:
                self._forget_expected(expected)
                num_known = 0 if work.kv is None else self.scheduler.num_known_tokens(sequence)
                is_read = work.kv is None or not self.mover.fetch(sequence, num_known, self.policy_version)
            if is_read:
                self.scheduler.add(sequence)
            else:
                self._fetching[sequence] = None
        except BaseException:  # an interrupt
            self._sequences.pop(state.sequence_id, None)
            self._restart()
            raise

    def expect(self, work: Work) -> None:
        """Starts to read the stored KV of a sequence that will be submitted here, while others step. Has no effect
        where there is nothing to read, or too much is being read already."""
        self.give_up([work.state.sequence_id])
        length = len(work.state.tokens)
        sequence = Sequence(state=work.state, max_len=length, release_len=length, kv=work.kv)
        num_known = self.scheduler.num_known_tokens(sequence)
        if work.kv is not None and self.mover.fetch(sequence, num_known, self.policy_version):
            self._expected[work.state.sequence_id] = sequence

    def give_up(self, sequence_ids: Iterable[SequenceId] | None = None) -> None:
        """Forgets what was read of these expected sequences, or of all, as they will not be submitted here."""
        for sequence_id in [*self._expected] if sequence_ids is None else sequence_ids:
            self._forget_expected(self._expected.pop(sequence_id, None))

    def _forget_expected(self, expected: Sequence | None) -> None:
        if expected is not None:
            self._read_ahead.discard(expected)
            self.mover.forget(expected)

    def step(self) -> StepOutput:
        """Runs one forward pass over the sequences that the scheduler chooses.

        After an error (of `ModelRunner.run`, `hidden_stop` or the drafter) or an interrupt, every sequence has the same
        tokens as before the step, and waits to be recomputed.
        """
        self.kept.clear()
        moves, preempted = self.kv_moves, self.scheduler.num_preemptions
        swapped_out, swapped_in = moves.num_swapped_out, moves.num_swapped_in
        lengths: list[int] = []
        scheduled: list[Scheduled] = []
        output = StepOutput(num_running=0, num_tokens=0, num_context_tokens=0)
        ended: list[Sequence] = []
        leaving: list[Sequence] = []
        stored: list[Sequence] = []
        try:
            output.fetched = self._take_fetched()
            schedule = self._schedule()
            scheduled = schedule.batch
            output.admitted = [one.state.sequence_id for one in schedule.admitted if one.state.in_turns]
            output.preempted = [one.state.sequence_id for one, _ in schedule.preempted if one.state.in_turns]
            results = self._runner.run(scheduled) if scheduled else []
            output.num_sampled, drawn = len(results), iter(results)
            lengths = [len(item.sequence.state.tokens) for item in scheduled]
            sum_tokens = sum_context = sum_pairs = 0
            for item, length in zip(scheduled, lengths, strict=True):
                sequence, num_tokens, draft, forks = item
                context = sequence.num_computed = sequence.num_computed + num_tokens
                sum_tokens += num_tokens
                sum_context += context
                sum_pairs += num_tokens * context - num_tokens * (num_tokens - 1) // 2
                if context >= length:  # as `Scheduled.samples` before the pass
                    if draft:
                        reason = self._verify(item, drawn)
                        for fork in forks:
                            num_rows, context = length + len(fork.draft) - fork.start, length + len(fork.draft)
                            sum_tokens += num_rows
                            sum_context += context
                            sum_pairs += num_rows * context - num_rows * (num_rows - 1) // 2
                    else:
                        reason = self._append(sequence, next(drawn))
                    if reason == "stop" and sequence.state.in_turns:
                        sequence.turn = self.endings.turn(sequence.state)
                        leaving.append(sequence)
                    elif reason is not None:
                        output.finished.append(self._finished(sequence, reason))
                        ended.append(sequence)
                    elif len(sequence.state.tokens) >= sequence.release_len:
                        leaving.append(sequence)
            output.num_tokens, output.num_context_tokens, output.num_pairs = sum_tokens, sum_context, sum_pairs
            if self.drafter is not None:
                self._observe(self.drafter, scheduled, lengths, output)
            blocks = self.scheduler.blocks
            output.kv_use = 1 - blocks.num_free_blocks / max(1, blocks.num_blocks)
            for sequence in ended:
                self._leave(sequence)
                self.mover.drop(sequence.kv)
            at_once = [sequence for sequence in leaving if not self._leave_later(sequence)]
            if at_once:
                output.released = self._release(at_once, with_kv=True)
            stored = self._stored(waits=not (self.scheduler.has_work or self._fetching))
            if stored:
                output.released += self._release(stored, with_kv=True)
            output.num_running = len(scheduled)
            if self.drafter is not None:
                output.draft_passes = self.scheduler.draft_passes
            output.num_preempted = self.scheduler.num_preemptions - preempted
            output.num_swapped_out = moves.num_swapped_out - swapped_out
            output.num_swapped_in = moves.num_swapped_in - swapped_in
            return output
        except BaseException:
            for item, length in zip(scheduled, lengths, strict=False):
                item.sequence.state.cut(length)
            for sequence in leaving:
                sequence.turn = None
            self._restart([*ended, *leaving], stored)
            raise

    def _take_fetched(self) -> list[SequenceId]:
        """Queues the sequences whose stored KV has been read by now; returns the trajectories among these, and among
        those that are expected."""
        if not (self._fetching or self._expected):
            return []
        fetched = self.mover.fetched(waits=bool(self._fetching) and not self.scheduler.has_work)
        for sequence in fetched:
            if sequence in self._fetching:
                del self._fetching[sequence]
                self.scheduler.add(sequence)
            else:
                self._read_ahead.add(sequence)
        return [one.state.sequence_id for one in fetched if one.state.in_turns]

    def _schedule(self) -> Schedule:
        """Plans the next pass; stores the KV of preempted sequences, and loads that of arriving ones."""
        schedule = self.scheduler.schedule(with_drafts=self.drafter is not None)
        for sequence, cached in schedule.preempted:
            handle = self.mover.swap_out(cached, self.policy_version)
            if handle is not None:
                sequence.num_pooled = sequence.kv.num_tokens if sequence.kv is not None else 0
                sequence.kv = handle
        if schedule.arriving:
            loaded = self.mover.load(schedule.arriving, self.policy_version)
            for sequence, (num_tokens, handle) in zip(schedule.arriving, loaded, strict=True):
                sequence.num_computed, sequence.kv, sequence.num_pooled = num_tokens, handle, None
            self.scheduler.add_loaded(schedule)
        for sequence in schedule.returning:
            self.kv_moves.returned(sequence, self.scheduler.blocks.block_size)
        if self.drafter is not None:
            # Each shard of the replica drafts for itself, and all must draft alike: a drafter is a function of the
            # states. One that depends on time runs on the first shard, which sends its drafts to the others
            # (`SharedDrafter`).
            self.scheduler.add_drafts(schedule, self.drafter)
        return schedule

    def _verify(self, item: Scheduled, drawn: Iterator[Drawn]) -> FinishReason | None:
        """Takes the item's draws; appends those behind accepted draft tokens, up to one that ends sequence or turn."""
        sequence, reason, taken = item.sequence, None, None
        draws = first = list(islice(drawn, 1 + len(item.draft)))
        count = num_accepted(item.draft, [draw[0] for draw in draws])
        last = len(sequence.state.tokens) - 1
        for fork in item.forks:
            own = [*first[: fork.start - last], *islice(drawn, last + 1 + len(fork.draft) - fork.start)]
            accepted = num_accepted(fork.draft, [draw[0] for draw in own])
            if accepted > count:
                draws, count, taken = own, accepted, fork
        for draw in draws[: 1 + count]:
            reason = self._append(sequence, draw)
            if reason is not None:
                break
        sequence.num_computed = len(sequence.state.tokens) - 1
        self.scheduler.settle(item, taken)
        return reason

    @staticmethod
    def _observe(drafter: Drafter, scheduled: list[Scheduled], lengths: list[int], output: StepOutput) -> None:
        """Counts drafted and accepted tokens, for the output and for the drafter."""
        counts, taken = Counter[int](), Counter[int]()
        drawn = []
        for item, length in zip(scheduled, lengths, strict=True):
            state, draft = item.sequence.state, item.draft
            if not draft:
                if len(state.tokens) > length:
                    drawn.append(Outcome(state))
                continue
            appended = state.tokens[length:]
            drawn.append(Outcome(state, draft, count := num_accepted(draft, appended)))
            counts.update(range(len(draft)))
            right, length = count, len(draft)
            for fork in item.forks:
                counts.update(range(fork.num_common, len(fork.draft)))
                right, length = max((right, length), (num_accepted(fork.draft, appended), len(fork.draft)))
            taken.update(range(right))
            output.num_compared += min(length, len(appended))
        if counts:
            output.drafted, output.accepted = [counts[place] for place in range(1 + max(counts))], list(taken.values())
        drafter.follow(News(drawn=drawn))

    def _restart(self, returning: Iterable[Sequence] = (), stored: Iterable[Sequence] = ()) -> None:
        """Makes all sequences wait to be recomputed, also `returning`, which were about to leave; interrupt-safe.

        Those that leave when their KV has been stored, as `stored` were about to, leave with what is stored by now.
        """
        for sequence in stored:
            self._sequences[sequence.state.sequence_id] = sequence
            self._leaving[sequence] = None
        for sequence in returning:
            self._sequences[sequence.state.sequence_id] = sequence
            self._leaving.pop(sequence, None)
        self._fetching.clear()
        self._expected.clear()
        self._read_ahead.clear()
        self.mover.forget()
        self.scheduler.restart([one for one in self._sequences.values() if one not in self._leaving])
        if self.drafter is not None:
            self.drafter.follow(News(ended=[sequence.state for sequence in self._sequences.values()]))

    def clear(self) -> None:
        """Drops all sequences, also after an interrupt at any point. Their stored KV stays where it is."""
        try:
            self._restart()
        finally:
            self._sequences.clear()
            self._leaving.clear()
            self.scheduler.restart(())

    def _append(self, sequence: Sequence, draw: Drawn) -> FinishReason | None:
        """Appends a drawn token; returns why the sequence, or its turn, ends with it."""
        state = sequence.state
        state.tokens.append(draw[0])
        state.logprobs.append(draw[1])
        state.versions.append(self.policy_version)
        if len(draw) > 2:
            state.top_logprobs += draw[2:]
        return self.endings.reason(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.follow(News(ended=(sequence.state,)))
        if sequence in self._fetching:
            del self._fetching[sequence]
        elif sequence in self._leaving:
            del self._leaving[sequence]
        else:
            self.scheduler.remove(sequence)
        self.mover.forget(sequence)
        del self._sequences[sequence.state.sequence_id]

    def holds(self, sequence_id: SequenceId) -> bool:
        """Whether the sequence is here, running or waiting."""
        return sequence_id in self._sequences

    def states(self) -> list[SequenceState]:
        """The states of all sequences here, in the order submitted. The next step appends to them."""
        return [sequence.state for sequence in self._sequences.values()]

    def abort(self, sequence_id: SequenceId) -> Finished:
        """Drops a sequence and its stored KV; returns what it generated. Raises KeyError when it is not here."""
        sequence = self._sequences[sequence_id]
        self._leave(sequence)
        self.mover.drop(sequence.kv)
        return self._finished(sequence, "abort")

    def _finished(self, sequence: Sequence, reason: FinishReason) -> Finished:
        return Finished(state=sequence.state, completion=self.endings.completion(sequence.state, reason))

    def pause(
        self,
        sequence_ids: Iterable[SequenceId] | None = None,
        *,
        with_kv: bool = False,
        keeping: Container[SequenceId] = (),
    ) -> list[Work]:
        """Removes sequences, in the order named, or all in the order submitted; each can be resumed anywhere.

        With `with_kv` the KV computed here is stored, while there is room, and leaves with its sequence. KV that is
        stored already leaves in any case. That of sequences in `keeping` stays here instead; see `kept`. Raises
        KeyError, before any sequence is removed, when one is not here.
        """
        named = list(self._sequences) if sequence_ids is None else list(dict.fromkeys(sequence_ids))
        absent = [sequence_id for sequence_id in named if sequence_id not in self._sequences]
        if absent:
            raise KeyError(f"sequence {absent[0]}: is not on this replica")
        sequences = [self._sequences[sequence_id] for sequence_id in named]
        leaving = [sequence for sequence in sequences if sequence in self._leaving]
        try:
            return self._release(sequences, with_kv=with_kv, keeping=keeping)
        except BaseException:  # an interrupt
            self._restart([sequence for sequence in sequences if sequence not in leaving], leaving)
            raise

    def _leave_later(self, sequence: Sequence) -> bool:
        """Frees the blocks of a running sequence that leaves when its KV has been stored; False if it need not wait."""
        if not self.mover.store_later(sequence, self.policy_version):
            return False
        self.scheduler.remove(sequence)
        self._leaving[sequence] = None
        return True

    def _stored(self, *, waits: bool) -> list[Sequence]:
        """Returns the sequences that leave now, since their KV has been stored; with `waits`, once all have."""
        while any(self.mover.is_storing(sequence) for sequence in self._leaving):
            for sequence, handle in self.mover.stored(waits=waits):
                sequence.kv = handle
            if not waits:
                break
        return [sequence for sequence in self._leaving if not self.mover.is_storing(sequence)]

    def _release(self, sequences: list[Sequence], *, with_kv: bool, keeping: Container[SequenceId] = ()) -> list[Work]:
        storing = [sequence for sequence in sequences if self.mover.is_storing(sequence)]
        if any(with_kv or sequence.state.sequence_id in keeping for sequence in storing):
            self._stored(waits=True)
        self.mover.moves.num_exported += sum(sequence.is_swapped_out for sequence in sequences)
        computed = [sequence for sequence in sequences if sequence.num_computed]
        staying = [sequence for sequence in computed if sequence.state.sequence_id in keeping]
        self.kept |= {sequence.state.sequence_id: self.scheduler.keep(sequence) for sequence in staying}
        computed = [one for one in computed if with_kv and one.state.sequence_id not in keeping]
        handles = self.mover.export([sequence.cached for sequence in computed], self.policy_version)
        for sequence, handle in zip(computed, handles, strict=True):
            sequence.kv = handle
        works = []
        for sequence in sequences:
            budget = sequence.release_len - len(sequence.state.tokens)
            is_bounded = sequence.is_bounded and sequence.release_len < sequence.max_len
            works.append(
                Work(
                    state=sequence.state,
                    max_new_tokens=budget if is_bounded and budget else None,
                    kv=sequence.kv,
                    turn=sequence.turn,
                )
            )
            self._leave(sequence)
        return works
