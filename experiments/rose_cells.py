"""The measurements of rose.py on the ranks of a world: each model alone, and each policy in each cell."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.parallel.collectives import Communicator
from engines.progress import Bar
from engines.serving.policies import AdmissionPolicy, MemoryPolicy
from experiments import launch
from experiments.comparison.turns import short
from experiments.rose_policies import ALIKE, SLOTS, admission_of, halves, latencies, slo_of
from experiments.rose_serving import SPEC, Lending, Models, Run, ServingProcess
from research.rose.admission import EqualTurns, ServingTimes
from research.rose.memory import ServingFirst, SharingOptions, StaticSplit
from research.simulator.pace import ProfilePace
from research.workloads.lengths import LogNormalLengths

if TYPE_CHECKING:
    from experiments.rose import RoseConfig

ALONE = "alone"
CHUNK = 512
"""Tokens of a rollout's prefill chunk (ROSE §4.1)."""
NUM_PAGES, ROLLOUT_S = 320, 4.0
MAX_MODEL_LEN, PROMPT = 4096, 256


@dataclass(kw_only=True)
class Measured:
    """All that `rose.py` reports, by cell and policy."""

    tokens_equal: bool = True
    is_compared: bool = False
    """Whether any tokens were compared."""
    slo: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    harvest: dict[str, dict[str, float]] = field(default_factory=dict)
    a_a: dict[str, float] = field(default_factory=dict)
    limits: dict[str, dict[str, float]] = field(default_factory=dict)
    """The SLOs of each cell."""
    facts: dict[str, Any] = field(default_factory=dict)
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Of the first run of the first cell under `dual`, or under the last policy: see `Run.pages`."""


def measure(config: RoseConfig, world: Communicator) -> Measured:
    """All ranks call it together; what it returns counts on rank 0."""
    with tempfile.TemporaryDirectory(prefix="curtail-rose-") as folder:
        made = launch.on_rank_0(world, lambda: save_models(Path(folder)))
        bench = _Bench(config, world, [Path(one) for one in made])
        measured = Measured()
        if "cells" in config.parts:
            bench.cells(measured)
        if "live" in config.parts and world.rank == 0:
            bench.live(measured)
        if "borrowed" in config.parts and world.rank == 0:
            from experiments.rose_borrowed import measure_borrowed

            borrowed, is_equal = measure_borrowed(config, [Path(one) for one in made])
            measured.tokens_equal, measured.is_compared = measured.tokens_equal and is_equal, True
            measured.facts["borrowed"] = borrowed
        world.barrier()
    return measured


def save_models(folder: Path) -> list[str]:
    """Writes two random models of different architectures: a Qwen3 that serves, and a Llama for the rollout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"vocab_size": 512, "intermediate_size": 96, "max_position_embeddings": 4096}
    shape |= {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}  # an H100 must be the slower one
    shape["initializer_range"] = 0.2  # logits differ by several units
    torch.manual_seed(0)
    serving = Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=1, head_dim=16))
    rollout = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2))
    for name, model in (("serving", serving), ("rollout", rollout)):
        model.save_pretrained(folder / name)
    return [str(folder / "serving"), str(folder / "rollout")]


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What a rank tells of a run."""

    cell: str
    policy: str
    run: int
    ttft: list[float]
    gaps: list[list[float]]
    seconds: float
    serving_s: float
    rollout_tokens: int
    lent_s: float
    num_taken_back: int
    num_stalled: int
    num_cuts: int
    late_share: float
    differ: int
    """Requests and sequences whose tokens differ from those without the other model."""
    compared: int


class _Bench:
    """A rank's engines, and the runs that fall to it."""

    def __init__(self, config: RoseConfig, world: Communicator, folders: list[Path]) -> None:
        self._config, self._world, self._folders = config, world, folders
        self._pace = ProfilePace.of(config.profile, scale=config.scale, token_scale=config.shorten)
        self._process = ServingProcess(models_of(config, folders, self._pace))
        serving = self._process.serving.config
        self._times = ServingTimes.of(
            self._pace, SPEC, chunk_tokens=serving.max_num_batched_tokens, max_num_seqs=serving.max_num_seqs
        )
        """With the margin that serving alone has shown, before anything is lent."""
        self._guard_s = 1e-3 * config.guard_ms * config.scale
        self._alone: dict[tuple[str, int], Run] = {}

    def cells(self, measured: Measured) -> None:
        config, rank, size = self._config, self._world.rank, self._world.size
        units = [(cell, run) for cell in config.cells for run in range(config.runs)]
        mine = units[rank::size]
        self._process.run(config.arrivals(*units[0])[:20], None, seed=0)  # warm
        rolled = self._process.run([], lending_of(config, EqualTurns(), ServingFirst()), seed=0, seconds=ROLLOUT_S)
        results = []
        for cell, run in Bar(mine, desc="serving alone", unit="run", disable=rank > 0):
            self._alone[cell, run] = found = self._process.run(config.arrivals(cell, run), None, seed=run)
            results.append(self._result(cell, ALONE, run, found, rolled))
        margin = max(0.0, *launch.gather(self._world, self._margin(), float))
        self._times = replace(self._times, margin=margin)
        alone = self._gathered(results)
        rate = statistics.mean(launch.gather(self._world, rolled.lent.num_tokens / rolled.seconds, float))
        slos: dict[str, tuple[float, float]] = {
            cell: slo_of([one for one in alone if one.cell == cell]) for cell in config.cells
        }
        results = []
        todo = [(cell, run, policy) for cell, run in mine for policy in config.policies]
        for cell, run, policy in Bar(todo, desc="lending", unit="run", disable=rank > 0):
            lending = self._of_policy(policy, *slos[cell])
            found = self._process.run(config.arrivals(cell, run), lending, seed=run)
            if policy == "dual" and not measured.timeline:
                measured.timeline = found.pages
            results.append(self._result(cell, policy, run, found, rolled))
        self._sum_up(measured, alone, self._gathered(results), slos, rate)
        measured.facts["margin"] = short(margin)

    def _margin(self) -> float:
        """Share by which serving alone was slower here than paced; 0 on a rank without runs."""
        alone = self._alone.values()
        return sum(one.busy_s for one in alone) / sum(one.paced_s for one in alone) - 1 if alone else 0.0

    def _gathered(self, results: list[_Result]) -> list[_Result]:
        return [one for part in launch.gather(self._world, results, list[_Result]) for one in part]

    def _of_policy(self, policy: str, ttft_s: float, tpot_s: float) -> Lending:
        admission = admission_of(policy, self._times, ttft_s, tpot_s, self._guard_s)
        if policy == "static_split":
            return lending_of(self._config, admission, StaticSplit(), serving_share=0.5)
        return lending_of(self._config, admission, memory_of(self._config))

    def _result(self, cell: str, policy: str, run: int, found: Run, rolled: Run) -> _Result:
        alone = self._alone[cell, run]
        both = found.rolled.keys() & rolled.rolled.keys()
        differ = sum(one != other for one, other in zip(found.served, alone.served, strict=True))
        differ += sum(found.rolled[number] != rolled.rolled[number] for number in both)
        counts = {"differ": differ, "compared": len(found.served) + len(both)}
        return _Result(cell=cell, policy=policy, run=run, **{**plain(found), **counts})

    def _sum_up(
        self,
        measured: Measured,
        alone: list[_Result],
        lent: list[_Result],
        slos: dict[str, tuple[float, float]],
        rate: float,
    ) -> None:
        measured.tokens_equal, measured.is_compared = not any(one.differ for one in lent), bool(lent)
        details: dict[str, Any] = {}
        for cell, (ttft_s, tpot_s) in slos.items():
            of_cell = [one for one in alone if one.cell == cell]
            measured.a_a[cell] = short(halves(of_cell))
            measured.slo[cell] = {ALONE: latencies(of_cell, ttft_s, tpot_s)}
            measured.harvest[cell] = {}
            measured.limits[cell] = {"ttft_slo_ms": short(1e3 * ttft_s), "tpot_slo_ms": short(1e3 * tpot_s)}
            details[cell] = {**measured.limits[cell], "serving_share": short(share_of(of_cell, "serving_s"))}
            for policy in self._config.policies:
                some = [one for one in lent if (one.cell, one.policy) == (cell, policy)]
                measured.slo[cell][policy] = latencies(some, ttft_s, tpot_s)
                idle = sum(one.seconds - one.serving_s for one in some)
                measured.harvest[cell][policy] = short(sum(one.rollout_tokens for one in some) / (rate * idle))
                details[cell][policy] = {
                    "of_alone": short(
                        sum(one.rollout_tokens for one in some) / rate / sum(one.seconds for one in some)
                    ),
                    "lent_share": short(share_of(some, "lent_s")),
                    "serving_share": short(share_of(some, "serving_s")),
                    **{name: sum(getattr(one, name) for one in some) for name in _COUNTS},
                }
        measured.facts |= {
            "compared": sum(one.compared for one in lent),
            "rollout_alone_tokens_per_s": short(rate),
            "void": [cell for cell, one in measured.a_a.items() if one > ALIKE or not measured.slo[cell][ALONE]["ok"]],
            "proves_nothing": [cell for cell, some in measured.slo.items() if "none" in some and some["none"]["ok"]],
            "steps_longer_than_paced": short(statistics.mean(one.late_share for one in (*alone, *lent))),
            "cells": details,
        }

    def live(self, measured: Measured) -> None:
        """One run of the conversation at this machine's own speed, under `dual`; not scored."""
        process = ServingProcess(models_of(self._config, self._folders, None))
        times = process.serving.row_times
        config = self._config
        arrivals = [replace(one, time_s=one.time_s / config.live_rate) for one in config.arrivals("conversation", 0)]
        alone = process.run(arrivals, None, seed=0)
        found = _Result(cell="", policy="", run=0, **plain(alone))
        ttft_s, tpot_s = slo_of([found])
        own = ServingTimes(
            prefill_s=lambda count: times(count),
            decode_s=lambda batch, context: times(batch),
            chunk_tokens=process.serving.config.max_num_batched_tokens,
            max_num_seqs=process.serving.config.max_num_seqs,
        )
        admission = admission_of("dual", own, ttft_s, tpot_s, self._guard_s)
        beside = process.run(arrivals, lending_of(config, admission, ServingFirst()), seed=0)
        measured.tokens_equal, measured.is_compared = measured.tokens_equal and beside.served == alone.served, True
        measured.facts["live"] = {
            "ttft_slo_ms": short(1e3 * ttft_s),
            "tpot_slo_ms": short(1e3 * tpot_s),
            ALONE: latencies([found], ttft_s, tpot_s),
            "dual": latencies([_Result(cell="", policy="", run=0, **plain(beside))], ttft_s, tpot_s),
            "serving_share": short(beside.serving_s / beside.seconds),
            "rollout_tokens_per_s": short(beside.lent.num_tokens / beside.seconds),
        }


