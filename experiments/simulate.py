"""One workload on many simulated GPUs under several dispatch policies, in virtual time. Tier: sim.

    python experiments/simulate.py --gpus 8 --groups 64 --slots 32 --median 800 --cap 6000

    python experiments/simulate.py --policies group-static on-demand seer seer+pat --median 1000 --cap 8000
    python experiments/simulate.py --lengths runs/NAME/lengths.jsonl --policies on-demand my_policy.py:Shortest
    python experiments/simulate.py --turns.median 6 --turns.tool-s 2 --median 200 --cap 8000

The policies are the objects of a live rollout: `group-static` is the baseline of Seer's paper, `divided` and `seer` are
Seer's; `oracle` (Seer's with the true lengths) and `longest-first` alone know the lengths, as hindsight does. With
`+pat` behind it, the TP size changes, too (PAT). Prints a table to stderr and one JSON object to stdout.
docs/simulator.md explains what is simulated, and how far to trust it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from engines.config import DraftLengths, EngineConfig
from engines.constraints import Count, Fraction, Int64, NonNegative, Positive, WholeNumber, check_fields
from engines.decoding import from_json
from engines.parallel.layout import contiguous_layout
from engines.progress import Bar
from engines.rollout.telemetry import StepRecord, draft_metrics, turn_metrics, write_chrome_trace
from experiments import launch
from experiments.comparison.results import check_figure, check_folders
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import in_columns
from experiments.engine_options import DRAFT_POLICIES, DraftPolicyName
from experiments.pat_cases import on_each_host
from experiments.policies import ChunkFields, schedule_policy
from research.pat.controller import PatController, PatOptions
from research.pat.profile import deployment_of
from research.seer.context_aware import ContextOptions
from research.simulator.cluster import Overheads
from research.simulator.drafts import SEER_TABLE_2, DraftAcceptance
from research.simulator.hindsight import floor_seconds
from research.simulator.latency import LatencyProfile, profile
from research.simulator.pace import ProfilePace
from research.workloads.lengths import GroupedLengths, LogNormalLengths
from research.workloads.trajectories import Spread, TrajectoryLengths, Turn

BLOCK_SIZE = 16
HINDSIGHT, WITH_PAT = "longest-first", "+pat"


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """Makes the sequences trajectories. `--median` and `--sigma` are then of the tokens of one turn, `--cap` of all
    that follows the prompt, `--correlation` of the numbers of turns."""

    median: NonNegative = 0.0
    """Turns of the median trajectory; 0: the sequences have no turns."""
    sigma: NonNegative = 0.6
    """Standard deviation of the logarithm of the number of turns."""
    most: Count = 100
    """Most turns of a trajectory."""
    tool_s: NonNegative = 1.0
    """Seconds of the median tool call."""
    tool_sigma: Spread = 1.0
    """Standard deviation of their logarithm."""
    observed: Positive = 200.0
    """Tokens that the median tool call returns."""
    observed_sigma: NonNegative = 0.8
    """Standard deviation of their logarithm."""

    def __post_init__(self) -> None:
        check_fields(self, "turns.")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(ChunkFields):
    """Roll one workload out on simulated GPUs, under each of the policies."""

    gpus: Count = 64
    """GPUs of the cluster."""
    device: str = "h100"
    """A device of research/simulator/datasheets.py."""
    model: str = "8b"
    """A model of research/simulator/datasheets.py."""
    tensor_parallel_size: Count = 1
    """GPUs of a replica."""
    groups: Count = 64
    """Prompts."""
    group_size: Count = 16
    """Responses to each prompt."""
    prompt: Count = 512
    """Tokens of a prompt."""
    median: Positive = 2750.0
    """Tokens of the median response. With the default sigma 10.85 % of responses pass 8K (PAT, section 2)."""
    sigma: NonNegative = 0.884
    """Standard deviation of the logarithm of the length."""
    cap: Count = 20_000
    """Tokens of the longest response."""
    correlation: Fraction = 0.5
    """Correlation between the logarithms of the lengths of two responses of a group."""
    lengths: Path | None = None
    """Replay the lengths of a run's `lengths.jsonl`, times `--length-scale`, instead of drawing them: those of its last
    step, group by group, of which there are as many as there."""
    length_scale: Positive = 1.0
    """Tokens here for each token of `--lengths`."""
    turns: TurnOptions = field(default_factory=TurnOptions)
    gpus_per_host: Count = 8
    """GPUs of a host: KV that a sequence takes to another host crosses the network."""
    slots: Count = 128
    """Most sequences that a replica runs at once."""
    policies: Annotated[tuple[str, ...], Meta(min_length=1, description="one or more policies")] = (
        "static",
        "on-demand",
        HINDSIGHT,
    )
    """Policies to compare: static, on-demand, group-static, divided, divided-in-turns, seer, oracle, longest-first, or
    a class of your own as FILE.py:Class; each also with `+pat` behind it. Chunks are an eighth of `--cap` by default.
    Heddle, whose trajectories are predicted, is simulated by experiments/heddle_sim.py."""
    history: WholeNumber = 2048
    """Lengths of earlier sequences that `+pat` knows: of the same distribution, or of the rollouts of `--lengths`
    before its last one."""
    pat: PatOptions = field(default_factory=PatOptions)
    message_s: NonNegative = 0.0005
    """Seconds from sending a control message to acting on it."""
    gap_s: NonNegative = 0.0
    """Seconds between two steps of a replica, beside what the latency profile counts."""
    seed: Int64 = 0
    """Random seed of the response lengths, and of which draft tokens are right."""
    max_draft_tokens: WholeNumber = 0
    """Most draft tokens of a sequence in a step; 0: no drafts."""
    draft_server: bool = False
    """References are also the sequences that other replicas run or have run."""
    draft_tokens_per_step: tuple[tuple[int, float], ...] = tuple(SEER_TABLE_2.items())
    """How often drafts are right: pairs of a number of references (others of the group that have ended, or are longer)
    and the tokens that a sequence then yields in a step with 8 draft tokens. The default is Seer's Table 2."""
    draft_lengths: DraftLengths = "adaptive"
    """Which draft tokens join a pass: those that raise the expected tokens per second, or always all."""
    draft_policy: DraftPolicyName = "marginal-gain"
    """What decides adaptive lengths of drafts: marginal-gain drafts as long as tokens per second are expected to rise,
    thresholds give all drafts one length by the batch size and the acceptance so far."""
    figure: Path | None = None
    """Draw the replicas' timelines there; and what drafts yield, in a second file beside it (`<name>_drafts`)."""
    traces: Path | None = None
    """Write a Chrome trace for each policy into this folder."""
    wandb: Literal["auto", "off"] = "auto"
    """auto: a run for each policy, by wandb's own settings and environment; offline if nobody is logged in."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        self.profile()
        self.chunk_options().check(block_size=BLOCK_SIZE, max_tokens=max(self.cap, BLOCK_SIZE))
        if self.lengths is not None and not self.lengths.is_file():
            raise ValueError(f"lengths={str(self.lengths)!r}: is no file; a run of train.py has one in its folder")
        if self.lengths is not None and self.turns.median:
            raise ValueError(f"lengths={str(self.lengths)!r}: has no turns; leave it out, or --turns.median")
        if len({*self.policies}) < len(self.policies):
            raise ValueError(f"policies={self.policies}: names one twice; leave it out")
        for name in self.policies:
            if name.removesuffix(WITH_PAT) == "heddle":
                raise ValueError(f"policies={name!r}: needs predictions of lengths; use experiments/heddle_sim.py")
            schedule_policy("policies", name.removesuffix(WITH_PAT), self.chunk_options(), {})
        EngineConfig(**self.options())
        self.drafts()
        if not self.changes_tp and self.pat != PatOptions():
            raise ValueError(
                f"pat: has no effect with policies={self.policies}; add {WITH_PAT} to one, or leave it out"
            )
        if self.gpus % self.tensor_parallel_size:
            raise ValueError(
                f"gpus={self.gpus}: is no multiple of tensor_parallel_size={self.tensor_parallel_size}; change --gpus"
            )
        if self.gpus % self.gpus_per_host and self.gpus > self.gpus_per_host and self.changes_tp:
            raise ValueError(
                f"gpus={self.gpus}: is no multiple of gpus_per_host={self.gpus_per_host}, and {WITH_PAT} needs whole "
                f"hosts; change --gpus"
            )
        if self.gpus_per_host % self.tensor_parallel_size:
            raise ValueError(
                f"gpus_per_host={self.gpus_per_host}: is no multiple of tensor_parallel_size="
                f"{self.tensor_parallel_size}, so a replica would be on two hosts; change --gpus-per-host"
            )
        if self.tensor_parallel_size not in self.num_kv_tokens():
            raise ValueError(
                f"cap={self.cap}: with prompt={self.prompt} a sequence can need more than the "
                f"{self.profile().kv_tokens_capacity()} tokens of KV that a replica holds; give a larger "
                f"--tensor-parallel-size or a lower --cap"
            )
        check_folders(self, ["figure"], folders=["traces"])
        check_figure(self.figure)

    @property
    def changes_tp(self) -> bool:
        return any(name.endswith(WITH_PAT) for name in self.policies)

    def chunk_options(self) -> ContextOptions:
        return self.chunks(max(BLOCK_SIZE, self.cap // 8), seed=self.seed)

    @property
    def max_model_len(self) -> int:
        return self.prompt + self.cap

    def pace(self) -> ProfilePace:
        return ProfilePace.of(self.profile().name)

    def num_kv_tokens(self) -> dict[int, int]:
        """Of a replica, in whole blocks, by the TP sizes that hold the longest sequence."""
        longest = -(-self.max_model_len // BLOCK_SIZE) * BLOCK_SIZE
        return {size: count // BLOCK_SIZE * BLOCK_SIZE for size, count in self.pace().num_kv_tokens(longest).items()}

    def options(self) -> dict[str, Any]:
        """Of the engine."""
        options: dict[str, Any] = {"max_num_seqs": self.slots, "block_size": BLOCK_SIZE}
        options |= {"draft_lengths": self.draft_lengths, "draft_server": self.draft_server}
        if self.max_draft_tokens:
            options |= {"drafter": "grouped_suffix", "max_draft_tokens": self.max_draft_tokens}
        return options

    def drafts(self) -> DraftAcceptance:
        return DraftAcceptance(table=dict(self.draft_tokens_per_step), seed=self.seed)

    def profile(self) -> LatencyProfile:
        try:
            return profile(f"{self.device}-{self.model}-tp{self.tensor_parallel_size}")
        except ValueError as error:
            raise ValueError(f"{error}; these are --device, --model and --tensor-parallel-size") from None


def main() -> dict[str, Any]:
    config = launch.options(SimulateConfig)
    world, workload = _world(config), _workload(config)
    lengths = dict(workload.lengths or {})
    runs, seconds = {}, {}
    with Bar(total=len(lengths) * len(config.policies), unit="sequence") as bar:
        for name in config.policies:
            bar.set_description(name)
            start = time.perf_counter()
            variant = _variant(config, name, workload)
            runs[name] = world.roll_out(workload, variant, on_finished=lambda _: bar.update())
            seconds[name] = round(time.perf_counter() - start, 2)
    floor = floor_seconds(
        config.profile(),
        [(config.prompt, length) for length in lengths.values()],
        num_replicas=config.gpus // config.tensor_parallel_size,
        max_num_seqs=config.slots,
        tool_s=[sum(turn.tool_s for turn in turns) for turns in (workload.turns or {}).values()],
    )
    results: dict[str, dict[str, float]] = {
        name: _describe(config, run, runs.get(HINDSIGHT), floor) for name, run in runs.items()
    }
    _print_table(results)
    _draw(config, runs)
    options = {key: value for key, value in asdict(config).items() if key not in ("figure", "traces", "wandb")}
    options["lengths"] = None if config.lengths is None else str(config.lengths)
    if config.wandb != "off":
        _track(options, results)
    return {
        "experiment": "simulate",
        "tier": "sim",
        "workload": options,
        "tokens": sum(lengths.values()),
        "floor": round(floor, 3),
        "seconds": seconds,
        "policies": results,
    }


def _workload(config: SimulateConfig) -> Workload:
    if config.turns.median:
        groups = _trajectories(config, config.groups, config.group_size, config.seed)
        return Workload.of_trajectories(groups, num_prompt_tokens=config.prompt, most=config.cap)
    return Workload.forced(_lengths(config), num_prompt_tokens=config.prompt, most=config.cap)


def _trajectories(config: SimulateConfig, groups: int, group_size: int, seed: int) -> list[list[list[Turn]]]:
    of = config.turns
    return TrajectoryLengths(
        num_turns=LogNormalLengths(median=of.median, sigma=of.sigma, cap=of.most),
        generated=LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap),
        observed=LogNormalLengths(median=of.observed, sigma=of.observed_sigma, cap=config.cap),
        tool_median_s=of.tool_s,
        tool_sigma=of.tool_sigma,
        correlation=config.correlation,
        cap=config.cap,
    ).draw(groups, group_size, seed)


class _Recorded(msgspec.Struct):
    """A line of lengths.jsonl."""

    lengths: Annotated[list[Count], Meta(min_length=1)]


def _recorded(config: SimulateConfig) -> list[list[int]]:
    """Lengths of each rollout of `--lengths`, scaled. Raises ValueError for a file that has none."""
    assert config.lengths is not None
    try:
        lines = [line for line in config.lengths.read_bytes().splitlines() if line.strip()]
        rollouts = [from_json(line, _Recorded).lengths for line in lines]
        scaled = [[max(1, round(length * config.length_scale)) for length in one] for one in rollouts]
        if not scaled:
            raise ValueError("it is empty")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"lengths={str(config.lengths)!r}: is no lengths.jsonl of train.py ({error})") from None
    return scaled


def _lengths(config: SimulateConfig) -> list[list[int]]:
    """Of each group's members."""
    if config.lengths is None:
        alone = LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap)
        groups = GroupedLengths(lengths=alone, correlation=config.correlation)
        return groups.draw(config.groups, config.group_size, config.seed)
    *_, last = _recorded(config)
    if num_cut := sum(length > config.cap for length in last):
        print(f"lengths: {num_cut} of {len(last)} are cut to --cap", file=sys.stderr)
        last = [min(length, config.cap) for length in last]
    size = config.group_size
    if len(last) % size:
        raise ValueError(
            f"group_size={size}: does not divide the {len(last)} lengths of {config.lengths}; give that of the run"
        )
    return [last[start : start + size] for start in range(0, len(last), size)]


