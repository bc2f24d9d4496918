"""Reads JSON files that may be damaged or written by another program: a value of the given type, or ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """Returns the file's content as `kind`. Raises ValueError with the path for invalid JSON or other types."""
    try:
        # Not msgspec's own reader: Hugging Face's files may hold Infinity, which it refuses.
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}; the file is damaged, or of another kind; restore it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file may be truncated; restore it") from None
