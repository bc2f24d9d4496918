"""How `specactor.py` chooses its settings: by the simulator, by formulas, and by the planner. Torch-free."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial

from engines.parallel.layout import ReplicaSpec
from engines.rollout.telemetry import StepRecord, guesses
from engines.speculation.policy import DraftPolicy
from engines.speculation.window import Guesses
from experiments.comparison.rollouts import Rollout, Workload, makespan
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import timed
from experiments.processes import call_each
from experiments.specactor_cases import CASES, METHODS, Case, Mode, Setting
from research.simulator.stated import simulated_token
from research.specactor import plan as planner
from research.specactor.profile import Costs, drafter_of, verifier_of
from research.specactor.reconfigure import Reconfiguration
from research.specactor.throughput import DecoupledMode, Pair, coupled, decoupled, printed_tau, renewal_tau

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
        found = {method: guesses(some) for method, some in runs.items()}
        shares = {method: right / max(1, compared) for method, (right, compared) in found.items()}
        return cls(shares, math.ceil(context))


def tokens_per_second(steps: Collection[StepRecord]) -> float:
    """Of all replicas, between a fifth and four fifths of the time."""
    start = min(step.start for step in steps)
    took = makespan(steps)
    begin, end = start + 0.2 * took, start + 0.8 * took
    tokens = 0.0
    for step in steps:
        share = (min(end, step.start + step.seconds) - max(begin, step.start)) / max(step.seconds, 1e-9)
        tokens += max(0.0, share) * (step.num_running + step.num_accepted)
    return tokens / (end - begin)


@dataclass(frozen=True)
class Planning:
    """What is known of a case before its rollouts."""

    case: Case
    num_ranks: int
    num_sequences: int
    scale: float

    def costs(self, context: int) -> Costs:
        """D and V, from the pace."""
        spec = ReplicaSpec(id=0, ranks=(*range(self.case.tp_size),))
        paces = {method: self.case.pace(method, self.scale).pace for method in METHODS}
        drafts = {
            method: drafter_of(pace, spec, "own", batches=BATCHES, context=context) for method, pace in paces.items()
        }
        first = next(iter(paces.values()))
        verify = verifier_of(first, spec, batches=BATCHES, max_rows=planner.MAX_WINDOW + 1, context=context)
        return Costs(drafts=drafts, verifiers={self.case.tp_size: verify}, delay_s=MESSAGE_S)

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

    def best(self, mode: Mode, seen: Seen, most_drafters: int | None = None) -> Setting:
        """The setting with drafters of its own that is the fastest by its formula, whatever coupled drafting gives."""
        rates = self.rates(mode, seen, most_drafters or self.num_ranks // 2)
        return max(rates, key=lambda one: rates[one])

    def rates(self, mode: Mode, seen: Seen, most_drafters: int) -> dict[Setting, float]:
        """Returns tokens per second of a sequence, by the formula of a mode with drafters of its own."""
        costs, size = self.costs(seen.context), self.case.tp_size
        rates: dict[Setting, float] = {}
        for num_drafters in range(1, 1 + most_drafters):
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
        return rates

    def gain(self, mode: Mode, p: float, batch: int, context: int) -> float:
        """Returns what a mode at its best gains over plain decoding, with so many sequences on each replica."""
        costs, size = self.costs(context), self.case.tp_size
        verify = costs.verifiers[size]
        if mode == "coupled":
            drafting_s = {window: costs.whole_drafts("0.5B", batch, size, window) for window in WINDOWS}
            rates = [coupled(p, window, took, verify(batch, window + 1)) for window, took in drafting_s.items()]
        else:
            crowd = replace(self, num_sequences=batch * self.num_ranks)
            rates = [*crowd.rates(mode, Seen({"0.5B": p}, context), 2).values()]
        return max(rates) * verify(batch, 1)

    def plan_of(self, setting: Setting, seen: Seen) -> planner.Plan:
        """The plan that would name a setting with drafters of its own; its rate is not estimated."""
        assert setting.mode == "filled" or setting.mode == "strict"
        size, drafters = self.case.tp_size, setting.num_drafters
        return planner.Plan(
            placement=planner.Placement(drafters, size, self.num_ranks - drafters, size),
            batch=math.ceil(self.num_sequences / (self.num_ranks - drafters)),
            leftover_gpus=0,
            mode=setting.mode,
            method=setting.method,
            window=setting.window,
            tokens_per_second=0.0,
        )

    def strict_windows(self, p: float, context: int) -> dict[str, int]:
        """Returns the best window of one drafter by the printed tau, and by renewal."""
        costs, batch = self.costs(context), math.ceil(self.num_sequences / (self.num_ranks - 1))
        draft_s = costs.draft("0.5B", self.num_sequences, self.case.tp_size)
        verify = costs.verifiers[self.case.tp_size]

        def best(tau: Callable[[float, int], float]) -> int:
            windows = range(1, planner.MAX_WINDOW + 1)
            return max(windows, key=lambda w: tau(p, w) / max(w * draft_s, verify(batch, w)))

        return {"printed": best(printed_tau), "renewal": best(renewal_tau)}

    def simulate(self, setting: Setting, workload: Workload) -> Rollout:
        options = {name: one for name, one in self.case.options().items() if name != "dtype"}
        world = SimulatedWorld(pace=self.case.pace(setting.method, self.scale), options=options)
        return world.roll_out(workload, self.case.variant(setting, self.num_ranks, simulated_token))

    def best_coupled(self, workload: Workload, count: int, processes: int | None) -> list[Setting]:
        """Returns the fastest settings of coupled drafting, by the simulator."""
        settings = [Setting(mode="coupled", method=method, window=window) for method in METHODS for window in WINDOWS]
        took = call_each(partial(_seconds, self, workload), settings, processes=processes, unit="rollout")
        return [one for _, one in sorted(zip(took, settings, strict=True), key=lambda pair: pair[0])][:count]

    def reconfigured(self, plan: planner.Plan, seen: Seen) -> DraftPolicy:
        """Algorithm 2 in the plan's layout."""
        costs = self.costs(seen.context)
        return lambda _: Reconfiguration(costs, plan, interval_tokens=self.case.interval)


