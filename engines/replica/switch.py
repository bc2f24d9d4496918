"""What a regroup took. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Switch:
    """What a regroup took on one rank, with its waits for the other ranks."""

    weights_s: float
    """Seconds to bring the weights into their new shapes."""
    kv_s: float
    """The same of the KV cache."""
    prepare_s: float
    """To make the copies of the weights from which products are computed."""
    weight_bytes: int
    """Bytes that the rank lacked, and that other ranks sent."""
    kv_bytes: int
    num_kv_tokens: int
    """`kv_bytes` in tokens of all heads."""
