"""On-demand against static dispatch of one long-tailed batch over data-parallel replicas, in paced mode.

    python experiments/bench_dispatch.py
    python experiments/bench_dispatch.py --profile h100-32b-tp2 --slots 8

Real processes, a real model, real messages; but each step lasts what a latency profile says of its batch and context
(docs/latency_profiles.md), `--scale` times slower, so that a machine with two cores can follow four replicas. Lengths
come from a log-normal tail and are hidden: dispatch sees only the cap. Both dispatches alternate, and each also runs
against itself (A/A). Beside the makespan stands the floor, which no dispatch can beat: all tokens at the throughput of
full batches on every replica, or the longest sequence alone, whichever takes longer.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from algos.warmstart import warm_start
from algos.warmstart_config import MODEL_SIZES, WarmStartConfig
from engines import LLM, SamplingParams, SequenceState
from engines.constraints import Count, NonNegative, Positive, check_fields
from engines.coordination.policies import OnDemand, SchedulePolicy, Static
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout, nested_layout
from engines.rollout.telemetry import StepRecord, busy_share, write_chrome_trace
from experiments import launch
from experiments.figures import draw_timelines
from research.simulator.latency import Pace, profile
from research.workloads.lengths import LogNormalLengths

PROMPT_LENGTH = 16
DISPATCHES: dict[str, type[Static] | type[OnDemand]] = {"static": Static, "on_demand": OnDemand}


@dataclass(frozen=True, kw_only=True)
class BenchDispatchConfig:
    """Time one rollout of a long-tailed batch under static and on-demand dispatch, paced, interleaved."""

    model: str = "tiny"
    """A Hugging Face folder, or an embedded model: what draws the tokens, not what sets the time."""
    ranks: Count = 4
    """Processes; under torchrun, its own number holds."""
    tensor_parallel_size: int = 1
    """Processes that form one replica, and run the model in shards."""
    profile: str | None = None
    """Whose steps: <device>-<model>-tp<size> (docs/latency_profiles.md); by default h100-8b at a replica's size."""
    scale: NonNegative = 2.0
    """Seconds here per second of the profile; 0 lets each step last what it lasts (tier "live", no floor)."""
    context_scale: Positive = 16.0
    """Tokens of context in the profile per token here: lengths are scaled down, their spread is not."""
    batch: Count = 384
    """Sequences."""
    slots: Count = 16
    """Most sequences of a replica at a time, as its KV cache would set it."""
    median: float = 100.0
    """Median response length, tokens."""
    sigma: float = 0.884
    """Spread of the logarithm of the length; PAT's anchors."""
    cap: Count = 600
    """Longest response, tokens: all that dispatch knows of lengths."""
    repeats: Count = 3
    """Interleaved measurements of each dispatch, and as many again for A/A."""
    seed: int = 0
    """Of lengths, prompts and samples."""
    output: Path | None = None
    """Folder for the JSON result, a Chrome trace of each dispatch, and the timeline figure."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.scale and profile(self.profile_name).tp_size != self.tensor_parallel_size:
            raise ValueError(
                f"profile={self.profile!r}: is not of tensor_parallel_size={self.tensor_parallel_size}, the replicas' "
                f"size here; leave the profile out, or name one that ends in tp{self.tensor_parallel_size}"
            )

    @property
    def profile_name(self) -> str:
        return self.profile or f"h100-8b-tp{self.tensor_parallel_size}"


def main() -> dict[str, Any] | None:
    with launch.told_once():
        config = tyro.cli(BenchDispatchConfig)
    pace = profile(config.profile_name).scaled(config.scale) if config.scale else None
    model = Path(config.model)
    if config.model in MODEL_SIZES and not model.exists():
        model = warm_start(Path("runs/models") / config.model, WarmStartConfig(size=config.model))
    launch.start_under_torchrun(config.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = TorchGroup()
    layout = nested_layout(range(world.size), config.tensor_parallel_size)
    groups = GroupCache(world, [layout])
    lengths = LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap).draw(config.batch, config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    prompts = torch.randint(2, 256, (config.batch, PROMPT_LENGTH), generator=generator).tolist()
    told: list[float] = []  # seconds that each step of this rank was to last
    engines = {
        name: _engine(model, config, groups, layout, policy(), pace, lengths, told)
        for name, policy in DISPATCHES.items()
    }
    lasted = 0.0
    runs: dict[str, list[list[StepRecord]]] = {name: [] for one in DISPATCHES for name in (one, f"{one}_again")}
    tokens = {}
    with tqdm(total=4 * config.repeats, desc="bench", unit="run", disable=world.rank > 0) as progress:
        for _ in range(config.repeats):
            for name in runs:
                llm = engines[name.removesuffix("_again")]
                outputs = llm.generate(
                    prompts, SamplingParams(max_tokens=config.cap, ignore_eos=True), prompt_uids=range(config.batch)
                )
                tokens[name] = [output.outputs[0].token_ids for output in outputs]
                runs[name].append(_gather(llm, layout, world))
                lasted += sum(step.seconds for step in llm.step_records)
                progress.update()
    assert all(one == tokens["static"] for one in tokens.values()), "dispatch changed a token"
    assert [len(one) for one in tokens["static"]] == lengths
    for llm in engines.values():
        llm.close()
    mine = lasted / sum(told) - 1 if told else 0.0
    overruns = [float(part) for part in world.all_gather_bytes(str(mine).encode())]
    dist.destroy_process_group()
    if world.rank > 0:
        return None
    return _result(config, pace, lengths, runs, max(overruns))


def _engine(
    model: Path,
    config: BenchDispatchConfig,
    groups: GroupCache,
    layout: Layout,
    policy: SchedulePolicy,
    pace: Pace | None,
    lengths: list[int],
    told: list[float],
) -> LLM:
    def seconds(batch: int, new_tokens: int, context_tokens: int) -> float:
        assert pace is not None
        told.append(pace.seconds(batch, new_tokens, round(context_tokens * config.context_scale)))
        return told[-1]

    def is_over(state: SequenceState) -> bool:
        return state.num_generated >= lengths[state.key.prompt_uid]

    return LLM(
        model,
        world=groups,
        layout=layout,
        schedule=policy,
        pace=seconds if pace is not None else None,
        hidden_stop=is_over,
        max_num_seqs=config.slots,
        max_model_len=PROMPT_LENGTH + config.cap,
        kv_cache_bytes=64 * 2**20,
    )


def _gather(llm: LLM, layout: Layout, world: TorchGroup) -> list[StepRecord]:
    """The steps of all replicas, as their leaders saw them."""
    leads = any(replica.ranks[0] == world.rank for replica in layout.replicas)
    parts = world.all_gather_bytes(msgspec.msgpack.encode(llm.step_records if leads else []))
    return [record for part in parts for record in msgspec.msgpack.decode(part, type=list[StepRecord])]


def _makespan(steps: list[StepRecord]) -> float:
    return max(step.start + step.seconds for step in steps) - min(step.start for step in steps)


def _idle_share(steps: list[StepRecord], num_replicas: int) -> float:
    return 1 - statistics.fmean(busy_share(steps, range(num_replicas)).values())


def _between_steps(runs: list[list[StepRecord]]) -> tuple[float, float]:
    """Medians in seconds: a step; from its end to the next one's start, when commands are heard and events are sent."""
    steps, gaps = [], []
    for one in runs:
        for replica in {step.replica_id for step in one}:
            own = sorted((step for step in one if step.replica_id == replica), key=lambda step: step.start)
            steps += [step.seconds for step in own]
            gaps += [after.start - before.start - before.seconds for before, after in itertools.pairwise(own)]
    return statistics.median(steps), statistics.median(gaps)


