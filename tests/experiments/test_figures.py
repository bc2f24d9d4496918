"""What a run's pictures show."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from experiments.figures import _reward


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
