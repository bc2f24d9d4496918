"""What changing the TP size during a rollout gains (PAT), against every static TP size and against hindsight.

    torchrun --standalone --nproc-per-node 2 experiments/pat.py
    python experiments/pat.py --parts paced --cases a40-8b-2048 --turns 3

Parts: `live`, on two ranks, a model of hidden 2048 at this machine's own speed; `paced`, on eight ranks that rank 0
then starts, steps and switches that take what latency profiles of named GPUs say, with lengths divided by 64. Lengths
are hidden; the controller knows lengths of earlier sequences. Variants: each static TP size, PAT, hindsight (a plan
made from the true lengths), and the best static TP size with sequences redistributed when hindsight would switch;
unscored: the paper's estimator, and PAT without history. They take turns, and medians count. A table goes to stderr,
one JSON object to stdout. docs/pat.md shows and explains a result.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
import tyro
from msgspec import Meta
from tqdm import tqdm

from engines import LLM, SamplingParams
from engines.config import DType, ModelConfig
from engines.constraints import Count, Positive, WholeNumber, check_fields
from engines.coordination.policies import LayoutPolicy, OnDemand
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache, Transport
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.replica import HiddenStop, StepOutput
from engines.rollout.pace import Pace
from engines.rollout.pace import Path as KVPath
from engines.rollout.telemetry import StepRecord
from experiments import launch, pat_cases
from experiments.bench import harness
from experiments.bench.models import checkpoint
from experiments.pat_cases import CASES, Batch, Case, CaseName, Variant
from research.pat.hindsight import PlayedPlan
from research.pat.lookahead import Deployment, Plan
from research.pat.predictor import Point, StepPredictor
from research.simulator.latency import TP_SIZES

Part = Literal["live", "paced"]
PAT = "pat"
FAR_BEHIND = 1.3
"""A static variant that takes so many times as long as the best one is measured once."""


@dataclass(frozen=True, kw_only=True)
class PatConfig:
    """Measure rollouts that change their TP size."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] = ("live", "paced")
    """What to measure."""
    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(
        one.name for one in CASES
    )
    """Cases of the paced part."""
    turns: Count = 3
    """Interleaved measurements of each variant, in the live part and in the first and the last case; medians count."""
    full: bool = False
    """As many turns in all cases; without it the others have one."""
    ranks: Count = 8
    """Ranks of the paced part."""
    scale: Positive = 1.0
    """Multiplies the time that paced work takes: larger where this machine is too slow to follow."""
    shrink: Count = 1
    """Divides the number of sequences."""
    hidden: Annotated[int, Meta(ge=256, multiple_of=256, description="a multiple of 256")] = 2048
    """Width of the live part's model, which has 4 layers."""
    transport: Transport = "gloo"
    """Between the ranks of the live part."""
    seed: WholeNumber = 3
    """Of the lengths."""
    figure: Path | None = None
    """Draw a figure of each case into this folder."""
    output: Path | None = None
    """Also write the JSON result to this file."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.parent)!r}; make it")
        if self.figure is not None and not self.figure.is_dir():
            raise ValueError(f"figure={str(self.figure)!r}: is no folder; make it")


def main() -> dict[str, Any] | None:
    with launch.told_once():
        config = tyro.cli(PatConfig)
    start = time.monotonic()
    in_place = config.parts == ("paced",)
    launch.start_under_torchrun(config.ranks if in_place else 2)
    launch.share_cores()
    dist.init_process_group("gloo")
    world = TorchGroup()
    measured: dict[str, Any] = {}
    if "live" in config.parts:
        measured |= live(config, world)
    if in_place:
        measured |= paced(config, world)
    dist.destroy_process_group()
    if world.rank:
        return None
    if "paced" in config.parts and not in_place:
        measured |= _on_other_ranks()
    result = {
        "experiment": "pat",
        "machine": harness.machine(),
        "workload": {key: value for key, value in asdict(config).items() if key not in ("output", "figure")},
        "seconds": round(time.monotonic() - start, 1),
        **measured,
    }
    text = json.dumps(result, default=str)
    if config.output is not None:
        config.output.write_text(text + "\n")
    return dict(json.loads(text))


def _on_other_ranks() -> dict[str, Any]:
    """Runs this command's paced part in a torchrun world of its own; returns what it has measured."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, *sys.argv, "--parts", "paced"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # its error is on stderr
    return {"paced": json.loads(done.stdout.splitlines()[-1])["paced"]}


# -- rollouts

