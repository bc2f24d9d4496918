"""Compares the costs of storing and loading a preempted sequence's KV with those of recomputing it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PrefillCost:
    """Seconds that a prefill adds to a forward pass: a constant, plus some for each token, plus some for each pair of
    a token and a token that it attends to, itself included."""

    latency: float
    seconds_per_token: float
    seconds_per_pair: float

    def seconds(self, num_tokens: int, num_known: int = 0) -> float:
        """Returns the seconds for the tokens from `num_known` to `num_tokens`."""
        num_pairs = _pairs(num_tokens) - _pairs(num_known)
        return self.latency + self.seconds_per_token * (num_tokens - num_known) + self.seconds_per_pair * num_pairs


@dataclass(frozen=True, kw_only=True)
class CopyCost:
    """Costs of storing a rank's KV in a tier and of loading it again."""

    bytes_per_token: int
    out_bandwidth: float
    """Bytes per second, as is `in_bandwidth`."""
    in_bandwidth: float
    latency: float
    """Seconds that storing and loading a part take together, whatever its size."""


@dataclass(frozen=True, kw_only=True)
class SwapCost:
    """Compares swapping and recomputing a preempted sequence. All other sequences wait meanwhile, either way."""

    prefill: PrefillCost
    copy: CopyCost

    def swap_seconds(self, num_tokens: int, num_known: int = 0) -> float:
        """Seconds to store all tokens and to load those that the prefix cache will not have (`num_known`)."""
        copy = self.copy
        out_s = num_tokens * copy.bytes_per_token / copy.out_bandwidth
        return copy.latency + out_s + (num_tokens - num_known) * copy.bytes_per_token / copy.in_bandwidth

    def recompute_seconds(self, num_tokens: int, num_known: int = 0) -> float:
        return self.prefill.seconds(num_tokens, num_known)

    def cheaper(self, num_tokens: int, num_known: int = 0) -> Literal["swap", "recompute"]:
        """Returns the cheaper way for a sequence of `num_tokens` computed tokens, the first `num_known` of which lie in
        blocks that other sequences also hold. In a tie it is "recompute", which takes no memory.
        """
        swap_s, recompute_s = self.swap_seconds(num_tokens, num_known), self.recompute_seconds(num_tokens, num_known)
        return "swap" if swap_s < recompute_s else "recompute"


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A timed forward pass over the last `num_tokens` tokens of a sequence of `context` tokens."""

    num_tokens: int
    context: int
    seconds: float

    @property
    def num_pairs(self) -> int:
        return _pairs(self.context) - _pairs(self.context - self.num_tokens)


def fit_prefill(one: PassTime, short: PassTime, long: PassTime, deep: PassTime) -> PrefillCost:
    """Fits the cost to four passes: of one token, of few, of more, and of few with a long context.

    The cost of a pass of one token is not counted: a pass runs anyway. A cost that noise makes negative is set to 0.
    """
    pair_s = 0.0
    if deep.num_pairs > short.num_pairs:
        pair_s = max(0.0, (deep.seconds - short.seconds) / (deep.num_pairs - short.num_pairs))
    if long.num_tokens > short.num_tokens:
        pairs_s = pair_s * (long.num_pairs - short.num_pairs)
        token_s = max(0.0, (long.seconds - short.seconds - pairs_s) / (long.num_tokens - short.num_tokens))
    else:
        token_s = short.seconds / short.num_tokens
    latency = short.seconds - one.seconds - token_s * short.num_tokens - pair_s * short.num_pairs
    return PrefillCost(latency=max(0.0, latency), seconds_per_token=token_s, seconds_per_pair=pair_s)


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2
