"""The trainer's weights go to the rollout engine: seconds and memory at every ZeRO stage and tensor-parallel size.

    python experiments/bench/weight_sync.py
    python experiments/bench/weight_sync.py --ranks 2 --hidden 256

Every rank holds a DeepSpeed engine and one shard of a replica. `update_weights` streams whole parameters, one at a
time, and each shard copies its part; at ZeRO-3 a parameter is first gathered from all ranks. The floor of the time is
the bytes that a rank must at least read and write, divided by its bandwidth while all ranks copy. The extra memory is
the peak resident set during the update minus the resident set before it; compare it with the largest parameter. All
checksums are compared.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from algos.deepspeed_config import TrainerConfig
from algos.grpo import GRPO
from engines.constraints import Count
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import checkpoint
from experiments.comparison.turns import Row, interleave, make_row, short, timed
from research.workloads.shapes import DecoderShape

if TYPE_CHECKING:
    from algos.trainer import Trainer
    from engines import LLM
    from engines.parallel.collectives import TorchGroup


@dataclass(frozen=True, kw_only=True)
class WeightSyncBench(harness.BenchConfig):
    """Time the copy of weights from a DeepSpeed trainer to tensor-parallel engines, interleaved."""

    ranks: Count = 4
    """Processes to start; under torchrun, its number of processes applies instead."""
    hidden: Annotated[int, Meta(ge=64, multiple_of=64, description="a multiple of 64, the head_dim")] = 512
    """Hidden size of a random Qwen3 (25 M parameters by default)."""
    layers: Count = 8
    """Layers of this model."""
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """ZeRO stages to measure."""


def measure(config: WeightSyncBench) -> dict[str, Any]:
    launch.start_under_torchrun(config.ranks)
    from algos.deepspeed_engine import start_deepspeed, stop_deepspeed
    from algos.trainer import Trainer
    from engines import LLM
    from engines.models.loader import checkpoint_tensors
    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache, all_layouts

    launch.share_cores()
    start_deepspeed(timedelta(seconds=600))
    world = TorchGroup()
    groups = GroupCache(world, all_layouts(range(world.size)))
    heads = config.hidden // 64
    shape = DecoderShape(
        hidden=config.hidden, layers=config.layers, heads=heads, kv_heads=heads, head_dim=64,
        intermediate=3 * config.hidden, vocab=8192, tied=True,
    )  # fmt: skip
    with checkpoint(shape, max_positions=1024, dtype="float32", world=world) as model:
        engines = {
            size: LLM(model, world=groups, tensor_parallel_size=size, kv_cache_bytes=2**22, load=False)
            for size in (1, 2, 4, 8)
            if world.size % size == 0
        }
        sizes_in_bytes = [weight.nbytes for _, weight in checkpoint_tensors(model)]
        bandwidth = _copy_bandwidth(world)
        rows = []
        for stage in config.stages:
            trainer = Trainer(TrainerConfig(zero_stage=stage, mini_batch_size=8), GRPO(), model)
            rows.append(_compare(trainer, stage, engines, world, config))
            # At ZeRO-3 every parameter is written whole and read whole. At every stage a shard's part is read and
            # written, and read again for the checksum.
            touched = {size: sum(sizes_in_bytes) * (3 / size + 2 * (stage == 3)) for size in engines}
            rows[-1]["floor_ms"] = {f"TP {size}": short(1e3 * touched[size] / bandwidth) for size in engines}
    stop_deepspeed()
    facts = {"model_bytes": sum(sizes_in_bytes), "largest_parameter_bytes": max(sizes_in_bytes)}
    return {"ranks": world.size, **facts, "copy_bytes_per_second": short(bandwidth), "rows": rows}


def _compare(trainer: Trainer, stage: int, engines: dict[int, LLM], world: TorchGroup, config: WeightSyncBench) -> Row:
    updates = interleave(
        {f"TP {size}": partial(_update, llm, trainer, world) for size, llm in engines.items()},
        config.turns,
        name=f"ZeRO {stage}",
    )
    checksums = {checksum for some in updates.values() for _, _, checksum in some}
    everyone = {one for mine in launch.gather(world, list(checksums)) for one in mine}
    assert len(everyone) == 1, "layouts or ranks hold other weights"
    return make_row(
        f"ZeRO {stage}",
        {name: [seconds for seconds, _, _ in some] for name, some in updates.items()},
        extra_bytes={name: max(extra for _, extra, _ in some) for name, some in updates.items()},
    )


def _update(llm: LLM, trainer: Trainer, world: TorchGroup) -> tuple[float, int, int]:
    """Returns the largest seconds and extra bytes of all ranks, and the checksum."""
    world.barrier()
    before = _reset_peak()
    took, checksum = timed(lambda: llm.update_weights(trainer.named_weights(), version=0))
    seconds, extra = zip(*launch.gather(world, (took, _status("VmHWM") - before)), strict=True)
    return max(seconds), max(extra), checksum


def _reset_peak() -> int:
    """Resets the kernel's record of the peak; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _copy_bandwidth(world: TorchGroup) -> float:
    """Bytes read and written per second on the slowest rank, while all ranks copy; the median of several copies."""
    import torch

    source, target = torch.zeros(2**24), torch.zeros(2**24)
    rates = []
    for _ in range(7):
        world.barrier()
        rates.append(2 * source.nbytes / timed(lambda: target.copy_(source))[0])
    return min(launch.gather(world, statistics.median(rates)))


if __name__ == "__main__":
    harness.run(WeightSyncBench, measure)
