"""What the same bits in any batch cost: prefills and decodes of a random model, with `batch_invariant` and without.

    python experiments/bench_batch_invariant.py
    python experiments/bench_batch_invariant.py --dtype float32 --batch 7

Both engines run the same sequences, in turn; the one without runs twice (A/A). Prompts are computed in one pass, and
each sequence then decodes `length` tokens.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from msgspec import Meta
from tqdm import tqdm

from engines import LLM, SamplingParams, SequenceKey, SequenceState
from engines.config import DType
from engines.constraints import Count, check_fields
from engines.sequence import Work
from experiments import launch
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES


@dataclass(frozen=True, kw_only=True)
class BenchBatchInvariantConfig:
    """Time prefills and decodes, with the same bits in any batch and without that promise."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    batch: Count = 32
    """Sequences at a time."""
    prompt: Count = 128
    """Tokens of each prompt."""
    length: Annotated[int, Meta(ge=2, description="at least 2")] = 64
    """Tokens that each sequence generates."""
    dtype: DType = "bfloat16"
    """Of weights and activations."""
    repeats: Count = 5
    """Interleaved measurements of each side; the median counts."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r}: give one of {', '.join(SHAPES)}")
        check_fields(self, "")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchBatchInvariantConfig)
    threads = launch.share_cores()
    engines, load_s = {}, {}
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        longest = config.prompt + config.length
        save_random_model(Path(folder), SHAPES[config.shape], max_positions=longest, dtype=config.dtype)
        for name in ("plain", "invariant"):
            start = time.perf_counter()
            engines[name] = LLM(
                folder,
                device="cpu",
                dtype=config.dtype,
                batch_invariant=name == "invariant",
                prefix_caching=False,
                max_num_seqs=config.batch,
                max_num_batched_tokens=config.batch * config.prompt,
            )
            load_s[name] = time.perf_counter() - start
    sides = {"plain": engines["plain"], "invariant": engines["invariant"], "plain_again": engines["plain"]}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tqdm(total=len(sides) * (config.repeats + 1), desc="bench", unit="run") as progress:
        for repeat in range(config.repeats + 1):
            for name, llm in sides.items():
                run = _roll_out(llm, config, seed=repeat)
                if repeat:  # the first warms up
                    runs[name].append(run)
                progress.update()
    median = {
        phase: {name: statistics.median(run[phase] for run in rows) for name, rows in runs.items()}
        for phase in ("prefill_s", "decode_step_s")
    }
    result: dict[str, Any] = {
        "experiment": "bench_batch_invariant",
        "tier": "live",
        "threads": threads,
        "workload": {**asdict(config), "output": None},
        "load_seconds": {name: round(value, 2) for name, value in load_s.items()},
    }
    for phase, values in median.items():
        name = phase.removesuffix("_s")
        result[f"{name}_ms"] = {side: round(1000 * value, 3) for side, value in values.items()}
        result[f"{name}_slowdown"] = round(values["invariant"] / values["plain"], 3)
        result[f"{name}_a_a"] = round(values["plain_again"] / values["plain"], 3)
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _roll_out(llm: LLM, config: BenchBatchInvariantConfig, seed: int) -> dict[str, float]:
    """Seconds of the pass that computes all prompts, and of a decoding step (the median of all)."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=config.length, ignore_eos=True)
    for index in range(config.batch):
        tokens = torch.randint(2, 256, (config.prompt,), generator=generator).tolist()
        key = SequenceKey(run_seed=0, policy_step=seed, prompt_uid=index, sample_index=0)
        state = SequenceState(key=key, group_id=index, tokens=tokens, num_prompt_tokens=len(tokens), params=params)
        llm.replica.submit(Work(state=state))
    steps = []
    while llm.replica.has_work:
        start = time.perf_counter()
        llm.replica.step()
        steps.append(time.perf_counter() - start)
    return {"prefill_s": steps[0], "decode_step_s": statistics.median(steps[1:])}


if __name__ == "__main__":
    launch.run(main)
