"""One replica: schedule, forward, sample, emit. A sequence enters as a state and leaves as a completion or a state."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from engines.kvcache.block_manager import BlockManager
from engines.runner import ModelRunner
from engines.scheduler import Scheduled, Scheduler, Sequence
from engines.sequence import Completion, FinishReason, SamplingParams, SequenceState

SequenceId = tuple[int, int, int]
Detokenize = Callable[[Tokens[int]], str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A sequence to go on with, for `max_new_tokens` tokens here, or to its end when None."""

    state: SequenceState
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished sequence: its state, and the completion made of it."""

    state: SequenceState
    completion: Completion


@dataclass(kw_only=True)
class StepOutput:
    """What one step did."""

    num_running: int
    """Sequences in the forward pass."""
    num_tokens: int
    """Tokens in the forward pass."""
    finished: list[Finished] = field(default_factory=list)
    released: list[SequenceState] = field(default_factory=list)
    """Sequences that used up their `max_new_tokens` here, not finished."""


class Replica:
    """Holds sequences between steps. `submit` and `abort` may be called between any two steps."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        scheduler: Scheduler,
        blocks: BlockManager,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        detokenize: Detokenize | None,
    ) -> None:
        self._runner = runner
        self.scheduler = scheduler
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._detokenize = detokenize
        self._sequences: dict[SequenceId, Sequence] = {}
        self.policy_version = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, tokens: list[int], params: SamplingParams) -> int:
        """Returns the length at which a prompt's completion must end; raises ValueError when it cannot run here."""
        if not tokens:
            raise ValueError("prompt: has no tokens; give at least one")
        wrong = [token for token in (min(tokens), max(tokens)) if not 0 <= token < self._vocab_size]
        if wrong:
            raise ValueError(f"prompt: token id {wrong[0]} is outside the model's vocabulary of {self._vocab_size}")
        if len(tokens) >= self._max_model_len:
            raise ValueError(
                f"prompt: {len(tokens)} tokens leave no room in max_model_len={self._max_model_len}; shorten the prompt"
            )
        if params.stop and self._detokenize is None:
            raise ValueError(f"SamplingParams.stop={params.stop}: stop strings need a tokenizer; use stop_token_ids")
        max_len = min(len(tokens) + params.max_tokens, self._max_model_len)
        capacity = self._blocks.num_blocks * self._blocks.block_size
        if max_len > capacity:
            raise ValueError(
                f"prompt: {len(tokens)} tokens with max_tokens={params.max_tokens} can reach {max_len} tokens, the KV "
                f"cache holds {capacity}; raise kv_cache_bytes or lower max_tokens or max_model_len"
            )
        return max_len

    def submit(self, work: Work) -> None:
        """Takes a sequence on. Raises ValueError when it can never run here, or is here already."""
        state = work.state
        prompt = state.tokens[: state.num_prompt_tokens]
        max_len = self.check(prompt, state.params)
        if len(state.tokens) >= max_len:
            raise ValueError(f"sequence {state.sequence_id}: is finished, {len(state.tokens)} of {max_len} tokens")
        if state.sequence_id in self._sequences:
            raise ValueError(f"sequence {state.sequence_id}: is on this replica already")
        release_len = max_len
        if work.max_new_tokens is not None:
            if work.max_new_tokens < 1:
                raise ValueError(f"Work.max_new_tokens={work.max_new_tokens}: must be at least 1")
            release_len = min(max_len, len(state.tokens) + work.max_new_tokens)
        sequence = Sequence(state=state, max_len=max_len, release_len=release_len)
        self._sequences[state.sequence_id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> StepOutput:
        """One forward pass over the sequences whose turn it is.

        After a FloatingPointError (see `ModelRunner.run`) every sequence waits to be recomputed.
        """
        scheduled = self.scheduler.schedule()
        output = StepOutput(num_running=len(scheduled), num_tokens=sum(item.num_tokens for item in scheduled))
        if not scheduled:
            return output
        try:
            tokens, logprobs = self._runner.run(scheduled)
        except FloatingPointError:
            self.scheduler.preempt_all()
            raise
        drawn = iter(zip(tokens, logprobs, strict=True))
        for item in scheduled:
            samples = item.samples
            item.sequence.num_computed += item.num_tokens
            if samples:
                self._append(item, *next(drawn), output)
        return output

    def _append(self, item: Scheduled, token: int, logprob: float, output: StepOutput) -> None:
        sequence = item.sequence
        state = sequence.state
        state.tokens.append(token)
        state.logprobs.append(logprob)
        state.versions.append(self.policy_version)
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self._leave(sequence)
            output.finished.append(Finished(state=state, completion=self._completion(state, reason)))
        elif len(state.tokens) >= sequence.release_len:
            self._leave(sequence)
            output.released.append(state)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.state.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return "stop"
        if params.stop and self._hits_stop_string(sequence.state):
            return "stop"
        return "length" if len(sequence.state.tokens) >= sequence.max_len else None

    def _hits_stop_string(self, state: SequenceState) -> bool:
        # Every ordinary token is at least one byte, so a stop string that ends here begins within this many.
        # The rest is slack for special tokens, which decode to nothing.
        reach = max(len(stop.encode()) for stop in state.params.stop) + 8
        assert self._detokenize is not None
        tail = self._detokenize(state.tokens[max(state.num_prompt_tokens, len(state.tokens) - reach) :])
        return any(stop in tail for stop in state.params.stop)

    def _completion(self, state: SequenceState, reason: FinishReason) -> Completion:
        generated = state.tokens[state.num_prompt_tokens :]
        text = self._detokenize(generated) if self._detokenize is not None else ""
        cuts = [cut for stop in state.params.stop if (cut := text.find(stop)) >= 0]
        return Completion(
            index=state.key.sample_index,
            token_ids=generated,
            logprobs=list(state.logprobs),
            versions=list(state.versions),
            finish_reason=reason,
            text=text[: min(cuts)] if cuts else text,
        )

    def _leave(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.state.sequence_id]

    def abort(self, sequence_id: SequenceId) -> Completion:
        """Drops a sequence; returns what it had. Raises KeyError when it is not here."""
        sequence = self._sequences[sequence_id]
        self._leave(sequence)
        return self._completion(sequence.state, "abort")

    def pause(self) -> list[SequenceState]:
        """Takes every sequence out, in the order they were submitted; each can be resumed anywhere."""
        sequences = list(self._sequences.values())
        for sequence in sequences:
            self._leave(sequence)
        return [sequence.state for sequence in sequences]