Step = tuple[StepRecord, int, float]
"""A step, its context tokens, and the seconds that it should take, with its transfers."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The same on all ranks, but for `policy`, which decides on rank 0."""

    steps: list[Step]
    switches: list[tuple[float, float]]
    """Start, on the clock of the steps, and seconds."""
    digest: str
    """Of all tokens."""
    policy: Any

    @property
    def seconds(self) -> float:
        ends = [step.start + step.seconds for step, _, _ in self.steps]
        return max(ends) - min(step.start for step, _, _ in self.steps)


@dataclass
class Recorder:
    """A `Pace` that keeps what steps were; without another pace, all takes its own time."""

    pace: Pace | None
    steps: list[tuple[int, float]] = field(default_factory=list)
    _in_step: bool = False
    """Whether the next transfer belongs to the last step, and not to a command."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        self.steps.append((output.num_context_tokens, self.pace.step(spec, output) if self.pace else 0.0))
        self._in_step = True
        return self.steps[-1][1]

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: KVPath) -> float:
        seconds = self.pace.transfer(spec, num_tokens, path) if self.pace else 0.0
        if self._in_step:
            self.steps[-1] = self.steps[-1][0], self.steps[-1][1] + seconds
        self._in_step = False
        return seconds

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return self.pace.switch(before, after, num_kv_tokens) if self.pace else 0.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Rolls a batch out. All ranks make and call it together."""

    model: str
    dtype: DType
    groups: GroupCache
    pace: Pace | None
    kv_tokens_of_rank: Callable[[int | None], int]
    """By static TP size, None where it changes: the tokens in a rank's KV pool if it held all heads."""
    max_num_seqs: int = 512

    def roll_out(self, batch: Batch, variant: Variant) -> Rollout:
        policy = variant.policy()
        llm, recorder = self.start(
            variant,
            policy,
            max_model_len=batch.max_model_len,
            hidden_stop=lambda state: state.num_generated >= batch.lengths[state.key.prompt_uid],
        )
        tokens, steps = self.generate(llm, recorder, len(batch.lengths), batch.num_prompt_tokens, batch.longest)
        assert llm.rollout is not None
        mine = [mark.time for mark in llm.rollout.marks if mark.name in ("regroup", "resume")]
        marks = msgspec.msgpack.decode(self.groups.world.broadcast_bytes(msgspec.msgpack.encode(mine)))
        llm.close()
        return Rollout(
            steps=steps,
            switches=[(start, end - start) for start, end in zip(marks[::2], marks[1::2], strict=True)],
            digest=hashlib.sha256(repr(tokens).encode()).hexdigest(),
            policy=policy,
        )

    def start(
        self,
        variant: Variant,
        policy: LayoutPolicy | None = None,
        *,
        max_model_len: int,
        hidden_stop: HiddenStop | None = None,
    ) -> tuple[LLM, Recorder]:
        recorder = Recorder(self.pace)
        bytes_per_token = ModelConfig.from_pretrained(self.model).kv_bytes_per_token(
            getattr(torch, self.dtype).itemsize
        )
        llm = LLM(
            self.model,
            world=self.groups,
            layout=variant.layout,
            schedule=OnDemand(),
            layout_policy=policy,
            pace=recorder,
            hidden_stop=hidden_stop,
            dtype=self.dtype,
            block_size=pat_cases.BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_bytes=self.kv_tokens_of_rank(variant.tp_size) * bytes_per_token,
        )
        return llm, recorder

    def generate(
        self, llm: LLM, recorder: Recorder, count: int, num_prompt_tokens: int, most: int
    ) -> tuple[list[list[int]], list[Step]]:
        """Returns the tokens of `count` sequences of at most `most` tokens, and the steps of all replicas."""
        recorder.steps.clear()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(2, 64, (count, num_prompt_tokens), generator=generator).tolist()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=most, ignore_eos=True), prompt_uids=range(count))
        assert llm.rollout is not None
        mine = [(record, *one) for record, one in zip(llm.rollout.step_records, recorder.steps, strict=True)]
        return [one.outputs[0].token_ids for one in outputs], self._gather(mine)

    def _gather(self, mine: list[Step]) -> list[Step]:
        """Returns the steps of all replicas, each replica's from its first rank."""
        first: dict[tuple[int, int], int] = {}
        parts = self.groups.world.all_gather_bytes(msgspec.msgpack.encode(mine))
        return [
            one
            for rank, part in enumerate(parts)
            for one in msgspec.msgpack.decode(part, type=list[Step])
            if first.setdefault((one[0].epoch, one[0].replica_id), rank) == rank
        ]


