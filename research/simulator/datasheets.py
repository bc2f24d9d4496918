"""Public numbers: GPUs from their data sheets, models from their `config.json`. Torch-free.

Bytes and FLOPs are decimal. Data sheets give bf16 FLOP/s with sparsity, and links in both directions: both are halved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BYTES_PER_ELEMENT = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of a host of eight, from its data sheet.

    Link numbers are per direction. `switched_links`: all pairs communicate at full speed at once (NVSwitch), so that a
    one-shot all-reduce can be faster. `link_efficiency`: share of `link_bandwidth` that collectives reach.
    `link_latency_s`: one exchange of flags and a small message between GPUs, inside a captured graph.
    """

    name: str
    peak_flops: float  # dense bf16 FLOP/s
    memory_bandwidth: float  # bytes/s
    memory_bytes: float
    link_bandwidth: float  # bytes/s
    link_latency_s: float
    link_efficiency: float
    switched_links: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder with SwiGLU and grouped-query attention."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qkv_bias: bool
    source: str
    qk_norm: bool = False
    tied: bool = False
    """Whether the output head is the embedding."""

    def splits_into(self, tp_size: int) -> bool:
        """Whether `tp_size` ranks can have the same number of query heads, and of KV heads."""
        return self.num_heads % tp_size == self.num_kv_heads % tp_size == 0

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Elements of the q, k, v, o, gate, up and down matrices: a token costs twice as many FLOPs."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def num_parameters(self) -> int:
        bias = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        per_layer = self.matrix_parameters_per_layer + bias + norms
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.num_layers * per_layer + embeddings + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers and all ranks."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT


H100 = Device(
    name="H100",
    peak_flops=989.5e12,
    memory_bandwidth=3.35e12,
    memory_bytes=80e9,
    link_bandwidth=450e9,
    link_latency_s=4e-6,
    link_efficiency=0.8,
    switched_links=True,
    source="NVIDIA H100 data sheet, SXM: 1,979 TFLOPS sparse, 3.35 TB/s, 80 GB, NVLink 900 GB/s",
)
H800 = replace(
    H100,
    name="H800",
    link_bandwidth=200e9,
    source="vendors' H800 SXM lists: an H100 SXM with NVLink at 400 GB/s (and less FP64, not used here)",
)
H200 = replace(
    H100,
    name="H200",
    memory_bandwidth=4.8e12,
    memory_bytes=141e9,
    source="NVIDIA H200 data sheet, SXM: 1,979 TFLOPS sparse, 4.8 TB/s, 141 GB, NVLink 900 GB/s",
)
H20 = replace(
    H100,
    name="H20",
    peak_flops=148e12,
    memory_bandwidth=4.0e12,
    memory_bytes=96e9,
    source="vendors' H20 lists: 148 TFLOPS dense, 4.0 TB/s, 96 GB, NVLink 900 GB/s",
)
# PCIe: NVLink bridges join A40s in pairs only, so TP 4 and 8 would cross PCIe anyway, and PAT's testbed has no bridges.
# link_efficiency is calibrated, so an input: PAT Fig. 12 re-shards in 1.03 s, 8 of 32 GB/s if a rank gathers 8 GB.
A40 = Device(
    name="A40",
    peak_flops=149.7e12,
    memory_bandwidth=696e9,
    memory_bytes=48e9,
    link_bandwidth=32e9,
    link_latency_s=5e-6,
    link_efficiency=0.25,
    switched_links=False,
    source="NVIDIA A40 data sheet: 149.7 TFLOPS dense, 696 GB/s, 48 GB, PCIe 4.0 x16 64 GB/s",
)
DEVICES = (H100, H800, H200, H20, A40)

LLAMA_8B = ModelShape(
    name="8B",
    num_layers=32,
    hidden=4096,
    intermediate=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab=128256,
    qkv_bias=False,
    source="meta-llama/Llama-3.1-8B",
)
QWEN_14B = ModelShape(
    name="14B",
    num_layers=48,
    hidden=5120,
    intermediate=13824,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    vocab=152064,
    qkv_bias=True,
    source="Qwen/Qwen2.5-14B",
)
QWEN_32B = replace(QWEN_14B, name="32B", num_layers=64, intermediate=27648, source="Qwen/Qwen2.5-32B")
QWEN_72B = ModelShape(
    name="72B",
    num_layers=80,
    hidden=8192,
    intermediate=29568,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab=152064,
    qkv_bias=True,
    source="Qwen/Qwen2.5-72B",
)
QWEN_7B = replace(
    QWEN_14B,
    name="7B",
    num_layers=28,
    hidden=3584,
    intermediate=18944,
    num_heads=28,
    num_kv_heads=4,
    source="Qwen/Qwen2.5-7B",
)
QWEN_1_5B = replace(
    QWEN_7B,
    name="1.5B",
    hidden=1536,
    intermediate=8960,
    num_heads=12,
    num_kv_heads=2,
    vocab=151936,
    tied=True,
    source="Qwen/Qwen2.5-1.5B",
)
QWEN_0_5B = replace(
    QWEN_1_5B,
    name="0.5B",
    num_layers=24,
    hidden=896,
    intermediate=4864,
    num_heads=14,
    head_dim=64,
    source="Qwen/Qwen2.5-0.5B",
)
QWEN3_8B = ModelShape(
    name="Qwen3-8B",
    num_layers=36,
    hidden=4096,
    intermediate=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab=151936,
    qkv_bias=False,
    qk_norm=True,
    source="Qwen/Qwen3-8B",
)
QWEN3_14B = replace(
    QWEN3_8B, name="Qwen3-14B", num_layers=40, hidden=5120, intermediate=17408, num_heads=40, source="Qwen/Qwen3-14B"
)
QWEN3_32B = replace(
    QWEN3_14B, name="Qwen3-32B", num_layers=64, intermediate=25600, num_heads=64, source="Qwen/Qwen3-32B"
)
SHAPES = (
    QWEN_0_5B, QWEN_1_5B, QWEN_7B, LLAMA_8B, QWEN_14B, QWEN_32B, QWEN_72B, QWEN3_8B, QWEN3_14B, QWEN3_32B
)  # fmt: skip
