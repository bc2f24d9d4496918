"""What a run's pictures show."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from engines.rollout.telemetry import StepRecord
from experiments import figures
from experiments.figures import _reward, draw_drafting, draw_drafts


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


def test_drafts_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 steps of one second: four sequences without drafts, then two whose drafts of 2 tokens are right and half
    right."""
    drawn: list[plt.Figure] = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    none = {"num_running": 4, "num_tokens": 4}
    some = {"num_running": 2, "num_tokens": 6, "drafted": (2, 2), "accepted": (2, 1)}
    steps = [
        StepRecord(replica_id=0, epoch=0, tp_size=1, start=100.0 + place, seconds=1.0, **(none if place < 16 else some))
        for place in range(32)
    ]
    path = draw_drafts(tmp_path / "drafts.png", {"some": steps, "again": steps, "none": steps[:16]})
    monkeypatch.undo()
    tokens, running, places = [[line.get_xydata() for line in ax.lines] for ax in drawn[0].axes]
    plt.close(drawn[0])
    assert path.stat().st_size > 5000
    assert len(tokens) == len(running) == len(places) == 3
    assert tokens[0][:, 1] == pytest.approx([1.0, (6 * 4 + 5 * 5) / (6 * 4 + 5 * 2), 2.5], abs=0.2)
    assert running[0][:, 1] == pytest.approx([4.0, 3.0, 2.0], abs=0.2)
    assert places[0].tolist() == [[1, 1.0], [2, 0.5]] and not len(places[2])
