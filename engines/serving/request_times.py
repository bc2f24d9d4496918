"""When a serving model's sequences arrived, and when each got its last token. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engines.replica.schedule import Sequence
from engines.sequence import SequenceId, SequenceState
from engines.serving.policies import QueuedRequest, ServingView


class RequestTimes:
    """Of the sequences of a replica that serves. What a call computes of each is of those that run: a view only copies
    the others."""

    def __init__(self) -> None:
        self._queued: dict[SequenceId, QueuedRequest] = {}
        """Without a token yet, in the order of their arrival."""
        self._begun: dict[SequenceId, int] = {}
        """Of these, the ones of which a part is computed: their tokens in all."""
        self._last: dict[SequenceId, tuple[float, int]] = {}
        """Of those that decode: when each got its last token, and its length then."""
        self._busy_at = -math.inf
        """When the last sequence came, or the last step ended."""

    @property
    def has_queue(self) -> bool:
        """Whether a sequence has no token yet."""
        return bool(self._queued)

    def arrived(self, state: SequenceState, now: float) -> None:
        self._queued[state.sequence_id] = QueuedRequest(arrived=now, num_tokens=len(state.tokens))
        self._busy_at = max(self._busy_at, now)

    def left(self, sequence_id: SequenceId) -> None:
        """One that has left already is no error."""
        self._queued.pop(sequence_id, None)
        self._begun.pop(sequence_id, None)
        self._last.pop(sequence_id, None)

    def stepped(self, running: Iterable[Sequence], now: float) -> None:
        """Notes what was computed, and who has got tokens, in a step that ended at `now`."""
        self._busy_at = now
        preempted, self._begun = self._begun, {}
        for sequence in running:
            state = sequence.state
            sequence_id, length = state.sequence_id, len(state.tokens)
            preempted.pop(sequence_id, None)
            if length > state.num_prompt_tokens:
                if self._last.get(sequence_id, (0.0, 0))[1] < length:
                    self._queued.pop(sequence_id, None)
                    self._last[sequence_id] = now, length
            elif sequence_id in self._queued:
                self._begun[sequence_id] = length
                self._note(sequence_id, length - sequence.num_computed)
        for sequence_id, length in preempted.items():
            if sequence_id in self._queued:
                self._note(sequence_id, length)

    def _note(self, sequence_id: SequenceId, num_tokens: int) -> None:
        arrived = self._queued[sequence_id].arrived
        self._queued[sequence_id] = QueuedRequest(arrived=arrived, num_tokens=num_tokens)

    def first_queued(self, default: float) -> float:
        """Returns when the first of those without a token arrived; without any, `default`."""
        return next((one.arrived for one in self._queued.values()), default)

    def view(self, now: float, delayed_s: float, delayed_before_s: float) -> ServingView:
        return ServingView(
            now=now,
            queued=tuple(self._queued.values()),
            last_token_times=tuple(last for last, _ in self._last.values()),
            num_context_tokens=sum(length for _, length in self._last.values()),
            busy_at=now if self._queued or self._last else self._busy_at,
            delayed_s=delayed_s,
            delayed_before_s=delayed_before_s,
        )
