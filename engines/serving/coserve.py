"""Two models on one device: a serving model, and that of a rollout, which runs in its idle memory and time (ROSE §4.1).

Torch-free, and without a clock: a live engine's thread and the simulator call the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engines.constraints import Seconds, check_fields
from engines.kvcache.pages import PageShare
from engines.replica.forecast import can_step, entry_blocks, growth_blocks, next_step
from engines.replica.replica import Replica, StepOutput
from engines.sequence import SequenceId, Work
from engines.serving.policies import AdmissionPolicy, MemoryPolicy, MemoryView
from engines.serving.request_times import RequestTimes

Turn = Literal["serving", "rollout"]
StepSeconds = Callable[[StepOutput], float]
"""Seconds of a step of the rollout's model that does this."""
RENEW_S = 1.0
"""Seconds after which a rollout without sequences hears again what it may have."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One of the two models: what steps it, and its pages of the pool that both share."""

    replica: Replica
    pages: PageShare


@dataclass(kw_only=True)
class Lent:
    """What the rollout has got, in all."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens that it has drawn."""
    seconds: float = 0.0
    num_cuts: int = 0
    """How often its budget was lowered."""
    num_taken_back: int = 0
    """Sequences that left because the serving model needed their pages."""
    num_stalled: int = 0
    """Sequences that left since they made no progress for too long."""


@dataclass(frozen=True, kw_only=True)
class CoServingLimits:
    stall_s: Seconds = 2.0
    """A sequence of the rollout leaves after so long without progress, to go on elsewhere (ROSE §4.1)."""

    def __post_init__(self) -> None:
        check_fields(self)


