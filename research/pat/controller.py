"""When a rollout changes its tensor parallelism, and to which size (PAT §4.1, Algorithm 1). Torch-free.

Each decision is logged with the estimates that it rests on.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.constraints import Fraction, NonNegative, check_fields
from engines.coordination.views import LayoutChange, LayoutView, SequenceView
from engines.parallel.layout import nested_layout
from engines.sequence import SequenceId
from research.pat.algorithm1 import one_switch
from research.pat.deployment import Deployment
from research.pat.lifetimes import Lengths, Lifetime, Lifetimes, lifetimes_of, run_to_limit
from research.pat.lookahead import Prompts, make_plan
from research.pat.redistribute import redistribute
from research.pat.switch_cost import moves_kv

_MOST_LOGGED = 10_000
_REPORTS_OF_PAPER = 64
_FEWEST_REPORTS = 16
"""Of each replica, before a plan that came out otherwise is made anew."""
Estimator = Literal["lookahead", "paper"]


@dataclass(frozen=True, kw_only=True)
class PatOptions:
    """How a `PatController` decides."""

    estimator: Estimator = "lookahead"
    """lookahead: lengths as expected from those that have ended, and all later switches. paper: Algorithm 1 as printed,
    in which every sequence runs to its limit, and one switch is weighed against none; its loop goes round whenever
    sequences have ended and after 64 reports of each replica, which tell of one step or, at most 20 times a second, of
    several, as the paper does not say how often it does."""
    margin: Fraction = 0.0
    """Share of the remaining time that a switch must save beyond its cost."""
    dwell_s: NonNegative = 0.0
    """Shortest time between two switches."""
    rung: Fraction = 0.2
    """Share of the unfinished sequences that must end before `lookahead` decides again; fewer where it has planned a
    switch, and none where the time has passed in which that, or the end, was expected."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Considered:
    """One decision."""

    now: float
    num_unfinished: int
    num_tokens: float
    """Context tokens of the unfinished sequences."""
    tp_size: int
    chosen: int
    kept_seconds: float
    """Expected time to the end without a switch."""
    seconds: float
    """The same with the chosen size, its switch included."""
    stages: tuple[tuple[int, int], ...]
    """The plan; see `Plan`."""
    with_kv: bool
    """Whether moving KV takes no longer than computing it again."""