def _floor(config: BenchDispatchConfig, pace: Pace, lengths: list[int], num_replicas: int) -> dict[str, float]:
    """Seconds, by two bounds: every replica full all the time; the longest sequence, never waiting, always alone."""

    def step(batch: int, context: float) -> float:
        return pace.seconds(batch, batch, max(batch, round(batch * context * config.context_scale)))

    contexts = [PROMPT_LENGTH + position for length in lengths for position in range(length)]
    full = step(config.slots, statistics.fmean(contexts)) / config.slots
    longest = sum(step(1, PROMPT_LENGTH + position) for position in range(max(lengths)))
    return {"work": full * sum(lengths) / num_replicas, "longest": longest}


def _result(
    config: BenchDispatchConfig,
    pace: Pace | None,
    lengths: list[int],
    runs: dict[str, list[list[StepRecord]]],
    overrun: float,
) -> dict[str, Any]:
    makespans = {name: [_makespan(steps) for steps in several] for name, several in runs.items()}
    median = {name: statistics.median(values) for name, values in makespans.items()}
    num_replicas = config.ranks // config.tensor_parallel_size
    idle = {name: statistics.median(_idle_share(steps, num_replicas) for steps in runs[name]) for name in DISPATCHES}
    floor = _floor(config, pace, lengths, num_replicas) if pace is not None else {}
    control = {name: _between_steps(runs[name]) for name in DISPATCHES}
    result = {
        "experiment": "bench_dispatch",
        "tier": "paced" if pace is not None else "live",
        "workload": {**asdict(config), "output": None},
        "tokens": sum(lengths),
        "longest": max(lengths),
        "makespan_s": {name: [round(value, 3) for value in values] for name, values in makespans.items()},
        "idle_share": {name: round(value, 3) for name, value in idle.items()},
        "floor_s": {name: round(value, 3) for name, value in floor.items()},
        "over_floor": {name: round(median[name] / max(floor.values()), 3) for name in DISPATCHES if floor},
        "on_demand_vs_static": round(median["static"] / median["on_demand"], 3),
        "a_a": {name: round(median[name] / median[f"{name}_again"], 3) for name in DISPATCHES},
        "steps_longer_than_paced": round(overrun, 4),
        "step_ms": {name: round(1e3 * one[0], 3) for name, one in control.items()},
        "between_steps_ms": {name: round(1e3 * one[1], 3) for name, one in control.items()},
    }
    if config.output is not None:
        config.output.mkdir(parents=True, exist_ok=True)
        for name in DISPATCHES:
            write_chrome_trace(config.output / f"{name}.trace.json", runs[name][0])
        draw_timelines(config.output / "dispatch_timeline.png", {name: runs[name][0] for name in DISPATCHES})
        (config.output / "bench_dispatch.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    launch.run(main)
