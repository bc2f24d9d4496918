"""Pictures of PAT: rollouts that change their TP size, what a switch takes, and the predictor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from engines.rollout.telemetry import StepRecord
from experiments.comparison.rollouts import makespan
from experiments.figures import draw_over_time, plt, save
from research.pat.profile import Profile


def draw_switches(
    path: Path, title: str, rollouts: Mapping[str, Sequence[StepRecord]], switches: Sequence[float], tier: str
) -> Path:
    """Draws, a line per rollout, running sequences, TP size and tokens per second over time (PAT, Figs. 1 and 4).

    Times count from each rollout's first step. The first rollout's `switches`, on its clock, are dotted lines.
    """
    figure, axes = plt.subplots(3, 1, figsize=(7, 6), sharex=True, layout="constrained")
    draw_over_time({"running sequences": axes[0], "tokens per second": axes[2]}, rollouts)
    for name, steps in rollouts.items():
        ordered = sorted(steps, key=lambda step: step.start)
        origin = ordered[0].start
        times = [*(step.start - origin for step in ordered), makespan(steps)]
        axes[1].step(times, [step.tp_size for step in [*ordered, ordered[-1]]], where="post")
        if name == next(iter(rollouts)):
            for ax, moment in itertools.product(axes, switches):
                ax.axvline(moment - origin, color="grey", linestyle=":", linewidth=0.8)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log", base=2)
    axes[1].set_ylabel("TP size")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[0].legend()
    axes[-1].set_xlabel("seconds")
    return save(figure, path, title, tier)


def draw_throughput(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Draws tokens per second over the limit of the lengths, a line per variant and a panel per figure of the paper
    (PAT, Figs. 10 and 11)."""
    panels = list(dict.fromkeys(row["figure"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.6), layout="constrained", squeeze=False)
    for ax, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if row["figure"] == panel]
        for name in mine[0]["tokens_per_second"]:
            points = [(row["cap"] / 1024, row["tokens_per_second"].get(name, np.nan)) for row in mine]
            style = ":" if name.startswith("TP") else "-"
            ax.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=name)
        ax.set(title=f"Fig. {panel}\n{mine[0]['hosts']} x 8 {mine[0]['gpus']}", xlabel="limit, 1,024 tokens", ylim=0)
    axes[0][0].set_ylabel("tokens per second")
    axes[0][0].legend(fontsize="small")
    return save(figure, path, "Generation by TP size, with PAT, and in hindsight", "sim")


def draw_profile(path: Path, profile: Profile, tier: str) -> Path:
    """Draws, a column per TP size, milliseconds of a decode step over its context tokens: for each batch size the
    profiled points and the predictor's line (PAT, Fig. 6). Of a profile that was checked it also draws measured and
    predicted tokens per second of a replica whose sequences end one by one (Fig. 14)."""
    predictors = profile.predictors()
    draining = {one["tp_size"]: one["points"] for one in profile.checks if one["what"] == "draining"}
    shape = 1 + bool(draining), len(predictors)
    figure, axes = plt.subplots(
        *shape, figsize=(4 * shape[1], 3.2 * shape[0]), sharey="row", squeeze=False, layout="constrained"
    )
    for column, (size, predictor) in zip(axes.T, predictors.items(), strict=True):
        points = [row[1:] for row in profile.decodes if row[0] == size]
        for batch in sorted({batch for batch, _, _ in points}):
            tokens, seconds = np.array([point[1:] for point in points if point[0] == batch]).T
            between = np.linspace(tokens.min(), tokens.max(), 50)
            (line,) = column[0].plot(between, 1e3 * predictor.seconds(batch, between), label=f"{batch} sequences")
            column[0].plot(tokens, 1e3 * seconds, "o", color=line.get_color(), markersize=3)
        column[0].set(title=f"TP{size}", xlabel="context tokens of a replica")
        if size in draining:
            batches, tokens, seconds = np.array(draining[size]).T
            column[1].plot(batches, batches / seconds, "o", label="measured")
            column[1].plot(batches, batches / predictor.seconds(batches, tokens), label="predicted")
            column[1].set(xlabel="running sequences of a replica")
            column[1].invert_xaxis()
    for row, label in zip(axes, ("milliseconds of a step", "tokens per second"), strict=False):
        row[0].set_ylabel(label)
        row[0].set_ylim(bottom=0)  # of all panels, once they have their points
        row[0].legend(fontsize="small")
    return save(figure, path, f"Decode steps on {profile.subject['device']}", tier)


def draw_ways(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Sequence[tuple[float, float]]],
    tier: str,
) -> Path:
    """Draws, a panel per row of `bench/switch.py`, the seconds of each way to switch, by part (PAT, Fig. 12); the bar
    of new processes is cut off. And `memory`: for each way, seconds and MiB of a rank beyond its start (Fig. 13)."""
    figure, (*bars, ax) = plt.subplots(len(rows) + 1, 1, figsize=(8, 2.2 * len(rows) + 3), layout="constrained")
    colours: dict[str, str] = {}
    for panel, row in zip(bars, rows, strict=True):
        ways = {way: row["parts_s"][way] for way in row["ms"]}
        totals = {way: sum(parts.values()) for way, parts in ways.items()}
        most = 1.3 * max(total for way, total in totals.items() if way != "restart")
        for way, parts in ways.items():
            starts = itertools.accumulate(parts.values(), initial=0.0)
            for (part, seconds), start in zip(parts.items(), starts, strict=False):
                panel.barh(way, seconds, left=start, color=colours.setdefault(part, f"C{len(colours)}"))
        for place, total in enumerate(totals.values()):
            panel.text(min(total, 0.9 * most), place, f" {total:.2f} s", va="center")
        panel.set(title=row["name"], xlim=(0, most), xlabel="seconds")
        panel.invert_yaxis()
    handles = [Patch(color=colour, label=part) for part, colour in colours.items()]
    bars[0].legend(handles=handles, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    for way, samples in memory.items():
        ax.plot(*zip(*samples, strict=True), label=way)
    ax.set(xlabel="seconds: the first switch, a step, the second one, a step", ylabel="MiB beyond the start")
    ax.legend(fontsize="small")
    return save(figure, path, "Ways to switch, and a rank's memory meanwhile", tier)
