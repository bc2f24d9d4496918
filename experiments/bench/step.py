"""What a decode step costs: its parts, against its floor, by batch, by context, by what has finished before, by dtype,
and beside busy processes.

    python experiments/bench/step.py
    python experiments/bench/step.py --batches 1 8 64 --dtypes float32 bfloat16 --neighbours 1 --threads 2
    python experiments/bench/step.py --batches 1 2 4 8 16 32 64 128 256 512 1024 2048 4096 \\
        --contexts 64 512 1024 1536 2048 2560 3072 3584 4096 --finished 0 1024 4096 16384 --steps 2 --figure step.png

Medians over the steps of a batch in which nobody ends. Its sequences bring KV of zeros, each its own, so that a long
context costs no prefill. A step's time should be linear in batch and context, above what the weights cost to read, and
flat in the number of finished sequences, for which a fresh engine steps in turn with one that has them behind it.

The parts (schedule, build, forward, sample, and control: tokens appended, ends looked for) are timed by wrapping the
engine's methods from here: the engine itself holds no clock. On CUDA the device is waited for around each part, so that
a step is longer than it is otherwise.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta

from engines import LLM
from engines.config import DType
from engines.constraints import Count, Counts, WholeNumber
from experiments import launch
from experiments.bench import harness
from experiments.bench.blank_kv import submit_decodes
from experiments.bench.models import Shape, checkpoint, floor_seconds
from research.workloads.shapes import SHAPES

PARTS = ("schedule", "build", "forward", "sample")
WARM_UP = 4
SETTLE_S = 1.0
"""In which threads find out whether cores are free."""
FINISHED_AT_ONCE = 256
"""Sequences that are run to their end in one step."""
FINISHED_CONTEXT = 33
"""Tokens of each: two full blocks, which the prefix cache keeps."""
Context = Annotated[int, Meta(gt=WARM_UP, description=f"more than the {WARM_UP} steps of the warm-up")]


@dataclass(frozen=True, kw_only=True)
class StepBench(harness.BenchConfig):
    """Time decode steps, and their parts."""

    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    batches: Counts = (1, 8, 64, 256)
    """Sequences in a step, each of `batch_context` tokens."""
    batch_context: Context = 128
    """Tokens of each sequence at the first timed step, where the context is not varied."""
    contexts: tuple[Context, ...] = ()
    """Tokens of each of `context_batch` sequences."""
    context_batch: Count = 64
    """Sequences, where the batch is not varied."""
    finished: tuple[WholeNumber, ...] = ()
    """Sequences that have finished before, ascending."""
    dtypes: Annotated[tuple[DType, ...], Meta(min_length=1, description="one or more dtypes")] = ("bfloat16",)
    """Of weights and activations; the first one is the baseline."""
    neighbours: WholeNumber = 0
    """Processes that keep a core busy each: where there are some, each dtype is timed beside them, too."""
    steps: Count = 4
    """Steps that a variant makes in a turn."""
    threads: Count = 1
    """torch threads."""
    figure: Path | None = None
    """Draw times by batch, by context and by finished sequences there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.finished) != sorted(set(self.finished)):
            raise ValueError(f"finished={self.finished}: must be ascending")


def measure(config: StepBench) -> dict[str, Any]:
    launch.share_cores()
    torch.set_num_threads(config.threads)
    longest = max(*config.contexts, config.batch_context) + _num_steps(config) + 1
    series: dict[str, list[harness.Row]] = {}
    with checkpoint(config.shape, max_positions=longest, dtype=config.dtypes[0]) as folder:
        time_row = partial(_time_row, folder, config)
        series["batch"] = [time_row("batch", size, size, config.batch_context) for size in config.batches]
        series["context"] = [time_row("context", length, config.context_batch, length) for length in config.contexts]
        series["finished"] = _time_finished(folder, config) if config.finished else []
    fits = {f"{name}_fit": _fit(rows) for name, rows in series.items() if name != "finished" and len(rows) > 1}
    if config.figure is not None:
        _draw(config.figure, config, series, fits)
    return {"rows": [row for rows in series.values() for row in rows], **fits}


def _num_steps(config: StepBench) -> int:
    """That each engine makes: the baseline's has two turns for one of another's, and `neighbours` one more."""
    return WARM_UP + config.steps * (config.turns + 1) * (3 if config.neighbours else 2)


def _engine(folder: str, config: StepBench, dtype: DType, batch: int, context: int) -> LLM:
    """An engine with room for `batch` sequences that decode from `context` tokens on."""
    token_bytes = SHAPES[config.shape].kv_elements_per_token * getattr(torch, dtype).itemsize
    return LLM(
        folder,
        dtype=dtype,
        max_num_seqs=batch,
        max_num_batched_tokens=max(4096, batch),
        kv_cache_bytes=batch * (context + _num_steps(config) + 16) * token_bytes,
    )


def _start(llm: LLM, config: StepBench, batch: int, context: int, first_uid: int = 0) -> None:
    submit_decodes(
        llm, num_sequences=batch, context=context - WARM_UP, length=_num_steps(config) + 1, first_uid=first_uid
    )
    for _ in range(WARM_UP):
        llm.replica.step()


