"""What Heddle's experiments set by simulation: the planner of a case, and baselines tuned as hard as it. Torch-free."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from engines.coordination.views import ReplicaView
from engines.parallel.layout import Layout
from experiments.comparison.rollouts import Rollout, Workload
from experiments.heddle_cases import Case
from research.heddle.baselines import CacheAware, Hybrid, LeastLoad, Router
from research.heddle.interference import GroupSimulation, server_of, simulated
from research.heddle.placement import Server
from research.heddle.planning import Planner, with_tools
from research.heddle.policy import HeddleOptions, HeddlePolicy
from research.heddle.priority import by_remaining, first_come, shortest_first
from research.pat.deployment import Deployment
from research.pat.profile import deployment_of
from research.workloads.agents import LOG_NORMAL, AgentName, Errors, Residuals

HEDDLE, FCFS, SJF = "heddle", "fcfs", "sjf"
LEAST_LOAD, CACHE_AWARE, HYBRID = "least_load", "cache_aware", "hybrid"
PRIORITIES = {HEDDLE: by_remaining, FCFS: first_come, SJF: shortest_first}
THRESHOLDS, SKEWS = (0.0, 2.0, 4.0, 8.0, 16.0), (1.5, 2.0, 4.0, 32.0)
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
    """The baselines' best settings, by simulation of the same workload."""

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

    def spread(self, errors: Errors) -> float:
        """Returns the deviation of the logarithms of true over predicted lengths before the first turn."""
        lengths = [math.log1p(length) for length in (self.workload.lengths or {}).values()]
        of_errors = {"residuals": statistics.pstdev(errors.residuals[0]), "oracle": 0.0}
        return min(1.0, of_errors.get(errors.kind, 1.0)) * statistics.pstdev(lengths)

    @cached_property
    def deployment(self) -> Deployment:
        return deployment_of(
            self.case.pace,
            num_ranks=max(self.num_kv_tokens),
            num_kv_tokens=self.num_kv_tokens,
            max_num_seqs=self.case.options()["max_num_seqs"],
            max_model_len=self.case.max_model_len,
        )

    def planner(self, error: float) -> Planner:
        """Places by simulated groups, and yields to least load where the predictions' errors make that better."""
        case, turns = self.case, (self.workload.turns or {}).values()
        deployment = self.deployment
        generated = sum(turn.num_generated for one in turns for turn in one)
        observed = sum(turn.num_observed for one in turns for turn in one)
        tool_s = sum(turn.tool_s for one in turns for turn in one)
        groups = {
            size: with_tools(
                GroupSimulation.of(deployment, size, case.num_prompt_tokens),
                growth=(generated + observed) / generated,
                tool_s=tool_s / generated,
                prefill_s=self._prefill_s(size),
            )
            for size in self.num_kv_tokens
        }
        cost = simulated(groups)
        return Planner(server_of=partial(self.server, deployment), group_seconds=cost, error=error)

    def _prefill_s(self, tp_size: int) -> float:
        """Of a token here."""
        num_tokens = 2048
        seconds = self.case.pace.profiles[tp_size].step_seconds(1, num_tokens, num_tokens)
        return self.case.pace.scale * seconds / num_tokens

    def server(self, deployment: Deployment, replica: ReplicaView, mean: float) -> Server:
        return self.server_at(deployment, replica.spec.tp_size, mean)

    def server_at(self, deployment: Deployment, tp_size: int, mean: float) -> Server:
        """A replica of this size, with F for trajectories of this mean length."""
        context = min(self.num_kv_tokens[tp_size], self.case.num_prompt_tokens + mean)
        return server_of(deployment, tp_size, context=context, num_prompt_tokens=self.case.num_prompt_tokens)

    def schedule(self, name: str, tuned: Tuned, error: float, **options: object) -> Callable[[], HeddlePolicy]:
        """Makes the policy of a variant. What replaces placement has the same priorities."""
        routers: Mapping[str, Callable[[], Router]] = {
            LEAST_LOAD: lambda: LeastLoad(threshold=tuned.threshold),
            CACHE_AWARE: CacheAware,
            HYBRID: lambda: Hybrid(skew=tuned.skew),
        }
        fields = {"waits_s": WAITS_S * self.clock, "priority": PRIORITIES.get(name, by_remaining), **options}
        heddle = HeddleOptions(places=name not in routers, **fields)  # type: ignore[arg-type]
        router = routers.get(name, routers[LEAST_LOAD])
        return self.case.heddle(self.planner(error), heddle, router)

    def simulate(self, name: str, tuned: Tuned, errors: Errors, **options: object) -> Rollout:
        """`options`: of `HeddleOptions`."""
        margin = math.inf if name == FCFS else 0.0
        schedule = self.schedule(name, tuned, self.spread(errors), **options)
        variant = self.case.variant(self.layout, 0, schedule, self.workload.turns, errors, priority_margin=margin)
        return replace(self.case.world(), num_kv_tokens=self.num_kv_tokens).roll_out(self.workload, variant)

    def tune(self, errors: Errors) -> Tuned:
        def took(tuned: Tuned, name: str) -> float:
            return self.simulate(name, tuned, errors).makespan_s

        threshold = min(THRESHOLDS, key=lambda one: took(Tuned(threshold=one, skew=32.0), LEAST_LOAD))
        skew = min(SKEWS, key=lambda one: took(Tuned(threshold=threshold, skew=one), HYBRID))
        return Tuned(threshold=threshold, skew=skew)