class PatController:
    """A `LayoutPolicy` for equal replicas over all ranks of the layout: wide ones for few sequences, narrow ones for
    many.

    While no sequences are added, fewer and fewer run, for which wider replicas are better: `lookahead` decides no more
    once they are as wide as they can be. It keeps what it has learnt from one rollout to the next.
    """

    def __init__(
        self, deployment: Deployment, options: PatOptions | None = None, *, ended: Iterable[Lifetime] = ()
    ) -> None:
        """`ended`: earlier sequences."""
        self._deployment = deployment
        self._options = options or PatOptions()
        self._lifetimes = Lifetimes(ended)
        self._phase: int | None = None
        self._first_size = 0
        """TP size in which the rollout began."""
        self._last_count = self._next_count = 0
        """Unfinished sequences at the last decision, and at which the next one is due."""
        self._next_time = np.inf
        """When one is due, whatever their number."""
        self._num_asked = 0
        """Calls since the last decision: one for each report of a replica, of steps or of ends."""
        self._last_switch = -np.inf
        self.log: deque[Considered] = deque(maxlen=_MOST_LOGGED)
        """The latest decisions, also those to stay."""

    def learn(self, ended: Iterable[Lifetime]) -> None:
        """Learns of sequences that it has not seen."""
        self._lifetimes.add(ended)

    def first_tp_size(self, contexts: Lengths, limits: Lengths, group_size: int = 1) -> int:
        """Returns the TP size to begin a rollout with; both are tokens, [sequences]: of prompts, and of what each may
        generate. Each `group_size` sequences, one behind the other, have the same prompt."""
        alone = contexts[::group_size]
        prompts = alone, np.full(len(alone), float(group_size))
        if self._options.estimator == "paper":
            plan = one_switch(self._deployment, contexts, limits, np.zeros(len(contexts), int), None, prompts)
        else:
            remaining = self._lifetimes.remaining(np.zeros(len(contexts)), limits)
            plan = make_plan(self._deployment, contexts, remaining, None, prompts=prompts)
        return plan.stages[0][1]

    def decide(self, view: LayoutView) -> LayoutChange | None:
        self.learn(lifetimes_of((one.num_generated, one.finish_reason) for one in view.ended))
        if view.phase != self._phase:
            if len(sizes := {spec.tp_size for spec in view.layout.replicas}) > 1:
                raise ValueError(
                    f"PatController: the layout has replicas of TP sizes {sorted(sizes)}; begin the rollout with equal "
                    f"ones, as `nested_layout` makes them"
                )
            self._phase, self._last_count, self._last_switch = view.phase, 0, -np.inf
            self._first_size = view.layout.replicas[0].tp_size
        tp_size = view.layout.replicas[0].tp_size
        is_early = view.now - self._last_switch < self._options.dwell_s
        if not view.num_unfinished or not self._is_due(view, tp_size) or is_early:
            return None
        if tp_size not in self._deployment.steps:
            raise ValueError(
                f"PatController: the layout has TP size {tp_size}, and the deployment has times of "
                f"{sorted(self._deployment.steps)}; begin the rollout in one of these, or profile that one, too"
            )
        sequences = list(view.unfinished.values())
        present = [one for one in sequences if not one.is_parked]  # a trajectory between two turns is in no batch
        if sequences and not present:
            return None  # and asks again
        has_more = view.num_unfinished > self._last_count
        self._last_count, self._num_asked = max(view.num_unfinished, len(sequences)), 0
        if not present:  # as of a host's window, which counts its share of those that wait
            return None
        considered, means, stage_seconds = self._consider(view, present, tp_size, has_more=has_more)
        self.log.append(considered)
        self._next_time = view.now + stage_seconds
        planned = next((fewer for fewer, size in considered.stages if size != considered.chosen), 0)
        count = view.num_unfinished
        self._next_count = min(count - 1, max(planned, int(count * (1 - self._options.rung))))
        if considered.chosen == tp_size:
            return None
        self._last_switch = view.now
        ranks = sorted(rank for spec in view.layout.replicas for rank in spec.ranks)
        layout = nested_layout(ranks, considered.chosen, epoch=view.layout.epoch + 1)
        places = redistribute(sequences, view.layout, layout, means)
        return LayoutChange(layout=layout, places=places, with_kv=considered.with_kv)

    def _is_due(self, view: LayoutView, tp_size: int) -> bool:
        self._num_asked += 1
        count = view.num_unfinished
        if self._options.estimator == "paper":
            return count != self._last_count or self._num_asked >= _REPORTS_OF_PAPER * len(view.layout.replicas)
        has_more = count > self._last_count
        is_late = view.now >= self._next_time and self._num_asked >= _FEWEST_REPORTS * len(view.layout.replicas)
        return has_more or ((count <= self._next_count or is_late) and tp_size < max(self._deployment.steps))

    def _consider(
        self, view: LayoutView, sequences: Sequence[SequenceView], tp_size: int, *, has_more: bool
    ) -> tuple[Considered, dict[SequenceId, float], float]:
        """Returns the decision, the tokens that each sequence is expected to generate, where they are estimated, and
        `Plan.stage_seconds`."""
        generated = np.array([one.num_generated for one in sequences], float)
        contexts = np.array([one.num_tokens for one in sequences], float)
        longest = self._deployment.max_model_len
        limits = generated + [min(one.max_new_tokens, longest - one.num_tokens) for one in sequences]
        prompts = _prompts(sequences)
        means: dict[SequenceId, float] = {}
        if self._options.estimator == "paper":
            dp_groups = _dp_groups(sequences, [spec.id for spec in view.layout.replicas])
            remaining = run_to_limit(generated, limits)
            plan = one_switch(self._deployment, contexts, remaining, dp_groups, tp_size, prompts, may_narrow=has_more)
        else:
            remaining = self._lifetimes.remaining(generated, limits)
            plan = make_plan(self._deployment, contexts, remaining, tp_size, self._first_size, prompts)
            expected = self._lifetimes.means(generated, limits).tolist()
            means = dict(zip((one.sequence_id for one in sequences), expected, strict=True))
        pays = plan.seconds < (1 - self._options.margin) * plan.kept_seconds
        chosen = plan.stages[0][1] if pays else tp_size
        considered = Considered(
            now=view.now,
            num_unfinished=len(contexts),
            num_tokens=float(contexts.sum()),
            tp_size=tp_size,
            chosen=chosen,
            kept_seconds=plan.kept_seconds,
            seconds=plan.seconds,
            stages=plan.stages,
            with_kv=moves_kv(self._deployment, tp_size, chosen, contexts),
        )
        return considered, means, plan.stage_seconds


def _prompts(sequences: Sequence[SequenceView]) -> Prompts:
    """Returns the prompts of those without a token: the pass that computes the last of a prompt draws the first one."""
    waiting = [one for one in sequences if not one.num_generated]
    tokens = {one.group_id: one.num_prompt_tokens for one in waiting}
    counts = Counter(one.group_id for one in waiting)
    return np.array([*tokens.values()], float), np.array([counts[group_id] for group_id in tokens], float)


def _dp_groups(sequences: Sequence[SequenceView], replica_ids: Sequence[int]) -> NDArray[np.int64]:
    """Returns the place of each sequence's replica in the layout; those that are on none of them are dealt in turn."""
    places = {replica_id: place for place, replica_id in enumerate(replica_ids)}
    turn = itertools.cycle(range(len(replica_ids)))
    found = (places.get(one.last_replica_id) if one.last_replica_id is not None else None for one in sequences)
    return np.array([next(turn) if place is None else place for place in found])
