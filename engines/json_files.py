"""Reads JSON files that may be damaged or written by another program: a value of the given type, or ValueError."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of the whole lines: the last line is cut short while it is written, or when its writer was
    killed. Empty if there is no file. Raises ValueError for another line that is damaged."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error}); the file is damaged; restore it") from None
    return rows


def loads_finite(text: str | bytes) -> Any:
    """As `json.loads`. Raises ValueError also for NaN, Infinity and what rounds to it, which are no JSON."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no finite number")
    return value


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns each single option by its path: {"rollout": {"top_k": -1}} gives {"rollout.top_k": -1}."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
