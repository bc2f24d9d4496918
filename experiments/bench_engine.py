"""Our engine against other engines on one model with random weights: fixed batches, and one long-tailed batch.

    python experiments/bench_engine.py --vllm-python /path/to/vllm/bin/python
    python experiments/bench_engine.py --shapes 25m --batches 1 --profile trace.json

All sides read the same checkpoint and generate the same numbers of tokens from the same prompts at temperature 1. In
the long tail ours sees the cap only, a hidden stop ends its sequences; vLLM knows each length; Hugging Face pads all
rows until the longest is done. Cells are run one after the other, their sides in turn; ours runs twice (A/A). Beside
milliseconds per step stands the floor: the bytes of weights and KV that a step must read over the bandwidth that a
plain read of as many bytes has here.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from engines import LLM, SamplingParams, SequenceState
from engines.config import DType
from engines.constraints import Count, check_fields
from experiments import launch
from experiments.hf_peer import START_S, ContinuousBatchingPeer, HuggingFacePeer, best_threads
from experiments.random_model import save_random_model
from research.workloads.lengths import LogNormalLengths
from research.workloads.shapes import SHAPES, DecoderShape

PROMPT_LENGTH = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class BenchEngineConfig:
    """Time our engine and its peers on the same tokens, interleaved."""

    shapes: tuple[str, ...] = ("25m", "200m")
    """Names in research/workloads/shapes.py."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Sequences of equal length."""
    length: Count = 128
    """Tokens that each of them generates."""
    tail: int = 64
    """Sequences of the long tail; 0 leaves it out."""
    median: float = 100.0
    """Its median length, tokens."""
    sigma: float = 1.0
    """Spread of the logarithm of its lengths."""
    cap: Count = 1024
    """Its longest length: all that our engine knows of lengths."""
    dtype: DType = "bfloat16"
    """Of weights and activations, all sides."""
    peers: tuple[Literal["hf", "hf_cb"], ...] = ("hf", "hf_cb")
    """Peers of this Python, in the long tail only: Hugging Face `generate`, and its continuous batching."""
    vllm_python: Path | None = None
    """A Python that has vLLM; it becomes a peer in every cell."""
    threads: Count | None = None
    """torch threads of ours and Hugging Face; by default ours takes the better of one and all cores, found in its
    warm-up, and Hugging Face all."""
    repeats: Count = 3
    """Interleaved measurements of each side and cell; the median counts."""
    hf_repeats: Count = 1
    """As many of Hugging Face's, minutes each: the first rounds have them."""
    seed: int = 0
    """Of prompts, lengths and samples."""
    profile: Path | None = None
    """Instead of timing peers, write a Chrome trace of 20 of our decode steps of the first shape and batch there."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.shapes if name not in SHAPES]
        if unknown or not self.shapes:
            raise ValueError(f"shapes={self.shapes}: give some of {', '.join(SHAPES)}")
        check_fields(self, "")
        if self.tail < 0 or any(batch < 1 for batch in self.batches) or not (self.batches or self.tail):
            raise ValueError(f"batches={self.batches}, tail={self.tail}: give numbers of sequences")
        if self.vllm_python is not None and not self.vllm_python.is_file():
            raise ValueError(f"vllm_python={str(self.vllm_python)!r}: there is no such file; give a venv's bin/python")
        for name in ("output", "profile"):
            path = getattr(self, name)
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}; make it")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What all sides of one comparison generate."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]


Side = Callable[[Cell], float]
"""Generates the cell's tokens; returns seconds."""


def main() -> dict[str, Any]:
    config = tyro.cli(BenchEngineConfig)
    cells = _cells(config)
    results = {}
    for name in config.shapes:
        with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder, ExitStack() as stack:
            shape = SHAPES[name]
            save_random_model(Path(folder), shape, max_positions=PROMPT_LENGTH + config.cap, dtype=config.dtype)
            ours = _Ours(folder, config)
            if config.profile is not None:
                _write_profile(ours, cells[0], config)
                return {"experiment": "bench_engine", "profile": str(config.profile), "shape": name}
            sides: dict[str, Side] = {"ours": ours}
            if config.vllm_python is not None:
                sides["vllm"] = stack.enter_context(_VLLM(config.vllm_python, folder, config))
            if "hf" in config.peers:
                sides["hf"] = _side(HuggingFacePeer(folder, config.dtype, DEVICE))
            if "hf_cb" in config.peers:
                num_tokens = config.tail * PROMPT_LENGTH + sum(cells[-1].lengths)
                sides["hf_cb"] = _side(ContinuousBatchingPeer(folder, config.dtype, DEVICE, num_tokens))
            results[name] = {cell.name: _compare(cell, sides, shape, config, label=name) for cell in cells}
    result = {
        "experiment": "bench_engine",
        "tier": "gpu" if DEVICE.type == "cuda" else "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"cpu ({os.cpu_count()} cores)",
        "workload": {**asdict(config), "output": None, "profile": None, "vllm_python": str(config.vllm_python)},
        "cells": results,
        **{
            f"vs_{peer}": {
                shape: {cell: row["ratios"][peer] for cell, row in rows.items() if peer in row["ratios"]}
                for shape, rows in results.items()
            }
            for peer in ("vllm", "hf", "hf_cb")
        },
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _cells(config: BenchEngineConfig) -> list[Cell]:
    generator = torch.Generator().manual_seed(config.seed)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(2, 256, (count, PROMPT_LENGTH), generator=generator).tolist()

    cells = [Cell(name=str(b), prompts=prompts(b), lengths=[config.length] * b) for b in config.batches]
    if config.tail:
        lengths = LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap)
        drawn = lengths.draw(config.tail, config.seed)
        cells.append(Cell(name="tail", prompts=prompts(config.tail), lengths=drawn))
    return cells


