"""Heddle's decisions during a rollout, as one schedule policy (§4.2, §5.2, §5.3). Torch-free.

First all trajectories are predicted, then placed; each turn is dispatched at once into the queue of its replica, with
its priority. When a tool gap brings a new prediction, the trajectory's rank may say another replica, which then reads
its KV beside the tool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engines.constraints import Fraction, NonNegative, check_fields
from engines.coordination.views import Dispatch, Prefetch, ReplicaView, ScheduleView, SequenceView
from engines.parallel.layout import ReplicaSpec
from engines.sequence import SequenceId
from research.heddle.baselines import Router, Soonest, able
from research.heddle.migration import Groups, capacities, group_of, pays
from research.heddle.priority import Priority, by_remaining
from research.heddle.ranks import Expected, Ranks
from research.heddle.transmission import Transmission, Transmissions

Planner = Callable[[Items[Expected], Items[ReplicaView]], Groups | None]
"""Places trajectories, in descending order of their predicted lengths, on these replicas; None where dispatching each
turn to the least loaded replica is better by its own estimate."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a move is weighed by."""

    token_s: Callable[[ReplicaSpec, int], float]
    """Seconds of a token on a replica with this many sequences, at least 1; 0 where that is not known."""
    transfer_s: Callable[[ReplicaSpec, int], float]
    """Seconds in which a replica reads the stored KV of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class HeddleOptions:
    """Each mechanism can be switched off alone."""

    places: bool = True
    """Else each turn goes where the policy's router says, and nothing migrates."""
    migrates: bool = True
    """Else a trajectory stays where it was placed."""
    priority: Priority = by_remaining
    hysteresis: Fraction = 0.02
    """Share of the unfinished trajectories by which a rank must lie outside of a group's: 0 is the paper's."""
    patience_s: NonNegative = 5.0
    """For how long the first turns wait for predictions of all trajectories; 0 where there is no predictor."""
    waits_s: NonNegative = 0.0
    """For how long a later turn waits for its prediction, longer than its tool; with 0 the last one stands."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(kw_only=True)
class Counters:
    """Of one policy, over all its rollouts."""

    num_gaps: int = 0
    """Tool gaps that have ended."""
    num_migrations: int = 0
    num_cancelled: int = 0
    """Moves by rank that would not have paid."""
    prediction_s: float = 0.0
    """What turns waited for predictions beyond their tools."""
    migration_s: float = 0.0
    """What was left of transmissions when tools had answered, as estimated."""
    num_yielded: int = 0
    """Placements that the planner left to least-load."""


@dataclass(kw_only=True)
class _Gap:
    """A trajectory between two turns."""

    since: float
    tool_s: float | None = None
    """From its start until the tool answered."""


@dataclass(kw_only=True)
class _Plan:
    """A placement in force."""

    groups: Groups
    places: Mapping[int, int]
    """Replica -> its group."""
    _counts: tuple[int, list[int]] = (0, [])

    def counts(self, num_active: int) -> list[int]:
        """See `capacities`; they change only when a trajectory ends."""
        if self._counts[0] != num_active:
            self._counts = num_active, capacities(self.groups.sizes, num_active)
        return self._counts[1]


class HeddlePolicy:
    """A `PrefetchingPolicy`. What has no place goes where `router` says, by default where a token comes soonest:
    without predictions all, and with `HeddleOptions.places=False`, which compares priorities alone."""

    def __init__(
        self, planner: Planner, costs: Costs, options: HeddleOptions | None = None, router: Router | None = None
    ) -> None:
        self._planner, self._costs, self.options = planner, costs, options or HeddleOptions()
        self._router = router or Soonest(costs.token_s)
        self.counters = Counters()
        self._ranks = Ranks()
        self._plan: _Plan | None = None
        self._planned_on = frozenset[int]()
        """The replicas that accepted then."""
        self._is_open = False
        """Whether first turns may begin."""
        self._first_seen: float | None = None
        self._unanswered: dict[SequenceId, None] = {}
        """Trajectories of which the predictor has said nothing."""
        self._homes: dict[SequenceId, int] = {}
        """The replica of a trajectory's next turn: of its last one, or as it was placed or moved since."""
        self._gaps: dict[SequenceId, _Gap] = {}
        self._mean_tool_s = 0.0
        self._num_seen: dict[SequenceId, int] = {}
        """Turns about which the prediction was that a trajectory's place was last chosen by."""
        self._ready: deque[SequenceId] = deque()
        self._held: dict[SequenceId, float] = {}
        """Trajectories that wait for a prediction: until when."""
        self._moves = Transmissions()
        self._begun: deque[Transmission] = deque()

    # --- What has happened

    def _note(self, view: ScheduleView) -> None:
        for ended in view.ended:
            self._ranks.remove(ended)
            self._moves.cancel(ended.sequence_id)
            for mapping in (self._homes, self._gaps, self._num_seen, self._unanswered, self._held):
                mapping.pop(ended.sequence_id, None)
        if view.ended and not self._ranks:  # the next rollout's may be in the same view
            self._plan, self._is_open, self._first_seen = None, False, None
        gone = {ended.sequence_id for ended in view.ended if ended.sequence_id not in view.waiting}
        entered = [one for one in view.entered if one.sequence_id not in gone]
        for sequence in (*entered, *view.changed):  # what has changed is newer
            self._ranks.put(sequence)
        for sequence in view.changed:
            self._note_change(view, sequence)
        for sequence in entered:
            self._note_entry(view, sequence)
        if self._is_open and _accepting(view) not in (self._planned_on, frozenset()):
            self._place(view)

    def _note_change(self, view: ScheduleView, sequence: SequenceView) -> None:
        """A trajectory has parked, or the predictor has said something of it."""
        id_ = sequence.sequence_id
        if sequence.answered_turns < 0:
            self._unanswered[id_] = None
            if self._first_seen is None:
                self._first_seen = view.now
        else:
            self._unanswered.pop(id_, None)
        if sequence.is_parked and sequence.num_turns and id_ not in self._gaps:
            self._gaps[id_] = _Gap(since=view.now)
        if sequence.answered_turns >= sequence.num_turns and id_ in self._held:
            self._release(view, id_)
        if sequence.is_parked and id_ in self._homes:
            self._consider(view, sequence)

    def _note_entry(self, view: ScheduleView, sequence: SequenceView) -> None:
        """A trajectory's tool has answered, or it is new, or has come back from a replica."""
        id_ = sequence.sequence_id
        gap = self._gaps.get(id_)
        if gap is not None:
            gap.tool_s = view.now - gap.since
            self.counters.num_gaps += 1
            self._mean_tool_s += (gap.tool_s - self._mean_tool_s) / self.counters.num_gaps
            if self.options.waits_s and self._is_open and sequence.answered_turns < sequence.num_turns:
                self._held[id_] = gap.since + max(gap.tool_s, self.options.waits_s)
                return
        self._make_ready(view, sequence)

    def _release(self, view: ScheduleView, sequence_id: SequenceId) -> None:
        del self._held[sequence_id]
        gap, sequence = self._gaps[sequence_id], view.waiting.get(sequence_id)
        assert gap.tool_s is not None
        self.counters.prediction_s += view.now - gap.since - gap.tool_s
        if sequence is not None:
            self._consider(view, sequence)
            self._make_ready(view, sequence)

    def _make_ready(self, view: ScheduleView, sequence: SequenceView) -> None:
        id_ = sequence.sequence_id
        move = self._moves.cancel(id_)
        if move is not None:  # it has not begun: the target reads the KV first
            if move.target in view.replicas and self._pays(view, sequence, move.source, move.target, move.seconds):
                self._homes[id_] = move.target
                self.counters.num_migrations += 1
                self.counters.migration_s += move.seconds
            else:
                self.counters.num_cancelled += 1
        elif id_ in self._gaps:
            self.counters.migration_s += self._moves.left_s(id_, view.now)
        self._gaps.pop(id_, None)
        self._ready.append(id_)

    # --- Placement

    def _may_begin(self, view: ScheduleView) -> bool:
        """Whether all that was submitted is placed; places it when all predictions have come, or patience ends."""
        if not self._is_open:
            waited_s = 0.0 if self._first_seen is None else view.now - self._first_seen
            if self._unanswered and waited_s < self.options.patience_s:
                return False
            if not _accepting(view):
                return False
            self._is_open = True
            self._place(view)
        return True

    def _place(self, view: ScheduleView) -> None:
        """Places all unfinished trajectories on the replicas that accept now. Those that have begun stay until a new
        prediction of theirs moves them by their rank."""
        self._plan, self._planned_on = None, _accepting(view)
        ids = self._planned_on
        if not self.options.places or not self._ranks.mean:
            return
        replicas = [view.replicas[id_] for id_ in sorted(ids)]
        groups = self._planner(self._ranks.expected(), replicas)
        if groups is None:
            self.counters.num_yielded += 1
            return
        places = {id_: place for place, id_ in enumerate(groups.replica_ids) if groups.sizes[place]}
        self._plan = _Plan(groups=groups, places=places)
        homes = [id_ for id_, size in zip(groups.replica_ids, groups.sizes, strict=True) for _ in range(size)]
        for sequence_id, home in zip(self._ranks, homes, strict=True):
            if self._homes.get(sequence_id) not in places:
                self._homes[sequence_id] = home

    def _home_by_rank(self, sequence_id: SequenceId, current: int | None) -> int | None:
        """The replica for a trajectory's rank; None without a placement."""
        if self._plan is None or sequence_id not in self._ranks:
            return None
        counts = self._plan.counts(len(self._ranks))
        margin = self.options.hysteresis * len(self._ranks)
        place = None if current is None else self._plan.places.get(current)
        return self._plan.groups.replica_ids[group_of(self._ranks.rank(sequence_id), counts, place, margin)]

    # --- Migration

    def _consider(self, view: ScheduleView, sequence: SequenceView) -> None:
        """Chooses a trajectory's replica anew, if the prediction is new."""
        id_, prediction = sequence.sequence_id, sequence.prediction
        source = self._homes.get(id_)
        if not self.options.migrates or source is None or prediction is None or self._plan is None:
            return
        if self._num_seen.get(id_, 0) >= prediction.num_turns or not sequence.has_kv:
            return
        self._num_seen[id_] = prediction.num_turns
        self._moves.cancel(id_)
        target = self._home_by_rank(id_, source)
        if target is None or target == source or target not in view.replicas:
            return
        seconds = self._costs.transfer_s(view.replicas[target].spec, sequence.num_tokens)
        if self._pays(view, sequence, source, target, seconds):
            length = -self._ranks.total(id_)
            self._moves.ask(Transmission(length, id_, source, target, seconds))
        else:
            self.counters.num_cancelled += 1

    def _pays(self, view: ScheduleView, sequence: SequenceView, source: int, target: int, seconds: float) -> bool:
        there, here = view.replicas[target], view.replicas.get(source)
        if not there.accepts or not there.can_hold(sequence):
            return False
        if here is None:
            return True
        gap = self._gaps.get(sequence.sequence_id)
        left_s = 0.0 if gap is None or gap.tool_s is not None else gap.since + self._mean_tool_s - view.now
        token_s, num_here = self._costs.token_s, here.num_assigned + 1
        return pays(
            self._ranks.estimate(sequence).remaining,
            (token_s(here.spec, num_here), token_s(there.spec, there.num_assigned + 1)),
            token_s(here.spec, max(1, num_here - 1)),
            max(0.0, seconds - max(0.0, left_s)),
        )

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        """See `PrefetchingPolicy`."""
        self._note(view)
        self._begun.extend(self._moves.begin(view.now))
        while self._begun:
            move = self._begun.popleft()
            sequence, replica = view.parked.get(move.sequence_id), view.replicas.get(move.target)
            if sequence is None or replica is None or not replica.accepts or not replica.can_hold(sequence):
                continue
            self._homes[move.sequence_id] = move.target
            self.counters.num_migrations += 1
            if sequence.expected_at != move.target:  # else a request has moved it there
                return Prefetch(sequence_id=move.sequence_id, replica_id=move.target)
        return None

    # --- Dispatch

    def next(self, view: ScheduleView) -> Dispatch | None:
        """See `SchedulePolicy`."""
        self._note(view)
        if not self._may_begin(view):
            return None
        for sequence_id in [id_ for id_, until in self._held.items() if until <= view.now]:
            self._release(view, sequence_id)
        for _ in range(len(self._ready)):
            sequence = view.waiting.get(self._ready.popleft())
            if sequence is None:
                continue
            chosen = self._choose(view, sequence)
            if chosen is None:
                self._ready.append(sequence.sequence_id)
                continue
            return Dispatch(
                sequence_id=sequence.sequence_id,
                replica_id=chosen,
                queued=True,
                priority=self.options.priority(sequence, self._ranks.estimate(sequence)),
            )
        return None

    def _choose(self, view: ScheduleView, sequence: SequenceView) -> int | None:
        """Returns the id of the replica for a turn; None if none can take it."""
        id_ = sequence.sequence_id
        chosen = None
        if self._plan is not None:
            chosen = self._homes.get(id_)
            if chosen not in self._plan.places:
                chosen = self._home_by_rank(id_, None)
        home = None if chosen is None else view.replicas.get(chosen)
        if home is None or not home.accepts or not home.can_hold(sequence):
            replicas = able(view, sequence)
            if not replicas:
                return None
            chosen = self._router.choose(sequence, replicas).spec.id
        assert chosen is not None
        self._homes[id_] = chosen
        return chosen


def _accepting(view: ScheduleView) -> frozenset[int]:
    return frozenset(id_ for id_, one in view.replicas.items() if one.accepts)
