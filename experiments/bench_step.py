"""What a decode step is made of: schedule, build, forward, sample, and control (tokens appended, ends looked for).

    python experiments/bench_step.py
    python experiments/bench_step.py --shape 200m --batches 1 64 --context 1024

Medians over the steps of a batch in which nobody ends, on a model with random weights. The parts are timed by wrapping
the engine's methods from here: the engine itself holds no clock. On CUDA the device is waited for around each part, so
that a step is longer than it is untimed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm

from engines import LLM
from engines.config import DType
from engines.constraints import Count, Counts, check_fields
from experiments import launch
from experiments.blank_kv import submit_decodes
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS = ("schedule", "build", "forward", "sample", "control")
WARM_UP = 4


@dataclass(frozen=True, kw_only=True)
class BenchStepConfig:
    """Time the parts of a decode step."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    batches: Counts = (1, 8, 64, 256)
    """Sequences in a step."""
    context: int = 128
    """Tokens of each sequence at the first timed step."""
    dtype: DType = "bfloat16"
    """Of weights and activations."""
    steps: Count = 40
    """Timed steps per batch; the medians count."""
    threads: Count = 1
    """torch threads."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: give one of {', '.join(SHAPES)}")
        if self.context <= WARM_UP:
            raise ValueError(f"context={self.context}: must be more than the {WARM_UP} steps of the warm-up")
        check_fields(self, "")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchStepConfig)
    launch.share_cores()
    torch.set_num_threads(config.threads)
    shape, longest = SHAPES[config.shape], config.context + config.steps
    cells: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        save_random_model(Path(folder), shape, max_positions=longest + 16, dtype=config.dtype)
        item = getattr(torch, config.dtype).itemsize
        for batch in tqdm(config.batches, desc="bench", unit="batch"):
            llm = LLM(
                folder,
                device=DEVICE,
                dtype=config.dtype,
                max_num_seqs=batch,
                max_num_batched_tokens=max(4096, batch),
                kv_cache_bytes=batch * (longest + 16) * shape.kv_elements_per_token * item,
            )
            cells[str(batch)] = _time_parts(llm, batch, config)
    result = {
        "experiment": "bench_step",
        "tier": "gpu" if DEVICE.type == "cuda" else "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "workload": {**asdict(config), "output": None},
        "batches": cells,
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _time_parts(llm: LLM, batch: int, config: BenchStepConfig) -> dict[str, Any]:
    """Milliseconds of each part, and its share of the step."""
    submit_decodes(llm, num_sequences=batch, context=config.context - WARM_UP, length=WARM_UP + config.steps)
    replica, runner = llm.replica, llm.replica._runner
    seconds: dict[str, float] = {}
    for owner, method, part in (
        (replica.scheduler, "schedule", "schedule"),
        (runner, "_build", "build"),
        (runner, "_forward", "forward"),
        (runner, "_draw", "sample"),
        (replica, "step", "step"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), part, seconds))
    rows = []
    for _ in range(WARM_UP + config.steps):
        replica.step()
        inner = sum(seconds[part] for part in PARTS if part != "control")
        rows.append({**seconds, "control": seconds["step"] - inner})
    median = {part: statistics.median(row[part] for row in rows[WARM_UP:]) for part in (*PARTS, "step")}
    return {
        "ms": {part: round(1e3 * value, 4) for part, value in median.items()},
        "share": {part: round(median[part] / median["step"], 4) for part in PARTS},
        "all_but_forward": round(1 - median["forward"] / median["step"], 4),
    }


def _timed(method: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The method, which writes how long it took last to `seconds`."""

    @wraps(method)
    def call(*args: Any) -> Any:
        _wait()
        start = time.perf_counter()
        result = method(*args)
        _wait()
        seconds[part] = time.perf_counter() - start
        return result

    return call


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    launch.run(main)
