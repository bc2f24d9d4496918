"""Profiles this machine's engine for PAT (§4.2): seconds of decode steps, prefills and switches, by TP size.

    python experiments/pat_profile.py --model 25m --output runs/25m.json
    torchrun --standalone --nproc-per-node 2 experiments/pat_profile.py --model FOLDER --output FILE --check

For each TP size that the ranks and the model's heads allow, all replicas run batches of dummy sequences, whose KV is
zeros and so needs no prefill. A point is the median of its steps on the slowest rank. Switches are timed in rollouts,
from the last step before to the first one after, KV included. `--check` then measures points between the profiled ones,
and batches whose sequences end one by one, twice each, and compares them with what the predictor says. The file is for
`train.py --layout-policy pat`, with the same engine options. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from engines import LLM, SamplingParams
from engines.config import ModelConfig
from engines.constraints import Count, Counts, WholeNumber, check_fields
from engines.coordination.policies import OnDemand
from engines.coordination.views import LayoutChange, LayoutView
from engines.parallel.collectives import Communicator, SingleRank, TorchGroup
from engines.parallel.groups import GroupCache, Transport
from engines.parallel.layout import Layout, nested_layout
from engines.parallel.sharding import check_shardable
from engines.replica.engine import kv_capacity
from engines.sequence import Work
from experiments import launch
from experiments.bench.blank_kv import submit_decodes
from experiments.bench.harness import machine
from experiments.bench.models import checkpoint, random_sequence
from experiments.engine_options import MIB, EngineOptions
from research.pat.predictor import Point, StepPredictor
from research.pat.profile import BATCHES, CONTEXTS, PassTime, PredictorError, Profile, Subject, SwitchTime
from research.workloads.shapes import SHAPES

WARM_UP = 2
PREFILL_BATCHES = (1, 4)
SHAPE_POSITIONS = 8192
"""Longest sequence of a model that is named by its shape."""
TRIGGER = 4
"""Generated tokens after which a measured switch begins."""


@dataclass(frozen=True, kw_only=True)
class PatProfileConfig:
    """Measure what PAT's decisions rest on, and write it to a file."""

    model: str
    """A Hugging Face folder, or a name in research/workloads/shapes.py, which gets random weights."""
    output: Path
    """The profile to write: one for a model, a device and a transport."""
    transport: Transport = "auto"
    """How the ranks of a replica exchange tensors on a CPU."""
    batches: Counts = BATCHES
    """Sequences of a replica, as far as --max-num-seqs allows, which is added."""
    contexts: Counts = CONTEXTS
    """Tokens of each sequence, as far as the KV cache allows; the longest that fit are added."""
    steps: Count = 6
    """Timed steps of a point in a turn (PAT: 60)."""
    turns: Count = 2
    """Times that all points are measured."""
    prefill_tokens: WholeNumber = 2048
    """Most tokens of a timed prefill; 0: none are timed."""
    switch_tokens: WholeNumber = 2048
    """Context tokens that a timed switch moves at most; 0: none are timed."""
    check: bool = False
    """Compare the predictor with points that were not profiled, and with batches whose sequences end one by one."""
    engine: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(
        default_factory=lambda: EngineOptions(kv_cache_bytes=256 * MIB)
    )

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise ValueError(f"model={self.model!r}: give a Hugging Face folder, or one of {', '.join(SHAPES)}")
        if not self.output.absolute().parent.is_dir() or self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r}: is a folder, or in none; give a file in a folder")
        if self.engine.drafter != "none":
            raise ValueError(f"drafter={self.engine.drafter!r}: the profile has no times of drafts; give 'none'")


