"""What a caller asks of a rollout at random (more sequences, moves, pauses, aborts), random dispatches and
predictions."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from engines.control.ends import Notice, Received
from engines.control.messages import SequencesReleased, decode_event
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand, SchedulePolicy
from engines.coordination.requests import RequestAbort, RequestMove, SubmitSequences
from engines.coordination.views import Dispatch, Prefetch, ReplicaView, ScheduleView, SequenceView
from engines.rollout.coordinator import Coordinator
from engines.rollout.prediction import Context
from engines.sequence import Finished, SequenceId, SequenceState
from research.heddle.baselines import able
from research.heddle.migration import Groups
from research.heddle.policy import Costs, HeddleOptions, HeddlePolicy


class Crowd:
    """Sends everything anywhere at once, room or not, some of it for a few tokens only, with any priority; lets
    replicas read the KV of parked trajectories that may go on elsewhere."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._share_short = rng.choice([0.0, 0.3, 0.9])

    def next(self, view: ScheduleView) -> Dispatch | None:
        sequence, ids = next(((one, ids) for one in view.waiting.values() if (ids := _able(view, one))), (None, [0]))
        if sequence is None:
            return None
        max_new_tokens = self._rng.randint(1, 20) if self._rng.random() < self._share_short else None
        return Dispatch(
            sequence_id=sequence.sequence_id,
            replica_id=self._rng.choice(ids),
            max_new_tokens=max_new_tokens,
            queued=True,
            priority=self._rng.choice([0.0, 0.0, 1.0, 2.0]),
        )

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        sequence = view.parked[self._rng.choice([*view.parked])]
        ids = _able(view, sequence)
        if not ids or not sequence.has_kv or self._rng.random() < 0.7:
            return None
        chosen = self._rng.choice(ids)
        return None if chosen == sequence.expected_at else Prefetch(sequence_id=sequence.sequence_id, replica_id=chosen)


def _able(view: ScheduleView, sequence: SequenceView) -> list[int]:
    return sorted(one.spec.id for one in able(view, sequence))


def random_policy(rng: random.Random) -> SchedulePolicy:
    return rng.choice([Crowd, lambda _: OnDemand(), _heddle, _heddle])(rng)


def _heddle(rng: random.Random) -> HeddlePolicy:
    """Heddle's decisions, with any placement, and any estimate of what a move costs."""

    def place(lengths: Sequence[float], replicas: Sequence[ReplicaView]) -> Groups | None:
        ids = rng.sample([one.spec.id for one in replicas], len(replicas))
        sizes = Counter(rng.choices(ids, k=len(lengths)))
        return None if rng.random() < 0.1 else Groups(tuple(sizes[id_] for id_ in ids), tuple(ids))

    costs = Costs(token_s=lambda *_: rng.uniform(0.0, 0.1), transfer_s=lambda *_: rng.choice([0.0, 0.001, 0.02]))
    options = HeddleOptions(
        hysteresis=rng.choice([0.0, 0.02]),
        patience_s=rng.choice([0.0, 0.03, 0.3]),
        waits_s=rng.choice([0.0, 0.0, 0.01, 0.1]),
    )
    return HeddlePolicy(place, costs, options)


class Predictor:
    """A `LengthPredictor` that guesses: some answers are no lengths, some come after the turn or the rollout, and some
    never."""

    source = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def ask(self, contexts: Sequence[Context], answer: Callable[[Sequence[float]], None]) -> None:
        rng = self._rng
        remaining = [rng.choice([*[rng.uniform(0, 90)] * 9, math.nan, math.inf, -1.0]) for _ in contexts]
        delay_s = rng.choice([0.0, 0.0, 0.0, 0.002, 0.02, 0.2, None])
        if delay_s is not None:
            threading.Timer(delay_s, answer, [remaining]).start()


def random_predictor(rng: random.Random) -> Predictor | None:
    return Predictor(rng) if rng.random() < 0.85 else None


def count_decisions(core: RolloutCore, policy: SchedulePolicy, counts: Counter[str]) -> None:
    counts["prefetches"] += sum(one.action == "prefetch" for one in core.decisions)
    counts.update({what: count for what, count in core.ignored.items() if "prediction" in what})
    if isinstance(policy, HeddlePolicy):
        counts["migrations"] += policy.counters.num_migrations


def num_handed_over(core: RolloutCore, notice: Notice) -> int:
    """Sequences that a replica has released as its KV cache was full."""
    event = decode_event(notice.payload) if isinstance(notice, Received) else None
    if not isinstance(event, SequencesReleased) or (replica := core._books.replicas.get(event.replica_id)) is None:
        return 0
    held = core._books.views()[replica.spec.id].num_kv_tokens
    return sum(work.turn is None and len(work.state.tokens) > held for work in event.works)


class Caller:
    """One phase's sequences, handed in in portions, and what is asked of them. Lives in the coordinator's thread."""

    def __init__(
        self, coordinator: Coordinator, states: Sequence[SequenceState], rng: random.Random, counts: Counter[str]
    ) -> None:
        self._coordinator, self._rng, self._counts = coordinator, rng, counts
        cuts = sorted(rng.sample(range(1, len(states)), min(rng.randint(0, 3), len(states) - 1)))
        ends = [*cuts, len(states)]
        portions = [tuple(states[a:b]) for a, b in zip([0, *cuts], ends, strict=True)]
        self.first, *self._later = portions
        self.submitted: dict[SequenceId, None] = dict.fromkeys(one.sequence_id for one in self.first)
        self.aborted: set[SequenceId] = set()
        self._ended: set[SequenceId] = set()

    def on_finished(self, finished: Finished) -> None:
        self._ended.add(finished.state.sequence_id)
        if self._later and len(self._ended) >= len(self.submitted):
            self.submit_more()  # the phase would end

    def submit_more(self) -> None:
        if self._later:
            portion = self._later.pop(0)
            self._coordinator.post(SubmitSequences(states=portion))
            self.submitted |= dict.fromkeys(one.sequence_id for one in portion)
            self._counts["portions"] += 1

    def move_some(self, replica_ids: Sequence[int]) -> None:
        """To other replicas, or back to wait (a pause), with KV or to be recomputed."""
        for sequence_id in self._some():
            target = self._rng.choice([None, *replica_ids, *replica_ids])
            with_kv = self._rng.random() < 0.6
            self._coordinator.post(RequestMove(sequence_id=sequence_id, replica_id=target, with_kv=with_kv))
            self._counts["pauses" if target is None else "moves"] += 1

    def abort_one(self) -> None:
        for sequence_id in self._some()[:1]:
            self._coordinator.post(RequestAbort(sequence_ids=(sequence_id,)))
            self.aborted.add(sequence_id)
            self._counts["aborts"] += 1

    def _some(self) -> list[SequenceId]:
        parked = [*self._coordinator.core._books.parked] if self._rng.random() < 0.3 else []
        running = parked or [one for one in self.submitted if one not in self._ended]
        return self._rng.sample(running, min(len(running), self._rng.randint(1, 5)))
