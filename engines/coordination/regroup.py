"""Changes the layout: pauses the replicas that change, orders the regroup, resumes. Torch-free.

requested -> all leaving replicas have paused: `Regroup` -> all coming replicas ready, all idle ranks idle: resume
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import msgspec

from engines.control import messages
from engines.coordination.books import Books
from engines.coordination.dispatcher import Dispatcher
from engines.coordination.outbox import Outbox
from engines.coordination.policies import LayoutPolicy, mistake, named
from engines.coordination.records import ReplicaRecord
from engines.coordination.requests import RegroupComplete, RequestRefused
from engines.coordination.views import LayoutChange, LayoutView
from engines.decoding import from_msgpack
from engines.parallel.layout import Layout, joint_groups
from engines.sequence import SequenceId

_NOWHERE: Mapping[SequenceId, int] = MappingProxyType({})


@dataclass(kw_only=True)
class Regrouping:
    """A regroup under way: old replicas leave, new ones come."""

    layout: Layout
    leaving: list[ReplicaRecord]
    coming: list[ReplicaRecord]
    kept: Mapping[SequenceId, int]
    """Sequences whose KV stays in the ranks' caches, and the replicas that continue them."""
    is_ordered: bool = False
    """Whether `Regroup` was sent, as all leaving replicas had paused."""
    idle: list[tuple[str, int, int]] = field(default_factory=list)
    """Keys of awaited `RankIdle`s: a command sent to such a rank earlier could overtake the `Regroup` relayed to it."""


