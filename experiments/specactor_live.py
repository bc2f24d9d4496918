"""The live part of `specactor.py`: a drafter and a verifier against two replicas that draft for themselves, with real
models at this machine's own speed, and what the formulas predict from passes that were measured here."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import engines
from algos.warmstart_config import ModelSize
from engines.rollout.generation import make_states
from engines.rollout.telemetry import StepRecord, guesses
from engines.sequence import SamplingParams
from engines.speculation.desk import Desk
from engines.speculation.drafter import Ask, News, Outcome
from engines.speculation.posts import Serves, ToDrafter, ToVerifier, decode_to_drafter, decode_to_verifier
from engines.speculation.posts import encode as encode_posts
from engines.speculation.remote import RemoteDrafter
from engines.speculation.verify import num_accepted
from experiments import launch
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.turns import AGAIN, interleave, short
from experiments.specactor_cases import Setting, layout
from experiments.specactor_planning import setting_of
from experiments.trained import dtype, encode, make_model, prompts, trained
from research.simulator.stated import StatedDrafter
from research.specactor.plan import Rollout as Planned
from research.specactor.plan import make_plan
from research.specactor.profile import Costs, Pieces
from research.specactor.throughput import Pair, coupled, decoupled, drawn, renewal_tau

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

WINDOWS, BATCHES = (2, 4, 6), (2, 4, 8)
"""Batches of each of the two replicas; a verifier alone has both."""
PROFILED = sorted({size for batch in BATCHES for size in (batch, 2 * batch)})
MOST = 8
"""Longest window of the profile."""
LENGTH, MAX_LEN = 64, 256
METHOD: ModelSize = "draft-2l"
LIVE_FIELDS = ("tgs_error", "planner_vs_best_fixed", "live_bound", "host_us")
"""Of the result, that are among its first ones."""


@dataclass(frozen=True)
class Bench:
    """Two ranks, which call its methods together."""

    world: RealWorld
    draft_model: str
    prompts: list[list[int]]

    def roll_out(self, setting: Setting, batch: int, *, is_in_vain: bool = False) -> Rollout:
        """`batch`: of each rank, where none drafts. `is_in_vain`: all guesses are wrong, and free."""
        options: dict[str, Any] = {}
        if is_in_vain:
            options = {"drafter": "own", "own_drafter": partial(StatedDrafter, lambda *_: 0, lambda *_: 0.0)}
            options |= {"draft_lengths": "fixed", "max_draft_tokens": setting.window}
        elif setting.window:
            options = {"drafter": "model", "draft_model": self.draft_model, "draft_lengths": "fixed"}
            options["max_draft_tokens"] = setting.window
        if setting.num_drafters:
            options["draft_mode"] = setting.mode
        groups = [[LENGTH]] * (2 * batch)
        workload = Workload.forced(groups, num_prompt_tokens=1, most=LENGTH, prompts=self.prompts[: 2 * batch])
        variant = Variant(layout=layout(2, setting.num_drafters), num_kv_tokens=64 * MAX_LEN, options=options)
        return self.world.roll_out(workload, variant)


def tokens_per_second(steps: Iterable[StepRecord]) -> float:
    """Of all replicas, while each of them has all of its sequences: behind its first two passes."""
    by_replica = defaultdict[int, list[StepRecord]](list)
    for step in steps:
        by_replica[step.replica_id].append(step)
    return sum(_rate(some)[0] for some in by_replica.values())


def seconds_of_pass(steps: Iterable[StepRecord]) -> float:
    """Of one replica after the other: the median over them, what is between passes included."""
    by_replica = defaultdict[int, list[StepRecord]](list)
    for step in steps:
        by_replica[step.replica_id].append(step)
    return statistics.median(_rate(some)[1] for some in by_replica.values())


def _rate(steps: list[StepRecord]) -> tuple[float, float]:
    """Returns tokens per second of a replica, and seconds per pass."""
    most = max(step.num_running for step in steps)
    full = [step for step in steps if step.num_running == most][2:]
    took = full[-1].start + full[-1].seconds - full[0].start
    return sum(step.num_running + step.num_accepted for step in full) / took, took / len(full)


@dataclass(frozen=True)
class Profile:
    """D and V as measured here."""

    verify_s: Mapping[int, Mapping[int, float]]
    """Batch -> rows of a sequence -> seconds of a pass."""
    draft_s: Mapping[int, float]
    """Batch -> seconds of a drafter's pass."""
    acceptance: float

    def verify(self, batch: float, rows: float) -> float:
        of_rows = [np.interp(rows, [*some], [*some.values()]) for some in self.verify_s.values()]
        return float(np.interp(batch, [*self.verify_s], of_rows))

    @property
    def costs(self) -> Costs:
        return Costs(drafts={METHOD: Pieces.fit(self.draft_s.items())}, verifiers={1: self.verify}, delay_s=2e-4)

    def predict(self, setting: Setting, batch: int) -> float:
        """Tokens per second of all sequences."""
        costs, window = self.costs, setting.window
        if setting.num_drafters == 0:
            drafting_s = costs.whole_drafts(METHOD, batch, 1, window)
            return 2 * batch * coupled(self.acceptance, window, drafting_s, self.verify(batch, window + 1))
        pair = Pair(self.draft_s[2 * batch], lambda rows: self.verify(2 * batch, rows), 2 * batch, costs.delay_s)
        return 2 * batch * decoupled(pair, self.acceptance, window, "filled").tokens_per_second

    def bound(self, window: int, batch: int) -> float:
        """What decoupling may gain: whole windows of a verifier with twice the batch, over coupled drafting."""
        ratio = renewal_tau(self.acceptance, window) / drawn(self.acceptance, window + 1)
        alone = window * self.draft_s[batch] + self.verify(batch, window + 1)
        return ratio * alone / max(window * self.draft_s[2 * batch], self.verify(2 * batch, window))

    def plan(self, batch: int) -> Setting:
        plan = make_plan(self.costs, Planned(num_sequences=2 * batch, num_gpus=2), {METHOD: self.acceptance})
        return setting_of(plan)


