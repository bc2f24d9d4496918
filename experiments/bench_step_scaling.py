"""How a decode step's time grows with the batch, with the context, and with the sequences that have already finished.

    python experiments/bench_step_scaling.py --figure docs/figures/step_time.png

It should be linear in the first two (above what the weights cost to read) and flat in the third. Sequences bring KV of
zeros, each its own, so that a long context costs no prefill here. In the third panel two engines step in turn, and only
one of them has finished sequences behind it.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from engines import LLM
from engines.config import DType
from experiments import launch
from experiments.blank_kv import submit_decodes
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_UP = 3
FINISHED_AT_ONCE = 256
"""Sequences that are run to their end in one step."""
FINISHED_CONTEXT = 33
"""Tokens of each: two full blocks, which the prefix cache keeps."""


@dataclass(frozen=True, kw_only=True)
class BenchStepScalingConfig:
    """Time decode steps over batch sizes, context lengths and numbers of finished sequences."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    """Sequences in a step, each of `batch_context` tokens."""
    batch_context: int = 128
    """Tokens of each sequence where the batch is varied."""
    contexts: tuple[int, ...] = (64, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
    """Tokens of each of `context_batch` sequences."""
    context_batch: int = 64
    """Sequences where the context or the number of finished ones is varied."""
    finished: tuple[int, ...] = (0, 1024, 4096, 16384)
    """Sequences that have finished before, ascending."""
    dtype: DType = "bfloat16"
    """Of weights and activations."""
    steps: int = 15
    """Timed steps per point; the median counts."""
    threads: int = 1
    """torch threads."""
    figure: Path | None = None
    """Draw the three panels there."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: give one of {', '.join(SHAPES)}")
        for name, least in (("batches", 1), ("contexts", WARM_UP + 1), ("finished", 0)):
            values = getattr(self, name)
            if len(values) < 2 or list(values) != sorted(set(values)) or values[0] < least:
                raise ValueError(f"{name}={values}: give two or more, ascending, of at least {least}")
        for name, least in (("batch_context", WARM_UP + 1), ("context_batch", 1), ("steps", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name in ("figure", "output"):
            path = getattr(self, name)
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}; make it")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchStepScalingConfig)
    launch.share_cores()
    torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        longest = max(*config.contexts, config.batch_context) + config.steps + 1
        save_random_model(Path(folder), SHAPES[config.shape], max_positions=longest, dtype=config.dtype)
        batches = {
            size: _step_ms(folder, config, size, config.batch_context) for size in tqdm(config.batches, desc="batch")
        }
        contexts = {
            length: _step_ms(folder, config, config.context_batch, length)
            for length in tqdm(config.contexts, desc="context")
        }
        finished = _finished_ms(folder, config)
    result = {
        "experiment": "bench_step_scaling",
        "tier": "gpu" if DEVICE.type == "cuda" else "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "workload": {**asdict(config), "figure": None, "output": None},
        "ms_by_batch": batches,
        "batch_fit": _fit(batches),
        "ms_by_context": contexts,
        "context_fit": _fit(contexts),
        "ms_by_finished": {count: row["after"] for count, row in finished.items()},
        "fresh_ms_beside_it": {count: row["fresh"] for count, row in finished.items()},
        "finished_ratio": {count: round(row["after"] / row["fresh"], 3) for count, row in finished.items()},
    }
    if config.figure is not None:
        _draw(config.figure, config, result)
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _engine(folder: str, config: BenchStepScalingConfig, batch: int, num_tokens: int) -> LLM:
    """An engine with room for `batch` sequences of `num_tokens` tokens."""
    token_bytes = SHAPES[config.shape].kv_elements_per_token * getattr(torch, config.dtype).itemsize
    return LLM(
        folder,
        device=DEVICE,
        dtype=config.dtype,
        max_num_seqs=batch,
        max_num_batched_tokens=max(4096, batch),
        kv_cache_bytes=batch * (num_tokens + 16) * token_bytes,
    )


def _step_ms(folder: str, config: BenchStepScalingConfig, batch: int, context: int) -> float:
    llm = _engine(folder, config, batch, context + config.steps)
    num_steps = WARM_UP + config.steps
    submit_decodes(llm, num_sequences=batch, context=context - WARM_UP, length=num_steps)
    seconds = [_step(llm) for _ in range(num_steps)]
    del llm
    gc.collect()  # KV caches of two points at once might not fit
    return round(1e3 * statistics.median(seconds[WARM_UP:]), 4)


def _finished_ms(folder: str, config: BenchStepScalingConfig) -> dict[int, dict[str, float]]:
    """Milliseconds of a step after each number of sequences has ended in the engine, and of one where none has."""
    room = FINISHED_CONTEXT * FINISHED_AT_ONCE // config.context_batch + config.batch_context + config.steps
    batch = max(config.context_batch, FINISHED_AT_ONCE)
    engines = {name: _engine(folder, config, batch, room) for name in ("after", "fresh")}
    rows: dict[int, dict[str, float]] = {}
    num_finished = 0
    for count in tqdm(config.finished, desc="finished"):
        while num_finished < count:
            many = min(FINISHED_AT_ONCE, count - num_finished)
            submit_decodes(
                engines["after"], num_sequences=many, context=FINISHED_CONTEXT, length=1, first_uid=num_finished
            )
            done = engines["after"].replica.step().finished
            assert len(done) == many
            num_finished += many
        num_steps = WARM_UP + config.steps
        for llm in engines.values():
            submit_decodes(
                llm,
                num_sequences=config.context_batch,
                context=config.batch_context - WARM_UP,
                length=num_steps,
                first_uid=2**32 + len(rows) * config.context_batch,
            )
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(num_steps):
            for name, llm in engines.items():
                seconds[name].append(_step(llm))
        rows[count] = {name: round(1e3 * statistics.median(each[WARM_UP:]), 4) for name, each in seconds.items()}
    return rows


def _step(llm: LLM) -> float:
    """Seconds. A step ends with what it has drawn on the host."""
    start = time.perf_counter()
    llm.replica.step()
    return time.perf_counter() - start


def _fit(ms: dict[int, float]) -> dict[str, float]:
    """The line through the points that makes their largest relative distance small, by weighted least squares."""
    x, y = np.array(list(ms)), np.array(list(ms.values()))
    slope, offset = np.polyfit(x, y, 1, w=1 / y)
    return {
        "offset_ms": round(float(offset), 4),
        "us_per_unit": round(1e3 * float(slope), 4),
        "largest_relative_distance": round(float(np.abs((offset + slope * x) / y - 1).max()), 4),
    }


def _draw(path: Path, config: BenchStepScalingConfig, result: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for ax, what, title, label in (
        (axes[0], "batch", f"{config.batch_context} tokens each", "sequences in the step"),
        (axes[1], "context", f"{config.context_batch} sequences", "tokens of each sequence"),
    ):
        ms, fit = result[f"ms_by_{what}"], result[f"{what}_fit"]
        x = np.array(list(ms))
        ax.plot(x, list(ms.values()), "o", markersize=4, label="measured")
        line = fit["offset_ms"] + x * fit["us_per_unit"] / 1e3
        ax.plot(x, line, "-", linewidth=1, label=f"{fit['offset_ms']:.2f} ms + {fit['us_per_unit']:.1f} µs each")
        ax.set(title=title, xlabel=label, ylabel="ms per step")
    axes[0].set(xscale="log", yscale="log")
    counts = list(result["ms_by_finished"])
    axes[2].plot(counts, list(result["ms_by_finished"].values()), "o-", markersize=4, label="after them")
    axes[2].plot(counts, list(result["fresh_ms_beside_it"].values()), "o--", markersize=4, label="fresh engine")
    title = f"{config.context_batch} sequences of {config.batch_context} tokens"
    axes[2].set(title=title, xlabel="sequences finished before", ylabel="ms per step")
    for ax in axes:
        if ax is not axes[0]:
            ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
            ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False)
    figure.suptitle(f"A decode step: {config.shape}, {config.dtype}, {result['device']}, {config.threads} thread(s)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    launch.run(main)
