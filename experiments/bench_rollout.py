"""Our engine against Hugging Face `generate` on one long-tailed batch of the same model, in one run.

    python experiments/bench_rollout.py
    python experiments/bench_rollout.py --model runs/models/tiny --batch 64

Each sequence ends at a length drawn from a log-normal tail. The engines do not know it: ours sees the cap only, and a
hidden stop takes the sequence away when its length is reached; `generate` gets the same stop as a stopping criterion,
and pads every row until the longest is done, as it must. Same model, dtype, prompts and lengths. Each side gets the
number of threads, one or all cores, that it is faster with in its warm-up; then the two alternate, and each is also run
against itself (A/A).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm

from algos.warmstart import warm_start
from algos.warmstart_config import MODEL_SIZES, WarmStartConfig
from engines import LLM, SamplingParams
from engines.config import DType
from engines.constraints import Count, check_fields
from experiments import launch
from experiments.hf_peer import HuggingFacePeer, best_threads
from research.workloads.lengths import LogNormalLengths

PROMPT_LENGTH = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class BenchRolloutConfig:
    """Time one rollout of a long-tailed batch: our engine and Hugging Face generate, interleaved."""

    model: str = "tiny"
    """A Hugging Face folder, or an embedded model (warm-started once under runs/models)."""
    batch: Count = 64
    """Sequences."""
    median: float = 100.0
    """Median response length, tokens."""
    sigma: float = 1.0
    """Spread of the logarithm of the length."""
    cap: Count = 1024
    """Longest response, tokens: all that the engines know of lengths."""
    dtype: DType = "float32"
    """Of weights and activations, both sides."""
    threads: int | None = None
    """torch threads, both sides; by default each side's better choice of one and all cores."""
    repeats: Count = 3
    """Interleaved measurements of each side."""
    seed: int = 0
    """Of prompts, lengths and samples."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.parent)!r}; make it")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchRolloutConfig)
    candidates = [config.threads] if config.threads else sorted({1, launch.share_cores()})
    model = Path(config.model)
    if config.model in MODEL_SIZES and not model.exists():
        model = warm_start(Path("runs/models") / config.model, WarmStartConfig(size=config.model))
    lengths = LogNormalLengths(median=config.median, sigma=config.sigma, cap=config.cap).draw(config.batch, config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    prompts = torch.randint(2, 256, (config.batch, PROMPT_LENGTH), generator=generator).tolist()
    ours = _our_engine(model, config, prompts, lengths)
    theirs = partial(HuggingFacePeer(model, config.dtype, DEVICE).generate, prompts, lengths)
    threads = {"ours": best_threads(ours, candidates), "hf": best_threads(theirs, candidates)}
    seconds: dict[str, list[float]] = {"ours": [], "ours_again": [], "hf": [], "hf_again": []}
    with tqdm(total=4 * config.repeats, desc="bench", unit="run") as progress:
        for _ in range(config.repeats):
            for name, side in (("ours", ours), ("hf", theirs), ("ours_again", ours), ("hf_again", theirs)):
                torch.set_num_threads(threads[name.removesuffix("_again")])
                seconds[name].append(side())
                progress.update()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "experiment": "bench_rollout",
        "tier": "live",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "workload": {**asdict(config), "model": str(model), "output": None, "threads": threads},
        "tokens": sum(lengths),
        "longest": max(lengths),
        "seconds": {name: [round(value, 6) for value in values] for name, values in seconds.items()},
        "tokens_per_second": {name: round(sum(lengths) / median[name], 1) for name in ("ours", "hf")},
        "vs_hf": round(median["hf"] / median["ours"], 2),
        "a_a": {name: round(median[name] / median[f"{name}_again"], 3) for name in ("ours", "hf")},
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _our_engine(
    model: Path, config: BenchRolloutConfig, prompts: list[list[int]], lengths: list[int]
) -> Callable[[], float]:
    llm = LLM(
        model,
        device=DEVICE,
        dtype=config.dtype,
        max_num_seqs=config.batch,
        max_model_len=PROMPT_LENGTH + config.cap,
        hidden_stop=lambda state: state.num_generated >= lengths[state.key.prompt_uid],
    )
    params = SamplingParams(max_tokens=config.cap, ignore_eos=True)

    def run() -> float:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, prompt_uids=range(len(prompts)))
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return seconds

    return run


if __name__ == "__main__":
    launch.run(main)
