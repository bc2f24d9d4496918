"""Builds DeepSpeed's configuration from a `TrainerConfig` and a user's DeepSpeed JSON.

The JSON overrides the fields of `TrainerConfig`; "auto" anywhere in it means the `TrainerConfig`'s value, or, where it
has none, DeepSpeed's default. (DeepSpeed's own schedulers warm up for at least one step.) The three batch-size fields
keep DeepSpeed's meanings, for micro-batches cut by tokens: `train_batch_size` is `mini_batch_size`,
`train_micro_batch_size_per_gpu` is the most sequences in a rank's micro-batch, and if one of these two is missing,
`gradient_accumulation_steps` determines it.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from engines.constraints import Count, NonNegative, Positive, WholeNumber, check_fields
from engines.json_files import read_json

DType = Literal["float32", "bfloat16"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
LoraTargets = Annotated[tuple[LoraTarget, ...], Meta(min_length=1, description=f"some of {', '.join(LORA_TARGETS)}")]
Beta = Annotated[float, Meta(ge=0, lt=1, description="in [0, 1)")]

BATCH_FIELDS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ADAM_TYPES = ("adam", "adamw")
STEPS_ADAM = (*ADAM_TYPES, "muon")  # Muon is for matrices that map hidden states: Adam steps the rest
OPTIMIZERS = (*ADAM_TYPES, "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
"""DeepSpeed's own; it also takes those of torch by name."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the policy is optimised. Sequences and tokens are counted over all ranks unless said otherwise."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed shards over ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    dtype: DType = "float32"
    """Dtype of weights and activations; bfloat16 keeps float32 master weights in the optimizer."""
    learning_rate: Positive = 1e-6
    """AdamW's learning rate after warm-up."""
    weight_decay: NonNegative = 0.01
    """AdamW's decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm; 0 is off."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to zero at `total_steps` linearly or along a half cosine."""
    warmup_steps: WholeNumber = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    total_steps: Count | None = None
    """Optimizer steps at which a linear or cosine schedule reaches zero."""
    mini_batch_size: Count | None = None
    """Sequences per optimizer step, all of a rollout by default; the last mini-batch of an epoch may be smaller."""
    micro_batch_tokens: Count | None = None
    """Most tokens, padding included, in a rank's micro-batch; a longer sequence gets its own micro-batch. By default
    1,024 on CPUs, whose caches hold the activations of no more, and 16,384 on CUDA."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    lora_rank: WholeNumber = 0
    """Train LoRA adapters of this rank by peft, and leave the model as it is; 0 trains the whole model."""
    lora_alpha: Positive = 32.0
    """LoRA: the adapters' product is multiplied by alpha / rank."""
    lora_targets: LoraTargets = LORA_TARGETS
    """LoRA: the matrices of each layer that get an adapter."""
    deepspeed_config: Path | None = None
    """A DeepSpeed JSON file; its sections override the fields above."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lr_schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"TrainerConfig.total_steps={self.total_steps}: must be above warmup_steps={self.warmup_steps} with "
                f"lr_schedule={self.lr_schedule!r}; give the run's number of optimizer steps"
            )
        for name in ("lora_alpha", "lora_targets") if not self.lora_rank else ():
            if (value := getattr(self, name)) != getattr(TrainerConfig, name):
                raise ValueError(
                    f"TrainerConfig.{name}={value!r}: is for LoRA; give lora_rank (--lora-rank), too, or leave it out"
                )
        if self.lora_rank and importlib.util.find_spec("peft") is None:
            raise ValueError(f"TrainerConfig.lora_rank={self.lora_rank}: needs peft; pip install peft, or leave it out")

    def on(self, device: str) -> TrainerConfig:
        """Returns these options with the defaults of a kind of device, "cpu" or "cuda"."""
        default = 16384 if device == "cuda" else 1024
        return replace(self, micro_batch_tokens=self.micro_batch_tokens or default)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The trainer's settings, after the user's JSON has replaced some of them."""

    deepspeed: dict[str, Any]
    """The configuration for `deepspeed.initialize`."""
    zero_stage: int
    dtype: DType
    mini_batch_size: int | None
    """None: all sequences of an update."""
    max_micro_batch_rows: int | None
    """Most sequences in a rank's micro-batch; None: only the token budget limits it."""
    owns_scheduler: bool
    """Whether the learning-rate schedule is `TrainerConfig`'s, not the JSON's."""


