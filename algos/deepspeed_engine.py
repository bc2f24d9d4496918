"""The code that depends on DeepSpeed's internals: starting it, engines, steps, and whole weights at any ZeRO stage."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from algos.deepspeed_config import ResolvedConfig, TrainerConfig, lr_factor
from algos.publish import save_tensors
from engines.models.loader import merge_factors
from engines.relay.held import Held

_NO_COMPILE = "TORCHDYNAMO_DISABLE"
_PIECE_BYTES = 4 << 20  # of all ranks together: large enough for bandwidth, small compared to any large parameter
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, pickle.UnpicklingError),
    *(AssertionError, AttributeError, LookupError, TypeError, ValueError),  # from DeepSpeed, for other contents
)


def start_deepspeed(timeout: timedelta = timedelta(minutes=10)) -> torch.device:
    """Imports DeepSpeed for this machine's device and joins or creates the process group. Returns this rank's device.

    Reads torchrun's environment; without it the world is this process alone. Uses NCCL with one rank per GPU where
    there are GPUs, otherwise gloo. `timeout` limits each collective of the group.
    """
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it looked for a GPU
        # DeepSpeed counts a host's CPU ranks by LOCAL_SIZE. Its launcher sets LOCAL_SIZE, torchrun does not.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("LOCAL_RANK", "0")
    _quieten()
    import deepspeed  # after DS_ACCELERATOR: the import picks the accelerator
    import deepspeed.ops

    if not on_cuda:
        # With an empty table of compilable ops, `init_distributed` does not compile its shared-memory all-reduce. That
        # would take 23 s and need a compiler, and training does not use it.
        deepspeed.ops.__compatible_ops__ = {}
    if not dist.is_initialized():
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout, **alone)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return device


def stop_deepspeed() -> None:
    """Leaves the process group, if there is one. Without this, a gloo thread sometimes aborts at exit. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _quieten() -> None:
    """Hides the progress reports of DeepSpeed and transformers, and three warnings; other warnings stay."""
    os.environ.setdefault("DS_LOG_LEVEL", "warning")  # for the output of its import
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_progress_bar()
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing_enable.*")
    # The device under the current context is this rank's: `start_deepspeed` sets it.
    warnings.filterwarnings("ignore", message=".*using the device under current context.*")


def make_engine(model: nn.Module, config: TrainerConfig, resolved: ResolvedConfig) -> Any:
    """A DeepSpeed engine that trains `model`. Collective. Raises ValueError, with its file, for a JSON that DeepSpeed
    refuses."""
    import deepspeed

    if resolved.deepspeed["optimizer"]["type"].lower() != "muon":
        _import_muon()
    scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(lr_factor, config))
    with contextlib.redirect_stdout(io.StringIO()):  # one of its optimizers prints memory figures
        try:
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
                config=resolved.deepspeed,
                lr_scheduler=scheduler if resolved.owns_scheduler else None,
            )
        except (AssertionError, TypeError, ValueError, deepspeed.DeepSpeedConfigError) as error:
            if (file := config.deepspeed_config) is None:
                raise
            raise ValueError(
                f"TrainerConfig.deepspeed_config={str(file)!r}: DeepSpeed does not start with it "
                f"({type(error).__name__}: {error}); mend it there"
            ) from error
    engine.train()
    _undo_first_step(engine)
    return engine


def _import_muon() -> None:
    """Imports DeepSpeed's Muon, as DeepSpeed does for every optimizer, but without compiling its function:
    torch.compile would import all of Inductor, which takes each rank 1.2 s."""
    before = os.environ.get(_NO_COMPILE)
    os.environ[_NO_COMPILE] = "1"
    try:
        with contextlib.suppress(ModuleNotFoundError):  # of another version
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        del os.environ[_NO_COMPILE]
        if before is not None:
            os.environ[_NO_COMPILE] = before


