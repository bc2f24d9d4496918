"""Times a decode step and its parts, against a floor: by batch, context and dtype, after many sequences have finished,
and beside busy processes.

    python experiments/bench/step.py
    python experiments/bench/step.py --batches 1 8 64 --dtypes float32 bfloat16 --neighbours 1 --threads 2
    python experiments/bench/step.py --batches 64 --finished 16384
    python experiments/bench/step.py --shape 8b --attentions triton sdpa --without-graphs     # on a GPU
    python experiments/bench/step.py --batches 1 2 4 8 16 32 64 128 256 512 1024 2048 4096 --steps 2 \\
        --contexts 64 512 1024 1536 2048 2560 3072 3584 4096

Times are medians over the steps of a batch in which no sequence ends. Each sequence has its own KV of zeros, so that a
long context needs no prefill. A step's time should be linear in batch and context, on top of the time to read the
weights, and independent of the number of finished sequences.

The parts are schedule, build, forward, sample, and control (appending tokens, looking for ends). They are timed by
wrapping the engine's methods here, since the engine has no clock, in steps of their own: on CUDA the device is
synchronised around each part, so these steps take longer than the others.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from engines.config import Attention, DType
from engines.constraints import Count, Counts, WholeNumber
from experiments import launch
from experiments.bench import harness
from experiments.bench.blank_kv import submit_decodes
from experiments.bench.models import Shape, floor_seconds, random_weights, save_config
from experiments.comparison.machine import busy
from experiments.comparison.turns import Row, interleave, make_row, short, timed
from research.workloads.shapes import SHAPES

if TYPE_CHECKING:
    from engines import LLM

PARTS = ("schedule", "build", "forward", "sample")
WARM_UP = 4
SETTLE_S = 1.0
"""Seconds in which threads find out whether cores are free."""
FINISHED_CONTEXT = 33
"""Tokens of a finished sequence: two full blocks, which the prefix cache keeps."""
Context = Annotated[int, Meta(gt=WARM_UP, description=f"more than the {WARM_UP} steps of the warm-up")]


@dataclass(frozen=True, kw_only=True)
class StepBench(harness.BenchConfig):
    """Time decode steps, and their parts."""

    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    batches: Counts = (1, 8, 64, 256)
    """Sequences in a step, each with 128 tokens at the start."""
    contexts: tuple[Context, ...] = ()
    """Tokens that each of 64 sequences has at the start."""
    dtypes: Annotated[tuple[DType, ...], Meta(min_length=1, description="one or more dtypes")] = ("bfloat16",)
    """Dtypes of weights and activations; the first one is the baseline."""
    attentions: Annotated[tuple[Attention, ...], Meta(min_length=1, description="one or more backends")] = ("auto",)
    """Attention backends; the first one is the baseline's, and the others are timed in the baseline's dtype."""
    without_graphs: bool = False
    """Whether the baseline is also timed without CUDA graphs."""
    finished: WholeNumber = 0
    """If above 0, the baseline is also timed in an engine in which this many sequences have finished before."""
    neighbours: WholeNumber = 0
    """If above 0, the baseline is also timed beside this many processes that each keep a core busy."""
    steps: Count = 4
    """Steps that a variant makes in a turn."""
    threads: Count = 1
    """torch threads."""

    @property
    def num_steps(self) -> int:
        """Most steps that an engine makes: the baseline's engine runs up to three times in a turn."""
        return WARM_UP + 3 * self.steps * (self.turns + 1) + self.steps


def measure(config: StepBench) -> dict[str, Any]:
    import torch

    launch.share_cores()
    torch.set_num_threads(config.threads)
    cells = {"batch": [(size, size, 128) for size in config.batches], "context": [(n, 64, n) for n in config.contexts]}
    longest = max(context for some in cells.values() for _, _, context in some) + config.num_steps + 1
    rows, fits = [], {}
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), SHAPES[config.shape], max_positions=longest)
        for what, some in cells.items():
            mine = [_compare(f"{what} {number}", folder, config, batch, context) for number, batch, context in some]
            if len(mine) > 1:
                fits[f"{what}_fit"] = _fit([number for number, _, _ in some], mine)
            rows += mine
    return {"rows": rows, **fits}


