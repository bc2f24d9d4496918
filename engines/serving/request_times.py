"""When a serving model's sequences arrived, and when each got its last token. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from engines.replica.schedule import Sequence
from engines.sequence import SequenceId, SequenceState
from engines.serving.policies import QueuedRequest, ServingView


class RequestTimes:
    """Of the sequences of a replica that serves. Each call takes time in proportion to those that wait or run."""

    def __init__(self) -> None:
        self._queued: dict[SequenceId, tuple[float, SequenceState]] = {}
        """Without a token yet, in the order of their arrival."""
        self._last: dict[SequenceId, tuple[float, int]] = {}
        """Of those that decode: when each got its last token, and its length then."""

    def arrived(self, state: SequenceState, now: float) -> None:
        self._queued[state.sequence_id] = now, state

    def left(self, sequence_id: SequenceId) -> None:
        """One that has left already is no error."""
        self._queued.pop(sequence_id, None)
        self._last.pop(sequence_id, None)

    def stepped(self, running: Iterable[Sequence], now: float) -> None:
        """Notes who has got tokens in a step that ended at `now`."""
        for sequence in running:
            state = sequence.state
            length = len(state.tokens)
            if length > state.num_prompt_tokens and self._last.get(state.sequence_id, (0.0, 0))[1] < length:
                self._queued.pop(state.sequence_id, None)
                self._last[state.sequence_id] = now, length

    @property
    def first_queued(self) -> float | None:
        """When the first of those without a token arrived; None without any."""
        return next((arrived for arrived, _ in self._queued.values()), None)

    def view(self, running: Iterable[Sequence], now: float, delayed_s: float) -> ServingView:
        computed = {one.state.sequence_id: one.num_computed for one in running}
        queued = tuple(
            QueuedRequest(arrived=arrived, num_tokens=len(state.tokens) - computed.get(id_, 0))
            for id_, (arrived, state) in self._queued.items()
        )
        return ServingView(
            now=now,
            queued=queued,
            last_token_times=tuple(last for last, _ in self._last.values()),
            num_context_tokens=sum(length for _, length in self._last.values()),
            delayed_s=delayed_s,
        )
