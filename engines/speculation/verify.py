"""The rule of lossless verification: a draft token counts only if the engine draws the same token. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items


def num_accepted(draft: Items[int], drawn: Items[int]) -> int:
    """Returns the number of leading draft tokens that equal the tokens drawn at their positions.

    The draw behind these tokens is valid, too: it follows accepted tokens only.
    """
    count = 0
    for guess, token in zip(draft, drawn, strict=False):
        if guess != token:
            break
        count += 1
    return count
