"""What a deployment takes, sampled at PAT's points (§4.2): from a pace, as that of the simulator. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from engines.parallel.layout import nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace
from research.pat.lookahead import Deployment
from research.pat.predictor import Point, StepPredictor

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
"""Ten sizes from 1 to 256, as PAT profiles; it does not list them."""
CONTEXTS = (8, 64, 128, 256, 384, 512, 2048, 8192, 32768, 131072)
"""Tokens of each sequence: denser below 512."""


def deployment_of(
    pace: Pace, *, num_ranks: int, num_kv_tokens: Mapping[int, int], max_num_seqs: int, max_model_len: int
) -> Deployment:
    """Returns what decoding and switching take at this pace, for the TP sizes of `num_kv_tokens` (tokens of a replica).

    In a switch between nested replicas, which have equal shares of the sequences, ranks exchange the KV that they lack.
    A sample needs at most the KV that a replica has.
    """
    layouts = {size: nested_layout(range(num_ranks), size) for size in num_kv_tokens}

    def step(size: int, batch: int, context: int) -> Point:
        tokens = batch * context
        output = StepOutput(
            num_running=batch, num_tokens=batch, num_context_tokens=tokens, num_pairs=tokens, num_sampled=batch
        )
        return batch, tokens, pace.step(layouts[size].replicas[0], output)

    def switch_seconds(before: int, after: int, num_tokens: float) -> float:
        share = (1 - before / after) / after if after > before else 1 / after - 1 / before
        return pace.switch(layouts[before], layouts[after], round(share * num_tokens * after / num_ranks))

    return Deployment(
        num_ranks=num_ranks,
        steps={
            size: StepPredictor(
                step(size, batch, context)
                for batch in BATCHES
                for place, context in enumerate(CONTEXTS)
                if place < 2 or batch * context <= most
            )
            for size, most in num_kv_tokens.items()
        },
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        switch_seconds=switch_seconds,
    )