def resolve(config: TrainerConfig, *, num_ranks: int) -> ResolvedConfig:
    """Merges the JSON into `config`. Raises ValueError, with file, field, value and fix, for an unsupported JSON."""
    user = _read(config.deepspeed_config) if config.deepspeed_config else {}
    name = str(config.deepspeed_config)
    _refuse_unsupported(user, name)
    _check_sections(user, name)
    mini_batch_size, max_rows = _batch_sizes(user, name, config.mini_batch_size, num_ranks)
    merged = {key: value for key, value in user.items() if key not in BATCH_FIELDS}
    zero = {"stage": config.zero_stage} | merged.get("zero_optimization", {})
    if zero["stage"] not in (0, 1, 2, 3):
        raise ValueError(f"{name}: zero_optimization.stage={zero['stage']!r}: must be 0, 1, 2 or 3")
    bf16 = {"enabled": config.dtype == "bfloat16"} | merged.get("bf16", {})
    merged |= {
        # DeepSpeed requires batch sizes. The trainer overrides their effects (loss scaling, accumulation).
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": bf16,
        "gradient_clipping": merged.get("gradient_clipping", config.max_grad_norm),
        "optimizer": _optimizer(merged.get("optimizer"), name, config, zero),
    }
    if bf16["enabled"] and zero["stage"] > 0:
        # Otherwise gradients accumulate over micro-batches in bf16. (DeepSpeed offers this only with ZeRO.)
        merged["data_types"] = {"grad_accum_dtype": "fp32"} | merged.get("data_types", {})
    merged.setdefault("steps_per_print", None)
    merged.setdefault("zero_allow_untested_optimizer", True)
    if "scheduler" in merged:
        merged["scheduler"] = _scheduler(merged["scheduler"], name, config)
    return ResolvedConfig(
        deepspeed=merged,
        zero_stage=zero["stage"],
        dtype="bfloat16" if bf16["enabled"] else "float32",
        mini_batch_size=mini_batch_size,
        max_micro_batch_rows=max_rows,
        owns_scheduler="scheduler" not in merged,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path, dict[str, Any])
    except (OSError, ValueError) as error:
        raise ValueError(f"TrainerConfig.deepspeed_config={str(path)!r}: cannot be read ({error})") from None
    # A section that is null counts as left out.
    return {key: value for key, value in _without_auto(data).items() if value is not None}


def _without_auto(value: Any) -> Any:
    """`value` without its "auto" entries, which then take the defaults."""
    if isinstance(value, dict):
        return {key: _without_auto(entry) for key, entry in value.items() if entry != "auto"}
    return value


def _refuse_unsupported(user: dict[str, Any], name: str) -> None:
    """Raises ValueError for sections that conflict with what Curtail itself must do."""
    sections = {
        "fp16": "use bf16, which needs no loss scaling",
        "amp": "use bf16",
        "elasticity": "remove it: it would change the mini-batch size",
    }
    for section, fix in sections.items():
        if isinstance(user.get(section), dict) and user[section].get("enabled"):
            raise ValueError(f"{name}: {section}.enabled=True: not supported; {fix}")
    if user.get("managed_gradient_accumulation") is False:
        fix = "remove it: the trainer sets the accumulation boundaries"
        raise ValueError(f"{name}: managed_gradient_accumulation=False: not supported; {fix}")
    if "tensor_parallel" in user:
        fix = "remove it: use ZeRO to shard"
        raise ValueError(f"{name}: tensor_parallel={user['tensor_parallel']!r}: not supported; {fix}")


