"""Pictures of `specactor.py`: what each rank did, and where drafting pays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.comparison.rollouts import Rollout
from experiments.figures import save
from experiments.specactor_cases import Case, Setting


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
