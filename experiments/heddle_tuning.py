"""What Heddle's experiments set by simulation: the planner of a case, and baselines tuned as hard as it. Torch-free."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

from engines.coordination.views import ReplicaView
from engines.parallel.layout import Layout, ReplicaSpec
from experiments.comparison.rollouts import Rollout, Workload
from experiments.heddle_cases import Case
from research.heddle.baselines import CacheAware, Hybrid, LeastLoad, Router, Soonest
from research.heddle.interference import GroupSimulation, server_of, simulated, simulated_spread
from research.heddle.placement import Server
from research.heddle.planning import Planner, with_tools
from research.heddle.policy import HeddleOptions, HeddlePolicy
from research.heddle.priority import by_remaining, first_come, shortest_first
from research.pat.deployment import Deployment
from research.pat.profile import deployment_of
from research.workloads.agents import LOG_NORMAL, AgentName, Errors, Residuals
from research.workloads.trajectories import Turn

HEDDLE, FCFS, SJF = "heddle", "fcfs", "sjf"
LEAST_LOAD, CACHE_AWARE, HYBRID = "least_load", "cache_aware", "hybrid"
PRIORITIES = {HEDDLE: by_remaining, FCFS: first_come, SJF: shortest_first}
THRESHOLDS, SKEWS = (0.0, 2.0, 4.0, 8.0, 16.0), (1.5, 2.0, 4.0, 32.0)
UNEVEN = 1.1
"""See `Planner.uneven`: 1.07 to 1.14 for the three agents, by simulation (`test_estimates_against_the_simulator`)."""
CLOCKS = (0.99, 1.0, 1.01)
"""By which the time of steps is multiplied: one turn that goes elsewhere may change a rollout by a third, so that a
single simulation does not say which of two settings is better."""
WAITS_S = 1.0
"""Of the profile: for how long a turn waits for a prediction that takes longer than its tool (Table 1)."""
TASKS: Mapping[AgentName, str] = {"coding": "gsm8k", "search": "lookup", "math": "gsm8k"}
"""The task whose predictor's errors an agent's predictions have."""
PREDICTOR = Path(__file__).parents[1] / "docs" / "results" / "heddle_predicting.json"


def fitted_residuals(task: str, path: Path = PREDICTOR) -> Residuals:
    """Returns the errors of the predictor that was fitted for a task; assumed ones where there is no result."""
    if not path.is_file():
        return LOG_NORMAL
    result = json.loads(path.read_text())
    rows, spreads = result["residuals"][task], result["spread"][task]
    # Without the least and the largest of all, which are no quantiles.
    return tuple(
        tuple(-value / spreads[turn] for value in reversed(rows[turn][1:-1])) for turn in sorted(rows, key=int)
    )


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The baselines' best settings, by the medians of simulations of the same workload."""

    threshold: float
    skew: float


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A case on replicas."""

    case: Case
    workload: Workload
    layout: Layout
    num_kv_tokens: Mapping[int, int]
    """Tokens that the KV cache of a replica holds, by the TP sizes that there may be."""

    @property
    def clock(self) -> float:
        """Seconds here per second of the profile, of what lies between steps: a token here stands for several."""
        return self.case.scale / self.case.token_scale

    def errors(self, errors: Errors) -> tuple[float, ...]:
        """Returns quantiles of the logarithm of true over predicted lengths before the first turn."""
        spread = statistics.pstdev(math.log1p(length) for length in (self.workload.lengths or {}).values())
        match errors.kind:
            case "residuals":
                return tuple(-spread * one for one in reversed(errors.residuals[0]))
            case "oracle":
                return (0.0,)
        return tuple(spread * NormalDist().inv_cdf((place + 0.5) / 21) for place in range(21))

    @cached_property
    def deployment(self) -> Deployment:
        return deployment_of(
            self.case.pace,
            num_ranks=max(self.num_kv_tokens),
            num_kv_tokens=self.num_kv_tokens,
            max_num_seqs=self.case.options()["max_num_seqs"],
            max_model_len=self.case.max_model_len,
        )

    def planner(self, errors: Errors) -> Planner:
        """Places by simulated groups, and yields to least load where the predictions' errors make that better."""
        return Planner(
            server_of=self.server,
            group_seconds=simulated(self.groups),
            spread_seconds=simulated_spread(self._groups(moved=1 - 1 / len(self.layout.replicas))),
            uneven=UNEVEN,
            errors=self.errors(errors),
        )

    @cached_property
    def groups(self) -> dict[int, GroupSimulation]:
        """By TP size, with the mean tools and observations of this workload."""
        return self._groups(moved=0.0)

    def _groups(self, moved: float) -> dict[int, GroupSimulation]:
        """`moved`: the share of the turns that are on another replica than the last one, and read their KV."""
        case, turns = self.case, (self.workload.turns or {}).values()
        generated = sum(turn.num_generated for one in turns for turn in one)
        observed = sum(turn.num_observed for one in turns for turn in one)
        tool_s = sum(turn.tool_s for one in turns for turn in one)
        read = sum(case.num_prompt_tokens + grown for one in turns for grown in _contexts(one))
        return {
            size: with_tools(
                GroupSimulation.of(self.deployment, size, case.num_prompt_tokens),
                growth=(generated + observed) / generated,
                tool_s=tool_s / generated,
                prefill_s=self._prefill_s(size),
                read_s=moved * read / generated * case.pace.transfer(_spec(size), 1, "host"),
            )
            for size in self.num_kv_tokens
        }

    def _prefill_s(self, tp_size: int) -> float:
        """Of a token here."""
        num_tokens, pace = 2048, self.case.pace
        seconds = pace.profiles[tp_size].step_seconds(1, num_tokens, num_tokens)
        return pace.scale * pace.sequence_scale * seconds / num_tokens

    def server(self, replica: ReplicaView, mean: float) -> Server:
        return self.server_at(replica.spec.tp_size, mean)

    def server_at(self, tp_size: int, mean: float) -> Server:
        """A replica of this size, with F for trajectories of this mean length."""
        context = min(self.num_kv_tokens[tp_size], self.case.num_prompt_tokens + mean)
        server = server_of(self.deployment, tp_size, context=context, num_prompt_tokens=self.case.num_prompt_tokens)
        return replace(server, longest=min(server.longest, self.groups[tp_size].longest))

    def schedule(self, name: str, tuned: Tuned, errors: Errors, **options: object) -> Callable[[], HeddlePolicy]:
        """Makes the policy of a variant. What replaces placement has the same priorities."""
        routers: Mapping[str, Callable[[], Router]] = {
            LEAST_LOAD: lambda: LeastLoad(threshold=tuned.threshold),
            CACHE_AWARE: CacheAware,
            HYBRID: lambda: Hybrid(skew=tuned.skew),
        }
        fields = {"waits_s": WAITS_S * self.clock, "priority": PRIORITIES.get(name, by_remaining), **options}
        heddle = HeddleOptions(places=name not in routers, **fields)  # type: ignore[arg-type]
        router = routers.get(name, lambda: Soonest(self.case.costs().token_s, threshold=tuned.threshold))
        return self.case.heddle(self.planner(errors), heddle, router)

    def simulate(self, name: str, tuned: Tuned, errors: Errors, **options: object) -> Rollout:
        """`options`: of `HeddleOptions`."""
        margin = math.inf if name == FCFS else 0.0
        schedule = self.schedule(name, tuned, errors, **options)
        variant = self.case.variant(self.layout, 0, schedule, self.workload.turns, errors, priority_margin=margin)
        return replace(self.case.world(), num_kv_tokens=self.num_kv_tokens).roll_out(self.workload, variant)

    def makespans(self, name: str, tuned: Tuned, errors: Errors) -> list[float]:
        """Returns the simulated ones with `CLOCKS`, in ascending order."""
        clocks = [replace(self, case=replace(self.case, scale=self.case.scale * one)) for one in CLOCKS]
        return sorted(one.simulate(name, tuned, errors).makespan_s for one in clocks)

    def tune(self, errors: Errors) -> Tuned:
        def took(tuned: Tuned, name: str) -> float:
            return statistics.median(self.makespans(name, tuned, errors))

        threshold = min(THRESHOLDS, key=lambda one: took(Tuned(threshold=one, skew=32.0), LEAST_LOAD))
        skew = min(SKEWS, key=lambda one: took(Tuned(threshold=threshold, skew=one), HYBRID))
        return Tuned(threshold=threshold, skew=skew)


def _spec(tp_size: int) -> ReplicaSpec:
    return ReplicaSpec(id=0, ranks=tuple(range(tp_size)))


def _contexts(turns: Items[Turn]) -> list[int]:
    """Tokens behind the prompt at the start of each turn but the first."""
    return [*accumulate(turn.num_generated + turn.num_observed for turn in turns[:-1])]
