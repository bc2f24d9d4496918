"""How long one forward pass of a replica takes on a named GPU: a roofline over data-sheet numbers. Torch-free.

The simulator and paced mode (real processes whose steps last as long as a profile says) share these profiles. The
equation, sources and a table are in docs/latency_profiles.md; `python -m research.simulator.latency` prints the table.
Bytes and FLOPs are decimal, times are seconds, weights, keys and values are bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from engines.constraints import NonNegative, Share, WholeNumber, check_fields
from research.simulator.datasheets import BYTES_PER_ELEMENT, DEVICES, SHAPES, Device, ModelShape

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of the data sheet that software reaches, and overheads: assumptions, equal for every device and model.

    weight_read: share of memory bandwidth in products of few rows. A copy on an H200 was measured at 4.3 of 4.8 TB/s
        (0.9, shared/FACTS.md); a product of few rows reaches somewhat less.
    gemm: share of peak FLOP/s in products of many rows. A large square product on an H200 was measured at 790 of 989.5
        TFLOP/s (0.8, shared/FACTS.md); a decoder's products are smaller, with norms and activations between them.
    kv_read: share of memory bandwidth in paged decode attention, of scattered blocks: assumed below `weight_read`.
    attention: share of peak FLOP/s in prefill attention: FlashAttention-2 reaches 35 % on an H100, FlashAttention-3 up
        to 75 % (Shah et al. 2024).
    step_overhead_s: scheduling, preparing inputs, one graph launch, fetching tokens: assumed.
    layer_overhead_s: about ten kernels in a captured graph, each about 1 us of ramp and tail: assumed.
    sampling_bytes_per_logit: four passes over fp32 logits (temperature, max, normaliser, noise and argmax): counted.
    """

    weight_read: Share = 0.8
    gemm: Share = 0.6
    kv_read: Share = 0.7
    attention: Share = 0.4
    step_overhead_s: NonNegative = 0.5e-3
    layer_overhead_s: NonNegative = 10e-6
    sampling_bytes_per_logit: WholeNumber = 16

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Latencies of a replica: `tp_size` GPUs of one host that hold one model. Pure functions of a step's sizes."""

    device: Device
    shape: ModelShape
    tp_size: int
    efficiencies: Efficiencies = Efficiencies()

    def __post_init__(self) -> None:
        if self.tp_size not in TP_SIZES:
            raise ValueError(f"tp_size={self.tp_size}: give one of {TP_SIZES}, the powers of two within a host")
        if not self.shape.splits_into(self.tp_size):
            heads = f"num_heads={self.shape.num_heads}, num_kv_heads={self.shape.num_kv_heads}"
            raise ValueError(f"tp_size={self.tp_size}: must divide {heads} of {self.shape.name}; give a smaller one")

    @property
    def name(self) -> str:
        return f"{self.device.name}-{self.shape.name}-tp{self.tp_size}".lower()

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token of the whole replica; a rank holds 1/tp_size of them."""
        return self.shape.kv_bytes_per_token

    @property
    def weight_bytes_per_rank(self) -> float:
        """Resident weights (norms and biases, under 0.01 %, are counted as if they were split too)."""
        return self.shape.num_parameters * BYTES_PER_ELEMENT / self.tp_size

    def kv_tokens_capacity(self, reserve: float = 0.1) -> int:
        """Tokens in the replica's KV cache, if weights and cache may not use a share `reserve` of memory.

        The default is that of vLLM's `gpu_memory_utilization=0.9`. Returns 0 when the weights leave no room.
        """
        if not 0 <= reserve < 1:
            raise ValueError(f"reserve={reserve}: a share of each GPU's memory, give one in [0, 1)")
        room = self.tp_size * (self.device.memory_bytes * (1 - reserve) - self.weight_bytes_per_rank)
        return max(0, int(room // self.kv_bytes_per_token))

    def fits(self, reserve: float = 0.1) -> bool:
        return self.kv_tokens_capacity(reserve) > 0

    def step_seconds(
        self,
        batch: int,
        new_tokens: int,
        context_tokens: int,
        *,
        pairs: float | None = None,
        logit_rows: int | None = None,
    ) -> float:
        """Seconds of one forward pass over `batch` sequences, sampling included.

        Counts are sums over the sequences. `new_tokens`: computed tokens (decode: `batch`; verification of k drafts:
        `batch * (1 + k)`). `context_tokens`: tokens attended to, new tokens included; PAT's T (§4.2). `pairs`: the sum
        of new x context; the default assumes equal sequences, which is wrong for a mix of prefill and decode.
        `logit_rows`: rows to sample from; by default every new token. A prefill has one row per sequence.
        """
        rows = new_tokens if logit_rows is None else logit_rows
        if batch < 1:
            raise ValueError(f"batch={batch}: a step has at least one sequence")
        if new_tokens < batch:
            raise ValueError(f"new_tokens={new_tokens}: a sum over batch={batch} sequences, each brings at least one")
        if context_tokens < new_tokens:
            raise ValueError(f"context_tokens={context_tokens}: a sum that includes new_tokens={new_tokens}; add them")
        if not 0 <= rows <= new_tokens:
            raise ValueError(f"logit_rows={rows}: must be from 0 to new_tokens={new_tokens}")
        pairs = new_tokens * context_tokens / batch if pairs is None else pairs
        if pairs < new_tokens:
            raise ValueError(f"pairs={pairs}: each of new_tokens={new_tokens} attends at least to itself")
        eff = self.efficiencies
        overhead = eff.step_overhead_s + self.shape.num_layers * eff.layer_overhead_s
        reduce = self.all_reduce_seconds(new_tokens * self.shape.hidden * BYTES_PER_ELEMENT)
        return (
            overhead
            + self._products_seconds(new_tokens, rows)
            + self._attention_seconds(context_tokens, pairs)
            + 2 * self.shape.num_layers * reduce
            + self._sampling_seconds(rows)
        )

    def prefill_seconds(self, batch: int, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of one unchunked pass over `batch` prompts of `prompt_tokens` each, after `cached_tokens` each."""
        pairs = batch * prompt_tokens * (cached_tokens + (prompt_tokens + 1) / 2)  # causal
        context = batch * (cached_tokens + prompt_tokens)
        return self.step_seconds(batch, batch * prompt_tokens, context, pairs=pairs, logit_rows=batch)

    def all_reduce_seconds(self, message_bytes: float) -> float:
        """Alpha-beta: ring, or with switched links the faster of ring and one-shot (read all peers, two barriers)."""
        peers, alpha = self.tp_size - 1, self.device.link_latency_s
        seconds_per_byte = 1 / (self.device.link_bandwidth * self.device.link_efficiency)
        ring = 2 * peers * (alpha + message_bytes / self.tp_size * seconds_per_byte)
        if peers == 0 or not self.device.switched_links:
            return ring
        return min(ring, 2 * alpha + peers * message_bytes * seconds_per_byte)

    def _products_seconds(self, new_tokens: int, logit_rows: int) -> float:
        """Linear layers and output head: the longer of reading the weights once and multiplying."""
        layers = self.shape.num_layers * self.shape.matrix_parameters_per_layer
        head = self.shape.vocab * self.shape.hidden
        read = BYTES_PER_ELEMENT * (layers + head) / (self.device.memory_bandwidth * self.efficiencies.weight_read)
        flops = 2 * (layers * new_tokens + head * logit_rows) / (self.device.peak_flops * self.efficiencies.gemm)
        return max(read, flops) / self.tp_size

    def _attention_seconds(self, context_tokens: int, pairs: float) -> float:
        """The longer of reading the cache once and computing scores and sums (4 FLOPs per pair and query element)."""
        read_bytes = context_tokens * self.kv_bytes_per_token
        flops = 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * pairs
        read = read_bytes / (self.device.memory_bandwidth * self.efficiencies.kv_read)
        return max(read, flops / (self.device.peak_flops * self.efficiencies.attention)) / self.tp_size

    def _sampling_seconds(self, logit_rows: int) -> float:
        """All-gather of each rank's part of the bf16 logits, then passes over all of them on every rank."""
        num_logits, peers = logit_rows * self.shape.vocab, self.tp_size - 1
        passes = num_logits * self.efficiencies.sampling_bytes_per_logit
        link = self.device.link_bandwidth * self.device.link_efficiency
        gather = peers * (self.device.link_latency_s + num_logits * BYTES_PER_ELEMENT / self.tp_size / link)
        return gather + passes / (self.device.memory_bandwidth * self.efficiencies.weight_read)


