"""What a decode step costs in bfloat16 and in float32, on a quiet machine and beside a process that keeps a core busy.

    python experiments/bench_machine.py
    CURTAIL_MARCH=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
        python experiments/bench_machine.py     # as on a processor without AVX-512 and bfloat16 instructions

Medians over the steps of batches in which nobody ends, on a model with random weights; the sides take turns.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm

from engines import LLM
from engines.constraints import Count, Counts, check_fields
from experiments import launch
from experiments.blank_kv import submit_decodes
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES

DTYPES = ("float32", "bfloat16")
SETTLE_S = 1.0
"""In which threads find out whether cores are free."""
CONTEXT = 128
TURN = 8
"""Steps that a side makes in a row; the first is not timed."""


@dataclass(frozen=True, kw_only=True)
class BenchMachineConfig:
    """Time decode steps in two dtypes, quiet and beside busy processes."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    batches: Counts = (1, 8, 64)
    """Sequences in a step."""
    neighbours: Count = 1
    """Processes that keep a core busy each."""
    turns: Count = 6
    """Of each side, per batch."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: give one of {', '.join(SHAPES)}")
        check_fields(self, "")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchMachineConfig)
    threads = launch.share_cores()
    cells = {}
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        save_random_model(Path(folder), SHAPES[config.shape], max_positions=1024)
        for batch in tqdm(config.batches, desc="bench", unit="batch"):
            cells[str(batch)], products = _time_batch(folder, batch, config)
    result = {
        "experiment": "bench_machine",
        "tier": "live",
        "device": "cpu",
        "workload": {**asdict(config), "output": None, "threads": threads, "context": CONTEXT},
        "products": products,
        "batches": cells,
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _time_batch(folder: str, batch: int, config: BenchMachineConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Milliseconds of a step of each side, their ratios; and what each dtype is multiplied in."""
    steps = 4 * config.turns * TURN
    tokens = CONTEXT + steps + 16
    engines = {
        name: LLM(
            folder,
            dtype=name.removesuffix("_again"),
            max_num_seqs=batch,
            max_num_batched_tokens=4096,
            kv_cache_bytes=batch * tokens * SHAPES[config.shape].kv_elements_per_token * 4,
        )
        for name in (*DTYPES, "float32_again")
    }
    for llm in engines.values():
        submit_decodes(llm, num_sequences=batch, context=CONTEXT, length=steps)
    times: dict[str, list[float]] = {f"{name}, {state}": [] for state in ("quiet", "busy") for name in engines}
    for state, neighbours in (("quiet", 0), ("busy", config.neighbours)) * 2:
        with _busy(neighbours):
            for _ in range(config.turns // 2 + 1):
                for name, llm in engines.items():
                    times[f"{name}, {state}"] += _time_steps(llm)
    ms = {name: round(1e3 * statistics.median(side), 2) for name, side in times.items()}
    ratios = {
        "bfloat16 to float32": ms["bfloat16, quiet"] / ms["float32, quiet"],
        "busy to quiet": ms["float32, busy"] / ms["float32, quiet"],
        "a_a": ms["float32_again, quiet"] / ms["float32, quiet"],
        "a_a, busy": ms["float32_again, busy"] / ms["float32, busy"],
    }
    products = {name: engines[name].product_dtype for name in DTYPES}
    return {"ms": ms, **{name: round(ratio, 3) for name, ratio in ratios.items()}}, products


def _time_steps(llm: LLM) -> list[float]:
    times = []
    for _ in range(TURN):
        start = time.perf_counter()
        llm.replica.step()
        times.append(time.perf_counter() - start)
    return times[1:]


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Beside `count` processes that never rest."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        _settle()
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _settle() -> None:
    x = torch.ones(64, 512)
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        x @ x.T


if __name__ == "__main__":
    launch.run(main)
