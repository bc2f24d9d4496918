"""Simulated against paced rollouts: the same workload, policy and pace, in virtual time and by real processes.

    python experiments/validate_simulator.py

Each cell is a policy with a size of the KV cache, in multiples of what the running sequences need at their mean
length. Real processes roll it out under a pace (`ProfilePace`), in turns; rank 0 then simulates it. One more cell
measures the time between two steps, which the simulator takes as an input; it is not scored. Where sequences wait for
room, a millisecond decides which replica has it first, and two paced rollouts differ, too. So both sides are medians:
of the turns, and of simulations whose messages and gaps jitter. And each paced rollout is compared with a simulation of
its own dispatches, in which no such millisecond decides. Prints a table to stderr and one JSON object to stdout.
docs/simulator.md shows and explains a result.
"""

from __future__ import annotations

import inspect
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

import engines
from engines.constraints import Count, NonNegative, Positive
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand, SchedulePolicy
from engines.parallel.layout import nested_layout
from engines.progress import Bar
from engines.rollout.pace import Pace
from experiments import launch
from experiments.bench.models import checkpoint
from experiments.comparison.machine import busy
from experiments.comparison.real import RealWorld
from experiments.comparison.results import ResultOptions, longer_than_paced, report
from experiments.comparison.rollouts import Rollout
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import in_columns, short
from experiments.validation_cells import (
    KINDS,
    MAX_MODEL_LEN,
    OPTIONS,
    TP_SIZES,
    AsRecorded,
    Cell,
    Kind,
    Recorded,
    Run,
    cells,
    describe,
    score,
)
from research.simulator.cluster import Overheads, SimulatedRollout
from research.simulator.pace import ProfilePace
from research.simulator.replay import play, recording

