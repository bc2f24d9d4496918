"""A sequence that gives up its blocks and comes back: its KV stored and read, or computed again; and what the cost model
picks.

    python experiments/bench/swap.py
    python experiments/bench/swap.py --tier disk --disk-folder /mnt/nvme

The time is that of leaving the replica, with stored KV or without, and of all steps to the next token, less that of a
step that the same sequence takes otherwise. `disk` is what a disk gives back just after it was written, mostly from
memory; `cold-disk` has the file flushed and its pages dropped before it is read (outside of the time; the cost model is
measured as for `disk`, and judged against both).

With `--shared` a second sequence of the same prompt runs, whose blocks the first one finds again: recomputing is then
little, and copying is not.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from engines import LLM, SamplingParams, SequenceKey, SequenceState
from engines.config import DType
from engines.constraints import Counts
from engines.kvcache.disk import disk_folder
from engines.sequence import Work
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import Shape, checkpoint
from research.workloads.shapes import SHAPES


@dataclass(frozen=True, kw_only=True)
class SwapBench(harness.BenchConfig):
    """Time both ways at several lengths, interleaved, and ask the cost model."""

    shape: Shape = "25m"
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.disk_folder.is_dir():
            raise ValueError(f"disk_folder={str(self.disk_folder)!r}: there is no such folder; make it")

    @property
    def most_tokens(self) -> int:
        """That a sequence may generate while it, or its neighbour, comes back again and again."""
        return 32 + 16 * self.turns


def measure(config: SwapBench) -> dict[str, Any]:
    launch.share_cores()
    tiers: dict[str, Any] = {"kv_host_bytes": 0, "kv_disk_bytes": 2**30, "kv_disk_folder": str(config.disk_folder)}
    longest = max(config.lengths) + config.most_tokens
    with checkpoint(config.shape, max_positions=longest, dtype=config.dtype) as folder:
        llm = LLM(
            folder,
            dtype=config.dtype,
            preemption="auto",
            prefix_caching=config.shared,  # else somebody else has taken the blocks
            **({} if config.tier == "host" else tiers),
        )
    rows = [_compare(llm, config, num_tokens) for num_tokens in config.lengths]
    llm.close()
    return {"rows": rows}


def _compare(llm: LLM, config: SwapBench, num_tokens: int) -> harness.Row:
    generator = torch.Generator().manual_seed(num_tokens)
    prompt = torch.randint(2, SHAPES[config.shape].vocab, (num_tokens,), generator=generator).tolist()
    params = SamplingParams(max_tokens=config.most_tokens, ignore_eos=True)
    for index in range(2 if config.shared else 1):
        key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=num_tokens, sample_index=index)
        state = SequenceState(key=key, group_id=0, tokens=list(prompt), num_prompt_tokens=num_tokens, params=params)
        llm.replica.submit(Work(state=state))
        while state.num_generated < 1:
            llm.replica.step()
    plain = statistics.median(_step(llm) for _ in range(3))
    ways = {
        "swap": partial(_come_back, llm, config, state, with_kv=True),
        "recompute": partial(_come_back, llm, config, state, with_kv=False),
    }
    seconds = harness.interleave(ways, config.turns, name=f"{num_tokens} tokens")
    for left in llm.replica.states():
        llm.replica.abort(left.sequence_id)
    # The first member computes the prompt's last block, the second has one of its own, and finds the first's again.
    num_known = num_tokens // llm.config.block_size * llm.config.block_size * config.shared
    row = harness.compare(
        f"{num_tokens} tokens",
        {way: [max(time - plain, 1e-6) for time in times] for way, times in seconds.items()},
        **_ask(llm, num_tokens, num_known),
    )
    return row | {"picks_the_faster": row["picks"] == min(row["ms"], key=row["ms"].__getitem__)}


def _come_back(llm: LLM, config: SwapBench, state: SequenceState, *, with_kv: bool) -> float:
    """Seconds from the loss of its blocks to the next token."""
    replica = llm.replica
    start = time.perf_counter()
    (work,) = replica.pause([state.sequence_id], replica.kv_store if with_kv else None)
    if with_kv and work.kv is None:
        raise ValueError("the tier has no room for the sequence; give shorter lengths, or free some memory or disk")
    seconds = time.perf_counter() - start
    if config.tier == "cold-disk":
        _drop_pages(disk_folder(config.disk_folder).glob("*"))
    replica.submit(work)
    num_before = len(state.tokens)
    while len(state.tokens) == num_before:
        seconds += _step(llm)
    return seconds


def _step(llm: LLM) -> float:
    start = time.perf_counter()
    llm.replica.step()
    return time.perf_counter() - start


def _drop_pages(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _ask(llm: LLM, num_tokens: int, num_known: int) -> dict[str, Any]:
    """What the cost model picks, and its times."""
    policy, store = llm.replica.swap_policy, llm.replica.kv_store
    assert policy is not None and store is not None
    swaps = policy.swaps(num_tokens, num_known, store)
    (cost,) = policy.costs.values()
    return {
        "picks": "swap" if swaps else "recompute",
        "model_ms": {
            "swap": harness.short(1e3 * cost.swap_seconds(num_tokens, num_known)),
            "recompute": harness.short(1e3 * cost.recompute_seconds(num_tokens, num_known)),
        },
    }


if __name__ == "__main__":
    harness.run(SwapBench, measure)
