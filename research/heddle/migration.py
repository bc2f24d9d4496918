"""Where a trajectory belongs after its predicted length has changed: Heddle, §5.3. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Groups:
    """A placement: groups of neighbours in descending order of predicted length."""

    sizes: tuple[int, ...]
    replica_ids: tuple[int, ...]
    """The replica of each group."""


def capacities(sizes: Items[int], num_active: int) -> list[int]:
    """Returns s_i n*/n, rounded by largest remainders so that the sum is `num_active`. Of equal remainders, the
    earlier group is rounded up. Raises ValueError where all sizes are 0."""
    total = sum(sizes)
    if not total:
        raise ValueError(f"sizes={list(sizes)}: no group has a trajectory; give the sizes of a placement")
    shares = [divmod(size * num_active, total) for size in sizes]
    counts = [count for count, _ in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda place: -shares[place][1])
    for place in by_remainder[: num_active - sum(counts)]:
        counts[place] += 1
    return counts


def group_of(rank: int, counts: Items[int], current: int | None = None, margin: float = 0.0) -> int:
    """Returns the group in which a rank lies; its `current` one, if the rank is at most `margin` outside of it.

    `counts` are the groups' capacities, whose sum is above `rank`.
    """
    bounds = list(accumulate(counts))
    if current is not None:
        first, end = bounds[current] - counts[current], bounds[current]
        if first - margin <= rank < end + margin:
            return current
    return bisect_right(bounds, rank)


def pays(remaining: float, token_s: tuple[float, float], without_it_s: float, exposed_s: float) -> bool:
    """Whether a move saves at least the seconds for which the trajectory waits for its KV. The paper moves in any case.

    `token_s`: seconds of a token where it is and where it would be. `without_it_s`: where it is, once it has left. A
    move helps the trajectory itself, or those that stay behind, over its remaining tokens.
    """
    here, there = token_s
    return exposed_s <= remaining * max(here - there, here - without_it_s)