def _seconds(planning: Planning, workload: Workload, setting: Setting) -> float:
    return planning.simulate(setting, workload).seconds


def seen_in(runs: Mapping[Setting, Rollout]) -> Seen:
    """What coupled rollouts have shown; of each method, those with its first setting."""
    return Seen.of({one.method: run.steps for one, run in reversed([*runs.items()])})


def setting_of(plan: planner.Plan) -> Setting:
    """The setting that a plan names."""
    return Setting(
        mode=plan.mode,
        method=plan.method or "0.5B",
        window=plan.window,
        num_drafters=plan.placement.num_drafters,
    )


def renewal_error(num_periods: int = 20_000) -> float:
    """Returns the mean error of the renewal rate, against windows that are drafted, verified and lost one by one."""
    errors = []
    for p, window in itertools.product((0.5, 0.7, 0.9), (2, 4, 8)):
        rng, num_tokens = random.Random(window), 0
        guesses = Guesses(num_known=1, window=window, ahead=True)
        for _ in range(num_periods):
            is_whole = len(guesses.tokens) >= window
            guesses.add([int(rng.random() < p) for _ in range(window)], [p] * window)
            if is_whole:
                num_right = next((place for place, one in enumerate(guesses.tokens[:window]) if not one), window)
                drawn = min(num_right + 1, window)
                guesses.commit([1] * drawn)
                num_tokens += drawn
        errors.append(abs(renewal_tau(p, window) * num_periods / num_tokens - 1))
    return sum(errors) / len(errors)


def plan_ms(num_gpus: int = 512) -> float:
    """Returns the milliseconds of a plan for so many GPUs in replicas of 4, with 128 sequences each."""
    case = next(one for one in CASES if one.tp_size == 4)
    costs = Planning(case, 8, 1, 1.0).costs(3000 // case.token_scale)
    rollout = planner.Rollout(num_sequences=128 * num_gpus // 4, num_gpus=num_gpus, whole_replicas=True)
    seconds, _ = timed(lambda: planner.make_plan(costs, rollout, {method: 0.8 for method in METHODS}))
    return 1e3 * seconds