PROFILE = "h100-8b-tp1"
TOKEN_SCALE = 16
"""Tokens of the profile per token here."""
SIMULATIONS = 9
"""Of each cell, with other jitter."""
COLUMNS = {
    "paced s": "{makespan:.2f}",
    "sim s": "{simulated:.2f}",
    "sim range": "{simulated_least:.2f}-{simulated_most:.2f}",
    "error": "{makespan_error:.2%}",
    "as dispatched": "{as_dispatched:.2%}",
    "A/A": "{a_a:.2%}",
    "finish": "{finish_error:.2%}",
    "A/A finish": "{a_a_finish:.2%}",
}
"""Of the table: by title, what of a `score`."""
PARTS = ("busy", "gap", "idle")
HOUSE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(ResultOptions):
    """Compare simulated with paced rollouts."""

    turns: Annotated[int, Meta(ge=2, description="at least 2")] = 2
    """Paced rollouts of each cell; the simulations are compared with their median, and they with each other (A/A)."""
    ranks: Count = 4
    """Processes, each a replica; under torchrun, its number of processes applies instead."""
    scale: Positive = 3.0
    """Seconds here per second of the latency profile; larger where this machine is too slow to follow."""
    batch: Count = 192
    """Sequences of a cell."""
    kinds: Annotated[tuple[Kind, ...], Meta(min_length=1, description="one or more kinds of cells")] = KINDS
    """Cells to run."""
    rooms: Annotated[tuple[Positive, ...], Meta(min_length=1, description="one or more sizes")] = (2.0, 1.0, 0.4)
    """Sizes of a replica's KV cache, in multiples of what its running sequences need at their mean length."""
    message_s: NonNegative = 0.0005
    """Seconds from sending a control message to acting on it, in the simulation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % 4:
            raise ValueError(f"batch={self.batch}: must be a multiple of 4, the size of a group of the mixed cells")


class Paced:
    """Rolls cells out with real processes. All ranks make and call it together."""

    def __init__(self, model: str, groups: engines.GroupCache, pace: Pace) -> None:
        self._model, self._groups, self._pace = model, groups, pace
        self.num_replayed = 0
        """Commands that fresh cores returned again."""
        self.digests: dict[str, set[str]] = {}
        """Of the tokens, by cell: one for all of its rollouts."""
        self.rollouts: dict[str, list[Rollout]] = {}
        """Those that were paced, by cell."""

    def roll_out(self, cell: Cell, policy: SchedulePolicy, *, is_paced: bool = True) -> Run:
        from engines.rollout import world as rollout_world

        world, recorded = self._groups.world, Recorded(policy)
        bench = RealWorld(
            model=self._model,
            groups=self._groups,
            pace=self._pace if is_paced else None,
            options={"dtype": "float64", **OPTIONS},
        )
        variant = cell.variant(world.size, self._pace, recorded)
        with recording(rollout_world):
            done = bench.roll_out(cell.workload(), variant, on_end=partial(self._replay, cell))
        self.digests.setdefault(cell.name, set()).add(done.digest)
        if is_paced:
            self.rollouts.setdefault(cell.name, []).append(done)
        ends = launch.on_rank_0(world, lambda: list(done.finish_times.items()))
        run = describe(done.steps, {tuple(id_): end for id_, end in ends}, world.size)
        return replace(run, dispatches=tuple(recorded.dispatches))

    def _replay(self, cell: Cell, llm: engines.LLM) -> None:
        """Plays the log of the rollout to a fresh core and policies; AssertionError where they decide otherwise."""
        assert llm.rollout is not None
        if llm.rollout.coordinator is None:
            return
        num_ranks = self._groups.world.size
        self.num_replayed += play(
            llm.rollout.coordinator.core.log,  # type: ignore[attr-defined]
            lambda: RolloutCore(
                layout=nested_layout(range(num_ranks), 1),
                world_size=num_ranks,
                schedule_policy=cell.schedule_policy(),
                layout_policy=cell.layout_policy(num_ranks, self._pace),
                keeps_kv=lambda *_: True,
                timeout_s=self._groups.timeout_s,
            ),
        )


def simulate(
    cell: Cell, policy: SchedulePolicy, pace: Pace, overheads: Overheads, num_ranks: int
) -> tuple[Run, SimulatedRollout]:
    world, workload = SimulatedWorld(pace=pace, options=OPTIONS, cluster={"overheads": overheads}), cell.workload()
    done = world.start(workload, cell.variant(num_ranks, pace, policy))[0].roll_out(workload.states())
    return describe(done.steps, done.finish_times, num_ranks), done


def main() -> dict[str, Any] | None:
    config = launch.options(ValidateConfig)
    world = launch.join_world(config.ranks)
    num_ranks = world.size
    if num_ranks % 2:
        raise ValueError(f"ranks={num_ranks}: must be even: a regroup makes replicas of two; give 4")
    import torch

    from algos.tokenizer import byte_tokenizer

    torch.set_num_threads(1)
    layouts = [nested_layout(range(num_ranks), size, epoch=size - 1) for size in TP_SIZES]
    groups = engines.GroupCache(world, layouts)
    pace = ProfilePace.of(PROFILE, scale=config.scale, token_scale=TOKEN_SCALE)
    calibration = Cell(kind="on demand", room=1.5, num_prompts=config.batch, median=60.0)
    chosen = cells(config.kinds, config.rooms, config.batch)
    paced: dict[str, list[Run]] = {}
    policies = {cell.name: cell.schedule_policy() for cell in chosen}

    def policy(cell: Cell) -> SchedulePolicy:
        """The same object live, paced and simulated; but Seer's goes on counting its chunks from rollout to rollout."""
        return cell.schedule_policy() if cell.kind == "chunks" else policies[cell.name]

    with checkpoint("0.8m", max_positions=MAX_MODEL_LEN, dtype="float32", world=world) as model:
        if not world.rank:
            byte_tokenizer().save_pretrained(model)  # trajectories read and observe text
        world.barrier()
        real = Paced(model, groups, pace)
        # Live, by the same policy object; it also warms up.
        real.roll_out(chosen[0], policy(chosen[0]), is_paced=False)
        gap_s = real.roll_out(calibration, OnDemand()).mean_gap
        for _turn in range(config.turns):
            for cell in Bar(chosen, unit="cell", disable=world.rank > 0):
                paced.setdefault(cell.name, []).append(real.roll_out(cell, policy(cell)))
    replayed, tokens_equal = real.num_replayed, all(len(some) == 1 for some in real.digests.values())
    if world.rank:
        return None
    if math.isnan(gap_s):
        raise ValueError(
            f"scale={config.scale}: every gap between two steps was longer than half a step, so this machine cannot "
            f"follow the pace; give a larger --scale"
        )
    even = Overheads(message_s=config.message_s, gap_s=max(0.0, gap_s))
    overheads = [replace(even, jitter=1.0, seed=seed) for seed in range(SIMULATIONS)]
    roll = partial(simulate, pace=pace, num_ranks=num_ranks)
    logs = {cell.name: [roll(cell, policy(cell), overheads=one) for one in overheads] for cell in chosen}
    with busy(len(os.sched_getaffinity(0))):
        log_equal = all(
            roll(cell, cell.schedule_policy(), overheads=overheads[0])[1] == logs[cell.name][0][1] for cell in chosen
        )
    simulated = {name: [run for run, _ in pairs] for name, pairs in logs.items()}
    as_dispatched = {
        cell.name: []
        if cell.regroups
        else [roll(cell, AsRecorded(run.dispatches), overheads=even)[0] for run in paced[cell.name]]
        for cell in chosen
    }
    scores = {name: score(run, paced[name], as_dispatched[name]) for name, run in simulated.items()}
    late = {name: longer_than_paced(name, real.rollouts[name]) for name in scores}
    return _result(config, simulated, paced, scores, late, gap_s, replayed, tokens_equal, log_equal, policies)