def _undo_first_step(engine: Any) -> None:
    """Undoes the optimizer step on zero gradients with which DeepSpeed creates the optimizer states of bf16 at stage 0.

    That step decays the master weights and advances Adam's bias correction by one step. ZeRO stages 1 to 3 do not
    make it.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    wrapper = engine.optimizer
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        wrapper.optimizer.state.clear()
        for masters, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, parameter in zip(masters, parameters, strict=True):
                master.data.copy_(parameter.data)


def make_frozen(model: nn.Module, resolved: ResolvedConfig) -> Any:
    """Returns `model` for calls without gradients; under ZeRO-3, an engine that keeps it sharded. Collective."""
    model.requires_grad_(False)
    model.eval()
    if resolved.zero_stage < 3:
        return model
    import deepspeed

    zero = {key: value for key, value in resolved.deepspeed["zero_optimization"].items() if key != "offload_optimizer"}
    sections = {"zero_optimization": zero, "bf16": resolved.deepspeed["bf16"], "train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=model, config=sections | {"steps_per_print": None})
    engine.eval()
    return engine


def backward(engine: Any, loss_share: Tensor) -> None:
    """Accumulates the gradient of this rank's share of the loss; at a boundary it is reduced over the ranks.

    DeepSpeed averages over ranks, but shares must be summed: the loss is multiplied by the number of ranks.
    """
    # A non-finite loss may have a finite gradient. Multiplying the loss by NaN makes the gradient NaN, so the check of
    # the gradient norm, whose result is the same on all ranks, catches both.
    poison = torch.where(torch.isfinite(loss_share.detach()), 1.0, math.nan)
    engine.backward(loss_share * (poison * dist.get_world_size()), scale_wrt_gas=False)


def set_boundary(engine: Any, *, is_last: bool) -> None:
    """Sets whether the next forward and backward are the last of an optimizer step. Call it before both."""
    engine.set_gradient_accumulation_boundary(is_last)


def step_if_finite(engine: Any) -> tuple[float, bool]:
    """Returns (global gradient norm before clipping, whether the optimizer stepped). Collective.

    With a non-finite norm it drops the gradient. The learning-rate schedule advances only with the optimizer.
    """
    if not (engine.zero_optimization() or engine.bfloat16_enabled()):
        # Plain fp32 data parallelism is the one case where DeepSpeed neither checks nor reports the norm.
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            engine.zero_grad()
            return norm, False
        engine.step()
        return norm, True
    skipped = engine.skipped_steps
    engine.step()
    norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm), engine.skipped_steps == skipped


def named_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of each parameter in the model's order, tied parameters once. A matrix
    with a LoRA adapter has it merged, in at least float32.

    A tensor is valid until the next one is requested. Under ZeRO-3 all are gathered into one buffer of the size of the
    largest parameter, and the call is collective: all ranks iterate in step, to the end.
    """
    adapted = {f"{name}.base_layer.weight": module for name, module in adapted_modules(engine.module)}
    for name, tensor in _whole(engine, _own_parameters(engine)):
        yield _plain(name), _merge(tensor, adapted[name]) if name in adapted else tensor


def held_weights(engine: Any) -> dict[str, Held]:
    """Returns what this rank has of each parameter, by Hugging Face name: under ZeRO-3 its own part, else all. Gathers
    and copies nothing. Raises ValueError, naming the option, for weights that are not in memory as they are trained."""
    if adapted_modules(engine.module):
        raise ValueError("lora_rank: with an adapter no rank has the merged weights; use --weights direct")
    held = {}
    for name, parameter in _own_parameters(engine).items():
        if not _is_partitioned(parameter):
            held[name] = Held(0, parameter.data.view(-1), is_shared=True)
            continue
        if not _is_plain(parameter):
            raise ValueError(f"weights: ZeRO-3 keeps {name!r} on a disk or quantised; use --weights direct")
        part = parameter.ds_tensor.data
        first = min(dist.get_rank(parameter.ds_process_group) * len(part), parameter.ds_numel)
        held[name] = Held(first, part[: parameter.ds_numel - first])
    return held


def adapter_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """As `named_weights`, the factors of the LoRA adapter under peft's names."""
    own = _own_parameters(engine)
    factors = {name: one for name, one in engine.module.named_parameters() if name not in own}
    for name, tensor in _whole(engine, factors):
        yield f"base_model.model.{name.replace('.default.', '.')}", tensor


