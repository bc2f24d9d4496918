"""Pictures of `heddle.py` and `heddle_sim.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from engines.rollout.telemetry import TurnSpan
from experiments.comparison.rollouts import Rollout
from experiments.comparison.turns import AGAIN
from experiments.figures import save

COLOURS = {"queue": "C3", "replica": "C0", "tool": "C7"}


def draw_case(
    path: Path, name: str, runs: Mapping[str, Items[Rollout]], extra: Mapping[str, Rollout], tier: str = "paced"
) -> Path:
    """Draws the times of all variants (Figs. 12, 14, 15), when trajectories end (Fig. 4), and what the longest ones do
    over time, with Heddle and without."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    seconds = {one: statistics.median(run.makespan_s for run in some) for one, some in runs.items() if AGAIN not in one}
    seconds |= {one: run.makespan_s for one, run in extra.items()}
    axes[0, 0].barh(list(seconds), list(seconds.values()), color=["C1" if one == "heddle" else "C0" for one in seconds])
    axes[0, 0].invert_yaxis()
    axes[0, 0].set(title="rollout", xlabel="seconds")
    for one in ("heddle", "fcfs", "least_load"):
        run = runs[one][0]
        begin = min(step.start for step in run.steps) if run.steps else 0.0
        ends = np.sort(np.array(run.ends)) - begin
        axes[0, 1].plot(ends / np.median(ends), np.arange(1, len(ends) + 1) / len(ends), label=one)
    axes[0, 1].set(title="ended trajectories (Fig. 4)", xlabel="time over the median end", ylabel="share")
    axes[0, 1].legend(fontsize="small")
    for ax, one in zip(axes[1], ("heddle", "fcfs"), strict=True):
        _draw_longest(ax, one, runs[one][0])
    return save(figure, path, f"Heddle, {name}", tier)


def _draw_longest(ax: plt.Axes, name: str, run: Rollout, count: int = 24) -> None:
    """A row for each of the longest trajectories: on replicas, in queues, at its tools."""
    longest = sorted(run.lengths, key=lambda id_: -run.lengths[id_])[:count]
    spans: dict[object, list[TurnSpan]] = {id_: [] for id_ in longest}
    for span in run.turns:
        if span.sequence_id in spans and span.kind in COLOURS:
            spans[span.sequence_id].append(span)
    begin = min((span.start for own in spans.values() for span in own), default=0.0)
    for row, own in enumerate(spans.values()):
        for kind in ("replica", "tool", "queue"):
            bars = [(span.start - begin, span.seconds) for span in own if span.kind == kind]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[kind])
    ax.set(
        title=f"{name}: the longest {len(longest)} trajectories",
        xlabel="seconds; blue: on replicas, red: in queues, grey: at tools",
        ylabel="longest first",
    )
    ax.invert_yaxis()


def draw_systems(
    path: Path,
    cells: Mapping[Any, Mapping[Any, Mapping[str, Any]]],
    agents: Items[str],
) -> Path:
    """Draws what a rollout takes, over Heddle's: systems (Fig. 12), and for 14B schedulers, placements and sizes of
    replicas (Figs. 14, 15, 16), with their ranges over seeds. `cells`: by model and agent, as `heddle_sim.describe`
    returns them."""
    panels: dict[str, tuple[str, tuple[str, ...]]] = {
        f"Fig. 12: {model}": (model, ("verl", "verl*", "slime")) for model in cells
    }
    if "14b" in cells:
        panels |= {
            "Fig. 14: schedulers, 14b": ("14b", ("fcfs", "rr", "sjf")),
            "Fig. 15: placements, 14b": ("14b", ("least_load", "cache_aware")),
            "Fig. 16: sizes of replicas, 14b": ("14b", ("fix1", "fix2", "fix4", "fix8", "unequal")),
        }
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 2.2 * len(panels)), layout="constrained", squeeze=False)
    for ax, (title, (model, names)) in zip(axes[:, 0], panels.items(), strict=True):
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            known = [agent for agent in agents if name in cells[model][agent]["over_heddle"]]
            over = np.array([cells[model][agent]["over_heddle"][name] for agent in known]).reshape(-1, 3).T
            ends = np.maximum(0, [over[0] - over[1], over[2] - over[0]])
            places = [agents.index(one) + place * width for one in known]
            ax.bar(places, over[0], width, label=name, yerr=ends, error_kw={"linewidth": 0.8})
        ax.axhline(1.0, color="grey", linewidth=0.5)
        ax.set(title=title, ylabel="times Heddle's", xticks=[i + 0.4 - width / 2 for i in range(len(agents))])
        ax.set_xticklabels(agents)
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(figure, path, "Heddle, 64 H100", "sim")
