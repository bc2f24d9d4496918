"""The interfaces of schedule and layout policies, and two simple schedule policies. Torch-free.

A policy has no clock, socket or tensor; it may keep a state of its own, which it updates from the views.
"""

from __future__ import annotations

import heapq
import sys
from typing import Protocol, runtime_checkable

from engines.coordination.views import Dispatch, LayoutChange, LayoutView, Prefetch, ScheduleView
from engines.sequence import SequenceId


class SchedulePolicy(Protocol):
    """Decides which waiting sequence goes to which replica."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        """Returns the next dispatch; None if there is none now. Called repeatedly until None, after every event."""
        ...


@runtime_checkable
class PrefetchingPolicy(SchedulePolicy, Protocol):
    """A schedule policy that also decides in the tool gaps of trajectories where they will go on."""

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        """Returns a parked trajectory and the replica that begins to read its KV now; None if there is none now.

        Called repeatedly until None, after each event, while trajectories are parked; before `next`, which then sees
        only what is new since. The policy itself must dispatch the trajectory there later.
        """
        ...


class LayoutPolicy(Protocol):
    """Decides which ranks form which replicas."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        """Returns the layout to regroup to, and which sequence goes where; None to keep the present layout.

        Called after each step report and each finished sequence, while no regroup is under way.
        """
        ...


def named(policy: object) -> str:
    """Returns the policy's class and the file that it is from, for messages."""
    kind = type(policy)
    return f"{kind.__qualname__} of {getattr(sys.modules.get(kind.__module__), '__file__', kind.__module__)}"


def mistake(policy: object, method: str, error: Exception) -> RuntimeError:
    """Returns the error to raise for one that a policy has raised."""
    return RuntimeError(f"{named(policy)}: {method} raised {type(error).__name__}: {error}")


class OnDemand:
    """First come, first served: the earliest submitted goes to the least loaded replica that has room for it.

    A trajectory goes on where its last turn ran, while there is room, since its KV may still be there.
    """

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
            return None  # later sequences that would fit wait too, so that none starves
        if first.num_turns:
            roomy = [one for one in roomy if one.spec.id == first.last_replica_id] or roomy
        best = min(roomy, key=lambda replica: (replica.num_assigned, replica.num_tokens, replica.spec.id))
        return Dispatch(sequence_id=first.sequence_id, replica_id=best.spec.id)


class Static:
    """Sequence i goes to replica i mod dp, all at once, with or without room: the dispatch does not depend on time.

    dp is the number of the layout's rollout replicas, ordered by id; nothing is dispatched before all accept.
    """

    def next(self, view: ScheduleView) -> Dispatch | None:
        sequence = next(iter(view.waiting.values()), None)
        ids = sorted(spec.id for spec in view.layout.replicas if spec.role == "rollout")
        if sequence is None or not ids or not all(view.replicas[id_].accepts for id_ in ids):
            return None
        return Dispatch(sequence_id=sequence.sequence_id, replica_id=ids[sequence.index % len(ids)], queued=True)
