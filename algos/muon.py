"""Muon in float32: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/).

`torch.optim.Muon` multiplies in bfloat16, which is 20 times slower than float32 on processors without bfloat16
instructions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices that map hidden states. A step is that of torch's `Muon` with its defaults, up to rounding."""

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One optimizer step. `closure` belongs to torch's interface and is not used."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalised(matrix.grad.lerp(momentum, group["momentum"]))  # Nesterov's
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Returns a matrix with the same singular vectors and all singular values near 1 (from about 0.7 to 1.2)."""
    x = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if len(matrix) > matrix.shape[1] else x