class Regrouper:
    """Runs one regroup at a time. Replicas that are the same in both layouts keep running during it."""

    def __init__(
        self,
        books: Books,
        outbox: Outbox,
        dispatcher: Dispatcher,
        *,
        policy: LayoutPolicy | None,
        check_layout: Callable[[Layout, Layout, int], None] | None,
        keeps_kv: Callable[[Layout, Layout], bool],
    ) -> None:
        """`policy` is `RolloutCore`'s `layout_policy`; the others are the same."""
        self._books = books
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._policy = policy
        self._check_layout = check_layout
        self._keeps_kv = keeps_kv
        self._ended = [] if policy is None else books.list_ended()
        self.layout_error: str | None = None
        self.under_way: Regrouping | None = None

    def consider(self) -> None:
        """Asks the layout policy for a layout. An invalid one ends the phase; see `layout_error`."""
        books = self._books
        if self._policy is None or self.under_way or self.layout_error or books.phase is None or books.phase.is_ending:
            return
        ended = tuple(self._ended)
        self._ended.clear()
        view = LayoutView(
            phase=books.phase.number,
            now=self._outbox.now,
            layout=books.layout,
            num_waiting=len(books.waiting),
            unfinished=books.unfinished,
            ended=ended,
            num_delivered=len(books.delivered),
            replicas=books.views(),
        )
        try:
            change = self._policy.decide(view)
        except Exception as error:
            raise mistake(self._policy, "decide", error) from error
        if change is None:
            return
        try:
            change = _checked(change)
            self.begin(change.layout, with_kv=change.with_kv, places=change.places)
        except RequestRefused as error:
            self.layout_error = f"layout_policy {named(self._policy)}: decide gave a layout that cannot be had: {error}"
            books.decide("refuse_layout", detail=self.layout_error)
            self._dispatcher.abort(list(books.sequences))

    def begin(self, layout: Layout, with_kv: bool, places: Mapping[SequenceId, int] = _NOWHERE) -> None:
        """Pauses the replicas that the layout changes; `places` as in `LayoutChange`. Raises RequestRefused for a
        layout that cannot be the next, or a place that it does not have."""
        self._check(layout)
        if elsewhere := set(places.values()) - {spec.id for spec in layout.replicas if spec.role == "rollout"}:
            raise RequestRefused(f"LayoutChange.places: {sorted(elsewhere)} are no rollout replicas of the layout")
        books = self._books
        old, new = set(books.layout.replicas), set(layout.replicas)
        leaving = [replica for replica in books.replicas.values() if replica.spec in old - new]
        coming = [
            ReplicaRecord(spec=spec, epoch=layout.epoch, outside=False, closed=True)
            for spec in layout.replicas
            if spec not in old
        ]
        books.decide("regroup", detail=f"epoch {layout.epoch}: {layout.replicas}")
        kept = self._kept(layout, leaving, places) if with_kv else {}
        self.under_way = Regrouping(layout=layout, leaving=leaving, coming=coming, kept=kept)
        books.forming = coming
        replicas = {spec.id: books.replicas[spec.id] for spec in old & new} | {one.spec.id: one for one in coming}
        self._pin({id_: replicas[replica_id] for id_, replica_id in places.items()}, leaving)
        for replica in leaving:
            replica.closed = True
            books.touch(replica)
            self._dispatcher.pause(replica, with_kv, keeping=tuple(id_ for id_ in replica.assigned if id_ in kept))

    def _pin(self, places: Mapping[SequenceId, ReplicaRecord], leaving: list[ReplicaRecord]) -> None:
        """Pins sequences before they are paused, so that no replica that goes on takes them meanwhile; but not those
        that it runs."""
        for sequence_id, replica in places.items():
            sequence = self._books.sequences.get(sequence_id)
            if sequence is None or sequence.aborting:
                continue
            if sequence.replica is None:
                self._books.repin(sequence, replica)
            elif sequence.replica in leaving:
                self._books.pin(sequence, replica)

    def assume(self, layout: Layout) -> None:
        """Takes over a layout between phases. Raises RequestRefused for one that cannot be the next."""
        self._check(layout)
        books = self._books
        books.decide("regroup", detail=f"epoch {layout.epoch}: {layout.replicas}")
        old, new = set(books.layout.replicas), set(layout.replicas)
        for spec in old - new:
            books.remove_replica(books.replicas[spec.id])
        books.layout = layout
        for spec in layout.replicas:
            if spec not in old:
                books.add_replica(ReplicaRecord(spec=spec, epoch=layout.epoch, outside=False))

    def _kept(
        self, layout: Layout, leaving: list[ReplicaRecord], places: Mapping[SequenceId, int]
    ) -> dict[SequenceId, int]:
        """Returns the sequences that go from ranks to ranks which exchange KV, with their places."""
        before = self._books.layout
        if not self._keeps_kv(before, layout):
            return {}
        group_of = {rank: ranks for ranks in joint_groups(before, layout) for rank in ranks}
        coming = {spec.id: group_of.get(spec.ranks[0]) for spec in layout.replicas}
        homes = {id_: group_of[replica.spec.ranks[0]] for replica in leaving for id_ in replica.assigned}
        return {id_: target for id_, target in places.items() if id_ in homes and homes[id_] == coming[target]}

    def _check(self, layout: Layout) -> None:
        if self.under_way:
            raise RequestRefused(f"regroup to epoch {layout.epoch}: one to {self.under_way.layout.epoch} is under way")
        if layout.epoch != self._books.layout.epoch + 1:
            raise RequestRefused(f"Layout.epoch={layout.epoch}: the next is {self._books.layout.epoch + 1}")
        try:
            check_ranks(layout, self._books.world_size)
            if self._check_layout is not None:
                longest = max((one.max_len for one in self._books.sequences.values()), default=0)
                self._check_layout(self._books.layout, layout, longest)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        if clash := {spec.id for spec in layout.replicas} & self._books.outside_ids:
            raise RequestRefused(f"Layout.replicas: ids {sorted(clash)} are of replicas outside the world; take others")

    def check_id(self, replica_id: int) -> None:
        """Raises RequestRefused if a new replica outside the world has an id of the layout to come."""
        if self.under_way and replica_id in {spec.id for spec in self.under_way.layout.replicas}:
            raise RequestRefused(f"AddReplica.spec.id={replica_id}: is in the layout to come; take another")

    def advance(self) -> None:
        """Orders the regroup once no answer of a leaving replica is awaited; ends it once all coming ones are ready."""
        regrouping = self.under_way
        if regrouping is None:
            return
        if not regrouping.is_ordered and not any(map(self._outbox.is_awaited_of, regrouping.leaving)):
            self._order(regrouping)
        is_quiet = not any(key in self._outbox.awaited for key in regrouping.idle)
        if regrouping.is_ordered and is_quiet and all(replica.ready for replica in regrouping.coming):
            for replica in regrouping.coming:
                replica.closed = False
                self._books.touch(replica)
            self.under_way = None
            self._books.decide("resume", detail=f"epoch {regrouping.layout.epoch}")
            self._outbox.tell(RegroupComplete(layout=regrouping.layout))

    def _order(self, regrouping: Regrouping) -> None:
        books, layout = self._books, regrouping.layout
        regrouping.is_ordered = True
        places = tuple(regrouping.kept.items())
        command = partial(messages.Regroup, layout=layout, before=books.layout, places=places)
        for replica in regrouping.leaving:
            self._outbox.send(command, replica)
            books.remove_replica(replica)
        for rank in books.idle_ranks():
            self._outbox.send_idle(command, rank, books.layout.epoch)
        books.layout, books.forming = layout, []
        for replica in regrouping.coming:
            replica.version = None if books.phase is None else books.phase.policy_version
            books.add_replica(replica)
            self._outbox.wait_for(replica.ready_key, replica, "to be ready")
        for rank in books.idle_ranks():
            regrouping.idle.append(("idle", rank, layout.epoch))
            self._outbox.wait_for(regrouping.idle[-1], f"rank {rank}", "to be idle after a regroup")


def _checked(change: LayoutChange) -> LayoutChange:
    """Returns what a message with it would carry. Raises RequestRefused for fields of other types."""
    if not isinstance(change, LayoutChange):
        raise RequestRefused(f"{change!r}: is no LayoutChange; return one, or None to keep the layout")
    try:
        return from_msgpack(msgspec.msgpack.encode(change), LayoutChange)
    except (TypeError, ValueError) as error:
        raise RequestRefused(f"{change}: {error}; see LayoutChange in engines/coordination/views.py") from None


def check_ranks(layout: Layout, world_size: int) -> None:
    """Raises ValueError for a layout with ranks that the world does not have."""
    if any(rank >= world_size for spec in layout.replicas for rank in spec.ranks):
        raise ValueError(f"{layout}: has a rank outside the world; use those below {world_size}")
