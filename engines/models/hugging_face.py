"""Finds a checkpoint's folder; reads it with transformers' own classes only, and without a question on stdin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def checkpoint_folder(model: str | Path) -> Path:
    """Returns the folder of a checkpoint: `model`, or what the Hugging Face hub has under that name.

    A name like "Qwen/Qwen3-0.6B", which is no path here, is looked up in the local cache of the hub, and downloaded if
    the cache has no weights of it. Raises FileNotFoundError, which says which cache was searched.
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
        f"model={name!r}: is no folder here, nor in the hub's cache {constants.HF_HUB_CACHE}, and could not be "
        f"downloaded ({reason}); give a folder, or run `hf download {name}` where there is a network"
    )


def read_checkpoint(auto_class: Any, directory: str | Path, **options: Any) -> Any:
    """Returns `auto_class.from_pretrained(directory)`. Code that comes with the checkpoint is never run.

    Where transformers has a class for the type, an `auto_map` is ignored. Raises ValueError for a checkpoint that
    cannot be read without its own code, or at all.
    """
    try:
        return auto_class.from_pretrained(directory, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # what a broken file raises depends on where it is broken
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model={str(directory)!r}: an auto_map in its JSON files wants Python code of the checkpoint's own, "
                f"which is never run; give a checkpoint of transformers' own classes, or take auto_map out"
            ) from None
        raise ValueError(f"model={str(directory)!r}: {auto_class.__name__} cannot read it ({error!r})") from error
