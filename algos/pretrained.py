"""Reads a model from a Hugging Face directory (sharded from the start under ZeRO-3), and writes one, or an adapter."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from algos.deepspeed_config import ResolvedConfig, TrainerConfig
from engines.adapter_config import ADAPTER_WEIGHTS, MERGE, is_adapter
from engines.json_files import read_json
from engines.models.hugging_face import read_checkpoint

MAX_SHARD_BYTES = 5_000_000_000
# Other files that a checkpoint directory may hold besides weights and config.json.
COMPANION_FILES = (
    *("generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def check_folder(path: Path) -> None:
    """Raises ValueError for a folder that is no checkpoint, or an adapter."""
    if is_adapter(path):
        raise ValueError(f"model={str(path)!r}: is an adapter, which training does not go on from; {MERGE}")
    if not (path / "config.json").is_file():
        raise ValueError(f"model={str(path)!r}: holds no config.json; give a Hugging Face checkpoint directory")


def load_model(
    path: Path, resolved: ResolvedConfig, device: torch.device, *, gradient_checkpointing: bool
) -> nn.Module:
    """Loads the causal language model in `path`, in the training dtype, without dropout. Collective under ZeRO-3.

    Raises ValueError as `check_folder`, and when weights are missing. The weights are never held twice: transformers
    builds the model on the meta device, then reads them. Under ZeRO-3 a rank keeps only its own part of each tensor.
    """
    check_folder(path)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    dtype = getattr(torch, resolved.dtype)
    hf_config = read_checkpoint(AutoConfig, path)
    for name, value in vars(hf_config).items():
        if "dropout" in name and isinstance(value, float):
            setattr(hf_config, name, 0.0)  # dropout would make the log-probs differ from the rollout engine's
    # While this object lives, transformers makes models under `deepspeed.zero.Init`.
    zero3 = HfDeepSpeedConfig(resolved.deepspeed) if resolved.zero_stage == 3 else None
    model, info = read_checkpoint(
        AutoModelForCausalLM,
        path,
        config=hf_config,
        dtype=dtype,
        attn_implementation=_attention(device, dtype),
        output_loading_info=True,
    )
    del zero3
    if missing := sorted(info["missing_keys"]):  # transformers has initialised them at random
        raise ValueError(f"model={str(path)!r}: weights {missing[:3]} are missing; copy the checkpoint again")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if resolved.zero_stage < 3:
        nn.Module.to(model, device)  # under ZeRO-3 the parameters are on the device already
    return model


def add_adapter(model: Any, config: TrainerConfig, path: Path) -> None:
    """Gives the model of `path` LoRA adapters, the same on all ranks, which do nothing yet. Freezes all else.

    They have no dropout, which would make the log-probs differ from the rollout engine's.
    """
    from peft import LoraConfig

    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type] # its hint says int, and a float is read as well
        target_modules=list(config.lora_targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.add_adapter(lora)
    model.peft_config["default"].base_model_name_or_path = str(path.resolve())


def weights_digest(path: Path) -> str:
    """SHA-256 of the checkpoint's weights and configuration, as lines of file name and digest."""
    lines = []
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name == "config.json":
            with open(file, "rb") as opened:
                lines.append(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    flash = device.type == "cuda" and dtype == torch.bfloat16 and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if flash else "sdpa"


def save_pretrained(
    source: Path,
    target: Path,
    weights: Iterator[tuple[str, Tensor]],
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `weights` as safetensors, and copies of `source`'s config and tokenizer files, to `target`.

    All ranks iterate over `weights`; rank 0 writes, and holds about one file of at most `max_shard_bytes` at a time.
    All ranks return together when the files are complete or a write has failed; rank 0 then raises its error.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    skeleton = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(skeleton, max_shard_size=max_shard_bytes)
    is_writer = dist.get_rank() == 0
    missing = {filename: set(names) for filename, names in split.filename_to_tensors.items()}
    pending: dict[str, dict[str, Tensor]] = {filename: {} for filename in missing}
    try:
        if is_writer:
            target.mkdir(parents=True, exist_ok=True)
            _write_config(source, target, dtype)
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for name, tensor in weights:
            filename = split.tensor_to_filename[name]
            missing[filename].remove(name)
            if is_writer:
                pending[filename][name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
                if not missing[filename]:
                    _save_shard(pending.pop(filename), target / filename)
        assert not any(missing.values()), "named weights and shapes differ"
    finally:
        for _ in weights:  # all ranks iterate to the end, also after a failed write
            pass
        dist.barrier()


def save_adapter(
    model: Any, source: Path, target: Path, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Writes the adapter of `model` in peft's format, and copies of `source`'s tokenizer files, to `target`.

    All ranks iterate over `weights`, and return together; rank 0 writes, and raises its error.
    """
    try:
        tensors = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in weights}
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
            _save_shard(tensors, target / ADAPTER_WEIGHTS)
            model.peft_config["default"].save_pretrained(target)
            _copy_companions(source, target)
    finally:
        dist.barrier()


def _save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = read_json(source / "config.json", dict[str, Any])
    name = str(dtype).removeprefix("torch.")
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    (target / "config.json").write_text(json.dumps(config, indent=2))
    _copy_companions(source, target)


def _copy_companions(source: Path, target: Path) -> None:
    for companion in COMPANION_FILES:
        if (source / companion).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / companion, target / companion)
