"""Figures of rose.py and rose_sim.py: latencies beside their SLOs, what the rollout harvests, and who has the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.figures import save

LATENCIES = {"ttft": "P99 time to first token", "tpot": "P99 time between two tokens"}
_ABOVE = 1.15
"""Room for a legend."""


def draw_cells(
    path: Path,
    slo: Mapping[str, Mapping[str, Mapping[str, Any]]],
    limits: Mapping[str, Mapping[str, float]],
    harvest: Mapping[str, Mapping[str, float]],
    timeline: Sequence[tuple[float, int, int, int]] = (),
    *,
    lent: Mapping[str, Sequence[float]] | None = None,
    tier: str,
) -> Path:
    """Draws latencies over SLOs by policy (as Fig. 9), the harvest, and the pages of one run over time (as Fig. 3a), or
    what was lent.

    `limits`: by cell, `ttft_slo_ms` and `tpot_slo_ms`. `timeline`: seconds; pages that serving uses, that the rollout
    holds, and its budget. `lent`: by policy, seconds of each serving replica.
    """
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    policies = list(next(iter(slo.values())))
    for ax, (kind, title) in zip(axes[0], LATENCIES.items(), strict=True):
        values = {
            cell: [some[policy][f"{kind}_p99"] / limits[cell][f"{kind}_slo_ms"] for policy in policies]
            for cell, some in slo.items()
        }
        _bars(ax, policies, values)
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        ax.set_ylim(0, min(4.0, max(1.25, ax.get_ylim()[1])))
        ax.set_ylabel("share of the SLO")
        ax.set_title(title)
    lending = [policy for policy in policies if policy in next(iter(harvest.values()))]
    _bars(axes[1][0], lending, {cell: [some[policy] for policy in lending] for cell, some in harvest.items()})
    axes[1][0].set_ylabel("rollout's tokens, of what it\nwould draw alone in the idle time")
    axes[1][0].set_title("harvest")
    if lent is None:
        _pages(axes[1][1], timeline)
    else:
        by_rank = zip(*lent.values(), strict=True)
        _bars(axes[1][1], list(lent), {f"replica {place}": some for place, some in enumerate(by_rank)})
        axes[1][1].set(ylabel="seconds", title="lent by each serving replica, first cell")
    return save(figure, path, "a rollout beside a serving model", tier)


def _pages(ax: Axes, timeline: Sequence[tuple[float, int, int, int]]) -> None:
    seconds, serving, rollout, budget = zip(*timeline, strict=True) if timeline else ((), (), (), ())
    ax.stackplot(seconds, serving, rollout, labels=("used by serving", "held by the rollout"), alpha=0.7)
    ax.plot(seconds, budget, color="black", linewidth=0.8, label="the rollout's budget")
    ax.set(xlabel="seconds", ylabel="pages", title="pages of one run")
    ax.set_ylim(0, _ABOVE * ax.get_ylim()[1])
    ax.legend(fontsize=8, ncols=3, loc="upper center")


def _bars(ax: Axes, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / max(1, len(values))
    for number, (cell, heights) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(names))]
        ax.bar(places, heights, width, label=cell)
    ax.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names], fontsize=7)
    ax.set_ylim(0, _ABOVE * ax.get_ylim()[1])
    ax.legend(fontsize=8, ncols=min(4, len(values)), loc="upper center")