def models_of(config: RoseConfig, folders: Items[Path], pace: ProfilePace | None) -> Models:
    serving, rollout = folders
    return Models(
        serving=serving,
        rollout=rollout,
        num_pages=NUM_PAGES,
        serving_tokens=serving_tokens_of(config),
        rollout_tokens=CHUNK // config.shorten,
        rollout_seqs=SLOTS,
        max_model_len=MAX_MODEL_LEN,
        lease_s=10.0 * config.scale / config.shorten,
        pace=pace,
    )


def serving_tokens_of(config: RoseConfig) -> int:
    """Most tokens of a serving pass."""
    return 2048 // config.shorten


def lending_of(
    config: RoseConfig, admission: AdmissionPolicy, memory: MemoryPolicy, *, serving_share: float = 1.0
) -> Lending:
    lengths = lengths_of(config)
    return Lending(
        admission=admission,
        memory=memory,
        serving_share=serving_share,
        stall_s=2.0 * config.scale,
        prompt_tokens=max(1, PROMPT // config.shorten),
        new_tokens=lambda number: lengths.at(random.Random(number).gauss(0, 1)),
    )


def lengths_of(config: RoseConfig, most: int = 4000) -> LogNormalLengths:
    """Of the rollout's responses."""
    return LogNormalLengths(median=400 / config.shorten, sigma=0.8, cap=most // config.shorten)


def memory_of(config: RoseConfig) -> MemoryPolicy:
    return ServingFirst(SharingOptions(window_s=60.0 * config.scale / config.shorten))


_COUNTS = ("num_cuts", "num_taken_back", "num_stalled")


def share_of(results: list[_Result], name: str) -> float:
    return sum(getattr(one, name) for one in results) / sum(one.seconds for one in results)


def plain(run: Run) -> dict[str, Any]:
    return {
        "ttft": run.ttft,
        "gaps": run.gaps,
        "seconds": run.seconds,
        "serving_s": run.serving_s,
        "rollout_tokens": run.lent.num_tokens,
        "lent_s": run.lent.seconds,
        "num_taken_back": run.lent.num_taken_back,
        "num_stalled": run.lent.num_stalled,
        "num_cuts": run.lent.num_cuts,
        "late_share": run.num_late / max(1, run.num_steps),
        "differ": 0,
        "compared": 0,
    }
