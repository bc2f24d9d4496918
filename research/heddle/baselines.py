"""What Heddle's placement is compared with: §7, "Baselines", and §7.3. Torch-free.

Each turn is dispatched at once, into the replica's own queue, as routers do before SGLang. The load of a replica is
what it has over its TP size, so that unequal ones compare. Other orders than that of coming: `HeddleOptions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from engines.constraints import Margin, check_value
from engines.coordination.views import Dispatch, ReplicaView, ScheduleView, SequenceView
from engines.parallel.layout import ReplicaSpec


def able(view: ScheduleView, sequence: SequenceView) -> list[ReplicaView]:
    """Replicas that take sequences and whose KV cache can hold this one."""
    return [one for one in view.replicas.values() if one.accepts and one.can_hold(sequence)]


def load(replica: ReplicaView) -> tuple[float, float]:
    """Sequences of a replica for each of its GPUs; then their tokens."""
    return replica.num_assigned / replica.spec.tp_size, replica.num_tokens / replica.spec.tp_size


def by_load(sequence: SequenceView, replicas: Items[ReplicaView], threshold: float = 0.0) -> ReplicaView:
    """The replica of the last turn if no other has less, or where the loads differ by at most the threshold; else the
    least loaded one."""
    least = min(replicas, key=lambda one: (load(one), one.spec.id))
    last = next((one for one in replicas if one.spec.id == sequence.last_replica_id), least)
    is_even = max(load(one)[0] for one in replicas) - load(least)[0] <= threshold
    return last if is_even or load(last)[0] <= load(least)[0] else least


class Router:
    """Dispatches what waits in the order of its coming, without priorities; subclasses say where."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.waiting.values():
            if replicas := able(view, sequence):
                chosen = self.choose(sequence, replicas)
                return Dispatch(sequence_id=sequence.sequence_id, replica_id=chosen.spec.id, queued=True)
        return None

    def choose(self, sequence: SequenceView, replicas: Items[ReplicaView]) -> ReplicaView:
        """Returns one of these replicas, at least one, which can all take the sequence."""
        raise NotImplementedError


class LeastLoad(Router):
    """Slime: to the replica with the least load, if that of the most loaded one is larger by more than `threshold`;
    else to the one with the longest cached prefix, on which the last turn was. Raises ValueError for a threshold below
    0."""

    def __init__(self, *, threshold: float = 0.0) -> None:
        check_value("LeastLoad.threshold", threshold, Margin)
        self._threshold = threshold

    def choose(self, sequence: SequenceView, replicas: Items[ReplicaView]) -> ReplicaView:
        return by_load(sequence, replicas, self._threshold)


class Soonest(LeastLoad):
    """Least load for replicas of unequal size: to the one on which a token of the turn takes least, to that of the last
    turn among equals. By sequences per GPU, an idle replica of one GPU would come before one of eight that has a single
    trajectory. On equal replicas, or where a time is not known, it is `LeastLoad`."""

    def __init__(self, token_s: Callable[[ReplicaSpec, int], float], *, threshold: float = 0.0) -> None:
        """`token_s`: see `Costs`."""
        super().__init__(threshold=threshold)
        self._token_s = token_s
        self._known: dict[tuple[int, int], float] = {}

    def choose(self, sequence: SequenceView, replicas: Items[ReplicaView]) -> ReplicaView:
        if len({one.spec.tp_size for one in replicas}) == 1:
            return super().choose(sequence, replicas)
        seconds, last = {one.spec.id: self._seconds(one) for one in replicas}, sequence.last_replica_id
        if not all(seconds.values()):
            return super().choose(sequence, replicas)
        return min(replicas, key=lambda one: (seconds[one.spec.id], one.spec.id != last, load(one), one.spec.id))

    def _seconds(self, replica: ReplicaView) -> float:
        key = replica.spec.tp_size, replica.num_assigned + 1
        if not self._known.get(key):
            self._known[key] = self._token_s(replica.spec, replica.num_assigned + 1)
        return self._known[key]


class CacheAware(Router):
    """Verl: all turns of a trajectory on one replica. First turns go to the replicas in turn, which spreads a group
    over them: its trajectories are alike, so that groups on single replicas would be less even."""

    def __init__(self) -> None:
        self._num_begun: Counter[int] = Counter()

    def choose(self, sequence: SequenceView, replicas: Items[ReplicaView]) -> ReplicaView:
        for one in replicas:
            if one.spec.id == sequence.last_replica_id:
                return one
        first = min(replicas, key=lambda one: ((self._num_begun[one.spec.id] + 1) / one.spec.tp_size, one.spec.id))
        self._num_begun[first.spec.id] += 1
        return first


class Hybrid(CacheAware):
    """Verl with SGLang's router: to the least loaded replica where the largest load is above `skew` times the smallest,
    else cache-aware. Raises ValueError for a skew below 0."""

    def __init__(self, *, skew: float = 32.0) -> None:
        super().__init__()
        check_value("Hybrid.skew", skew, Margin)
        self._skew = skew

    def choose(self, sequence: SequenceView, replicas: Items[ReplicaView]) -> ReplicaView:
        loads = [load(one)[0] for one in replicas]
        if max(loads) > self._skew * min(loads) and sequence.last_replica_id is not None:
            return by_load(sequence, replicas)
        return super().choose(sequence, replicas)