def compare(
    bench: Bench, name: str, batch: Batch, deployment: Deployment, turns: int, *, with_hindsight: bool
) -> dict[str, list[Rollout]]:
    """Returns the rollouts of each variant: the best static one first, with its second runs."""
    sizes = list(deployment.steps)
    statics = {f"static TP{size}": pat_cases.static(deployment.num_ranks, size) for size in sizes}
    roll = partial(bench.roll_out, batch)
    probes = {one: roll(statics[one]) for one in tqdm(statics, desc=f"{name}, static", disable=launch.rank() > 0)}
    best = min(probes, key=lambda one: probes[one].seconds)
    near = [one for one, run in probes.items() if run.seconds < FAR_BEHIND * probes[best].seconds and one != best]
    variants = {best: statics[best], PAT: pat_cases.adaptive(deployment, batch)}
    unscored: dict[str, Variant] = {}
    if with_hindsight:
        variants |= pat_cases.informed(deployment, batch, sizes[list(statics).index(best)])
        unscored["paper"] = pat_cases.adaptive(deployment, batch, "paper")
        unscored["no history"] = pat_cases.adaptive(deployment, batch, with_history=False)
    variants |= {one: statics[one] for one in near} | unscored
    calls = {one: partial(roll, variant) for one, variant in variants.items()}
    most_turns = dict.fromkeys(near, turns - 1) | dict.fromkeys(unscored, 1)
    runs = harness.interleave(calls, turns, name=name, warm_up=False, most_turns=most_turns)
    for one in statics:
        if one != best:
            runs.setdefault(one, []).append(probes[one])
    return runs