def _side(peer: HuggingFacePeer | ContinuousBatchingPeer) -> Side:
    return lambda cell: peer.generate(cell.prompts, cell.lengths)


def _compare(
    cell: Cell, sides: dict[str, Side], shape: DecoderShape, config: BenchEngineConfig, label: str
) -> dict[str, Any]:
    here = {name: side for name, side in sides.items() if name not in ("hf", "hf_cb") or cell.name == "tail"}
    threads = {}
    for name, side in here.items():
        if name == "vllm":
            side(cell)
        elif name in ("hf", "hf_cb"):  # minutes in a long tail: all cores, which they are faster with, a short warm-up
            threads[name] = config.threads or launch.share_cores()
            torch.set_num_threads(threads[name])
            side(replace(cell, lengths=[min(8, length) for length in cell.lengths]))
        else:
            candidates = [config.threads] if config.threads else sorted({1, launch.share_cores()})
            threads[name] = best_threads(partial(side, cell), candidates)
    order = [*here, "ours_again"]
    seconds: dict[str, list[float]] = {name: [] for name in order}
    with tqdm(desc=f"{label} {cell.name}", unit="run") as progress:
        for repeat in range(config.repeats):
            for name in order:
                if name in ("hf", "hf_cb") and repeat >= config.hf_repeats:
                    continue
                real = name.removesuffix("_again")
                if real in threads:
                    torch.set_num_threads(threads[real])
                seconds[name].append(here[real](cell))
                progress.update()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    num_steps = max(cell.lengths)
    return {
        "tokens": sum(cell.lengths),
        "threads": threads,
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "ms_per_step": {name: round(1e3 * median[name] / num_steps, 3) for name in here},
        "floor_ms_per_step": round(1e3 * _floor_seconds(cell, shape, config) / num_steps, 3),
        "tokens_per_second": {name: round(sum(cell.lengths) / median[name], 1) for name in here},
        "ratios": {name: round(median[name] / median["ours"], 3) for name in here if name != "ours"},
        "a_a": round(median["ours_again"] / median["ours"], 3),
    }


def _floor_seconds(cell: Cell, shape: DecoderShape, config: BenchEngineConfig) -> float:
    """All steps' weights and KV, read once each at the bandwidth of a plain read."""
    item = getattr(torch, config.dtype).itemsize
    weights = shape.num_matrix_parameters * item
    context_tokens = sum(length * PROMPT_LENGTH + length * (length + 1) // 2 for length in cell.lengths)
    num_bytes = max(cell.lengths) * weights + context_tokens * shape.kv_elements_per_token * item
    return num_bytes / _read_bandwidth(weights)


def _read_bandwidth(num_bytes: int) -> float:
    """Bytes per second of summing `num_bytes` again and again: from a cache where they fit in one."""
    data = torch.ones(num_bytes // 8, dtype=torch.int64, device=DEVICE)
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        data.sum().item()
        rates.append(data.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


class _Ours:
    def __init__(self, folder: str, config: BenchEngineConfig) -> None:
        self._lengths: list[int] = []
        self._config = config
        self.llm = LLM(
            folder,
            device=DEVICE,
            dtype=config.dtype,
            max_num_seqs=max((*config.batches, config.tail)),
            max_model_len=PROMPT_LENGTH + config.cap,
            hidden_stop=self._stops,
        )

    def _stops(self, state: SequenceState) -> bool:
        return state.num_generated >= self._lengths[state.key.prompt_uid]

    def __call__(self, cell: Cell) -> float:
        self._lengths = cell.lengths
        params = SamplingParams(max_tokens=self._config.cap, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(cell.prompts, params, prompt_uids=range(len(cell.prompts)))
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == cell.lengths
        return seconds


class _VLLM:
    """A process of another Python; see `vllm_peer.py`."""

    def __init__(self, python: Path, folder: str, config: BenchEngineConfig) -> None:
        options = {
            "model": folder,
            "dtype": config.dtype,
            "max_model_len": PROMPT_LENGTH + config.cap,
            "max_num_seqs": max((*config.batches, config.tail)),
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("vllm_peer.py")), json.dumps(options)],
            env=os.environ
            | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self) -> _VLLM:
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __call__(self, cell: Cell) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": cell.prompts, "lengths": cell.lengths}).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self._log.seek(0)
            end = self._log.read()[-1500:].decode(errors="replace")
            problem = "has ended" if ready else f"gave no answer for {START_S:g} s"
            raise ValueError(f"vllm_python: vLLM {problem}; its last words:\n{end}")
        return dict(json.loads(line))


def _write_profile(ours: _Ours, cell: Cell, config: BenchEngineConfig) -> None:
    """Of 20 steps in the middle of the cell, after a warm-up."""
    torch.set_num_threads(config.threads or launch.share_cores())
    ours(cell)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        ours(Cell(name=cell.name, prompts=cell.prompts, lengths=[min(20, length) for length in cell.lengths]))
    profiler.export_chrome_trace(str(config.profile))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
