"""Reads a checkpoint with transformers' own classes only, and without a question on stdin."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
