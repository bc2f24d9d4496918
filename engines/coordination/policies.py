"""The interfaces of schedule and layout policies, and two simple schedule policies. Torch-free.

A policy has no clock, socket or tensor; it may keep a state of its own, which it updates from the views.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from engines.coordination.views import (
    Dispatch,
    LayoutChange,
    LayoutView,
    Prefetch,
    ReplicaView,
    ScheduleView,
    SequenceView,
)
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


def least_loaded(replicas: list[ReplicaView]) -> ReplicaView:
    """Returns the replica with the fewest sequences, then tokens; ties: by id."""
    return min(replicas, key=lambda replica: (replica.num_assigned, replica.num_tokens, replica.spec.id))


def where_it_was(sequence: SequenceView, roomy: list[ReplicaView]) -> ReplicaView:
    """Returns the replica of a trajectory's last turn, since its KV may still be there, else the least loaded one."""
    last = [one for one in roomy if sequence.num_turns and one.spec.id == sequence.last_replica_id]
    return least_loaded(last or roomy)


class OnDemand:
    """First come, first served: the earliest submitted goes to one of the replicas that have room for it.

    While the earliest waits for room, later ones go only where its tokens do not fit at all.
    """

    def __init__(self, choose: Callable[[SequenceView, list[ReplicaView]], ReplicaView] = where_it_was) -> None:
        self._choose = choose
        self._order: list[tuple[int, SequenceId]] = []

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.entered:
            heapq.heappush(self._order, (sequence.index, sequence.sequence_id))
        open_to_all, passed = [one for one in view.replicas.values() if one.is_open], list[tuple[int, SequenceId]]()
        try:
            while open_to_all and self._order:
                first = view.waiting.get(self._order[0][1])
                if first is None:
                    heapq.heappop(self._order)  # dispatched, aborted or moved since
                    continue
                roomy = [replica for replica in open_to_all if replica.room_for(first)]
                if roomy:
                    return Dispatch(sequence_id=first.sequence_id, replica_id=self._choose(first, roomy).spec.id)
                # A replica that can hold it takes no later one, so that none starves.
                open_to_all = [one for one in open_to_all if not one.can_hold(first) and one.has_room(1)]
                passed.append(heapq.heappop(self._order))
        finally:
            for entry in passed:
                heapq.heappush(self._order, entry)
        return None


class Static:
    """Sequence i goes to replica i mod dp, all at once, with or without room: the dispatch does not depend on time.

    dp is the number of the layout's rollout replicas, ordered by id; nothing is dispatched before all accept. A replica
    that cannot hold the sequence is passed over for the next one.
    """

    def next(self, view: ScheduleView) -> Dispatch | None:
        sequence = next(iter(view.waiting.values()), None)
        ids = sorted(spec.id for spec in view.layout.replicas if spec.role == "rollout")
        if sequence is None or not ids or not all(view.replicas[id_].accepts for id_ in ids):
            return None
        return queued_from(ids, sequence.index % len(ids), sequence, view)


def queued_from(ids: list[int], place: int, sequence: SequenceView, view: ScheduleView) -> Dispatch | None:
    """Returns a dispatch to the own queue of the replica at `place`, or of the next one, around the list, that can hold
    the sequence; None if none can."""
    able = (id_ for id_ in ids[place:] + ids[:place] if view.replicas[id_].can_hold(sequence))
    chosen = next(able, None)
    return None if chosen is None else Dispatch(sequence_id=sequence.sequence_id, replica_id=chosen, queued=True)
