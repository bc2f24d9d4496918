"""How `specactor.py` chooses its settings: by the simulator, by formulas, and by the planner. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from engines.parallel.layout import ReplicaSpec
from engines.rollout.telemetry import StepRecord
from engines.speculation.drafter import DraftPass
from experiments.comparison.rollouts import Rollout, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.specactor_cases import MEDIAN, METHODS, Case, Mode, Setting
from research.simulator.stated import simulated_token
from research.specactor import plan as planner
from research.specactor.profile import Costs, Pieces, verifier_of
from research.specactor.throughput import DecoupledMode, Pair, coupled, decoupled

WINDOWS = (1, 2, 3, 4, 5, 6, 8)
"""Of coupled drafting."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MESSAGE_S = 0.5e-3


@dataclass(frozen=True)
class Seen:
    """What rollouts have shown."""

    acceptance: Mapping[str, float]
    """By method: the share of right guesses among those behind right ones only."""
    context: int
    """Tokens of a sequence in a pass, on average."""

    @classmethod
    def of(cls, runs: Mapping[str, Items[StepRecord]]) -> Seen:
        """`runs`: steps of coupled rollouts, by method."""
        steps = [step for some in runs.values() for step in some]
        context = sum(step.num_context_tokens for step in steps) / max(1, sum(step.num_running for step in steps))
        return cls({method: accepted_share(some) for method, some in runs.items()}, math.ceil(context))


def accepted_share(steps: Collection[StepRecord]) -> float:
    right = sum(step.num_accepted for step in steps)
    tried = sum(sum(step.drafted[:1]) + sum(step.accepted[: len(step.drafted) - 1]) for step in steps)
    return right / max(1, tried)


@dataclass(frozen=True)
class Planning:
    """What is known of a case before its rollouts."""

    case: Case
    num_ranks: int
    num_sequences: int
    scale: float

    def costs(self, context: int) -> Costs:
        """D and V, from the pace."""
        case = self.case
        spec, alone = (ReplicaSpec(id=0, ranks=(*range(size),)) for size in (case.tp_size, 1))
        paces = {method: case.pace(method, self.scale).pace for method in METHODS}
        drafts = {
            method: Pieces.fit((rows, pace.draft(alone, "own", [DraftPass(rows, rows * context)])) for rows in BATCHES)
            for method, pace in paces.items()
        }
        verify = verifier_of(
            next(iter(paces.values())), spec, batches=BATCHES, max_rows=planner.MAX_WINDOW + 1, context=context
        )
        return Costs(drafts=drafts, verifiers={case.tp_size: verify}, delay_s=MESSAGE_S)

    def plan(self, seen: Seen) -> planner.Plan:
        """What Algorithm 1 chooses, from what coupled rollouts have shown."""
        size = self.case.tp_size
        rollout = planner.Rollout(
            num_sequences=self.num_sequences,
            num_gpus=self.num_ranks * size,
            max_len=seen.context,
            kv_tokens={size: self.case.pace("0.5B").pace.num_kv_tokens(self.case.longest)[size]},
            whole_replicas=True,
        )
        return planner.make_plan(self.costs(seen.context), rollout, seen.acceptance)

    def best(self, mode: Mode, seen: Seen) -> Setting:
        """The setting with drafters of its own that is the fastest by its formula, whatever coupled drafting gives."""
        costs, size = self.costs(seen.context), self.case.tp_size
        rates: dict[Setting, float] = {}
        for num_drafters in range(1, self.num_ranks // 2 + 1):
            batch = math.ceil(self.num_sequences / (self.num_ranks - num_drafters))
            of_drafter = math.ceil(self.num_sequences / num_drafters)
            for method, p in seen.acceptance.items():
                draft_s = costs.draft(method, of_drafter, size)
                verify = partial(costs.verifiers[size], batch)
                for window in range(1, planner.MAX_WINDOW + 1):
                    if mode == "naive":
                        rate = coupled(p, window, window * draft_s + 2 * MESSAGE_S, verify(window + 1))
                    else:
                        kind: DecoupledMode = "strict" if mode == "strict" else "filled"
                        rate = decoupled(Pair(draft_s, verify, batch, MESSAGE_S), p, window, kind).tokens_per_second
                    rates[Setting(mode=mode, method=method, window=window, num_drafters=num_drafters)] = rate
        return max(rates, key=lambda one: rates[one])

    def simulate(self, setting: Setting, workload: Workload) -> Rollout:
        options = {name: one for name, one in self.case.options().items() if name != "dtype"}
        world = SimulatedWorld(pace=self.case.pace(setting.method, self.scale), options=options)
        return world.roll_out(workload, self.case.variant(setting, self.num_ranks, simulated_token))

    def best_coupled(self, count: int) -> list[Setting]:
        """Returns the fastest settings of coupled drafting by its formula."""
        chances = {method: sum(self.case.chances) / 2 for method in METHODS}
        costs, batch = self.costs(MEDIAN // self.case.token_scale), self.num_sequences // self.num_ranks
        size = self.case.tp_size

        def rate(one: Setting) -> float:
            drafting_s = costs.whole_drafts(one.method, batch, size, one.window)
            return coupled(chances[one.method], one.window, drafting_s, costs.verifiers[size](batch, one.window + 1))

        settings = [Setting(mode="coupled", method=method, window=window) for method in METHODS for window in WINDOWS]
        return sorted(settings, key=rate, reverse=True)[:count]


def setting_of(plan: planner.Plan) -> Setting:
    """The setting that a plan names."""
    return Setting(
        mode=plan.mode,
        method=plan.method or "0.5B",
        window=plan.window,
        num_drafters=plan.placement.num_drafters,
    )
