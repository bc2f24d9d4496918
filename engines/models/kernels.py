"""Which small operations run: a decision, and the operations that it names."""

from __future__ import annotations

from engines.attention.choose import Setting, refusal, why_not_importable
from engines.config import Kernels
from engines.models.operations import NativeOperations, Operations, TorchOperations
from engines.native.library import Library, choose_library


def choose_kernels(asked: Kernels, setting: Setting, *, attention: str) -> str:
    """"native", "triton" or "torch", to run beside that attention.

    "auto" takes native ones on a CPU and Triton's on CUDA, where they can be had, and else torch's. Raises ValueError
    when others are asked for and cannot be had.
    """
    if asked == "torch":
        return "torch"
    if setting.batch_invariant and attention == "triton":
        return "triton"
    if asked == "native" or (asked == "auto" and setting.device.type == "cpu"):
        return "torch" if choose_library(asked, setting.dtype, setting.device) is None else "native"
    reason = refusal("triton", setting) or why_not_importable("triton")
    if reason is None:
        return "triton"
    if asked == "triton":
        why = reason.replace("use 'sdpa'", "use 'auto'")
        raise ValueError(f"EngineConfig.kernels='triton': {why}")
    return "torch"


def make_operations(name: str, library: Library | None) -> Operations:
    """`library`: the native kernels, where those are to run."""
    if name == "triton":
        from engines.models.triton_operations import TritonOperations

        return TritonOperations()
    return TorchOperations() if library is None else NativeOperations(library)
