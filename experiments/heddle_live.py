"""The live part of `heddle.py`: trajectories on two ranks at this machine's own speed; planning; the predictor."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engines
from engines.coordination.policies import SchedulePolicy
from experiments import launch
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.parts import PartsConfig
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.turns import interleave, make_row, short, table
from experiments.heddle_cases import singles
from experiments.heddle_options import check_gsm8k
from experiments.heddle_report import exposed_s, queue_of_longest
from experiments.heddle_times import PassTimes
from research.heddle.planning import Planner
from research.heddle.policy import HeddleOptions, HeddlePolicy
from research.heddle.priority import Priority, by_remaining, first_come
from research.workloads.agents import AGENTS, GROUP_SIZE, Errors, StatedPredictions, scaled
from research.workloads.trajectories import Later

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

TOKEN_SCALE, TOOL_S, NUM_GROUPS, NUM_PROMPT_TOKENS, SLOTS = 64, 0.02, 6, 16, 16
SHAPE = "0.8m"
HERE = Path(__file__).parent
PLANNED = ("dp_exact", "dp_ms", "annealing_gap", "annealing_s", "mapping")
PREDICTED = ("predictor", "linear", "shuffled", "ask_ms", "train_s")
"""Of the results of the commands for planning and prediction."""


@dataclass(frozen=True, kw_only=True)
class LiveConfig(PartsConfig):
    """Options of the live part."""

    plans: bool = True
    """Check and time the planners, too, in the live part."""
    predicts: bool = True
    """Fit and judge length predictors, too, in the live part."""
    gsm8k: Path | None = None
    """GSM8K's training file, for a predictor of its trajectories, too."""
    gsm8k_held_out: Path | None = None
    """GSM8K's test file."""
    models: Path = Path("runs/models")
    """Folder of the embedded models, which are made there if they are missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gsm8k(self.gsm8k, self.gsm8k_held_out)


def live_part(config: LiveConfig, world: TorchGroup) -> dict[str, Any]:
    """Fields of the result: on rank 0 alone."""
    import torch

    from algos.tokenizer import byte_tokenizer

    torch.set_num_threads(1)
    lengths = replace(scaled(AGENTS["coding"], TOKEN_SCALE), tool_median_s=TOOL_S)
    groups = lengths.draw(max(1, NUM_GROUPS // config.shrink), GROUP_SIZE, config.seed)
    prompts = random_prompts(len(groups), NUM_PROMPT_TOKENS, seed=config.seed)
    workload = Workload.of_trajectories(groups, num_prompt_tokens=NUM_PROMPT_TOKENS, most=lengths.cap, prompts=prompts)
    longest = NUM_PROMPT_TOKENS + lengths.cap
    options = {"dtype": "float64", "max_num_seqs": SLOTS, "max_model_len": longest, "block_size": 16}
    cache = engines.GroupCache(world, [singles(world.size)])
    with checkpoint(SHAPE, max_positions=longest, dtype="float64", world=world) as model:
        if not world.rank:
            byte_tokenizer().save_pretrained(model)
        world.barrier()
        real = RealWorld(model=model, groups=cache, pace=None, options=options)
        runs, measured = _compare(config, real, workload, longest)
    cache.close()
    if world.rank:
        return {}
    return {"live": _describe(runs, measured, world.size) | _planned_and_predicted(config)}


def _compare(
    config: LiveConfig, real: RealWorld, workload: Workload, longest: int
) -> tuple[dict[str, list[Rollout]], PassTimes]:
    num_ranks, times = real.groups.world.size, PassTimes()
    num_kv_tokens, errors = 2 * SLOTS * longest, Errors()
    logs = [math.log1p(length) for length in (workload.lengths or {}).values()]
    spread = statistics.pstdev(logs)
    quantiles = [-spread * one for one in reversed(errors.residuals[0])]

    def predictor(later: Later) -> StatedPredictions:
        return StatedPredictions(workload.turns or {}, later, errors)

    def variant(schedule: Callable[[], SchedulePolicy], **options: Any) -> Variant:
        return Variant(
            layout=singles(num_ranks),
            num_kv_tokens=num_kv_tokens,
            schedule=schedule,
            predictor=predictor,
            options=options,
        )

    def heddle(priority: Priority = by_remaining, *, places: bool = True) -> Callable[[], SchedulePolicy]:
        options = HeddleOptions(priority=priority, places=places)
        return lambda: HeddlePolicy(Planner(server_of=times.server_of, errors=quantiles), times.costs, options)

    # The first rollout is a plain one; it warms up, and its engine tells what passes take.
    probe = real.roll_out(workload, variant(heddle(places=False)), on_end=partial(times.measure, num_sequences=SLOTS))
    variants = {
        "heddle": variant(heddle()),
        "fcfs": variant(heddle(first_come), priority_margin=math.inf),
        "least_load": variant(heddle(places=False)),
    }
    calls = {name: partial(real.roll_out, workload, one) for name, one in variants.items()}
    runs = interleave(calls, config.turns, name="live", warm_up=False)
    return {**runs, "probe": [probe]}, times


def _describe(runs: dict[str, list[Rollout]], times: PassTimes, num_ranks: int) -> dict[str, Any]:
    equal = len({one.digest for some in runs.values() for one in some}) == 1
    runs.pop("probe")
    row = make_row("live", {name: [one.makespan_s for one in some] for name, some in runs.items()})
    print(table([row]), file=sys.stderr, flush=True)
    ours = runs["heddle"]
    return {
        "tokens_equal": equal,
        "num_ranks": num_ranks,
        "ratios": row["ratios"],
        "a_a": row["a_a"],
        "queue_of_longest_s": {
            name: short(statistics.median(map(queue_of_longest, some))) for name, some in runs.items()
        },
        "exposed_s": {
            name: short(statistics.fmean(exposed_s(one.turns)[name] for one in ours))
            for name in ("prediction", "migration")
        },
        "num_preempted": statistics.median(one.num_preempted for one in ours),
        "row": row,
    }


def _planned_and_predicted(config: LiveConfig) -> dict[str, Any]:
    """What `heddle_planning.py` and `heddle_predicting.py` print; nothing else runs meanwhile."""
    found: dict[str, Any] = {}
    if config.plans:
        result = launch.result_of([str(HERE / "heddle_planning.py")])
        found = {name: result[name] for name in PLANNED}
    if config.predicts:
        options = ["--models", str(config.models)]
        for name in ("gsm8k", "gsm8k_held_out"):
            if (path := getattr(config, name)) is not None:
                options += [f"--{name.replace('_', '-')}", str(path)]
        result = launch.result_of([str(HERE / "heddle_predicting.py"), *options])
        found |= {name: result[name] for name in PREDICTED}
    return found
