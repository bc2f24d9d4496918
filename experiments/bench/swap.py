"""A sequence loses its blocks and comes back. Its KV is stored and read, or recomputed: which way is faster, and which
one does the cost model pick?

    python experiments/bench/swap.py
    python experiments/bench/swap.py --tier disk --disk-folder /mnt/nvme

The time covers leaving the replica, with stored KV or without, and all steps to the next token, minus the time of a
plain step of the same sequence. Data that was just written to a disk is mostly read back from memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engines import LLM, SequenceState
from engines.config import DType
from engines.constraints import Counts
from engines.replica.mover import KVMover
from engines.sequence import Work
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import Shape, checkpoint, random_sequence
from experiments.comparison.turns import Row, interleave, make_row, short


@dataclass(frozen=True, kw_only=True)
class SwapBench(harness.BenchConfig):
    """Time swapping and recomputing at several lengths, interleaved, and ask the cost model for its choice."""

    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    lengths: Counts = (128, 1024, 4096)
    """Tokens of the sequence."""
    tier: Literal["host", "disk"] = "host"
    """Where its KV is stored."""
    disk_folder: Path = Path(tempfile.gettempdir())
    """A folder on the disk to measure."""
    dtype: DType = "bfloat16"
    """Dtype of weights, activations and KV."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.disk_folder.is_dir():
            raise ValueError(f"disk_folder={str(self.disk_folder)!r}: there is no such folder; make it")


def measure(config: SwapBench) -> dict[str, Any]:
    launch.share_cores()
    tiers: dict[str, Any] = {"kv_host_bytes": 0, "kv_disk_bytes": 2**30, "kv_disk_folder": str(config.disk_folder)}
    longest = max(config.lengths) + _most_tokens(config)
    with checkpoint(config.shape, max_positions=longest, dtype=config.dtype) as folder:
        llm = LLM(
            folder,
            dtype=config.dtype,
            preemption="auto",
            prefix_caching=False,  # as if others had taken the blocks
            **({} if config.tier == "host" else tiers),
        )
    rows = [_compare(llm, config, num_tokens) for num_tokens in config.lengths]
    llm.close()
    return {"rows": rows}


def _most_tokens(config: SwapBench) -> int:
    """Most tokens that a sequence generates: the first one, a few in plain steps, and one after each return."""
    return 8 + 3 * config.turns


def _compare(llm: LLM, config: SwapBench, num_tokens: int) -> Row:
    state = random_sequence(num_tokens, num_tokens=num_tokens, length=_most_tokens(config))
    llm.replica.submit(Work(state=state))
    while not state.num_generated:
        llm.replica.step()
    plain = statistics.median(_step(llm) for _ in range(3))
    ways = {
        "swap": partial(_come_back, llm, state, with_kv=True),
        "recompute": partial(_come_back, llm, state, with_kv=False),
    }
    seconds = interleave(ways, config.turns, name=f"{num_tokens} tokens")
    llm.replica.abort(state.sequence_id)
    row = make_row(
        f"{num_tokens} tokens",
        {way: [max(time - plain, 1e-6) for time in times] for way, times in seconds.items()},
        **_ask(llm, num_tokens),
    )
    return row | {"picks_the_faster": row["picks"] == min(row["ms"], key=row["ms"].__getitem__)}


def _come_back(llm: LLM, state: SequenceState, *, with_kv: bool) -> float:
    """Seconds from the loss of the sequence's blocks to its next token."""
    replica = llm.replica
    start = time.perf_counter()
    (work,) = replica.pause([state.sequence_id], with_kv=with_kv)
    if with_kv and work.kv is None:
        raise ValueError("the tier has no room for the sequence; give shorter lengths, or free some memory or disk")
    replica.submit(work)
    seconds = time.perf_counter() - start
    num_before = len(state.tokens)
    while len(state.tokens) == num_before:
        seconds += _step(llm)
    return seconds


def _step(llm: LLM) -> float:
    start = time.perf_counter()
    llm.replica.step()
    return time.perf_counter() - start


def _ask(llm: LLM, num_tokens: int) -> dict[str, Any]:
    """The cost model's choice, and the times that it predicts."""
    mover = llm.replica.mover
    assert isinstance(mover, KVMover) and mover.store is not None
    policy, store = mover.swap_policy, mover.store
    swaps = policy.swaps(num_tokens, 0, store)
    (cost,) = policy.costs.values()
    return {
        "picks": "swap" if swaps else "recompute",
        "model_ms": {
            "swap": short(1e3 * cost.swap_seconds(num_tokens, 0)),
            "recompute": short(1e3 * cost.recompute_seconds(num_tokens, 0)),
        },
    }


if __name__ == "__main__":
    harness.run(SwapBench, measure)
