"""Named variants take turns, and their medians go into one table.

A turn runs each variant once, every second turn in reverse order, so that a machine that becomes slower or faster
favours no variant. A ratio is of two times of the same turn, and the median over the turns is reported. The first
variant is the baseline. It runs twice in a turn: its ratio to itself (A/A) shows the effect of noise alone. Torch-free.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Any, TypeVar

from engines.progress import Bar
from experiments import launch

AGAIN = " again"
"""Suffix of the name of the baseline's second run in a turn."""

Row = dict[str, Any]
T = TypeVar("T")


def interleave(
    variants: Mapping[str, Callable[[], T] | Items[Callable[[], T]]],
    turns: int,
    *,
    name: str = "",
    warm_up: bool = True,
) -> dict[str, list[T]]:
    """Returns each variant's results, one per turn; the baseline's second runs are under its name and `AGAIN`.

    Where turns differ, or a slow variant has fewer, there is a call for each of its turns. Results of the warm-up are
    discarded. In a world all ranks call this together, with the same variants.
    """
    base = next(iter(variants))
    again = {base + AGAIN: variants[base]}
    order = {one: [some] * turns if callable(some) else some for one, some in {**again, **variants}.items()}
    order[base + AGAIN] = order.pop(base + AGAIN)  # behind all others
    if warm_up:
        for one in variants:
            order[one][0]()
    results: dict[str, list[T]] = {one: [] for one in order}
    for turn in Bar(range(turns), desc=name, unit="turn", disable=launch.rank() > 0):
        for one in reversed(order) if turn % 2 else order:
            if turn < len(order[one]):
                results[one].append(order[one][turn]())
    return results


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds that a call took, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def make_row(name: str, seconds: Mapping[str, Items[float]], **facts: object) -> Row:
    """Makes a row of the result from seconds per turn: medians in milliseconds, ratios to the baseline, A/A."""
    base = next(iter(seconds))
    ratios = {
        one: short(statistics.median(mine / its for mine, its in zip(values, seconds[base], strict=False)))
        for one, values in seconds.items()
        if one != base
    }
    return {
        "name": name,
        "ms": {one: short(1e3 * statistics.median(times)) for one, times in seconds.items() if not one.endswith(AGAIN)},
        "a_a": ratios.pop(base + AGAIN),
        "ratios": ratios,
        **facts,
        "turns_ms": {one: [short(1e3 * time) for time in times] for one, times in seconds.items()},
    }


def short(value: float) -> float:
    """Rounds to four significant digits."""
    return float(f"{value:.4g}")


def median_and_range(values: Items[float]) -> list[float]:
    """The median, the least and the largest."""
    return [short(value) for value in (statistics.median(values), min(values), max(values))]


def table(rows: Items[Row]) -> str:
    """One line per variant, and one per fact that is a number or a string."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        base, *others = row["ms"]
        ratios = {base: f"A/A {row['a_a']:g}", **{one: f"{row['ratios'][one]:g} x the time" for one in others}}
        lines += [(row["name"], one, f"{ms:g} ms", ratios[one]) for one, ms in row["ms"].items()]
        facts = {key: value for key, value in row.items() if key not in ("name", "a_a")}
        lines += [(row["name"], key, str(one), "") for key, one in facts.items() if isinstance(one, int | float | str)]
    return in_columns(lines, str.ljust)


def in_columns(lines: Items[Items[str]], justify: Callable[[str, int], str] = str.rjust) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)