def _compare(name: str, folder: str, config: StepBench, batch: int, context: int) -> Row:
    """The time of a step, and for the baseline also its parts and its floor."""
    base = config.dtypes[0]
    make = partial(_engine, folder, config, batch, context)
    engines: dict[str, LLM] = {dtype: make(dtype, config.attentions[0]) for dtype in config.dtypes}
    engines |= {attention: make(base, attention) for attention in config.attentions[1:]}
    if config.without_graphs:
        engines["no graphs"] = make(base, config.attentions[0], cuda_graphs=False)
    if config.finished:
        engines["after finished"] = make(base, config.attentions[0])
        _finish(engines["after finished"], config.finished, batch)
    for llm in engines.values():
        submit_decodes(
            llm, num_sequences=batch, context=context - WARM_UP, length=config.num_steps + 1, first_uid=2**32
        )
        for _ in range(WARM_UP):
            llm.replica.step()
    settle = config.neighbours > 0
    # The baseline runs twice in a turn. The others make twice the steps at once, so that all contexts grow alike.
    turns: dict[str, Callable[[], float]] = {
        one: partial(_turn, llm, config.steps * (1 + (one != base)), settle) for one, llm in engines.items()
    }
    if config.neighbours:
        turns["busy"] = partial(_turn, engines[base], config.steps, settle, config.neighbours)
    seconds = interleave(turns, config.turns, name=name)
    parts = _watch_parts(engines[base])
    _turn(engines[base], config.steps, settle)
    median = {part: statistics.median(times) for part, times in parts.items()}
    median["control"] = median["step"] - sum(median[part] for part in PARTS)
    tokens = batch * (context + config.num_steps // 2)
    device = engines[base].device
    products = {one: llm.product_dtype for one, llm in engines.items()}
    attentions = {one: llm.attention for one, llm in engines.items()}
    turns.clear()
    engines.clear()
    del llm
    gc.collect()  # the memory of engines on a GPU, before the next ones are made
    floor = floor_seconds(SHAPES[config.shape], base, steps=1, context_tokens=tokens, device=device)
    return make_row(
        name,
        seconds,
        floor_ms=short(1e3 * floor),
        parts_ms={part: short(1e3 * value) for part, value in median.items()},
        all_but_forward=short(1 - median["forward"] / median["step"]),
        products=products,
        attentions=attentions,
    )


def _engine(
    folder: str, config: StepBench, batch: int, context: int, dtype: DType, attention: Attention, **options: Any
) -> LLM:
    """An engine with room for `batch` sequences that decode from `context` tokens on, or that finish."""
    import torch

    from engines import LLM

    token_bytes = SHAPES[config.shape].kv_elements_per_token * getattr(torch, dtype).itemsize
    llm = LLM(
        folder,
        load=False,
        dtype=dtype,
        attention=attention,
        max_num_seqs=batch,
        max_num_batched_tokens=max(4096, batch),
        kv_cache_bytes=batch * (max(context, FINISHED_CONTEXT) + config.num_steps + 16) * token_bytes,
        **options,
    )
    llm.update_weights(random_weights(llm), version=0)
    return llm


def _finish(llm: LLM, count: int, at_once: int) -> None:
    """Runs `count` sequences to their end, `at_once` at a time."""
    for first in range(0, count, at_once):
        many = min(at_once, count - first)
        submit_decodes(llm, num_sequences=many, context=FINISHED_CONTEXT, length=1, first_uid=first)
        assert len(llm.replica.step().finished) == many


def _turn(llm: LLM, num_steps: int, settle: bool, neighbours: int = 0) -> float:
    """Median seconds of a step, which ends when the sampled tokens are on the host."""
    import torch

    with busy(neighbours):
        end = time.monotonic() + SETTLE_S * settle
        while time.monotonic() < end:
            torch.ones(64, 512) @ torch.ones(512, 64)
        return statistics.median(timed(llm.replica.step)[0] for _ in range(num_steps))


def _watch_parts(llm: LLM) -> dict[str, list[float]]:
    """Returns a list per part, and for the whole step, to which every later step appends its seconds."""
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
    import torch

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = method(*args, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        return result

    return call


def _fit(x: list[int], rows: list[Row]) -> dict[str, float]:
    """Fits a line to the baseline's points by least squares, weighted so that relative distances are small."""
    y = np.array([next(iter(row["ms"].values())) for row in rows])
    slope, offset = np.polyfit(x, y, 1, w=1 / y)
    return {
        "offset_ms": short(offset),
        "us_per_unit": short(1e3 * slope),
        "largest_relative_distance": short(np.abs((offset + slope * np.array(x)) / y - 1).max()),
    }


if __name__ == "__main__":
    harness.run(StepBench, measure)
