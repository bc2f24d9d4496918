"""What storing KV takes: a tier beside a copy in memory and a plain file; for how long others wait when a sequence
leaves; and a sequence that is generated in chunks, with a new range of tokens per chunk, and with all stored anew.

    python experiments/bench/kv_pool.py
    python experiments/bench/kv_pool.py --disk-folder /mnt/nvme

Files are written without a flush, and data that was just written to a disk is mostly read back from memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engines
from engines.config import DType
from engines.constraints import Count
from engines.parallel.owned_files import DEV_SHM
from engines.replica.schedule import CachedKV, Sequence
from engines.sequence import KVHandle
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import Shape, checkpoint, random_sequence
from experiments.comparison.turns import Row, interleave, make_row, short, timed


@dataclass(frozen=True, kw_only=True)
class PoolBench(harness.BenchConfig):
    """Time the tiers of stored KV, and the chunks of one sequence."""

    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    chunk: Count = 32
    """Tokens of a chunk."""
    chunks: Count = 64
    """Chunks of the sequence."""
    disk_folder: Path = Path(tempfile.gettempdir())
    """A folder on the disk to measure."""
    dtype: DType = "bfloat16"
    """Dtype of the KV."""


class Pool:
    """One sequence whose KV is in the cache, and the store beside it. The KV is of no tokens that were computed."""

    def __init__(self, llm: engines.LLM, config: PoolBench) -> None:
        from engines.kvcache.tiers import TieredKVStore
        from engines.replica.mover import KVMover

        assert isinstance(llm.replica.mover, KVMover) and isinstance(llm.replica.mover.store, TieredKVStore)
        self.mover, self.tiers = llm.replica.mover, llm.replica.mover.store
        self.num_tokens = config.chunk * config.chunks
        self._chunk = config.chunk
        self._state = random_sequence(0, num_tokens=self.num_tokens + 1, length=1)
        blocks = llm.replica.scheduler.blocks
        self._blocks = list(range(blocks.blocks_for(self.num_tokens + 1)))

    def store(self, num_tokens: int, stored: KVHandle | None = None) -> KVHandle:
        (handle,) = self.mover.export([CachedKV(self._state.tokens, num_tokens, self._blocks, stored=stored)], 0)
        if handle is None or handle.num_tokens < num_tokens:
            raise ValueError("the tier has no room for the sequence; give fewer chunks, or free some memory or disk")
        return handle

    def store_in_chunks(self, *, anew: bool) -> KVHandle:
        handle = None
        for num_tokens in range(self._chunk, self.num_tokens + 1, self._chunk):
            if anew:
                self.mover.drop(handle)
                handle = None
            handle = self.store(num_tokens, handle)
        assert handle is not None
        return handle

    def write(self, store: Callable[[], KVHandle]) -> float:
        seconds, handle = timed(store)
        self.mover.drop(handle)
        return seconds

    def leave(self) -> float:
        """Seconds for which the others wait while a thread stores the KV of a sequence."""
        length, tokens = self.num_tokens + 2, self.num_tokens
        sequence = Sequence(
            state=self._state, max_len=length, release_len=length, blocks=self._blocks, num_computed=tokens
        )
        seconds, is_behind = timed(lambda: self.mover.store_later(sequence, 0))
        ((_, handle),) = self.mover.stored(waits=True)
        assert is_behind and handle is not None
        self.mover.drop(handle)
        return seconds

    def read(self, store: Callable[[], KVHandle]) -> float:
        """Seconds to load all KV into the cache."""
        length = self.num_tokens + 2
        sequence = Sequence(state=self._state, max_len=length, release_len=length, kv=store(), blocks=self._blocks)
        seconds, ((num_tokens, handle),) = timed(lambda: self.mover.load([sequence], 0))
        assert num_tokens == self.num_tokens
        self.mover.drop(handle)
        return seconds

    def bytes_written(self, *, anew: bool) -> int:
        before = self.mover.moves.stored_bytes
        self.mover.drop(self.store_in_chunks(anew=anew))
        return self.mover.moves.stored_bytes - before


def measure(config: PoolBench) -> dict[str, Any]:
    launch.share_cores()
    longest = config.chunk * config.chunks + 2
    tiers: dict[str, Any] = {"kv_host_bytes": 2**30, "kv_disk_bytes": 2**30, "kv_disk_folder": str(config.disk_folder)}
    with checkpoint(config.shape, max_positions=longest, dtype=config.dtype) as folder:
        llm = engines.LLM(folder, dtype=config.dtype, preemption="swap", **tiers)
    pool = Pool(llm, config)
    rows = [_tier(pool, config, name) for name in ("host", "disk")]
    pool.mover.use(pool.tiers)
    rows += _chunks(pool, config)
    llm.close()
    return {"rows": rows}


def _tier(pool: Pool, config: PoolBench, name: str) -> Row:
    import torch

    pool.mover.use(getattr(pool.tiers, name))
    store = partial(pool.store, pool.num_tokens)
    handle = store()
    num_bytes = sum(part.num_bytes for part in handle.parts)
    pool.mover.drop(handle)
    data = torch.ones(num_bytes, dtype=torch.uint8)
    path = (DEV_SHM if name == "host" else config.disk_folder) / f"curtail-bench-{time.time_ns()}"
    ways: dict[str, Callable[[], float]] = {
        "copy in memory": lambda: timed(data.clone)[0],
        "plain file": lambda: timed(lambda: path.write_bytes(data.numpy().data))[0],
        "write": partial(pool.write, store),
        "read": partial(pool.read, store),
    }
    try:
        seconds = interleave(ways, config.turns, name=name)
    finally:
        path.unlink(missing_ok=True)
    return make_row(f"{name} tier", seconds, MiB=short(num_bytes / 2**20))


def _chunks(pool: Pool, config: PoolBench) -> list[Row]:
    whole, ranges, anew = (
        partial(pool.store, pool.num_tokens),
        partial(pool.store_in_chunks, anew=False),
        partial(pool.store_in_chunks, anew=True),
    )
    name = f"{config.chunks} chunks of {config.chunk}"
    written = {"ranges": partial(pool.write, ranges), "anew": partial(pool.write, anew)}
    loaded = {"one entry": partial(pool.read, whole), "ranges": partial(pool.read, ranges)}
    per_token = {
        f"bytes_per_token_{way}": round(pool.bytes_written(anew=way == "anew") / pool.num_tokens) for way in written
    }
    waits: dict[str, Callable[[], float]] = {"in the step": partial(pool.write, whole), "by a thread": pool.leave}
    return [
        make_row("others wait", interleave(waits, config.turns, name="others wait")),
        make_row(f"{name}, stored", interleave(written, config.turns, name="stored"), **per_token),
        make_row(f"{name}, loaded", interleave(loaded, config.turns, name="loaded")),
    ]


if __name__ == "__main__":
    harness.run(PoolBench, measure)
