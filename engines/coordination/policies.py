"""The questions that the core asks its policies, and the two plain answers. Torch-free.

A policy has no clock, socket or tensor; it may keep books of its own, fed by the views.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from engines.coordination.views import Dispatch, LayoutView, ScheduleView
from engines.parallel.layout import Layout
from engines.sequence import SequenceId


class SchedulePolicy(Protocol):
    """Which waiting sequence goes where."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        """The next dispatch; None when there is none for now. Called again until None, after every event."""
        ...


class LayoutPolicy(Protocol):
    """Which ranks form which replicas."""

    def decide(self, view: LayoutView) -> Layout | None:
        """The layout to regroup to, with the next epoch; None to keep the present one.

        Asked after each step report and each finished sequence, while no regroup is under way.
        """
        ...


class OnDemand:
    """First come, first served: the earliest submitted goes to the least loaded replica that has room for it."""

    def __init__(self) -> None:
        self._order: list[tuple[int, SequenceId]] = []

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.entered:
            heapq.heappush(self._order, (sequence.index, sequence.sequence_id))
        while self._order and self._order[0][1] not in view.waiting:
            heapq.heappop(self._order)  # dispatched, aborted or moved since
        if not self._order:
            return None
        first = view.waiting[self._order[0][1]]
        roomy = [replica for replica in view.replicas.values() if replica.room_for(first)]
        if not roomy:
            return None  # later ones that would fit wait too: nobody is overtaken for ever
        best = min(roomy, key=lambda replica: (replica.num_assigned, replica.num_tokens, replica.spec.id))
        return Dispatch(sequence_id=first.sequence_id, replica_id=best.spec.id)


class Static:
    """Sequence i to replica i mod dp, all at once, room or not: a dispatch that depends on nothing timed.

    dp counts the layout's rollout replicas, in the order of their ids; nothing is dispatched before all accept.
    """

    def next(self, view: ScheduleView) -> Dispatch | None:
        sequence = next(iter(view.waiting.values()), None)
        ids = sorted(spec.id for spec in view.layout.replicas if spec.role == "rollout")
        if sequence is None or not ids or not all(view.replicas[id_].accepts for id_ in ids):
            return None
        return Dispatch(sequence_id=sequence.sequence_id, replica_id=ids[sequence.index % len(ids)], queued=True)