def all_profiles() -> Iterator[LatencyProfile]:
    """One for each device, shape and TP size that splits the heads evenly, whether or not it fits."""
    for device, shape, tp_size in itertools.product(DEVICES, SHAPES, TP_SIZES):
        if shape.splits_into(tp_size):
            yield LatencyProfile(device=device, shape=shape, tp_size=tp_size)


def profile(name: str) -> LatencyProfile:
    """The profile named `<device>-<model>-tp<size>`, as in "h100-8b-tp1".

    Raises ValueError when there is none, as for a TP size that does not divide the heads, or no room for the weights.
    """
    found = next((candidate for candidate in all_profiles() if candidate.name == name.lower()), None)
    if found is None:
        devices, shapes = ", ".join(device.name for device in DEVICES), ", ".join(shape.name for shape in SHAPES)
        exist = f"<device>-<model>-tp<size> of {devices} x {shapes} x TP {', '.join(map(str, TP_SIZES))}"
        raise ValueError(f"profile={name!r}: no such latency profile; there are {exist}, as in 'h100-8b-tp1'")
    if not found.fits():
        weights, memory = found.weight_bytes_per_rank / 1e9, found.device.memory_bytes / 1e9
        room = f"weights take {weights:.1f} GB per rank, of {memory:.0f} GB 90 % may be used"
        raise ValueError(f"profile={name!r}: does not fit: {room}; give a larger TP size")
    return found


def markdown_table(batches: tuple[int, ...] = (1, 32, 128), context: int = 4096) -> str:
    """Milliseconds of a decode step of every profile that fits; "-" where the replica's cache is too small."""
    columns = ["profile", "weights, GB/rank", "KV capacity, tokens", *(f"batch {batch}, ms" for batch in batches)]
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for row in all_profiles():
        capacity = row.kv_tokens_capacity()
        cells = [
            f"{row.step_seconds(batch, batch, batch * context) * 1e3:.2f}" if batch * context <= capacity else "-"
            for batch in batches
        ]
        if row.fits():
            weights = f"{row.weight_bytes_per_rank / 1e9:.1f}"
            lines.append("| " + " | ".join([row.name, weights, f"{capacity:,}", *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
