"""What decoding and switching take in the layouts of a world. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engines.kvcache.cost import PrefillCost
from research.pat.predictor import StepPredictor


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Its layouts are equal replicas of one TP size, over all ranks."""

    num_ranks: int
    steps: Mapping[int, StepPredictor]
    """By TP size; only these are considered."""
    num_kv_tokens: Mapping[int, int]
    """Tokens that the KV cache of one replica holds, by TP size."""
    max_num_seqs: int
    """Most sequences that run on a replica."""
    max_model_len: int
    """Tokens of the longest sequence, prompt included."""
    switch_seconds: Callable[[int, int, float], float]
    """(TP size before, after, context tokens of all unfinished sequences) -> seconds of the switch, their KV moved."""
    way_back_seconds: Callable[[int, int], float] | None = None
    """(TP size at a rollout's end, at its start) -> seconds to go back before the next rollout, where that time counts;
    None in training, where new weights come in between anyway."""
    prefills: Mapping[int, PrefillCost] = field(default_factory=dict)
    """By TP size, what prefills take on one replica; without it, prompts take no time and a switch always moves KV."""