def describe(name: str, runs: dict[str, list[Rollout]], facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of one case."""
    row = harness.compare(name, {one: [run.seconds for run in some] for one, some in runs.items()})
    print(harness.table([row]), file=sys.stderr, flush=True)
    seconds = {one: statistics.median(run.seconds for run in some) for one, some in runs.items()}
    best = min(seconds[one] for one in runs if one.startswith("static") and not one.endswith(harness.AGAIN))
    pat = runs[PAT]
    return {
        **facts,
        "tokens_equal": len({run.digest for some in runs.values() for run in some}) == 1,
        "regret": harness.short(seconds[PAT] / min(best, seconds.get("hindsight", best)) - 1),
        "vs_best_static": harness.short(best / seconds[PAT]),
        "vs_rebalanced": harness.short(seconds.get("rebalanced", best) / seconds[PAT]),
        "switches": [
            [one.num_unfinished, one.tp_size, one.chosen] for one in pat[0].policy.log if one.chosen != one.tp_size
        ],
        "switch_share": statistics.median(sum(length for _, length in run.switches) / run.seconds for run in pat),
        "a_a": row["a_a"],
        "row": row,
        "decisions": [asdict(one) for one in pat[0].policy.log],
    }


# -- live


def live(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    sizes = [size for size in range(1, world.size + 1) if world.size % size == 0]
    layouts = [nested_layout(range(world.size), size) for size in sizes]
    groups = GroupCache(world, layouts, transport=config.transport)
    batch = pat_cases.live_batch(config.seed, config.shrink)
    with checkpoint(
        pat_cases.live_model(config.hidden), max_positions=batch.max_model_len, dtype="float32", world=world
    ) as model:
        bench = Bench(
            model=model,
            dtype="float32",
            groups=groups,
            pace=None,
            kv_tokens_of_rank=lambda _: len(batch.lengths) * (batch.max_model_len + pat_cases.BLOCK_SIZE),
            max_num_seqs=len(batch.lengths),
        )
        deployment = measure(bench, batch, sizes)
        runs = compare(bench, "live", batch, deployment, config.turns, with_hindsight=False)
    groups.close()
    if world.rank:
        return {}
    errors = [
        abs(float(deployment.steps[step.tp_size].seconds(step.num_running, contexts)) / step.seconds - 1)
        for some in runs.values()
        for run in some
        for step, contexts, _ in run.steps
        if step.num_tokens == step.num_running
    ]
    found = {"tier": "live", **describe("live", runs, {"transport": config.transport})}
    if config.figure is not None:
        draw(config.figure, "live", runs)
    return {"live": found, "predictor_error": harness.short(statistics.fmean(errors))}


def measure(bench: Bench, batch: Batch, sizes: list[int]) -> Deployment:
    """Measures decode steps and a switch on these ranks."""
    num_ranks, most = bench.groups.world.size, len(batch.lengths)
    points: dict[int, list[Point]] = {size: [] for size in sizes}
    for size in sizes:
        llm, recorder = bench.start(pat_cases.static(num_ranks, size), max_model_len=batch.max_model_len)
        most_here, num_replicas = -(-most * size // num_ranks), num_ranks // size
        for count, prompt in itertools.product(
            sorted({1, 2, -(-most_here // 4), most_here}), (batch.num_prompt_tokens, batch.longest // 4)
        ):
            _, steps = bench.generate(llm, recorder, count * num_replicas, prompt, 8)
            decodes = [one for one in steps if one[0].num_tokens == one[0].num_running == count]
            seconds = statistics.median(step.seconds for step, _, _ in decodes)
            points[size].append((count, round(statistics.fmean(contexts for _, contexts, _ in decodes)), seconds))
        llm.close()
    switch_s = {}
    some = Batch(lengths=(4, 12) * (most // 2), history=(), longest=12)
    for before, after in itertools.permutations(sizes, 2):
        plan = Plan(stages=((most, before), (most // 2, after)), seconds=0.0, kept_seconds=0.0)
        played = PlayedPlan(plan, num_ranks)
        run = bench.roll_out(some, Variant(layout=played.layout(), policy=partial(pat_cases.itself, played)))
        switch_s[before, after] = run.switches[0][1]
    of_rank = bench.kv_tokens_of_rank(None)
    return Deployment(
        num_ranks=num_ranks,
        steps={size: StepPredictor(some) for size, some in points.items()},
        num_kv_tokens={size: size * of_rank for size in sizes},
        max_num_seqs=bench.max_num_seqs,
        max_model_len=batch.max_model_len,
        switch_seconds=lambda before, after, tokens: switch_s[before, after],
    )


# -- paced


def paced(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    """Results of all cases: for each name, those of each case."""
    torch.set_num_threads(1)
    chosen = [one for one in CASES if one.name in config.cases]
    layouts = [nested_layout(range(world.size), size) for size in TP_SIZES if world.size % size == 0]
    groups = GroupCache(world, layouts)
    found: dict[str, dict[str, Any]] = {}
    with checkpoint(pat_cases.PACED_MODEL, max_positions=512, dtype="float64", world=world) as model:
        for case in chosen:
            turns = config.turns if config.full or case in (CASES[0], CASES[-1]) else 1
            start = time.monotonic()
            runs, facts = _case(config, case, model, groups, turns)
            if world.rank == 0:
                found[case.name] = describe(case.name, runs, facts) | {"seconds": round(time.monotonic() - start, 1)}
                if config.figure is not None:
                    draw(config.figure, case.name, runs)
    groups.close()
    names = next(iter(found.values()), {})
    table = {name: {case: one[name] for case, one in found.items()} for name in names}
    return {"paced": {"tier": "paced", **table, "tokens_equal": all(table.get("tokens_equal", {}).values())}}


def _case(
    config: PatConfig, case: Case, model: str, groups: GroupCache, turns: int
) -> tuple[dict[str, list[Rollout]], dict[str, Any]]:
    batch, pace, num_ranks = case.draw(config.seed, config.shrink), case.pace(config.scale), groups.world.size
    sizes = case.num_kv_tokens(num_ranks)
    bench = Bench(
        model=model,
        dtype="float64",
        groups=groups,
        pace=pace,
        kv_tokens_of_rank=lambda size: min(sizes.values()) // min(sizes) if size is None else sizes[size] // size,
    )
    deployment = case.deployment(pace, num_ranks, bench.max_num_seqs, batch.max_model_len)
    runs = compare(bench, case.name, batch, deployment, turns, with_hindsight=True)
    steps = [(step.seconds, priced) for some in runs.values() for run in some for step, _, priced in run.steps]
    slow = sum(seconds > 1.1 * priced for seconds, priced in steps) / len(steps)
    without = [size for size in case.profiles if size not in sizes and num_ranks % size == 0]
    return runs, {"scale": pace.scale, "no_room": without, "steps_longer_than_paced": harness.short(slow)}


def draw(folder: Path, name: str, runs: dict[str, list[Rollout]]) -> None:
    from experiments.figures import draw_switches

    best = next(iter(runs))
    chosen = {one: [step for step, _, _ in runs[one][0].steps] for one in (PAT, best)}
    draw_switches(folder / f"{name}.png", chosen, [start for start, _ in runs[PAT][0].switches])


if __name__ == "__main__":
    launch.run(main)
