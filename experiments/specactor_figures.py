"""Pictures of `specactor.py`: what each rank did, and where drafting pays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.comparison.rollouts import Rollout
from experiments.figures import save
from experiments.specactor_cases import Case, Setting
from experiments.specactor_planning import Planning


def draw_roles(
    path: Path, case: Case, runs: Mapping[str, Items[Rollout]], settings: Mapping[str, Setting], num_ranks: int
) -> Path:
    """Draws, a panel for each mode and a row for each rank, its role over time: passes of verifiers, darker with more
    sequences, and ranks that draft (Fig. 14)."""
    names = list(settings)
    figure, axes = plt.subplots(len(names), 1, figsize=(9, 1.7 * len(names)), sharex=True, layout="constrained")
    most = max(step.num_running for some in runs.values() for step in some[0].steps)
    colours = plt.get_cmap("Blues")
    for ax, name in zip(axes, names, strict=True):
        steps, setting = runs[name][0].steps, settings[name]
        origin = min(step.start for step in steps)
        for step in steps:
            span = [(step.start - origin, step.seconds)]
            ax.broken_barh(span, (step.replica_id - 0.4, 0.8), facecolors=colours(0.2 + 0.8 * step.num_running / most))
        end = max(step.start + step.seconds for step in steps) - origin
        for rank in range(num_ranks - setting.num_drafters, num_ranks):
            ax.broken_barh([(0, end)], (rank - 0.4, 0.8), facecolors="C1")
        ax.set(title=f"{name}: {setting.name}", ylabel="rank", yticks=range(num_ranks))
    axes[-1].set_xlabel("seconds; blue: verifies, darker with more sequences; orange: drafts")
    return save(figure, path, f"SpecActor, case {case.name}", "paced")


def draw_gains(path: Path, planning: Planning, p: float, context: int) -> Path:
    """Draws what drafting gains over plain decoding by the formulas, each mode with its best window and drafters: by
    the batch of a replica (Fig. 6b), and by acceptance (Fig. 7)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    batches = (1, 4, 8, 16, 32, 64, 128, 256)
    chances = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.95)
    here = planning.num_sequences // planning.num_ranks
    for mode in ("coupled", "filled", "strict", "naive"):
        left.plot(batches, [planning.gain(mode, p, batch, context) for batch in batches], label=mode)
        right.plot(chances, [planning.gain(mode, one, here, context) for one in chances], label=mode)
    left.set(xscale="log", xlabel=f"sequences of a replica, p = {p:g}", ylabel="times plain decoding")
    right.set(xlabel=f"probability that a guess is right, {here} sequences")
    for ax in (left, right):
        ax.axhline(1.0, color="grey", linewidth=0.5)
    left.legend(fontsize="small")
    return save(figure, path, f"32B on {planning.case.tp_size} H100, drafts of 0.5B", "formula")
