"""A preempted sequence: its KV swapped out and in again, or computed again; and which of the two the cost model picks.

    python experiments/bench_swap.py
    python experiments/bench_swap.py --tier disk --disk-folder /mnt/nvme

One sequence with a context of that many tokens loses its blocks and comes back. The time is that of all steps from the
preemption to the next token, less that of the steps that the same sequence takes without a preemption. Both ways are
taken in turn, one of them twice (A/A). `disk` is what a disk gives back just after it was written, mostly from memory;
`cold-disk` has the file flushed and its pages dropped before it is read (outside of the time; the cost model is
measured as for `disk`, and judged against both).

With `--shared` a second sequence of the same prompt runs, whose blocks the first one finds again: recomputing is then
little, and copying is not.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from engines import LLM, SamplingParams, SequenceKey, SequenceState
from engines.config import DType
from engines.constraints import Count, Counts, check_fields
from engines.kvcache.tiers import disk_folder
from engines.replica.scheduler import CachedKV, Sequence
from engines.sequence import Work
from experiments import launch
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDES = ("swap", "recompute", "swap_again")
MORE = 32
"""Tokens that a sequence may grow by while it is preempted again and again."""


@dataclass(frozen=True, kw_only=True)
class BenchSwapConfig:
    """Time both ways of a preempted sequence at several lengths, and ask the cost model."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    lengths: Counts = (128, 1024, 4096)
    """Tokens of the sequence."""
    tier: Literal["host", "disk", "cold-disk"] = "host"
    """Where its KV goes."""
    shared: bool = False
    """Whether another sequence of the same prompt runs, so that all full blocks are found again."""
    disk_folder: Path = Path(tempfile.gettempdir())
    """For the disk tiers; a folder on the disk to measure."""
    dtype: DType = "bfloat16"
    """Of weights, activations and KV."""
    repeats: Count = 5
    """Interleaved measurements of each way and length; the median counts."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: give one of {', '.join(SHAPES)}")
        check_fields(self, "")
        if not self.disk_folder.is_dir():
            raise ValueError(f"disk_folder={str(self.disk_folder)!r}: there is no such folder; make it")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchSwapConfig)
    launch.share_cores()
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        save_random_model(
            Path(folder), SHAPES[config.shape], max_positions=max(config.lengths) + MORE, dtype=config.dtype
        )
        llm = LLM(folder, device=DEVICE, dtype=config.dtype, preemption="auto", **_tiers(config))
    seconds: dict[int, dict[str, list[float]]] = {n: {side: [] for side in SIDES} for n in config.lengths}
    with tqdm(total=len(config.lengths) * (config.repeats + 1), desc="bench", unit="sequence") as progress:
        for repeat in range(config.repeats + 1):
            for num_tokens in config.lengths:
                took = _preempt(llm, config, num_tokens, uid=repeat)
                if repeat:  # the first warms up
                    for side in SIDES:
                        seconds[num_tokens][side].append(took[side])
                progress.update()
    # The first member computes the prompt's last block, the second has one of its own, and finds the first's again.
    picks = {
        n: _ask(llm, n, n // llm.config.block_size * llm.config.block_size * config.shared) for n in config.lengths
    }
    llm.close()
    result = {
        "experiment": "bench_swap",
        "tier": "gpu" if DEVICE.type == "cuda" else "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "workload": {**asdict(config), "disk_folder": str(config.disk_folder), "output": None},
        "threads": torch.get_num_threads(),
        "lengths": {str(n): _row(seconds[n], picks[n]) for n in config.lengths},
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _tiers(config: BenchSwapConfig) -> dict[str, Any]:
    if config.tier == "host":
        return {}
    return {"kv_host_bytes": 0, "kv_disk_bytes": 2**30, "kv_disk_folder": str(config.disk_folder)}


def _preempt(llm: LLM, config: BenchSwapConfig, num_tokens: int, uid: int) -> dict[str, float]:
    """Seconds that each way costs a sequence with `num_tokens` computed tokens."""
    generator = torch.Generator().manual_seed(uid)
    prompt = torch.randint(2, 256, (num_tokens,), generator=generator).tolist()
    for index in range(2 if config.shared else 1):
        key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=index)
        params = SamplingParams(max_tokens=MORE, ignore_eos=True)
        state = SequenceState(key=key, group_id=uid, tokens=list(prompt), num_prompt_tokens=num_tokens, params=params)
        llm.replica.submit(Work(state=state))
        llm.replica.step()
    plain = statistics.median(_step(llm) for _ in range(3))
    sequence = llm.replica.scheduler.running[-1]
    took = {side: _come_back(llm, config, sequence, side) - plain for side in SIDES}
    for left in llm.replica.states():
        llm.replica.abort(left.sequence_id)
    llm.replica.scheduler.blocks.forget()
    return took


def _come_back(llm: LLM, config: BenchSwapConfig, sequence: Sequence, side: str) -> float:
    """Seconds from the preemption to the next token."""
    scheduler = llm.replica.scheduler
    start = time.perf_counter()
    _, cached = scheduler._preempt_latest()
    if side.startswith("swap"):
        _swap_out(llm, sequence, cached)
    seconds = time.perf_counter() - start
    if not config.shared:
        scheduler.blocks.forget()  # somebody else has taken the blocks
    if config.tier == "cold-disk":
        _drop_pages(disk_folder(config.disk_folder).glob("*"))
    num_before = len(sequence.state.tokens)
    while len(sequence.state.tokens) == num_before:
        seconds += _step(llm)
    return seconds


def _swap_out(llm: LLM, sequence: Sequence, cached: CachedKV) -> None:
    """As the replica does it when the policy says so."""
    replica = llm.replica
    (sequence.kv,) = replica.mover.export([cached], replica.policy_version)
    if sequence.kv is None:
        raise ValueError("the tier has no room for the sequence; give shorter lengths, or free some memory or disk")


def _step(llm: LLM) -> float:
    start = time.perf_counter()
    llm.replica.step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _drop_pages(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _ask(llm: LLM, num_tokens: int, num_known: int) -> dict[str, Any]:
    policy, store = llm.replica.mover.swap_policy, llm.replica.mover.store
    assert store is not None
    start = time.perf_counter()
    swaps = policy.swaps(num_tokens, num_known, store)
    took = time.perf_counter() - start
    (cost,) = policy.costs.values()
    return {
        "picks": "swap" if swaps else "recompute",
        "model_ms": {
            "swap": round(1e3 * cost.swap_seconds(num_tokens, num_known), 3),
            "recompute": round(1e3 * cost.recompute_seconds(num_tokens, num_known), 3),
        },
        "asked_ms": round(1e3 * took, 1),
    }


def _row(seconds: dict[str, list[float]], pick: dict[str, Any]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    faster = "swap" if median["swap"] < median["recompute"] else "recompute"
    return {
        "ms": {name: round(1e3 * value, 3) for name, value in median.items()},
        "recompute_over_swap": round(median["recompute"] / median["swap"], 2),
        "a_a": round(median["swap_again"] / median["swap"], 3),
        "faster": faster,
        **pick,
        "picks_the_faster": pick["picks"] == faster,
    }


if __name__ == "__main__":
    launch.run(main)
