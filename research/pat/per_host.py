"""Hosts that change their TP size each for itself (PAT §4.1): TP stays within a host. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engines.coordination.views import LayoutChange, LayoutView, SequenceView
from engines.parallel.layout import Layout
from engines.sequence import SequenceId
from research.pat.controller import PatController
from research.pat.lifetimes import lifetimes_of


class PerHost:
    """A `LayoutPolicy` that asks one controller for each host. All learn from all lengths.

    The core makes one change at a time; while one host switches, the others decode on, and are asked afterwards.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], controllers: Sequence[PatController]) -> None:
        """`hosts`: the ranks of each, and no replica has ranks of several; `controllers`: in the same order."""
        self._hosts = [frozenset(ranks) for ranks in hosts]
        self._controllers = [*controllers]
        self._first = 0
        """The host that is asked first: the one behind the last that switched, so that none waits for ever."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        ended = lifetimes_of((one.num_generated, one.finish_reason) for one in view.ended)
        for controller in self._controllers:
            controller.learn(ended)
        count = len(self._hosts)
        for number in [*range(self._first, count), *range(self._first)]:
            mine = [spec for spec in view.layout.replicas if self._hosts[number].issuperset(spec.ranks)]
            if not mine:
                continue
            others = [spec for spec in view.layout.replicas if spec not in mine]
            part = replace(
                view,
                layout=replace(view.layout, replicas=tuple(mine)),
                unfinished=_OnHost(view, self._hosts[number], number, count),
                ended=(),
            )
            change = self._controllers[number].decide(part)
            if change is not None:
                self._first = (number + 1) % count
                replicas = tuple(sorted([*others, *change.layout.replicas], key=lambda spec: spec.id))
                return replace(change, layout=Layout(epoch=change.layout.epoch, replicas=replicas))
        return None


class _OnHost(Mapping[SequenceId, SequenceView]):
    """A window on the unfinished sequences of a host's replicas, and its share of those that have not run.

    The id of a nested replica is its first rank, also where the replica is gone meanwhile.
    """

    def __init__(self, view: LayoutView, ranks: frozenset[int], number: int, num_hosts: int) -> None:
        self._view, self._ranks, self._number, self._num_hosts = view, ranks, number, num_hosts

    def __getitem__(self, sequence_id: SequenceId) -> SequenceView:
        return self._view.unfinished[sequence_id]

    def __iter__(self) -> Iterator[SequenceId]:
        num_waiting = 0
        for sequence_id, one in self._view.unfinished.items():
            if one.last_replica_id in self._ranks:
                yield sequence_id
            elif one.last_replica_id is None:
                num_waiting += 1
                if num_waiting % self._num_hosts == self._number:
                    yield sequence_id

    def __len__(self) -> int:
        """Counts without a look at each sequence: decisions are asked for after each step."""
        mine = sum(one.num_assigned for id_, one in self._view.replicas.items() if id_ in self._ranks)
        return mine + -(-self._view.num_waiting // self._num_hosts)
