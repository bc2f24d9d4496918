"""Log-probs and entropies of tokens from logits, without a second tensor as large as the logits.

Shape suffixes: N positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Elements of a full-precision scratch tensor: few compared to any logits worth chunking, and they fit a CPU's cache.
CHUNK_ELEMENTS = 1 << 20


def token_logprobs(
    logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """(log-prob of each token, entropy in nats of each distribution), both [N], of softmax(logits / temperature).

    Computed and returned in at least fp32. Differentiable in the logits (once); the softmax is recomputed for the
    gradient, so that neither pass holds more than the logits, their gradient and one chunk.
    """
    logprobs_N, entropy_N = _TokenLogprobs.apply(logits_NV, tokens_N, temperature, chunk_elements)
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        num_rows = logits_NV.shape[0]
        lse_N = torch.empty(num_rows, dtype=wide, device=logits_NV.device)
        logprobs_N, entropy_N = torch.empty_like(lse_N), torch.empty_like(lse_N)
        chunk = max(1, chunk_elements // logits_NV.shape[1])
        for start in range(0, num_rows, chunk):
            rows = slice(start, start + chunk)
            scaled_NV = logits_NV[rows].to(wide) / temperature
            lse = torch.logsumexp(scaled_NV, dim=-1)
            lse_N[rows] = lse
            logprobs_N[rows] = scaled_NV.gather(1, tokens_N[rows, None])[:, 0] - lse
            entropy_N[rows] = lse - (torch.exp(scaled_NV - lse[:, None]) * scaled_NV).sum(-1)
        ctx.save_for_backward(logits_NV, tokens_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """d logp(y) / d z_j = [j = y] - p_j;  d H / d z_j = -p_j (log p_j + H);  z = logits / temperature."""
        logits_NV, tokens_N, lse_N, entropy_N = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        for start in range(0, logits_NV.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p_NV = (logits_NV[rows].to(lse_N.dtype) / ctx.temperature).sub_(lse_N[rows, None])
            p_NV = torch.exp(log_p_NV)
            grad_NV = torch.zeros_like(p_NV)
            if grad_logprobs_N is not None:
                grad = grad_logprobs_N[rows, None]
                grad_NV.addcmul_(p_NV, -grad).scatter_add_(1, tokens_N[rows, None], grad)
            if grad_entropy_N is not None:
                grad_NV.addcmul_(p_NV * (log_p_NV + entropy_N[rows, None]), -grad_entropy_N[rows, None])
            grad_logits_NV[rows] = grad_NV.div_(ctx.temperature)
        return grad_logits_NV, None, None, None