def main() -> dict[str, Any]:
    with launch.told_once():
        config = tyro.cli(PatProfileConfig)
    start = time.perf_counter()
    launch.share_cores()
    groups = _join(config.transport)
    world: Communicator = groups.world if groups is not None else SingleRank()
    positions = config.engine.max_model_len or SHAPE_POSITIONS
    with checkpoint(config.model, max_positions=positions, dtype=config.engine.dtype, world=world) as folder:
        profile = Profiler(config, folder, groups).measure()
    if world.rank == 0:
        profile.save(config.output)
        for one in profile.checks:
            print(f"TP{one.tp_size} {one.what}: error {one.error:.1%}, A/A {one.a_a:.1%}", file=sys.stderr)
    if groups is not None:
        groups.close()
        dist.destroy_process_group()
    return {
        "experiment": "pat_profile",
        "tier": "gpu" if torch.cuda.is_available() else "live",
        "machine": machine(),
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "output": str(config.output),
        "num_points": len(profile.decodes),
        "switches": [asdict(one) for one in profile.switches],
        "checks": [asdict(one) for one in profile.checks],
    }


def subject_of(model: ModelConfig, dtype: str, groups: GroupCache | None) -> Subject:
    """Returns what a profile made here, or used here, is of."""
    where = machine()
    num_ranks = groups.world.size if groups is not None else 1
    return Subject(
        model=Subject.sizes(model),
        dtype=dtype,
        device=where["cpu"] if where["device"] == "cpu" else where["device"],
        transport=groups.get(tuple(range(num_ranks))).name if groups is not None else "single",
        num_ranks=num_ranks,
        num_threads=where["threads"],
    )


def tp_sizes(model: ModelConfig, num_ranks: int) -> list[int]:
    """Returns the TP sizes that the ranks and the model's heads allow, ascending."""
    return [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and _can_be_cut(model, size)]


def _can_be_cut(model: ModelConfig, size: int) -> bool:
    try:
        check_shardable(model, size)
    except ValueError:
        return False
    return True


def _join(transport: Transport) -> GroupCache | None:
    """The groups of all nested layouts, if there are several ranks."""
    num_ranks = launch.num_ranks()
    if num_ranks == 1:
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return GroupCache(TorchGroup(), [nested_layout(range(num_ranks), size) for size in sizes], transport=transport)


