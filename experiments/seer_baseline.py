"""Seer's baselines at their best: slots, what happens to preempted sequences, and an assignment's luck. Torch-free.

A baseline binds sequences to replicas. How many of them run at a time is the engine's `max_num_seqs`; preempted ones
are swapped or recomputed. The best of these settings counts. A random assignment takes up to 1.5 times as long as
another, so a baseline's time is the median over several.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from engines.config import Preemption
from engines.coordination.policies import OnDemand, SchedulePolicy
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import short
from experiments.processes import call_each
from research.seer.baselines import RandomStatic

BoundName = Literal["group static", "static by sequence", "on demand"]
WAYS: tuple[Preemption, ...] = ("recompute", "swap")
T = TypeVar("T")


class Tuning(NamedTuple):
    """A setting of a baseline's engine."""

    max_num_seqs: int
    preemption: Preemption


class Trial(NamedTuple):
    """A rollout of a baseline."""

    name: BoundName
    tuning: Tuning
    assignment: int
    """Seed of a random one."""


def policy(name: BoundName, assignment: int) -> SchedulePolicy:
    if name == "on demand":
        return OnDemand()
    return RandomStatic(assignment, by="group" if name == "group static" else "sequence")


def bound(plain: Variant, trial: Trial, **options: Any) -> Variant:
    """Returns a baseline with an engine's setting and an assignment."""
    schedule = partial(policy, trial.name, trial.assignment)
    return replace(plain, schedule=schedule, options={**trial.tuning._asdict(), **options})


def assignments(name: BoundName, count: int, seed: int = 0) -> range:
    """Returns seeds of assignments, from `seed` on: `count`, or one where nothing is random."""
    return range(seed, seed + (1 if name == "on demand" else count))


def best(seconds: Mapping[Tuning, Items[float]]) -> Tuning:
    """Returns the setting with the least median over the same assignments."""
    return min(seconds, key=lambda one: statistics.median(seconds[one]))


def report(seconds: Mapping[Tuning, Items[float]]) -> dict[str, Any]:
    """Returns the best setting, and the median seconds of each."""
    named = {one: f"{one.max_num_seqs} slots, {one.preemption}" for one in seconds}
    sweep = {named[one]: short(statistics.median(some)) for one, some in seconds.items()}
    return {"setting": named[best(seconds)], "sweep_s": sweep}


def evenly(ranked: Items[T], count: int) -> list[T]:
    """Returns `count` items from evenly spread places of a ranking: of one, its median."""
    return [ranked[(2 * number + 1) * len(ranked) // (2 * count)] for number in range(count)]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A baseline at its best."""

    tuning: Tuning
    assignments: list[int]
    """The fastest first, where that is known."""
    seconds: list[float]
    """Simulated, of a rollout with each."""
    report: dict[str, Any]
    """As that of `report`."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Rollouts of a paced workload in virtual time: the same core, policies and prices."""

    TRIALS, ASSIGNMENTS = 2, 9

    world: SimulatedWorld
    workload: Workload
    plain: Variant
    """What all baselines have in common."""
    processes: int | None = None
    """Simulations at a time; see `call_each`."""

    def of(self, trial: Trial) -> float:
        return self.world.roll_out(self.workload, bound(self.plain, trial)).seconds

    def tune(self, names: Items[BoundName], slots: Items[int], seed: int) -> dict[BoundName, Tuned]:
        """Returns each baseline with the best of all settings, tried with the same assignments, from `seed` on."""
        settings = [Tuning(*one) for one in itertools.product(slots, WAYS)]
        tried = self._each(
            Trial(name, one, number)
            for name in names
            for one in settings
            for number in assignments(name, self.TRIALS, seed)
        )
        sweeps = {name: {one: [*tried[name, one].values()] for one in settings} for name in names}
        chosen = {name: best(sweep) for name, sweep in sweeps.items()}
        taken = self._each(
            Trial(name, one, number)
            for name, one in chosen.items()
            for number in assignments(name, self.ASSIGNMENTS, seed)
        )
        ranked = {name: sorted(taken[name, one].items(), key=lambda item: item[1]) for name, one in chosen.items()}
        return {
            name: Tuned(
                tuning=one,
                assignments=[number for number, _ in ranked[name]],
                seconds=[short(seconds) for _, seconds in ranked[name]],
                report=report(sweeps[name]),
            )
            for name, one in chosen.items()
        }

    def over_paced(
        self, runs: Mapping[str, Items[Rollout]], variants: Mapping[str, Items[Variant]]
    ) -> dict[str, float]:
        """Returns, for each variant without drafts, its simulated seconds over the paced ones: medians."""
        found = {}
        for name, some in runs.items():
            different = {id(one): one for one in variants.get(name, ())}.values()
            if different and not any("drafter" in one.options for one in different):
                seconds = statistics.median(self.world.roll_out(self.workload, one).seconds for one in different)
                found[name] = short(seconds / statistics.median(run.seconds for run in some))
        return found

    def _each(self, trials: Iterable[Trial]) -> dict[tuple[BoundName, Tuning], dict[int, float]]:
        """Returns the seconds of each trial, by its assignment."""
        trials = [*trials]
        found = defaultdict[tuple[BoundName, Tuning], dict[int, float]](dict)
        done = call_each(self.of, trials, processes=self.processes, unit="rollout")
        for trial, seconds in zip(trials, done, strict=True):
            found[trial.name, trial.tuning][trial.assignment] = seconds
        return found