def _result(
    config: ValidateConfig,
    simulated: dict[str, list[Run]],
    paced: dict[str, list[Run]],
    scores: dict[str, dict[str, float]],
    late: dict[str, dict[str, Any]],
    gap_s: float,
    num_replayed: int,
    tokens_equal: bool,
    log_equal: bool,
    policies: dict[str, SchedulePolicy],
) -> dict[str, Any]:
    lines = [["cell", *COLUMNS, "preempted", *PARTS]]
    for name, one in scores.items():
        runs = [paced[name], simulated[name]]
        parts = [
            "/".join(f"{statistics.fmean(getattr(run, part) for run in some):.2f}" for some in runs) for part in PARTS
        ]
        preempted = "/".join([*(str(run.num_preempted) for run in paced[name]), f"{one['preempted']:.4g}"])
        lines.append(
            [name, *(column.format(**one).replace("nan%", "-") for column in COLUMNS.values()), preempted, *parts]
        )
    print(in_columns(lines), file=sys.stderr)

    def each(field: str) -> dict[str, float]:
        """Where there is a number."""
        return {name: short(one[field]) for name, one in scores.items() if not math.isnan(one[field])}

    measured = {
        "tier": "paced and sim",
        "policies": {
            name: f"{type(policy).__name__} of {Path(inspect.getfile(type(policy))).relative_to(HOUSE)}"
            for name, policy in policies.items()
        },
        "gap_ms": short(1e3 * gap_s),
        "replay_equal": num_replayed > 0,
        "num_replayed": num_replayed,
        "tokens_equal": tokens_equal,
        "log_equal": log_equal,
        "makespan_error": each("makespan_error"),
        "error_as_dispatched": each("as_dispatched"),
        "finish_error": each("finish_error"),
        "a_a": each("a_a"),
        "steps_longer_than_paced": {name: one["steps_longer_than_paced"] for name, one in late.items()},
        "follows_pace": all(one["follows_pace"] for one in late.values()),
        "simulated_range": {
            name: [short(one["simulated_least"]), short(one["simulated_most"])] for name, one in scores.items()
        },
        "preempted": {
            name: {"paced": [run.num_preempted for run in paced[name]], "sim": scores[name]["preempted"]}
            for name in scores
        },
        "median_error": short(statistics.median(one["makespan_error"] for one in scores.values())),
        "worst_error": short(max(one["makespan_error"] for one in scores.values())),
    }
    return report("validate_simulator", config, measured)


if __name__ == "__main__":
    launch.run(main)