def _check_sections(user: dict[str, Any], name: str) -> None:
    """Raises ValueError for a section that is no object, and for numbers in quotes."""
    for section in ("zero_optimization", "bf16", "data_types", "optimizer", "scheduler"):
        inner = "offload_optimizer" if section == "zero_optimization" else "params"
        value = _object(user, section, section, name)
        for key, given in _object(value, inner, f"{section}.{inner}", name).items():
            if isinstance(given, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", given, re.IGNORECASE):
                raise ValueError(f"{name}: {section}.{inner}.{key}={given!r}: must be a number; leave the quotes out")


def _object(owner: dict[str, Any], key: str, field: str, name: str) -> dict[str, Any]:
    value = owner.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {field}={value!r}: must be an object, as in DeepSpeed's documentation")
    return value


def _check_type(kind: Any, field: str, own: Sequence[str], module: str, name: str) -> None:
    """Raises ValueError for a `type` that DeepSpeed does not have, nor torch in this module."""
    is_known = isinstance(kind, str) and (kind in own or isinstance(getattr(import_module(module), kind, None), type))
    if not is_known:
        raise ValueError(f"{name}: {field}={kind!r}: is unknown; give one of {', '.join(own)}, or a class of {module}")


def _batch_sizes(user: dict[str, Any], name: str, default: int | None, num_ranks: int) -> tuple[int | None, int | None]:
    """(mini-batch size, most sequences in a rank's micro-batch); DeepSpeed's train = micro x accumulation x ranks."""
    for field in BATCH_FIELDS:
        value = user.get(field)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name}: {field}={value!r}: must be an integer of at least 1")
    train, micro, accumulation = (user.get(field) for field in BATCH_FIELDS)
    if train and micro and accumulation and train != micro * accumulation * num_ranks:
        raise ValueError(
            f"{name}: train_batch_size={train}: must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
            f"ranks = {micro} x {accumulation} x {num_ranks} = {micro * accumulation * num_ranks}; remove one of them"
        )
    if train is None:
        train = micro * accumulation * num_ranks if micro and accumulation else default
    if micro is None and accumulation is not None:
        if train is None:
            raise ValueError(
                f"{name}: gradient_accumulation_steps={accumulation}: says nothing without train_batch_size or "
                "mini_batch_size; give one"
            )
        micro = -(-train // (accumulation * num_ranks))
    return train, micro


def _optimizer(user: dict[str, Any] | None, name: str, config: TrainerConfig, zero: dict[str, Any]) -> dict[str, Any]:
    """The JSON's optimizer section, or AdamW. Parameters that the JSON leaves out are `config`'s."""
    optimizer = {"type": "AdamW"} | (user or {})
    if str(optimizer["type"]).lower() not in OPTIMIZERS:
        _check_type(optimizer["type"], "optimizer.type", OPTIMIZERS, "torch.optim", name)
    kind = optimizer["type"].lower()
    params: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if kind in STEPS_ADAM:
        params |= {"betas": list(config.betas), "eps": config.adam_eps}
    params |= optimizer.get("params", {})
    offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if kind in STEPS_ADAM and not offloads:
        # torch's AdamW: DeepSpeed's compiles a kernel at the first start, for minutes. Offloading requires DeepSpeed's.
        params.setdefault("torch_adam", True)
        if kind in ADAM_TYPES and params["torch_adam"] and not params.get("foreach"):
            params.setdefault("fused", True)
    return optimizer | {"params": params}


def _scheduler(user: dict[str, Any], name: str, config: TrainerConfig) -> dict[str, Any]:
    """The JSON's scheduler section. Parameters that it leaves out are `config`'s, where `config` has them."""
    _check_type(user.get("type"), "scheduler.type", SCHEDULERS, "torch.optim.lr_scheduler", name)
    known: dict[str, Any] = {
        "warmup_max_lr": config.learning_rate,
        "warmup_num_steps": max(1, config.warmup_steps),  # DeepSpeed refuses 0
        "total_num_steps": config.total_steps,
    }
    wanted = {
        "WarmupLR": ("warmup_max_lr", "warmup_num_steps"),
        "WarmupDecayLR": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
        "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
    }.get(user["type"], ())
    params = {key: known[key] for key in wanted} | user.get("params", {})
    fixes = {"warmup_num_steps": "give 1 or more", "total_num_steps": "give it, or total_steps (--total-steps)"}
    for key, fix in fixes.items():
        if key not in wanted:
            continue
        value = params[key]
        is_number = isinstance(value, int) or (key == "total_num_steps" and isinstance(value, float))
        if not is_number or value < 1:
            raise ValueError(f"{name}: scheduler.params.{key}={value!r}: must be an integer of at least 1; {fix}")
    return user | {"params": params}


def lr_factor(config: TrainerConfig, step: int) -> float:
    """The factor on the learning rate, in [0, 1], at optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return 1.0
    assert config.total_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
