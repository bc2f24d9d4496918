"""JSON files that may be damaged, or of another program: read as what they must hold, or refused by one ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """What the file holds, as `kind`. Raises ValueError, with the path, for what is no JSON or has other types."""
    try:
        # Not msgspec's own reader: Hugging Face's files may hold Infinity, which it refuses.
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}; the file is damaged, or of another kind; restore it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file may be truncated; restore it") from None
