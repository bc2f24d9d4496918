"""What it costs to take a preempted sequence's KV away and bring it back, and what to compute it again. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PrefillCost:
    """Seconds that a prefill adds to a forward pass: some by itself, some for each token, and some for each pair of a
    token and one that it attends to, itself included."""

    latency: float
    seconds_per_token: float
    seconds_per_pair: float

    def seconds(self, num_tokens: int, num_known: int = 0) -> float:
        """For the tokens after the first `num_known`, up to `num_tokens`."""
        num_pairs = _pairs(num_tokens) - _pairs(num_known)
        return self.latency + self.seconds_per_token * (num_tokens - num_known) + self.seconds_per_pair * num_pairs


@dataclass(frozen=True, kw_only=True)
class CopyCost:
    """Seconds that a tier takes to keep a rank's KV and to give it back."""

    bytes_per_token: int
    out_bandwidth: float
    """Bytes per second; so is the other."""
    in_bandwidth: float
    latency: float
    """Seconds of one part's way out and in, whatever its size."""


@dataclass(frozen=True, kw_only=True)
class SwapCost:
    """Compares the two ways of a preempted sequence. All other sequences of the replica wait meanwhile, either way."""

    prefill: PrefillCost
    copy: CopyCost

    def swap_seconds(self, num_tokens: int, num_known: int = 0) -> float:
        """All goes out; what is found in the prefix cache again need not come in."""
        copy = self.copy
        out_s = num_tokens * copy.bytes_per_token / copy.out_bandwidth
        return copy.latency + out_s + (num_tokens - num_known) * copy.bytes_per_token / copy.in_bandwidth

    def recompute_seconds(self, num_tokens: int, num_known: int = 0) -> float:
        return self.prefill.seconds(num_tokens, num_known)

    def cheaper(self, num_tokens: int, num_known: int = 0) -> Literal["swap", "recompute"]:
        """The cheaper way for a sequence of `num_tokens` computed tokens, the first `num_known` of which lie in blocks
        that other sequences also hold.

        A tie is recomputed: it takes no memory.
        """
        swap_s, recompute_s = self.swap_seconds(num_tokens, num_known), self.recompute_seconds(num_tokens, num_known)
        return "swap" if swap_s < recompute_s else "recompute"


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A forward pass that was timed: the last `num_tokens` tokens of a sequence of `context`."""

    num_tokens: int
    context: int
    seconds: float

    @property
    def num_pairs(self) -> int:
        return _pairs(self.context) - _pairs(self.context - self.num_tokens)


def fit_prefill(one: PassTime, short: PassTime, long: PassTime, deep: PassTime) -> PrefillCost:
    """From four passes: of one token, of few, of more, and of few with a long context.

    What a pass of one token costs would be paid anyway. Noise may make a cost negative: it is 0 then.
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
