"""Makes the drafter that the engine's options name. Torch-free."""

from __future__ import annotations

from engines.config import EngineConfig
from engines.speculation.drafter import Drafter
from engines.speculation.ngram import NGramDrafter
from engines.speculation.policy import AdaptedDrafter, DraftPolicy, RowSeconds
from engines.speculation.suffix import SuffixDrafter


def choose_drafter(config: EngineConfig, policy: DraftPolicy | None, seconds: RowSeconds) -> Drafter | None:
    """Returns the drafter of a replica; None for "none"."""
    drafter: Drafter
    if config.drafter == "none":
        return None
    if config.drafter == "ngram":
        drafter = NGramDrafter()
    else:
        drafter = SuffixDrafter(
            grouped=config.drafter == "grouped_suffix",
            max_draft_tokens=config.max_draft_tokens,
            max_bytes=config.draft_tree_bytes,
        )
    return drafter if policy is None else AdaptedDrafter(drafter, policy(seconds))