def _time_row(folder: str, config: StepBench, what: str, number: int, batch: int, context: int) -> harness.Row:
    """What a step takes with each dtype; the parts of the first one's, and its floor."""
    engines = {dtype: _engine(folder, config, dtype, batch, context) for dtype in config.dtypes}
    for llm in engines.values():
        _start(llm, config, batch, context)
    base = config.dtypes[0]
    parts = _watch_parts(engines[base])
    turns: dict[str, Callable[[], float]] = {}
    for dtype, llm in engines.items():
        # The baseline runs twice in a turn. Another engine makes as many steps, so that their contexts are as long.
        steps = config.steps * (1 if dtype == base else 2)
        turns[dtype] = partial(_turn, llm, steps, 0, settle=config.neighbours > 0)
        if config.neighbours:
            turns[f"{dtype}, busy"] = partial(_turn, llm, config.steps, config.neighbours, settle=True)
    name = f"{what} {number}"
    seconds = harness.interleave(turns, config.turns, name=name)
    median = {part: statistics.median(times) for part, times in parts.items()}
    median["control"] = median["step"] - sum(median[part] for part in PARTS)
    llm = engines[base]
    context_tokens = batch * (context + _num_steps(config) // 2)
    floor = floor_seconds(SHAPES[config.shape], base, steps=1, context_tokens=context_tokens, device=llm.device)
    return harness.compare(
        name,
        seconds,
        number=number,
        floor_ms=harness.short(1e3 * floor),
        parts_ms={part: harness.short(1e3 * value) for part, value in median.items()},
        all_but_forward=harness.short(1 - median["forward"] / median["step"]),
        products=llm.product_dtype,
    )


def _time_finished(folder: str, config: StepBench) -> list[harness.Row]:
    """What a step takes after each number of sequences has ended in the engine, against one where none has."""
    room = FINISHED_CONTEXT * FINISHED_AT_ONCE // config.context_batch + config.batch_context
    batch = max(config.context_batch, FINISHED_AT_ONCE)
    engines = {name: _engine(folder, config, config.dtypes[0], batch, room) for name in ("fresh", "after")}
    rows: list[harness.Row] = []
    num_finished = 0
    for count in config.finished:
        while num_finished < count:
            many = min(FINISHED_AT_ONCE, count - num_finished)
            submit_decodes(
                engines["after"], num_sequences=many, context=FINISHED_CONTEXT, length=1, first_uid=num_finished
            )
            assert len(engines["after"].replica.step().finished) == many
            num_finished += many
        for llm in engines.values():
            first_uid = 2**32 + len(rows) * config.context_batch
            _start(llm, config, config.context_batch, config.batch_context, first_uid)
        name = f"finished {count}"
        turns = {"fresh": partial(_turn, engines["fresh"], config.steps)}
        turns["after"] = partial(_turn, engines["after"], 2 * config.steps)
        rows.append(harness.compare(name, harness.interleave(turns, config.turns, name=name), number=count))
        for llm in engines.values():
            for state in llm.replica.states():
                llm.replica.abort(state.sequence_id)
    return rows


def _turn(llm: LLM, num_steps: int, neighbours: int = 0, *, settle: bool = False) -> float:
    """Median seconds of a step. A step ends with what it has drawn on the host."""
    with _busy(neighbours):
        end = time.monotonic() + SETTLE_S * settle
        while time.monotonic() < end:
            torch.ones(64, 512) @ torch.ones(512, 64)
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            llm.replica.step()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Beside `count` processes that never rest."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _watch_parts(llm: LLM) -> dict[str, list[float]]:
    """From now on: the seconds of each part of each step, and of the whole."""
    replica, runner = llm.replica, llm.replica._runner
    seconds: dict[str, list[float]] = {}
    for owner, method, part in (
        (replica.scheduler, "schedule", "schedule"),
        (runner, "_build", "build"),
        (runner, "_forward", "forward"),
        (runner, "_draw", "sample"),
        (replica, "step", "step"),
    ):
        seconds[part] = []
        setattr(owner, method, _timed(getattr(owner, method), seconds[part]))
    return seconds


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = method(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        return result

    return call


def _fit(rows: list[harness.Row]) -> dict[str, float]:
    """The line through the baseline's points that makes their relative distances small, by weighted least squares."""
    x, y = (np.array(values, dtype=float) for values in _points(rows))
    slope, offset = np.polyfit(x, y, 1, w=1 / y)
    return {
        "offset_ms": harness.short(offset),
        "us_per_unit": harness.short(1e3 * slope),
        "largest_relative_distance": harness.short(np.abs((offset + slope * x) / y - 1).max()),
    }


def _points(rows: list[harness.Row], variant: str | None = None) -> tuple[list[int], list[float]]:
    return [row["number"] for row in rows], [row["ms"][variant or next(iter(row["ms"]))] for row in rows]


def _draw(path: Path, config: StepBench, series: dict[str, list[harness.Row]], fits: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    labels = {
        "batch": f"sequences of {config.batch_context} tokens",
        "context": f"tokens of {config.context_batch} sequences",
        "finished": f"sequences finished before {config.context_batch} of {config.batch_context} tokens",
    }
    for ax, (name, rows) in zip(axes, series.items(), strict=True):
        for variant in rows[0]["ms"] if rows else ():
            ax.plot(*_points(rows, variant), "o", markersize=4, label=variant)
        if fit := fits.get(f"{name}_fit"):
            x = np.array(_points(rows)[0])
            label = f"{fit['offset_ms']:.2f} ms + {fit['us_per_unit']:.1f} us each"
            ax.plot(x, fit["offset_ms"] + x * fit["us_per_unit"] / 1e3, "-", linewidth=1, label=label)
        ax.set(xlabel=labels[name], ylabel="ms per step", ylim=(0, None))
        ax.legend(frameon=False)
    axes[0].set(xscale="log", yscale="log")
    figure.suptitle(f"A decode step: {config.shape}, {harness.machine()['device']}, {config.threads} thread(s)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    harness.run(StepBench, measure)