@dataclass
class Profiler:
    """Times passes of each batch, again and again: this machine's speed changes from minute to minute."""

    bench: Bench
    seconds: dict[tuple[int, int, bool], list[float]] = field(default_factory=dict)
    """Batch, rows of a sequence, whether a small model drafts -> seconds of each rollout's passes."""
    drafted: list[StepRecord] = field(default_factory=list)

    def measure(self) -> Profile:
        for batch, window in itertools.product(PROFILED, (0, 2, MOST)):
            setting = Setting(mode="coupled" if window else "off", window=window)
            self._add(batch, window, self.bench.roll_out(setting, batch, is_in_vain=window > 0), has_model=False)
        for batch in PROFILED:
            run = self.bench.roll_out(Setting(mode="coupled", window=MOST), batch)
            self._add(batch, MOST, run, has_model=True)
            self.drafted += run.steps
        return self.profile

    def _add(self, batch: int, window: int, run: Rollout, *, has_model: bool) -> None:
        self.seconds.setdefault((batch, 1 + window, has_model), []).append(seconds_of_pass(run.steps))

    @property
    def profile(self) -> Profile:
        known = {key: statistics.median(some) for key, some in self.seconds.items()}
        verify_s = {batch: {rows: known[batch, rows, False] for rows in (1, 3, 1 + MOST)} for batch in PROFILED}
        draft_s = {
            batch: max(1e-5, (known[batch, 1 + MOST, True] - verify_s[batch][1 + MOST]) / MOST) for batch in PROFILED
        }
        right, compared = guesses(self.drafted)
        return Profile(verify_s, draft_s, right / max(1, compared))


def live_part(models: Path, turns: int, world: TorchGroup) -> dict[str, Any]:
    paths = launch.on_rank_0(world, lambda: [str(make_model(models, 8)), str(trained(models, METHOD))])
    groups = engines.GroupCache(world, [])
    options = {"dtype": dtype(), "block_size": 16, "max_num_seqs": 64, "max_model_len": MAX_LEN}
    real = RealWorld(model=paths[0], groups=groups, pace=None, options=options)
    bench = Bench(real, paths[1], encode(Path(paths[0]), prompts(4 * max(BATCHES))))
    start = time.monotonic()
    bench.roll_out(Setting(mode="coupled", method=METHOD, window=2), BATCHES[0])  # warms up
    profiler = Profiler(bench)
    runs = {batch: _measure(bench, profiler.measure(), batch, max(1, turns - 1)) for batch in BATCHES}
    groups.close()
    known = profiler.profile
    found = {batch: _describe(known, batch, *one) for batch, one in runs.items()}
    errors = [row["error"] for one in found.values() for row in one["settings"].values()]
    return {
        "tier": "live",
        "seconds": short(time.monotonic() - start),
        "acceptance": short(known.acceptance),
        "draft_ms": {batch: short(1e3 * one) for batch, one in known.draft_s.items()},
        "verify_ms": {
            batch: {rows: short(1e3 * one) for rows, one in some.items()} for batch, some in known.verify_s.items()
        },
        "live_bound": {f"{w},{b}": short(known.bound(w, b)) for w in WINDOWS for b in BATCHES},
        "tgs_error": short(statistics.fmean(errors)),
        "planner_vs_best_fixed": short(min(one["planner_vs_best_fixed"] for one in found.values())),
        "host_us": host_us(),
        "batches": found,
    }


