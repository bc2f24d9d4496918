"""What a caller asks of a rollout at random (more sequences, moves, pauses, aborts), and random dispatches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from engines.coordination.policies import OnDemand, SchedulePolicy
from engines.coordination.requests import RequestAbort, RequestMove, SubmitSequences
from engines.coordination.views import Dispatch, Prefetch, ScheduleView
from engines.rollout.coordinator import Coordinator
from engines.sequence import Finished, SequenceId, SequenceState


class Crowd:
    """Sends everything anywhere at once, room or not, some of it for a few tokens only, with any priority; lets
    replicas read the KV of parked trajectories that may go on elsewhere."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._share_short = rng.choice([0.0, 0.3, 0.9])

    def next(self, view: ScheduleView) -> Dispatch | None:
        sequence = next(iter(view.waiting.values()), None)
        ids = sorted(id_ for id_, replica in view.replicas.items() if replica.accepts)
        if sequence is None or not ids:
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
        ids = sorted(id_ for id_, replica in view.replicas.items() if replica.accepts)
        sequence = view.parked[self._rng.choice([*view.parked])]
        if not ids or not sequence.has_kv or self._rng.random() < 0.7:
            return None
        chosen = self._rng.choice(ids)
        return None if chosen == sequence.expected_at else Prefetch(sequence_id=sequence.sequence_id, replica_id=chosen)


def random_policy(rng: random.Random) -> SchedulePolicy:
    return Crowd(rng) if rng.random() < 0.5 else OnDemand()


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
        running = [one for one in self.submitted if one not in self._ended]
        return self._rng.sample(running, min(len(running), self._rng.randint(1, 5)))