def _earlier(config: SimulateConfig) -> list[int]:
    """Lengths of earlier sequences: of the rollouts before, or drawn by another seed."""
    if config.lengths is not None:
        *before, _ = _recorded(config)
        lengths = [min(length, config.cap) for one in before for length in one]
        return lengths[max(0, len(lengths) - config.history) :]
    if config.turns.median:
        drawn = _trajectories(config, config.history, 1, config.seed + 1000)
        return [sum(turn.num_generated for turn in turns) for (turns,) in drawn]
    alone = LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap)
    return alone.draw(config.history, config.seed + 1000)


def _variant(config: SimulateConfig, name: str, workload: Workload) -> Variant:
    bare = name.removesuffix(WITH_PAT)
    schedule = schedule_policy("policies", bare, config.chunk_options(), workload.lengths)
    if bare == name:
        return Variant(layout=contiguous_layout(range(config.gpus), config.tensor_parallel_size), schedule=schedule)
    num_gpus = min(config.gpus, config.gpus_per_host)
    host = deployment_of(
        config.pace(),
        num_ranks=num_gpus,
        num_kv_tokens={size: count for size, count in config.num_kv_tokens().items() if num_gpus % size == 0},
        max_num_seqs=config.slots,
        max_model_len=config.max_model_len,
        goes_back=True,
    )
    history = [(length, length >= config.cap) for length in _earlier(config)]
    make = partial(PatController, host, config.pat, ended=history)
    contexts = np.full(len(workload.lengths or ()), float(config.prompt))
    num_hosts, group_size = config.gpus // num_gpus, config.group_size
    return replace(on_each_host(host, num_hosts, make, contexts, config.cap, group_size), schedule=schedule)


