"""Folders of checkpoints: by a name of the hub; of a LoRA adapter's base; adapter_config.json. Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from msgspec import Struct

from engines.constraints import Positive
from engines.json_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGE = "merge it with its base by peft (docs/training.md, LoRA), and give the merged model"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """The fields that are read. Which matrices are adapted, and the rank of each, the tensors say."""

    lora_alpha: Positive
    use_rslora: bool = False
    base_model_name_or_path: str | None = None

    def scale(self, rank: int) -> float:
        """The factor of B @ A (LoRA, §4.1; rank-stabilised LoRA divides by the root of the rank)."""
        return self.lora_alpha / (rank**0.5 if self.use_rslora else rank)


_OTHERWISE = (
    *("alpha_pattern", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens"),
    *("use_bdlora", "use_qalora", "kasa_config"),
)
"""Options by which an adapter is not W + scale * B @ A, the same for every token."""


def is_adapter(directory: str | Path) -> bool:
    return (Path(directory) / ADAPTER_CONFIG).is_file()


def read_adapter(directory: str | Path) -> AdapterConfig:
    """Raises ValueError for an adapter that is more than factors A and B for matrices of an unchanged base."""
    path = Path(directory) / ADAPTER_CONFIG
    options = read_json(path, dict[str, Any])
    begins = options.get("init_lora_weights")
    supported = {
        "peft_type": options.get("peft_type") == "LORA",
        # The other ways to begin (PiSSA, OLoRA, LoftQ, ...) change the base.
        "init_lora_weights": begins in (True, False, None, "gaussian", "eva", "orthogonal"),
        **{name: not options.get(name) for name in _OTHERWISE},
    }
    for name, is_supported in supported.items():
        if not is_supported:
            raise ValueError(f"{path}: {name}={options.get(name)!r} is not supported; {MERGE}")
    return read_json(path, AdapterConfig)


def base_folder(directory: str | Path, base_model: str | Path | None = None) -> Path:
    """Returns the folder of an adapter's base: `base_model`, or the one that the adapter names. Without an adapter in
    `directory`, it is `directory`.

    Raises FileNotFoundError when the named one is not there, ValueError for a `base_model` without an adapter.
    """
    if not is_adapter(directory):
        if base_model is not None:
            raise ValueError(f"base_model={str(base_model)!r}: {str(directory)!r} is no adapter; leave it out")
        return Path(directory)
    base = base_model or read_adapter(directory).base_model_name_or_path
    named = f"model={str(directory)!r}: is an adapter of base_model_name_or_path"
    fix = "give the folder of its base as base_model"
    try:
        if base is not None and ((folder := checkpoint_folder(base, named)) / "config.json").is_file():
            return folder
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{named}={str(base)[:80]!r}...: {error.strerror}; {fix}") from None
    raise FileNotFoundError(f"{named}={str(base)!r}, where there is no checkpoint; {fix}")


def checkpoint_folder(model: str | Path, field: str = "model") -> Path:
    """Returns the folder of a checkpoint: `model`, or what the Hugging Face hub has under that name.

    A name like "Qwen/Qwen3-0.6B", which is no path here, is looked up in the local cache of the hub, and downloaded if
    the cache has no weights of it. Raises FileNotFoundError, which says where was searched, and begins with `field`.
    """
    name = str(model)
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return Path(name)
    from huggingface_hub import constants, snapshot_download

    reason = ""
    for is_local in (True, False):
        try:
            folder = Path(snapshot_download(name, local_files_only=is_local, allow_patterns=_FILES))
        except Exception as error:  # what is raised depends on where the way to the hub is broken
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        else:
            if any(folder.glob("*.safetensors")):
                return folder
            reason = "it has no weights in safetensors"
    raise FileNotFoundError(
        f"{field}={name!r}: there is no folder {os.path.abspath(name)!r}; as a name of the hub it is not in the cache "
        f"{constants.HF_HUB_CACHE}, and could not be downloaded ({reason}); check the folder's path, or run "
        f"`hf download {name}` where there is a network"
    )
