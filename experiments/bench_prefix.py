"""A group of samples of one long prompt, with the prefix cache and without: tokens computed, KV memory, and time.

    python experiments/bench_prefix.py
    python experiments/bench_prefix.py --shape 200m --group-size 8 --prompt 1024

Both engines draw the same tokens from the same random model, in turn; the one with the cache runs twice (A/A). Each run
has a prompt of its own, so that nothing is left over from the run before.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm

from engines import LLM, SamplingParams, SequenceKey, SequenceState
from engines.config import DType
from engines.constraints import Count, check_fields
from engines.sequence import Work
from experiments import launch
from experiments.random_model import save_random_model
from research.workloads.shapes import SHAPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class BenchPrefixConfig:
    """Time a group of samples of one prompt, with the prefix cache and without."""

    shape: str = "25m"
    """A name in research/workloads/shapes.py."""
    group_size: Count = 16
    """Samples of the prompt."""
    prompt: Count = 512
    """Its tokens."""
    length: Count = 64
    """Tokens that each sample generates."""
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
    config = tyro.cli(BenchPrefixConfig)
    launch.share_cores()
    longest = config.prompt + config.length
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as folder:
        save_random_model(Path(folder), SHAPES[config.shape], max_positions=longest, dtype=config.dtype)
        engines = {
            name: LLM(
                folder,
                device=DEVICE,
                dtype=config.dtype,
                prefix_caching=name == "shared",
                max_num_seqs=config.group_size,
                max_num_batched_tokens=config.group_size * config.prompt,
            )
            for name in ("shared", "alone")
        }
    sides = {"shared": engines["shared"], "alone": engines["alone"], "shared_again": engines["shared"]}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with tqdm(total=len(sides) * (config.repeats + 1), desc="bench", unit="run") as progress:
        for repeat in range(config.repeats + 1):
            tokens = set()
            for index, (name, llm) in enumerate(sides.items()):
                run, sampled = _roll_out(llm, config, seed=repeat * 2 + (index == 2))
                if index < 2:
                    tokens.add(str(sampled))
                if repeat:  # the first warms up
                    runs[name].append(run)
                progress.update()
            assert len(tokens) == 1 or config.dtype != "float64", "the cache changed a token"
    median = {name: statistics.median(run["seconds"] for run in rows) for name, rows in runs.items()}
    prefill = {name: statistics.median(run["first_step_s"] for run in rows) for name, rows in runs.items()}
    result = {
        "experiment": "bench_prefix",
        "tier": "gpu" if DEVICE.type == "cuda" else "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "workload": {**asdict(config), "output": None},
        "tokens_computed": {name: runs[name][0]["tokens_computed"] for name in ("shared", "alone")},
        "peak_kv_blocks": {name: runs[name][0]["peak_kv_blocks"] for name in ("shared", "alone")},
        "seconds": {name: round(value, 4) for name, value in median.items()},
        "first_step_seconds": {name: round(value, 4) for name, value in prefill.items()},
        "speedup": round(median["alone"] / median["shared"], 2),
        "first_step_speedup": round(prefill["alone"] / prefill["shared"], 2),
        "a_a": round(median["shared_again"] / median["shared"], 3),
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _roll_out(llm: LLM, config: BenchPrefixConfig, seed: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Seconds, tokens of all forward passes, and most KV blocks in use; and what was sampled."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, 256, (config.prompt,), generator=generator).tolist()
    params = SamplingParams(max_tokens=config.length, ignore_eos=True)
    for index in range(config.group_size):
        key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=seed, sample_index=index)
        state = SequenceState(key=key, group_id=seed, tokens=list(prompt), num_prompt_tokens=len(prompt), params=params)
        llm.replica.submit(Work(state=state))
    blocks = llm.replica.scheduler.blocks
    num_tokens, peak, first_step_s, sampled = 0, 0, 0.0, {}
    start = time.perf_counter()
    while llm.replica.has_work:
        output = llm.replica.step()
        num_tokens += output.num_tokens
        first_step_s = first_step_s or time.perf_counter() - start
        peak = max(peak, blocks.num_blocks - blocks.num_free_blocks)
        sampled.update({one.completion.index: one.completion.token_ids for one in output.finished})
    run = {
        "seconds": time.perf_counter() - start,
        "first_step_s": first_step_s,
        "tokens_computed": num_tokens,
        "peak_kv_blocks": peak,
    }
    return run, [sampled[index] for index in range(config.group_size)]


if __name__ == "__main__":
    launch.run(main)