def adapted_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of each matrix that has a LoRA adapter."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _own_parameters(engine: Any) -> dict[str, Any]:
    """The model's own parameters, without adapters."""
    return {name: one for name, one in engine.module.named_parameters() if ".lora_" not in name}


def _plain(name: str) -> str:
    """The name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def _merge(weight: Tensor, module: Any) -> Tensor:
    import deepspeed

    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    parts = [factor for factor in (a, b) if _is_partitioned(factor)]
    with deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)):
        return merge_factors(weight, a.data, b.data, module.scaling["default"])


def _whole(engine: Any, named: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields these parameters, whole."""
    import deepspeed

    buffer: Tensor | None = None
    for name, parameter in named.items():
        if not _is_partitioned(parameter):
            yield name, parameter.data
        elif _is_plain(parameter):
            if buffer is None:
                longest = max(_gathered_size(one) for one in named.values() if _is_partitioned(one))
                buffer = torch.empty(longest, dtype=parameter.dtype, device=engine.device)
            yield name, _gather(parameter, buffer)
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data


def _is_partitioned(parameter: Any) -> bool:
    """Whether ranks hold parts. Small parameters are whole under ZeRO-3, too (`stage3_param_persistence_threshold`)."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def _is_plain(parameter: Any) -> bool:
    """Whether this rank's part is in memory and has the parameter's dtype: neither quantised nor on a disk."""
    part = parameter.ds_tensor
    return part.status.name == "AVAILABLE" and part.dtype == parameter.dtype and not hasattr(part, "ds_quant_scale")


def _gathered_size(parameter: Any) -> int:
    return int(parameter.ds_tensor.numel() * dist.get_world_size(parameter.ds_process_group))


def _gather(parameter: Any, buffer: Tensor) -> Tensor:
    """Returns the whole parameter, gathered into `buffer` one piece of every rank's part at a time.

    On gloo, DeepSpeed's own gather takes twice the parameter's memory, because gloo gathers into its own memory first.
    """
    part, group = parameter.ds_tensor, parameter.ds_process_group
    parts = buffer[: _gathered_size(parameter)].view(-1, part.numel())  # rank r holds row r; the last one is padded
    step = max(1, _PIECE_BYTES // (len(parts) * part.element_size()))
    for start in range(0, part.numel(), step):
        mine = part[start : start + step].to(buffer.device)
        pieces = buffer.new_empty(len(parts) * len(mine))
        dist.all_gather_into_tensor(pieces, mine, group=group)
        parts[:, start : start + step] = pieces.view(len(parts), -1)
    return parts.flatten()[: parameter.ds_numel].view(parameter.ds_shape)


def save_states(engine: Any, directory: Path, tag: str) -> None:
    """Writes DeepSpeed's states, without frozen weights, into `directory`/`tag`. Collective: errors are raised after
    all ranks are done."""
    failed: list[Exception] = []

    def attempt(write: Callable[..., None], *args: Any, **options: Any) -> None:
        try:
            write(*args, **options)
        except (OSError, RuntimeError) as error:
            failed.append(error)

    engine.checkpoint_engine.save = partial(attempt, save_tensors)
    engine._copy_recovery_script = partial(attempt, type(engine)._copy_recovery_script, engine)
    engine.save_checkpoint(str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=True)
    if failed:
        raise failed[0]


def load_states(engine: Any, directory: Path, tag: str) -> None:
    """Loads what `save_states` wrote. Raises ValueError when files are missing or unreadable. Collective."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # DeepSpeed's own call would execute any code in a pickle.
    engine.checkpoint_engine.load = partial(torch.load, weights_only=True)
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            is_whole = not adapted_modules(engine.module)
            loaded, _ = engine.load_checkpoint(str(directory), tag=tag, load_module_strict=is_whole)
        assert loaded is not None
    except _UNREADABLE as error:
        raise ValueError(
            f"directory={str(directory)!r}: DeepSpeed's states in {tag!r} are missing, damaged or of other code "
            f"({type(error).__name__}); give another"
        ) from error


def weight_shapes(engine: Any) -> dict[str, torch.Size]:
    """Names and whole shapes of the tensors that `named_weights` yields. Gathers nothing."""
    named = _own_parameters(engine)
    return {_plain(name): getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named.items()}