class CoServing:
    """Says whose step is next, and takes memory back from the rollout. Only one of the two steps at a time.

    `next` before each step, `stepped` after it; `begin` when a phase of rollouts begins. Sequences that lose their
    place are whole states in `take_released`: only their KV is lost.
    """

    def __init__(
        self,
        *,
        serving: Neighbour,
        rollout: Neighbour,
        admission: AdmissionPolicy,
        memory: MemoryPolicy,
        seconds: StepSeconds,
        limits: CoServingLimits | None = None,
    ) -> None:
        """`seconds` estimates a step of the rollout before it runs."""
        self.times = RequestTimes()
        self.lent = Lent()
        self._serving, self._rollout = serving, rollout
        self._admission, self._memory, self._seconds = admission, memory, seconds
        self._stall_s = (limits or CoServingLimits()).stall_s
        self._budget = 0
        """Pages that the rollout may hold in this phase."""
        self._renewed, self._num_cuts = 0.0, 0
        """When that was set last, and how many cuts there were by then."""
        self._released: list[Work] = []
        self._waiting: dict[SequenceId, float] = {}
        """Since when sequences of the rollout wait to enter a pass."""
        self._delayed_s = 0.0
        """See `ServingView.delayed_s`; of the gaps that have ended."""
        self._delayed_before_s = 0.0
        """See `ServingView.delayed_before_s`."""
        self._kept_waiting: float | None = None
        """Since when the serving model has had work, and has not stepped; None without work."""
        self._progressed: float | None = None
        """When the rollout last stepped, or got work; None without work."""

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def serves(self) -> bool:
        """Whether the serving model has work."""
        return self._serving.replica.has_work

    def begin(self, now: float) -> None:
        """A phase of rollouts begins: its budget is made anew, and may then only fall (ROSE §4.1)."""
        self._renewed, self._num_cuts = now, self.lent.num_cuts
        self._forget_progress()
        self._budget = self._memory.begin(self._memory_view(now))
        self._limit_leases(now)

    def renew(self, now: float) -> bool:
        """Returns whether a report should say again how many pages the rollout may have: from time to time while it has
        no sequences. Without a cut in this phase, its budget is made anew, too. After a cut, the budget waits for the
        next phase, but what serving took beyond the cut comes back."""
        if self._rollout.replica.num_sequences or now - self._renewed < RENEW_S:
            return False
        if self.lent.num_cuts == self._num_cuts:
            self.begin(now)
        else:
            self._renewed = now
            self._take_back(self._limit_leases(now))
        return True

    def end(self) -> None:
        """The rollout has left for good: it may hold no page before the next `begin`."""
        self._budget = 0
        self._rollout.pages.set_budget(0)
        self._released = []

    def observe(self, now: float) -> None:
        """Shows the memory policy what is in use, where no step has shown it."""
        self._memory.observe(self._memory_view(now))

    def next(self, now: float) -> Turn | None:
        """Returns who steps next; None while neither may. Takes memory back from the rollout first."""
        self._share_memory(now)
        self._drop_stalled(now)
        if not self.serves:
            self._kept_waiting = None
        elif self._kept_waiting is None:
            self._kept_waiting = min(now, self.times.first_queued(now))
        self._note_queue(now)
        if self._rollout.replica.has_work and self._may_step(now):
            return "rollout"
        return "serving" if self.serves else None

    def stepped(self, turn: Turn, output: StepOutput, start: float, now: float) -> None:
        """Notes a step that has ended at `now`."""
        if turn == "serving":
            for finished in output.finished:
                self.times.left(finished.state.sequence_id)
            self.times.stepped(self._serving.replica.scheduler.running, now)
            if self._kept_waiting is not None:
                self._delayed_s += max(0.0, start - self._kept_waiting)
            self._kept_waiting = now if self.serves else None
            self._note_queue(now)
        else:
            self.lent.num_steps += 1
            self.lent.num_tokens += output.num_sampled
            self.lent.seconds += now - start
            if not self._rollout.replica.num_sequences:
                self._forget_progress()  # nobody may ask who is next until others come
            elif output.num_tokens:
                self._progressed = now
        self.observe(now)

    def take_released(self) -> list[Work]:
        """Returns the sequences that have left the rollout's replica since the last call, to go on elsewhere."""
        released, self._released = self._released, []
        return released

    # -- time

    def _may_step(self, now: float) -> bool:
        scheduler = self._rollout.replica.scheduler
        if not can_step(scheduler):
            return False
        view = self.times.view(now, self._delayed_until(now), self._delayed_before_s)
        return self._admission.admits(view, self._seconds(next_step(scheduler)))

    def _delayed_until(self, now: float) -> float:
        return self._delayed_s + (0.0 if self._kept_waiting is None else now - self._kept_waiting)

    def _note_queue(self, now: float) -> None:
        """Not after a step of the rollout: requests that came during it are not known yet."""
        if not self.times.has_queue:
            self._delayed_before_s = self._delayed_until(now)

    def _drop_stalled(self, now: float) -> None:
        """Lets go of sequences that have made no progress for `stall_s`."""
        replica = self._rollout.replica
        if not replica.num_sequences:
            self._forget_progress()
            return
        if self._progressed is None:
            self._progressed = now
        if now - self._progressed > self._stall_s:
            self._let_go([state.sequence_id for state in replica.states()])
            self._progressed = None
            return
        waiting = {one.state.sequence_id: one for one in replica.scheduler.waiting}
        self._waiting = {id_: self._waiting.get(id_, now) for id_ in waiting}
        self._let_go([id_ for id_, since in self._waiting.items() if now - since > self._stall_s])

    def _forget_progress(self) -> None:
        self._progressed = None
        self._waiting.clear()

    def _let_go(self, stalled: list[SequenceId]) -> None:
        if stalled:
            self.lent.num_stalled += len(stalled)
            self._released += self._rollout.replica.pause(stalled)
            self._waiting = {id_: since for id_, since in self._waiting.items() if id_ not in stalled}

    # -- memory

    def _memory_view(self, now: float) -> MemoryView:
        pages = self._serving.pages
        return MemoryView(
            now=now,
            num_pages=pages.pool.num_pages,
            num_serving=pages.num_used_pages,
            num_rollout=self._rollout.pages.num_pages,
            budget=self._budget,
        )

    def _share_memory(self, now: float) -> None:
        """Takes back what has expired, and what a cut or the serving model's next step asks for."""
        rollout = self._rollout.pages
        rollout.expire(now)
        lower = self._memory.cut(self._memory_view(now))
        if lower is not None and lower < self._budget:
            self._budget = lower
            self.lent.num_cuts += 1
            self._take_back(rollout.num_pages - lower)
        self._take_back(self._limit_leases(now))
        if self._rollout.replica.has_work:
            self._make_room()
            self._keep_promises()

    def _limit_leases(self, now: float) -> int:
        """Sets how many pages the rollout may hold: its budget, and no more than leave the headroom to the serving
        model. Returns the pages that the serving model's next step needs of those that the rollout has."""
        serving, rollout, scheduler = self._serving.pages, self._rollout.pages, self._serving.replica.scheduler
        wanted = growth_blocks(scheduler) + entry_blocks(scheduler)
        most = serving.pool.budget(serving.owner)
        view = self._memory_view(now)
        coming = min(most, view.num_serving + serving.pages_for(wanted))
        rollout.set_budget(max(0, min(self._budget, view.num_pages - coming - self._memory.headroom(view))))
        missing = serving.pages_for(wanted - scheduler.blocks.num_free_blocks)
        return max(0, min(missing, most - serving.num_pages - serving.pool.num_free, rollout.num_pages))

    def _take_back(self, count: int) -> None:
        """Takes pages that no sequence of the rollout holds; then lets whole sequences go, those with the fewest
        computed tokens first, until enough pages are back."""
        if count <= 0:
            return
        pages = self._rollout.pages
        count -= pages.reclaim(count)
        while count > 0 and self._rollout.replica.scheduler.running:
            self._let_go_of_one()
            count -= pages.reclaim(count)

    def _let_go_of_one(self) -> None:
        replica = self._rollout.replica
        victim = min(replica.scheduler.running, key=lambda one: one.num_computed)
        self._released += replica.pause([victim.state.sequence_id])
        self.lent.num_taken_back += 1

    def _make_room(self) -> None:
        """Takes idle pages of the serving model (its prefix cache) for the rollout's next step, within its budget."""
        rollout, scheduler = self._rollout.pages, self._rollout.replica.scheduler
        most = rollout.pool.budget(rollout.owner) - rollout.num_pages - rollout.pool.num_free
        missing = growth_blocks(scheduler) + entry_blocks(scheduler) - scheduler.blocks.num_free_blocks
        if missing > 0 and most > 0:
            self._serving.pages.reclaim(min(most, rollout.pages_for(missing)))

    def _keep_promises(self) -> None:
        """Lets sequences go until those that stay have the blocks of their next step. Those with a bound were admitted
        because all would have blocks to their ends: the scheduler never preempts them, so here some must leave."""
        scheduler = self._rollout.replica.scheduler
        while scheduler.running and growth_blocks(scheduler) > scheduler.blocks.num_free_blocks:
            self._let_go_of_one()