class Profiler:
    """Measures one model on these ranks, which make the same calls."""

    def __init__(self, config: PatProfileConfig, folder: str, groups: GroupCache | None) -> None:
        self._config, self._folder, self._groups = config, folder, groups
        self._world: Communicator = groups.world if groups is not None else SingleRank()
        self._model = ModelConfig.from_pretrained(folder)
        self._bar = tqdm(desc="profile", unit="batch", disable=self._world.rank > 0)
        self._uids = itertools.count(1)

    def measure(self) -> Profile:
        decodes: list[PassTime] = []
        prefills: list[PassTime] = []
        checks: list[PredictorError] = []
        sizes = tp_sizes(self._model, self._world.size)
        for size in sizes:
            llm = LLM(self._folder, world=self._groups, tensor_parallel_size=size, **asdict(self._config.engine))
            launch.tell_engine(llm)
            mine = self._decodes(llm, size)
            decodes += mine
            prefills += self._prefills(llm, size)
            if self._config.check:
                checks += self._check(llm, size, mine)
            llm.close()
        return Profile(
            format=1,
            subject=subject_of(self._model, self._config.engine.dtype, self._groups),
            torch=str(torch.__version__),
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            switches=tuple(self._switches(sizes)) if len(sizes) > 1 and self._config.switch_tokens else (),
            checks=tuple(checks),
        )

    # -- passes

    def _decodes(self, llm: LLM, size: int) -> list[PassTime]:
        grid = list(self._grid(llm, size))
        if len({batch for batch, _ in grid}) < 2:
            raise ValueError(
                f"kv_cache_bytes={llm.config.kv_cache_bytes}: fewer than two batch sizes fit with two contexts each; "
                f"raise --kv-cache-mib, or give other --batches and --contexts"
            )
        turns = [[self._decode(llm, *point) for point in grid] for _ in range(self._config.turns)]
        return [
            PassTime(tp_size=size, batch=batch, num_tokens=num_tokens, seconds=statistics.median(times))
            for points in zip(*turns, strict=True)
            for batch, num_tokens, times in [(*points[0][:2], [point[2] for point in points])]
        ]

    def _grid(self, llm: LLM, size: int) -> Iterator[tuple[int, int]]:
        """Batches and contexts that fit."""
        slots, capacity = llm.config.max_num_seqs, kv_capacity(self._model, llm.config, size)
        for batch in sorted({slots, *(one for one in self._config.batches if one < slots)}):
            most = self._most(llm, batch, capacity)
            contexts = sorted({most, *(one for one in self._config.contexts if 1.1 * one < most)})
            if len(contexts) > 1:
                yield from ((batch, context) for context in contexts)

    def _most(self, llm: LLM, batch: int, capacity: int) -> int:
        """Tokens of the longest contexts with which a batch fits and can decode."""
        blocks = capacity // llm.config.block_size // batch
        return min(llm.max_model_len, blocks * llm.config.block_size) - WARM_UP - self._config.steps - 1

    def _decode(self, llm: LLM, batch: int, context: int) -> Point:
        """Returns the batch, its tokens and the median seconds of a step."""
        num_steps = WARM_UP + self._config.steps
        submit_decodes(llm, num_sequences=batch, context=context, length=num_steps + 1)
        rows = self._step(llm, num_steps)[WARM_UP:]
        assert {running for running, _, _ in rows} == {batch}
        return batch, *self._median(rows)

    def _step(self, llm: LLM, num_steps: int) -> list[Point]:
        """Steps the replica, and removes what is left there."""
        self._world.barrier()
        self._bar.update()
        rows = []
        for _ in range(num_steps):
            start = time.perf_counter()
            output = llm.replica.step()
            rows.append((output.num_running, output.num_context_tokens, time.perf_counter() - start))
        llm.replica.clear()
        return rows

    def _median(self, rows: list[Point]) -> tuple[int, float]:
        """The median tokens, and the median seconds on the slowest rank."""
        mine = statistics.median(seconds for _, _, seconds in rows)
        everyone = self._world.all_gather_bytes(repr(mine).encode())
        return round(statistics.median(tokens for _, tokens, _ in rows)), max(map(float, everyone))

    def _prefills(self, llm: LLM, size: int) -> list[PassTime]:
        times = []
        most = min(self._config.prefill_tokens, kv_capacity(self._model, llm.config, size) // 2)
        for batch, context in itertools.product(PREFILL_BATCHES, self._config.contexts):
            if batch * context > most or batch > llm.config.max_num_seqs or context >= llm.max_model_len:
                continue
            rows: list[Point] = []
            for _ in range(1 + self._config.turns):
                for _ in range(batch):
                    state = random_sequence(next(self._uids), num_tokens=context, length=1)
                    llm.replica.submit(Work(state=state))
                self._world.barrier()
                start = time.perf_counter()
                while llm.replica.has_work:
                    llm.replica.step()
                rows.append((batch, batch * context, time.perf_counter() - start))
            self._bar.update()
            num_tokens, seconds = self._median(rows[1:])
            times.append(PassTime(tp_size=size, batch=batch, num_tokens=num_tokens, seconds=seconds))
        return times

    # -- the predictor

    def _check(self, llm: LLM, size: int, decodes: list[PassTime]) -> list[PredictorError]:
        predictor = StepPredictor((one.batch, one.num_tokens, one.seconds) for one in decodes)
        capacity = kv_capacity(self._model, llm.config, size)
        batches = sorted({one.batch for one in decodes})
        between = [round((a * b) ** 0.5) for a, b in itertools.pairwise(batches) if b > a + 1]
        points = [
            (batch, max(2, round(share * self._most(llm, batch, capacity))))
            for batch in between or batches
            for share in (0.03, 0.2, 0.6)
        ]
        held_out = [[self._decode(llm, *point) for point in points] for _ in range(2)]
        draining = [self._drain(llm, min(24, batches[-1]), capacity) for _ in range(2)]
        return [
            PredictorError(
                tp_size=size,
                what=what,
                num_points=len(first),
                error=_mean_error([(float(predictor.seconds(*one[:2])), one[2]) for one in first + second]),
                a_a=_mean_error([(a[2], b[2]) for a, b in zip(first, second, strict=True)]),
            )
            for what, (first, second) in (("held out", held_out), ("draining", draining))
        ]

    def _drain(self, llm: LLM, batch: int, capacity: int) -> list[Point]:
        """Decodes a batch of unequal contexts in which one sequence after the other ends; returns a point for each
        number of sequences."""
        steps = self._config.steps
        most = min(llm.max_model_len, capacity // batch) - (batch + 1) * steps - WARM_UP
        contexts = np.linspace(2, max(3, min(most, 1024)), batch).round().astype(int).tolist()
        for index, context in enumerate(contexts):
            length = WARM_UP + (1 + index * 7 % batch) * steps
            submit_decodes(llm, num_sequences=1, context=context, length=length, first_uid=index)
        rows = self._step(llm, WARM_UP + batch * steps)[WARM_UP:]
        groups = [[row for row in rows if row[0] == running] for running in range(1, batch + 1)]
        return [(group[0][0], *self._median(group)) for group in groups if group]

    # -- switches

    def _switches(self, sizes: list[int]) -> list[SwitchTime]:
        """Between each two TP sizes, up and down, with few and with many tokens."""
        policy = _OneSwitch()
        llm = LLM(
            self._folder,
            world=self._groups,
            tensor_parallel_size=sizes[0],
            schedule=OnDemand(),
            layout_policy=policy,
            **asdict(self._config.engine),
        )
        times = switch_times(llm, policy, self._world, sizes, self._config.switch_tokens, self._config.turns, self._bar)
        llm.close()
        return times


def switch_times(
    llm: LLM, policy: _OneSwitch, world: Communicator, sizes: list[int], most_tokens: int, turns: int, bar: tqdm[Any]
) -> list[SwitchTime]:
    """Returns the seconds of switches in rollouts with few and with many tokens, both ways between each two sizes."""
    num_sequences = min(2 * world.size, llm.config.max_num_seqs)
    longest = llm.max_model_len // 2
    targets = [
        (size, context)
        for pair in itertools.combinations(sizes, 2)
        for context in (8, min(longest, max(9, most_tokens // num_sequences)))
        for size in (*pair, *pair[::-1])
    ]
    times = []
    for size, context in targets[1:2] + targets[:1] + turns * targets:  # the first two are a warm-up
        before = llm.layout.replicas[0].tp_size
        if size == before:
            continue
        policy.target = nested_layout(range(world.size), size)
        seconds = _time_switch(llm, world, num_sequences, context)
        bar.update()
        num_tokens = num_sequences * (context + TRIGGER)
        times.append(SwitchTime(before=before, after=size, num_tokens=num_tokens, seconds=seconds))
    return times[2:]


class _OneSwitch:
    """A `LayoutPolicy` that regroups to its target once the first sequence has ended."""

    target: Layout | None = None

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if self.target is None or not view.num_delivered:
            return None
        target, self.target = self.target, None
        return LayoutChange(layout=replace(target, epoch=view.layout.epoch + 1))


def _time_switch(llm: LLM, world: Communicator, num_sequences: int, context: int) -> float:
    """Seconds from the end of the last step in the old layout to the end of all replicas' first step in the new one,
    less a usual step."""
    length = 32
    while True:
        prompts = torch.randint(2, llm.model_config.vocab_size, (num_sequences + 1, context)).tolist()
        lengths = [TRIGGER] + [min(length, llm.max_model_len - context)] * num_sequences
        params = [SamplingParams(max_tokens=one, ignore_eos=True) for one in lengths]
        world_prompts = json.loads(world.broadcast_bytes(json.dumps(prompts).encode()))
        llm.generate(world_prompts, params)
        mine = [(one.epoch, one.start, one.seconds) for one in llm.step_records]
        everyone = [json.loads(part) for part in world.all_gather_bytes(json.dumps(mine).encode())]
        newest = max(epoch for part in everyone for epoch, _, _ in part)
        old = [start + seconds for part in everyone for epoch, start, seconds in part if epoch < newest]
        new = [[(start, seconds) for epoch, start, seconds in part if epoch == newest] for part in everyone]
        if old and all(new):
            usual = statistics.median(seconds for part in new for _, seconds in part)
            return max(0.0, max(sum(part[0]) for part in new) - max(old) - usual)
        length *= 2  # the rollout was over before the switch


def _mean_error(pairs: list[tuple[float, float]]) -> float:
    return statistics.fmean(abs(a / b - 1) for a, b in pairs)


if __name__ == "__main__":
    launch.run(main)
