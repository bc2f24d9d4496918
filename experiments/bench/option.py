"""Times the same rollouts with an option of the engine and without it.

    python experiments/bench/option.py                # the prefix cache, for 16 samples of one long prompt
    python experiments/bench/option.py --option batch_invariant --prompts 32 --group-size 1 --prompt 128

All prompts are computed in one pass, and each sequence then decodes. Each run has prompts of its own, so that it cannot
use cached KV of the run before. A ratio is the time with the option over the time without it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from engines import LLM
from engines.config import DType
from engines.constraints import Count
from engines.sequence import Work
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import Shape, checkpoint, random_sequence
from experiments.comparison.turns import interleave, make_row


@dataclass(frozen=True, kw_only=True)
class OptionBench(harness.BenchConfig):
    """Time rollouts with an option of the engine and without it, interleaved."""

    option: Literal["prefix_caching", "batch_invariant"] = "prefix_caching"
    """A switch among the fields of EngineConfig."""
    shape: Shape = "25m"
    """A name in research/workloads/shapes.py."""
    prompts: Count = 1
    """Number of prompts, which have nothing in common."""
    prompt: Count = 512
    """Tokens per prompt."""
    group_size: Count = 16
    """Samples per prompt."""
    length: Annotated[int, Meta(ge=2, description="at least 2")] = 64
    """Tokens that each sample generates."""
    dtype: DType = "bfloat16"
    """Dtype of weights and activations."""


def measure(config: OptionBench) -> dict[str, Any]:
    launch.share_cores()
    num_sequences = config.prompts * config.group_size
    without: dict[str, Any] = {"prefix_caching": False, config.option: False}
    both = {"without": without, "with": {**without, config.option: True}}
    with checkpoint(config.shape, max_positions=config.prompt + config.length, dtype=config.dtype) as folder:
        engines = {
            name: LLM(
                folder,
                dtype=config.dtype,
                max_num_seqs=num_sequences,
                max_num_batched_tokens=num_sequences * config.prompt,
                **options,
            )
            for name, options in both.items()
        }
    uids = itertools.count()
    variants = {name: partial(_roll_out, llm, config, uids) for name, llm in engines.items()}
    runs = interleave(variants, config.turns)
    rows = [
        make_row(part, {name: [one[part] for one in some] for name, some in runs.items()})
        for part in ("total", "prefill", "decode_step")
    ]
    counts = {key: {name: runs[name][0][key] for name in variants} for key in ("tokens_computed", "peak_kv_blocks")}
    return {"rows": rows, **counts}


def _roll_out(llm: LLM, config: OptionBench, uids: itertools.count[int]) -> dict[str, Any]:
    """Returns counts, and seconds in total, of the first step (it computes all prompts) and of later ones (median)."""
    for uid in itertools.islice(uids, config.prompts):
        for index in range(config.group_size):
            state = random_sequence(uid, num_tokens=config.prompt, length=config.length, sample_index=index)
            llm.replica.submit(Work(state=state))
    blocks = llm.replica.scheduler.blocks
    seconds, num_tokens, peak = [], 0, 0
    while llm.replica.has_work:
        start = time.perf_counter()
        num_tokens += llm.replica.step().num_tokens
        seconds.append(time.perf_counter() - start)
        peak = max(peak, blocks.num_blocks - blocks.num_free_blocks)
    return {
        "total": sum(seconds),
        "prefill": seconds[0],
        "decode_step": statistics.median(seconds[1:]),
        "tokens_computed": num_tokens,
        "peak_kv_blocks": peak,
    }


if __name__ == "__main__":
    harness.run(OptionBench, measure)
