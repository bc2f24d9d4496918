from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from algos.muon import Muon, orthogonalised
from algos.warmstart import WarmStartConfig, train

SHAPES = [(24, 24), (64, 16), (16, 64), (1, 8), (8, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_torch_s_muon_to_its_rounding(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1),
    ]
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - start).abs().max() > 0.02
    assert (ours - theirs).norm() < 0.02 * (ours - start).norm()  # theirs multiplies in bfloat16


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalised_keeps_singular_vectors_and_brings_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ orthogonalised(matrix) @ vh.T
    values = core.diagonal()
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (core - torch.diag(values)).abs().max() < 1e-9


def test_a_warm_start_computes_nothing_in_low_precision() -> None:
    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            seen.update(value.dtype for value in (*args, result) if isinstance(value, torch.Tensor))
            return result

    with Watch():
        train(WarmStartConfig(size="draft-1l", steps=1, batch_size=2))
    assert torch.float32 in seen
    assert not seen & {torch.bfloat16, torch.float16}
