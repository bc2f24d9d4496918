"""What changed weights take as bytes, and how fast the relay's codec is.

    python experiments/bench/relay_codec.py

Weights are bfloat16 from N(0, 0.02). In `bytes_vs_dense`, `uniform`, a share of them, anywhere, moves to a neighbouring
value, up or down; in `masters`, float32 weights take a step of fixed size and random sign, and are rounded, as in
training: small weights then move by many values. `bits_per_change` compares ways to deflate. GB/s are bytes of weights
per second; a copy in memory is the baseline. `paper_wrong_share` is the share of changed weights whose bits are wrong
after the paper's sums in bfloat16.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from engines.constraints import Count
from engines.relay.codec import Bits, apply, encode, read_update
from engines.relay.message import Bucket
from experiments.bench import harness
from experiments.comparison.turns import interleave, make_row, short, timed

DENSITIES = (0.1, 1, 4, 50)
"""Percent."""
STEPS = (1e-6, 1e-5, 1e-4, 1e-3)


@dataclass(frozen=True, kw_only=True)
class RelayCodecBench(harness.BenchConfig):
    """Time the relay's codec and count its bytes, beside a copy in memory."""

    elements: Count = 2**25
    """Weights of a bucket; 64 MiB by default."""


def measure(config: RelayCodecBench) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(config.elements, np.float32) * 0.02).astype(np.float32)
    base = _bf16(values)
    alone = Bucket(model="0" * 32, dtype="bfloat16", start=0, length=config.elements, version=1)
    of = replace(alone, base_version=0)
    uniform = {density: _moved(base, density / 100, rng) for density in DENSITIES}
    variants: dict[str, Callable[[], float]] = {"copy": lambda: timed(base.copy)[0]}
    messages = {f"{density:g}": encode(bits, of, base) for density, bits in uniform.items()}
    for density, bits in uniform.items():
        variants[f"encode {density:g} %"] = partial(_seconds, encode, bits, of, base)
        variants[f"decode {density:g} %"] = partial(_decode, messages[f"{density:g}"], of, base)
    dense = encode(base, alone)
    variants |= {"encode dense": partial(_seconds, encode, base, alone), "decode dense": partial(_decode, dense, alone)}
    row = make_row("a bucket", interleave(variants, config.turns))
    signs = np.where(rng.random(config.elements) < 0.5, np.float32(1), np.float32(-1))
    masters = {f"{step:g}": _bf16((values + np.float32(step) * signs).astype(np.float32)) for step in STEPS}
    return {
        "rows": [row],
        "bytes_vs_dense": {name: short(len(data) / of.num_bytes) for name, data in messages.items()},
        "deflated_dense": short(len(dense) / of.num_bytes),
        "masters": {name: _of_masters(bits, of, base) for name, bits in masters.items()},
        "bits_per_change": _ways(uniform[1], base),
        "gb_per_s": {name: short(of.num_bytes / ms / 1e6) for name, ms in row["ms"].items()},
    }


def _of_masters(bits: Bits, of: Bucket, base: Bits) -> dict[str, float]:
    changed, paper = int(np.count_nonzero(bits != base)), encode(bits, of, base, mode="paper")
    wrong = int(np.count_nonzero(apply(read_update(paper, of), base) != bits))
    return {
        "density": short(changed / of.length),
        "bytes_vs_dense": short(len(encode(bits, of, base)) / of.num_bytes),
        "paper_vs_dense": short(len(paper) / of.num_bytes),
        "paper_wrong_share": short(wrong / max(1, changed)),
    }


def _ways(bits: Bits, base: Bits) -> dict[str, dict[str, float]]:
    """Deflated bits per change of 1 % of the weights, and MB/s of zlib: what is added to their bits, and the XOR."""
    at = np.flatnonzero(bits != base)
    added = (bits[at] - base[at]).view(np.int16)
    values = {"added": ((added << 1) ^ (added >> 15)).view(np.uint16), "xor": bits[at] ^ base[at]}
    found: dict[str, dict[str, float]] = {}
    for way, level, strategy in (("runs", 1, zlib.Z_RLE), ("level 1", 1, 0), ("level 6", 6, 0)):
        found[way] = {}
        for name, some in values.items():
            planes = [np.ascontiguousarray(plane) for plane in some.view(np.uint8).reshape(-1, 2).T]
            start, size = time.perf_counter(), 0
            for plane in planes:
                stream = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
                size += len(stream.compress(plane.data)) + len(stream.flush())
            found[way][name] = short(8 * size / max(1, len(at)))
            found[way][f"{name}, MB/s"] = short(some.nbytes / 1e6 / (time.perf_counter() - start))
    return found


def _moved(base: Bits, share: float, rng: np.random.Generator) -> Bits:
    bits, at = base.copy(), np.flatnonzero(rng.random(len(base), np.float32) < share)
    bits[at] += rng.choice(np.array([1, 2**16 - 1], np.uint16), len(at))
    return bits


def _bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> Bits:
    """Rounds finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _seconds(call: Any, *arguments: Any) -> float:
    return timed(lambda: call(*arguments))[0]


def _decode(data: bytes, of: Bucket, base: Bits | None = None) -> float:
    return timed(lambda: apply(read_update(data, of), base))[0]


if __name__ == "__main__":
    harness.run(RelayCodecBench, measure)
