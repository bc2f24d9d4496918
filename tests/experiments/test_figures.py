"""What a run's pictures show."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from experiments.figures import _reward, draw_drafting


@pytest.mark.parametrize("rewards", [[0.0, 0.5, 1.0], [-3.0, -1.0, 0.5], [10.0, 400.0], [2.0, 2.0], []])
def test_every_reward_is_inside_the_picture(rewards: list[float]) -> None:
    metrics = [{"training/global_step": 0.0, "val-core/pass@1": 0.25}]
    metrics += [{"training/global_step": float(i), "critic/rewards/mean": r} for i, r in enumerate(rewards, 1)]
    figure, ax = plt.subplots()
    _reward(ax, metrics)
    shown = {line.get_label(): (line.get_ydata(), own.get_ylim()) for own in figure.axes for line in own.lines}
    plt.close(figure)
    assert list(shown["critic/rewards/mean"][0]) == rewards
    assert all(low <= value <= high for values, (low, high) in shown.values() for value in values)
    assert shown["val-core/pass@1"][1] == (0, 1.02), "its meaning is that of a share"


def test_drafting(tmp_path: Path) -> None:
    acceptance = {"1": {0: {1: 1.5, 2: 1.6}, 15: {1: 2.5, 2: 2.7}}}
    speedups = {"both": {"suffix": {1: 1.2}, "grouped": {1: 3.0, 8: 1.5}}, "one": {}}
    sizes = [
        draw_drafting(tmp_path / f"{name}.png", acceptance, speedup).stat().st_size
        for name, speedup in speedups.items()
    ]
    assert sizes[0] > sizes[1] > 5000
