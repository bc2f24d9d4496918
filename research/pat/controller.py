"""When a rollout changes its tensor parallelism, and to which size (PAT §4.1, Algorithm 1). Torch-free.

Each decision is logged with the estimates that it rests on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engines.constraints import NonNegative, check_fields
from engines.coordination.views import EndedView, LayoutChange, LayoutView
from engines.parallel.layout import nested_layout
from research.pat.lifetimes import Lengths, Lifetimes, run_to_limit
from research.pat.lookahead import Deployment, Plan, WorkLeft, make_plan
from research.pat.redistribute import redistribute
from research.pat.switch_cost import moves_kv

_MOST_LOGGED = 10_000
Estimator = Literal["lookahead", "paper"]


@dataclass(frozen=True, kw_only=True)
class PatOptions:
    """How a `PatController` decides."""

    estimator: Estimator = "lookahead"
    """lookahead: lengths as expected from those that have ended, and all later switches. paper: Algorithm 1, in which
    every sequence runs to its limit, and one switch is weighed against none."""
    margin: NonNegative = 0.0
    """Share of the remaining time that a switch must save beyond its cost."""
    dwell_s: NonNegative = 0.0
    """Shortest time between two switches."""
    rung: NonNegative = 0.2
    """Share of the unfinished sequences that must end before it decides again; fewer where a switch is planned."""

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


def generated_by(ended: Iterable[EndedView]) -> list[int]:
    """Returns the generated tokens of those that ended by themselves."""
    return [one.num_generated for one in ended if one.finish_reason != "abort"]


class PatController:
    """A `LayoutPolicy` for equal replicas over all ranks of the layout: wide ones for few sequences, narrow ones for
    many.

    While no sequences are added, fewer and fewer run, for which wider replicas are better: it decides no more once they
    are as wide as they can be. It keeps what it has learnt from one rollout to the next.
    """

    def __init__(self, deployment: Deployment, options: PatOptions | None = None, *, ended: Iterable[int] = ()) -> None:
        """`ended`: generated tokens of earlier sequences."""
        self._deployment = deployment
        self._options = options or PatOptions()
        self._lifetimes = Lifetimes(ended)
        self._phase: int | None = None
        self._last_count = self._next_count = 0
        """Unfinished sequences at the last decision, and at which the next one is due."""
        self._last_switch = -np.inf
        self.log: deque[Considered] = deque(maxlen=_MOST_LOGGED)
        """The latest decisions, also those to stay."""

    def learn(self, ended: Iterable[int]) -> None:
        """Learns the generated tokens of sequences that it has not seen."""
        for num_generated in ended:
            self._lifetimes.add(num_generated)

    def first_tp_size(self, contexts: Lengths, limits: Lengths) -> int:
        """Returns the TP size to begin a rollout with; both are tokens, [sequences]: of prompts, and of what each may
        generate."""
        plan = make_plan(self._deployment, contexts, self._remaining(np.zeros(len(contexts)), limits), None)
        return plan.stages[0][1]

    def decide(self, view: LayoutView) -> LayoutChange | None:
        self.learn(generated_by(view.ended))
        count = view.num_unfinished
        if view.phase != self._phase:
            self._phase, self._last_count, self._last_switch = view.phase, 0, -np.inf
        has_more = count > self._last_count
        tp_size = view.layout.replicas[0].tp_size
        is_due = count <= self._next_count and tp_size < max(self._deployment.steps)
        is_early = view.now - self._last_switch < self._options.dwell_s
        if not count or is_early or not (has_more or is_due):
            return None
        if tp_size not in self._deployment.steps:
            raise ValueError(
                f"PatController: the layout has TP size {tp_size}, and the deployment has times of "
                f"{sorted(self._deployment.steps)}; begin the rollout in one of these, or profile that one, too"
            )
        sequences = list(view.unfinished.values())
        self._last_count = max(count, len(sequences))
        if not sequences:  # as of a host's window, which counts its share of those that wait
            return None
        generated = np.array([one.num_generated for one in sequences], float)
        contexts = generated + [one.num_prompt_tokens for one in sequences]
        longest = self._deployment.max_model_len
        limits = [min(one.max_tokens, longest - one.num_prompt_tokens) for one in sequences]
        remaining = self._remaining(generated, np.array(limits, float))
        considered = self._consider(view.now, contexts, remaining, tp_size, may_narrow=has_more)
        self.log.append(considered)
        planned = next((fewer for fewer, size in considered.stages if size != considered.chosen), 0)
        self._next_count = min(count - 1, max(planned, int(count * (1 - self._options.rung))))
        if considered.chosen == tp_size:
            return None
        self._last_switch = view.now
        ranks = sorted(rank for spec in view.layout.replicas for rank in spec.ranks)
        layout = nested_layout(ranks, considered.chosen, epoch=view.layout.epoch + 1)
        places = redistribute(sequences, view.layout, layout)
        return LayoutChange(layout=layout, places=places, with_kv=considered.with_kv)

    def _remaining(self, generated: Lengths, limits: Lengths) -> Lengths:
        if self._options.estimator == "paper":
            return run_to_limit(generated, limits)
        return self._lifetimes.remaining(generated, limits)

    def _consider(
        self, now: float, contexts: Lengths, remaining: Lengths, tp_size: int, *, may_narrow: bool
    ) -> Considered:
        if self._options.estimator == "paper":
            plan = self._one_switch(contexts, remaining, tp_size, may_narrow)
        else:
            plan = make_plan(self._deployment, contexts, remaining, tp_size)
        pays = plan.seconds < (1 - self._options.margin) * plan.kept_seconds
        chosen = plan.stages[0][1] if pays else tp_size
        return Considered(
            now=now,
            num_unfinished=len(contexts),
            num_tokens=float(contexts.sum()),
            tp_size=tp_size,
            chosen=chosen,
            kept_seconds=plan.kept_seconds,
            seconds=plan.seconds,
            stages=plan.stages,
            with_kv=chosen == tp_size or moves_kv(self._deployment, tp_size, chosen, contexts),
        )

    def _one_switch(self, contexts: Lengths, remaining: Lengths, tp_size: int, may_narrow: bool) -> Plan:
        """Algorithm 1, lines 5 to 20: the best wider size, its switch included, or the present one. With more sequences
        than at the last decision, as at the start of a rollout in the layout that another has left, also a narrower
        one."""
        one, tokens = self._deployment, float(contexts.sum())
        work = WorkLeft.of(one, contexts, remaining)
        kept = float(work.seconds(tp_size).sum())
        totals = {tp_size: kept}
        for size in one.steps:
            if size > tp_size or (may_narrow and size != tp_size):
                totals[size] = float(work.seconds(size).sum()) + one.switch_seconds(tp_size, size, tokens)
        best = min(totals, key=lambda size: (totals[size], size))
        return Plan(stages=((len(contexts), best),), seconds=totals[best], kept_seconds=kept)