Rates = dict[str, list[float]]


def _measure(bench: Bench, known: Profile, batch: int, turns: int) -> tuple[Setting, dict[str, Setting], Rates]:
    """Returns what the planner chooses, all settings of a batch, and tokens per second, each of `turns` twice."""
    settings = [
        Setting(mode=mode, method=METHOD, window=window, num_drafters=int(mode == "filled"))
        for window in WINDOWS
        for mode in ("coupled", "filled")
    ]
    planned = launch.on_rank_0(bench.world.groups.world, lambda: asdict(known.plan(batch)))
    planner = replace(Setting(**planned), method=METHOD)
    every = {one.name: one for one in dict.fromkeys([*settings, planner])}
    calls = {name: lambda one=one: tokens_per_second(bench.roll_out(one, batch).steps) for name, one in every.items()}
    return planner, every, interleave(calls, 2 * turns, name=f"live, {batch}", warm_up=False)


def _describe(
    known: Profile, batch: int, planner: Setting, settings: Mapping[str, Setting], rates: Rates
) -> dict[str, Any]:
    """The first half of the turns finds the best fixed setting, the other half times it."""
    first = {
        name: statistics.median(some[: len(some) // 2]) for name, some in rates.items() if not name.endswith(AGAIN)
    }
    best = max(first, key=lambda name: first[name])
    later = {name: statistics.median(some[len(some) // 2 :]) for name, some in rates.items()}
    base = next(iter(settings))
    rows = {}
    for name, one in settings.items():
        predicted, measured = known.predict(one, batch), statistics.median(rates[name])
        rows[name] = {
            "predicted": short(predicted),
            "measured": short(measured),
            "error": short(abs(predicted / measured - 1)),
        }
    return {
        "planner": planner.name,
        "best_fixed": best,
        "planner_vs_best_fixed": short(later[planner.name] / later[best]),
        "a_a": short(statistics.median(rates[base + AGAIN]) / statistics.median(rates[base])),
        "settings": rows,
    }


@dataclass
class _Loop:
    """A `Link` to a desk in this process, by encoded messages."""

    desk: Desk
    data: list[bytes] = field(default_factory=list)
    is_up: bool = True

    def post(self, posts: list[ToDrafter]) -> None:
        self.data.append(encode_posts(posts))

    def take(self, *, waits: bool) -> list[ToVerifier]:
        received, self.data = self.data, []
        found: list[ToVerifier] = []
        for one in received:
            found += [post for post in decode_to_verifier(one) if not isinstance(post, Serves)]
        return found

    def draft(self) -> None:
        """What the other rank does meanwhile, twice."""
        posts = [post for one in self.data for post in decode_to_drafter(one)]
        answers = [self.desk.hear("", posts), *(self.desk.draft().get("", []) for _ in range(2))]
        self.data = [encode_posts(one) for one in answers if one]


def host_us(count: int = 64, passes: int = 50) -> float:
    """Returns the microseconds that a pass of a verifier spends on its remote drafter: messages, windows, drafts."""
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    states = make_states([[1] * 64] * count, [params] * count, range(count), run_seed=0, policy_step=0)
    link = _Loop(Desk(StatedDrafter(lambda *_: 2, lambda *_: 0.9), max_num_seqs=count))
    drafter, took = RemoteDrafter([link], "filled", window=4, clock=time.monotonic), []
    for _ in range(passes):
        start = time.perf_counter()
        drafts = drafter.propose([Ask(state, 4) for state in states], count, count)
        between = time.perf_counter()
        for state, draft in zip(states, drafts, strict=True):
            state.tokens += [2] * (1 + num_accepted(draft.tokens, [2] * 5))
        again = time.perf_counter()
        drafter.follow(News(drawn=[Outcome(state) for state in states]))
        took.append(time.perf_counter() - again + between - start)
        link.draft()
    return short(1e6 * statistics.median(took[5:]))