def _world(config: SimulateConfig) -> SimulatedWorld:
    return SimulatedWorld(
        pace=config.pace(),
        options={
            **config.options(),
            "max_model_len": config.max_model_len,
            "draft_policy": DRAFT_POLICIES[config.draft_policy],
        },
        num_kv_tokens=config.num_kv_tokens(),
        drafts=config.drafts(),
        cluster={
            "gpus_per_host": config.gpus_per_host,
            "overheads": Overheads(message_s=config.message_s, gap_s=config.gap_s),
        },
    )


def _describe(config: SimulateConfig, run: Rollout, best: Rollout | None, floor: float) -> dict[str, float]:
    idle = 1 - sum(step.seconds * step.tp_size for step in run.steps) / (run.makespan_s * config.gpus)
    drafting = draft_metrics(run.steps) if config.max_draft_tokens else {}
    return {
        "makespan": round(run.seconds, 3),
        "tail": round(run.tail_seconds, 3),
        "idle_share": round(max(0.0, idle), 4),
        "preempted": run.num_preempted,
        **({"queue_s": round(turn_metrics(run.turns)["timing_s/agent_loop/queue/mean"], 3)} if run.turns else {}),
        **({"switches": len(run.switches)} if config.changes_tp else {}),
        "of_floor": round(floor / run.seconds, 4),
        **{name: round(drafting[name], 4) for name in ("draft_length", "tokens_per_step") if drafting},
    } | ({"of_hindsight": round(best.seconds / run.seconds, 4)} if best is not None else {})


def _print_table(results: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(results.values())))
    lines = [["", *columns], *([name, *(f"{one[key]:g}" for key in columns)] for name, one in results.items())]
    print(in_columns(lines), file=sys.stderr)


def _draw(config: SimulateConfig, runs: dict[str, Rollout]) -> None:
    if config.figure is not None:
        from experiments.figures import draw_drafts, draw_timelines

        steps: dict[str, list[StepRecord]] = {name: run.steps for name, run in runs.items()}
        draw_timelines(config.figure, steps, "sim")
        if config.max_draft_tokens:
            draw_drafts(config.figure.with_stem(f"{config.figure.stem}_drafts"), steps, "sim")
    if config.traces is not None:
        config.traces.mkdir(exist_ok=True)
        for name, run in runs.items():
            write_chrome_trace(config.traces / f"{name.replace('/', '_')}.json", run.steps, turns=run.turns)


def _track(options: dict[str, Any], results: dict[str, dict[str, float]]) -> None:
    from experiments.tracking import start_run

    for name, values in results.items():
        with start_run(f"simulate-{name}", {**options, "policies": [name]}, several=True) as run:
            run.summary.update(values)


if __name__ == "__main__":
    launch.run(main)
