"""Makes the drafter that the engine's options name. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.config import LOOKUPS, EngineConfig
from engines.speculation.client import DraftClient
from engines.speculation.drafter import Drafter
from engines.speculation.history import DraftHistory
from engines.speculation.ngram import NGramDrafter
from engines.speculation.policy import AdaptedDrafter, DraftPolicy, Prices
from engines.speculation.shared import SharedDrafter, SplitDrafter
from engines.speculation.suffix import SuffixDrafter

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator

Connect = Callable[[bool], DraftClient | None]
"""Returns a client of the draft server; None on a shard that is not the replica's first, for which it gets False."""


def choose_drafter(
    config: EngineConfig,
    policy: DraftPolicy,
    prices: Prices,
    shards: Communicator,
    *,
    connect: Connect | None = None,
    model: Drafter | None = None,
    history: DraftHistory | None = None,
    remote: Drafter | None = None,
) -> Drafter | None:
    """Returns the drafter of a replica's shard; None for "none". `policy` makes what decides adaptive lengths.
    All shards have `connect` where there is a draft server; `model` is this shard's drafter of drafter="model" or
    "own", and `remote` that of a replica for which other ranks draft. `history` is what
    "grouped_suffix" knows of earlier rollouts."""
    drafter: Drafter | None
    if config.drafter == "none":
        return None
    if remote is not None:
        drafter = remote
    elif config.drafter == "ngram":
        drafter = NGramDrafter()
    elif config.drafter in ("model", "own"):
        drafter = model
    else:
        client = None if connect is None else connect(shards.rank == 0)
        drafter = SuffixDrafter(
            grouped=config.drafter == "grouped_suffix",
            max_draft_tokens=config.max_draft_tokens,
            num_paths=config.draft_paths,
            max_bytes=config.draft_tree_bytes,
            client=client,
            history=history,
        )
    if shards.size > 1 and (connect is not None or remote is not None):
        drafter = SharedDrafter(drafter if shards.rank == 0 else None, shards)
    elif shards.size > 1 and config.drafter not in LOOKUPS:
        assert drafter is not None
        drafter = SplitDrafter(drafter, shards)
    assert drafter is not None
    return drafter if config.draft_lengths == "fixed" else AdaptedDrafter(drafter, policy(prices))
