"""Trajectories between their turns: environments get what a turn says, and their answers come back as tokens.

Torch-free. One `Turns` serves one rollout; its methods are called by the thread that drives the rollout, which never
waits for an environment. Environments answer on threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.coordination.requests import ContinueTurn, EndTrajectory, NotePredictions, PredictedLength
from engines.replica.endings import Endings
from engines.rollout.environment import Answer, CallCounts, Environments
from engines.rollout.prediction import Context, LengthPredictor
from engines.sequence import Completion, Finished, FinishReason, KVHandle, SequenceId, SequenceState, Work

logger = logging.getLogger(__name__)

Columns = Mapping[str, Any]
EncodeAnswer = Callable[[int, Answer, Sequence[int]], list[int]]
"""(prompt uid, what is observed, the tokens of the turn before; none before the first turn) -> the tokens that go on.
An error of it ends the trajectory. Environments call it on their threads."""
_WAIT_S = 0.2
"""Most seconds between two looks at what has come, where nothing runs."""


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """What an environment has answered to a call."""

    sequence_id: SequenceId
    turn: int
    answer: Answer
    observation: list[int]
    """What is observed, as tokens."""


class Turns:
    """Passes turns to environments, and collects how their trajectories go on."""

    def __init__(
        self,
        environments: Environments,
        *,
        columns: Mapping[int, Columns],
        encode: EncodeAnswer,
        endings: Endings,
        max_model_len: int,
        in_rounds: bool = False,
        predictor: LengthPredictor | None = None,
    ) -> None:
        """`columns`, by prompt uid, are for `Environment.reset`. With `in_rounds`, trajectories go on when none runs,
        together and in the order in which they began: then no batch depends on how long a call takes. A `predictor` is
        asked before the first turn and at the end of each one, beside the environment."""
        self._environments = environments
        self._columns = columns
        self._encode = encode
        self._endings = endings
        self._max_model_len = max_model_len
        self._in_rounds = in_rounds
        self._answered: queue.SimpleQueue[_Answered | Finished] = queue.SimpleQueue()
        self._waiting: dict[SequenceId, tuple[int, SequenceState]] = {}
        """Trajectories whose environment has not answered: observations before the answer."""
        self._begun: dict[SequenceId, int] = {}
        """Trajectories, in the order in which they began."""
        self._live: set[SequenceId] = set()
        """Trajectories whose environment has begun and not ended."""
        self._next: dict[SequenceId, ContinueTurn | EndTrajectory] = {}
        self._predictor = predictor
        self._predicted: queue.SimpleQueue[PredictedLength] = queue.SimpleQueue()
        self._num_ending = 0
        self._finished: list[Finished] = []
        self.calls = CallCounts()
        self.wake: Callable[[], object] = lambda: None
        """Called on an environment's thread when an answer has come."""

    @property
    def num_open(self) -> int:
        """Calls that have not been answered, and answers that were not taken."""
        return len(self._waiting) + len(self._next) + self._num_ending + len(self._finished)

    def begin(self, state: SequenceState) -> None:
        """Makes the trajectory's environment; what its `reset` returns is observed before the first turn."""
        self._begun[state.sequence_id] = len(self._begun)
        self._live.add(state.sequence_id)
        self._waiting[state.sequence_id] = (0, state)
        self._predict(state)
        columns = self._columns.get(state.key.prompt_uid, {})
        self._environments.begin(state.sequence_id, columns, self._answer(state))

    def step(self, state: SequenceState, text: str) -> None:
        """Passes on what a turn says."""
        self._waiting[state.sequence_id] = (len(state.observed), state)
        self._predict(state)
        self._environments.step(state.sequence_id, text, self._answer(state))

    def _predict(self, state: SequenceState) -> None:
        if self._predictor is None:
            return
        context = Context.of(state)

        def take(remaining: Sequence[float]) -> None:
            answer = PredictedLength(
                sequence_id=context.sequence_id, num_turns=context.num_turns, remaining=remaining[0]
            )
            self._predicted.put(answer)
            self.wake()

        self._predictor.ask([context], take)

    def take_predictions(self) -> NotePredictions | None:
        """Returns what the predictor has answered since the last call; None if that is nothing."""
        if self._predictor is None or self._predicted.empty():
            return None
        answers = []
        while not self._predicted.empty():
            answers.append(self._predicted.get())
        return NotePredictions(source=self._predictor.source, answers=tuple(answers))

    def end(self, finished: Finished) -> None:
        """Ends a trajectory's environment; see `take_finished`."""
        sequence_id = finished.state.sequence_id
        self._waiting.pop(sequence_id, None)
        self._next.pop(sequence_id, None)
        if finished.completion.finish_reason == "abort":
            self._finished.append(finished)
            self._close(sequence_id)
            return
        self._live.discard(sequence_id)
        self._num_ending += 1

        def rewarded(reward: float | None) -> None:
            completion = replace(finished.completion, reward=reward)
            self._put(Finished(state=finished.state, completion=completion))

        self._environments.end(sequence_id, rewarded)

    def close(self) -> None:
        """Ends the environments of trajectories that have not ended, as after an error."""
        for sequence_id in sorted(self._live):
            self._close(sequence_id)

    def _close(self, sequence_id: SequenceId) -> None:
        self._live.discard(sequence_id)
        self._environments.end(sequence_id, None)

    def _answer(self, state: SequenceState) -> Callable[[Answer], None]:
        """Returns what takes the environment's answer, on the environment's thread."""
        sequence_id, turn, said = state.sequence_id, len(state.observed), state.tokens[state.turn_start :]

        def take(answer: Answer) -> None:
            observation: list[int] = []
            if answer.text is not None or not (turn or answer.done):
                try:
                    observation = self._encode(state.key.prompt_uid, answer, said)
                except Exception as error:  # a tokenizer's; unanswered, the trajectory would wait for ever
                    logger.warning("trajectory %s: what it observes cannot be encoded: %s", sequence_id, error)
                    answer = Answer(done=True, seconds=answer.seconds, failure="invalid", error=str(error))
            self._put(_Answered(sequence_id=sequence_id, turn=turn, answer=answer, observation=observation))

        return take

    def _put(self, item: _Answered | Finished) -> None:
        self._answered.put(item)
        self.wake()

    def wait(self, timeout_s: float) -> None:
        """Returns when something can be taken, or an answer has come, or after this time."""
        if not self._finished and not self._may_go_on:
            with contextlib.suppress(queue.Empty):
                self._note(self._answered.get(timeout=timeout_s))

    @property
    def _may_go_on(self) -> bool:
        """Whether trajectories may go on where none runs."""
        return bool(self._next) and not (self._in_rounds and self._waiting)

    def take_finished(self) -> list[Finished]:
        """Returns the ended trajectories whose environment has ended, with their rewards."""
        self._note_all()
        finished, self._finished = self._finished, []
        return finished

    def take(self, *, is_running: bool) -> tuple[ContinueTurn | EndTrajectory, ...]:
        """Returns how trajectories go on, as far as that is known; `is_running`: whether others run."""
        self._note_all()
        if not self._may_go_on or (self._in_rounds and is_running):
            return ()
        answers, self._next = self._next, {}
        return tuple(sorted(answers.values(), key=lambda one: self._begun[one.sequence_id]))

    def _note_all(self) -> None:
        while not self._answered.empty():
            self._note(self._answered.get())

    def _note(self, item: _Answered | Finished) -> None:
        if isinstance(item, Finished):
            self._num_ending -= 1
            self._finished.append(item)
            return
        turn, state = self._waiting.get(item.sequence_id, (-1, None))
        if state is None or turn != item.turn:
            return  # an answer that comes twice, or after the trajectory's end
        del self._waiting[item.sequence_id]
        self._next[item.sequence_id] = self._go_on(state, item)

    def _go_on(self, state: SequenceState, item: _Answered) -> ContinueTurn | EndTrajectory:
        self.calls.note(item.answer)
        params, turn, observation = state.params, item.turn, tuple(item.observation)
        num_left = min(state.num_prompt_tokens + params.most_tokens, self._max_model_len) - len(state.tokens)
        num_left -= len(observation)
        is_over = item.answer.done or (turn > 0 and item.answer.text is None)
        if not is_over and num_left > 0 and (params.max_turns is None or state.num_turns < params.max_turns):
            return ContinueTurn(sequence_id=item.sequence_id, turn=turn, observation=observation)
        if not is_over or num_left < 0:
            observation = ()  # nobody goes on behind it
        reason: FinishReason = "stop" if is_over else "length"
        text = self._endings.completion(replace(state, tokens=[*state.tokens, *observation]), reason).text
        return EndTrajectory(sequence_id=item.sequence_id, turn=turn, reason=reason, observation=observation, text=text)


