"""Which kernels compute the decoder's small operations and the draw: chosen once for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engines.attention.choose import Setting, refusal, why_not_importable
from engines.config import Kernels
from engines.models.operations import NativeOperations, Operations, TorchOperations
from engines.native.library import Library, choose_library
from engines.sampling.sampler import Draw, draw_natively


@dataclass(frozen=True, kw_only=True)
class ChosenKernels:
    name: str
    """ "native", "triton" or "torch"."""
    operations: Operations
    draw: Draw | None
    """None for torch's."""
    library: Library | None = None
    """The native kernels."""


def choose_kernels(asked: Kernels, setting: Setting) -> ChosenKernels:
    """Chooses: "auto" takes native ones on a CPU and Triton's on CUDA, where they are available, and otherwise torch's.

    Raises ValueError when kernels that are named are not available.
    """
    if asked == "native" or (asked == "auto" and setting.device.type == "cpu"):
        library = choose_library(asked, setting.dtype, setting.device)
        if library is not None:
            draw = partial(draw_natively, library)
            return ChosenKernels(name="native", operations=NativeOperations(library), draw=draw, library=library)
    elif asked != "torch":
        reason = refusal("triton", setting) or why_not_importable("triton")
        if reason is None:
            from engines.models.triton_operations import TritonOperations
            from engines.sampling.triton_draw import draw_in_triton

            return ChosenKernels(name="triton", operations=TritonOperations(), draw=draw_in_triton)
        if asked == "triton":
            raise ValueError(f"EngineConfig.kernels='triton': {reason.replace('sdpa', 'torch')}")
    return ChosenKernels(name="torch", operations=TorchOperations(), draw=None)
