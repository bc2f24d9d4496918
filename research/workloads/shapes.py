"""The named model shapes that benchmarks fill with random weights. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A dense Qwen3: grouped-query attention with normed queries and keys, SwiGLU, no biases."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def num_matrix_parameters(self) -> int:
        """Elements of the matrices that every token goes through: all matrices of the layers, and the head."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "0.8m": DecoderShape(
        hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=512, tied=True
    ),
    "25m": DecoderShape(
        hidden=512, layers=8, heads=8, kv_heads=2, head_dim=64, intermediate=1536, vocab=512, tied=True
    ),
    "200m": DecoderShape(
        hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, intermediate=3072, vocab=512, tied=True
    ),
    "8b": DecoderShape(
        hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, tied=False
    ),
}
