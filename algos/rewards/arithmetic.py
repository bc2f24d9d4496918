"""The reward of worked additions. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_answer(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1.0 where the text after the last `#` is exactly the answer, 0.0 elsewhere (also where there is no `#`)."""
    return [
        float("#" in completion and completion.rpartition("#")[2] == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]
