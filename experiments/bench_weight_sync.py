"""The trainer's weights into the rollout engine: seconds and memory at every ZeRO stage and tensor-parallel size.

    python experiments/bench_weight_sync.py
    python experiments/bench_weight_sync.py --ranks 2 --hidden 256

Every rank holds a DeepSpeed engine and one shard of a replica. `update_weights` streams whole parameters, one at a
time, and each shard copies its part; at ZeRO-3 a parameter is first gathered from all ranks. Beside the seconds stands
the floor, the bytes that a rank must at least read and write over the bandwidth that all ranks copying at once have;
beside the extra memory (peak resident set during the update, over that before it) the largest parameter. All checksums
are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from algos.deepspeed_config import TrainerConfig
from algos.deepspeed_engine import start_deepspeed, stop_deepspeed
from algos.grpo import GRPO
from algos.tokenizer import VOCAB_SIZE
from algos.trainer import Trainer
from engines import LLM
from engines.constraints import Count, check_fields
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache, all_layouts
from experiments import launch
from experiments.random_model import save_random_model
from research.workloads.shapes import DecoderShape


@dataclass(frozen=True, kw_only=True)
class BenchWeightSyncConfig:
    """Time the way of the weights from a DeepSpeed trainer to tensor-parallel engines."""

    ranks: Count = 4
    """Processes to start."""
    hidden: Count = 512
    """Hidden size of a random Qwen3 (25 M parameters by default)."""
    layers: Count = 8
    """Its layers."""
    vocab: Count = 8192
    """Its vocabulary; the embedding is the largest parameter."""
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """ZeRO stages."""
    repeats: Count = 5
    """Updates of each kind; the median counts."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.hidden % 64:
            raise ValueError(f"hidden={self.hidden}: must be a multiple of 64, the head_dim")


def main() -> dict[str, Any] | None:
    with launch.told_once():
        config = tyro.cli(BenchWeightSyncConfig)
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
            _save_model(Path(folder), config)
            starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.ranks), "--"]
            command = [sys.executable, *starter, *sys.argv]
            done = subprocess.run(command, env=os.environ | {"CURTAIL_BENCH_MODEL": folder}, check=False)
        raise SystemExit(done.returncode)
    launch.share_cores()
    start_deepspeed(timedelta(seconds=600))
    world = TorchGroup()
    groups = GroupCache(world, all_layouts(range(world.size)))
    model = os.environ["CURTAIL_BENCH_MODEL"]
    sizes = [size for size in (1, 2, 4, 8) if world.size % size == 0]
    engines = {
        size: LLM(model, world=groups, tensor_parallel_size=size, kv_cache_bytes=2**22, load=False) for size in sizes
    }
    rows = []
    with tqdm(total=len(config.stages) * len(sizes), desc="bench", unit="cell", disable=world.rank > 0) as progress:
        for stage in config.stages:
            trainer = Trainer(TrainerConfig(zero_stage=stage, mini_batch_size=8), GRPO(), model)
            checksums = set()
            for size, llm in engines.items():
                seconds, extra = [], 0
                for repeat in range(config.repeats + 1):
                    world.barrier()
                    before = _reset_peak()
                    start = time.perf_counter()
                    checksum = llm.update_weights(trainer.named_weights(), version=0)
                    elapsed = time.perf_counter() - start
                    if repeat:  # the first warms up
                        seconds.append(elapsed)
                        extra = max(extra, _peak() - before)
                    checksums.add(checksum)
                mine = f"{statistics.median(seconds)} {extra}"
                told = [part.decode() for part in world.all_gather_bytes(mine.encode())]
                rows.append(
                    {
                        "zero_stage": stage,
                        "tp_size": size,
                        "seconds": max(float(one.split()[0]) for one in told),
                        "extra_bytes": max(int(one.split()[1]) for one in told),
                    }
                )
                progress.update()
            everyone = {part for part in world.all_gather_bytes(repr(sorted(checksums)).encode())}
            assert len(checksums) == 1 and len(everyone) == 1, "layouts or ranks hold other weights"
    shapes = {name: view.shape for name, view in engines[1]._engine.decoder.logical_views().items()}
    num_bytes = 4 * sum(shape.numel() for shape in shapes.values())
    bandwidth = _copy_bandwidth(world)
    for row in rows:
        # Every parameter is read whole (at ZeRO-3 it was written whole before); a shard's part is read and written,
        # and read again for the checksum.
        touched = num_bytes * (2 if row["zero_stage"] == 3 else 0) + 3 * num_bytes / row["tp_size"]
        row["floor_seconds"] = touched / bandwidth
    stop_deepspeed()
    result = {
        "experiment": "bench_weight_sync",
        "tier": "live",
        "device": f"cpu ({len(os.sched_getaffinity(0))} cores)",
        "workload": {**asdict(config), "output": None},
        "model_bytes": num_bytes,
        "largest_parameter_bytes": 4 * max(shape.numel() for shape in shapes.values()),
        "copy_bandwidth_per_rank": round(bandwidth / 1e9, 2),
        "rows": [{name: round(value, 4) for name, value in row.items()} for row in rows],
    }
    if world.rank == 0 and config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _save_model(folder: Path, config: BenchWeightSyncConfig) -> None:
    shape = DecoderShape(
        hidden=config.hidden, layers=config.layers, heads=config.hidden // 64, kv_heads=config.hidden // 64,
        head_dim=64, intermediate=3 * config.hidden, vocab=max(config.vocab, VOCAB_SIZE), tied=True,
    )  # fmt: skip
    save_random_model(folder, shape, max_positions=1024)


def _reset_peak() -> int:
    """Resident bytes now, from which on the kernel notes the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _copy_bandwidth(world: TorchGroup) -> float:
    """Bytes read and written per second and rank, while all ranks copy; the median of several."""
    source, target = torch.zeros(2**24), torch.zeros(2**24)
    rates = []
    for _ in range(7):
        world.barrier()
        start = time.perf_counter()
        target.copy_(source)
        rates.append(2 * source.nbytes / (time.perf_counter() - start))
    return min(float(part) for part in world.all_gather_bytes(str(statistics.median(rates)).encode()))


if __name__ == "__main__":
    launch.run(main)