class Parked:
    """The trajectories between two turns where one process has them all, and no coordinator."""

    def __init__(self, turns: Turns | None, drop_kv: Callable[[KVHandle | None], None]) -> None:
        self._turns = turns
        self._drop_kv = drop_kv
        self._works: dict[SequenceId, Work] = {}

    @property
    def num_open(self) -> int:
        """Trajectories that no replica has and that are not delivered."""
        return 0 if self._turns is None else self._turns.num_open

    def begin(self, work: Work) -> bool:
        """Takes a trajectory that has not begun; returns False for any other sequence."""
        if self._turns is None or not work.state.in_turns or work.state.observed:
            return False
        self._works[work.state.sequence_id] = work
        self._turns.begin(work.state)
        return True

    def add(self, work: Work) -> None:
        """Takes a trajectory whose turn has ended."""
        assert self._turns is not None and work.turn is not None
        self._works[work.state.sequence_id] = work
        self._turns.step(work.state, work.turn)

    def end(self, finished: Finished) -> bool:
        """Takes a trajectory that has ended, until its environment has; returns False for any other sequence."""
        if self._turns is None or not finished.state.in_turns:
            return False
        self._turns.end(finished)
        return True

    def take(self, *, is_running: bool) -> list[Work]:
        """Returns the trajectories that go on now; waits for an answer if none runs."""
        if self._turns is None or not self._turns.num_open:
            return []
        if not is_running:
            self._turns.wait(_WAIT_S)
        works = []
        for answer in self._turns.take(is_running=is_running):
            work = self._works.pop(answer.sequence_id)
            if isinstance(answer, ContinueTurn):
                work.state.observe(answer.observation)
                works.append(replace(work, turn=None))
            else:
                self._drop_kv(work.kv)
                if answer.observation:
                    work.state.observe(answer.observation)
                completion = Completion.of(work.state, answer.reason, answer.text)
                self._turns.end(Finished(state=work.state, completion=completion))
        return works

    def take_finished(self) -> list[Finished]:
        """Returns the ended trajectories whose environment has ended."""
        return [] if self._turns is None else self._turns.take_finished()
