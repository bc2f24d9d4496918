"""Checks before memory is taken or a process started: each raises a ValueError with field, value and fix."""

from __future__ import annotations

import os
import stat

import torch

from engines.attention.choose import choose_backend, setting_of
from engines.config import EngineConfig, ModelConfig, draft_model_config, longest_sequence
from engines.models.kernels import choose_kernels


def check_engine(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises ValueError when length, disk folder, kernels or attention of the config are not available on `device`; for
    a draft model that cannot draft for `model` also FileNotFoundError.

    Takes no memory of the device; compiles the kernels if this machine has not done so yet.
    """
    longest_sequence(config, model)
    _check_disk_folder(config)
    draft = draft_model_config(config, model)
    for one in (model, draft) if draft is not None else (model,):
        choose_backend(config, one, device)
        choose_kernels(config.kernels, setting_of(config, one, device))


def _check_disk_folder(config: EngineConfig) -> None:
    """A folder that is full or cannot be written to is no error: KV is then recomputed, and the store warns."""
    if config.kv_disk_folder is None:
        return
    why = "it is no folder"
    try:
        if stat.S_ISDIR(os.stat(config.kv_disk_folder).st_mode):
            return
    except OSError as error:
        why = str(error.strerror)
    raise ValueError(
        f"EngineConfig.kv_disk_folder={config.kv_disk_folder!r}: cannot be used ({why}); give a folder that exists"
    )


def usable_device(owner: str, device: str | torch.device | None) -> torch.device:
    """Returns the device of that name; for None the GPU if there is one, else the CPU. Raises ValueError if absent."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told = f"{owner}.device={str(device)!r}"
    if not isinstance(device, str | torch.device):
        raise ValueError(f"{owner}.device={device!r}: give 'cpu', 'cuda' or 'cuda:<index>'")
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{told}: names no device; give 'cpu', 'cuda' or 'cuda:<index>'") from None
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"{told}: the engine runs on 'cpu' and 'cuda'; give one of them")
    if named.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{told}: torch sees no GPU here; give 'cpu', or install a driver and torch's build for it")
    if named.type == "cuda" and named.index is not None and named.index >= torch.cuda.device_count():
        raise ValueError(f"{told}: there are {torch.cuda.device_count()} GPUs here, counted from 0")
    return named


def check_policy(name: str, policy: object, method: str) -> None:
    """Raises ValueError when `policy` is no object with this method, or is a class instead of an object."""
    if isinstance(policy, type) or not callable(getattr(policy, method, None)):
        raise ValueError(f"{name}={policy!r}: give an object with the method `{method}`")
