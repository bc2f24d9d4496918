"""What a run's pictures show."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from engines.rollout.telemetry import StepRecord
from experiments import figures
from experiments.figures import (
    _reward,
    draw_drafting,
    draw_drafts,
    draw_instances,
    draw_run,
    draw_tasks,
    draw_timelines,
)
from experiments.pat_figures import draw_profile, draw_switches, draw_throughput, draw_ways
from research.pat.profile import Profile


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
        draw_drafting(tmp_path / f"{name}.png", acceptance, speedup, "live").stat().st_size
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
    path = draw_drafts(tmp_path / "drafts.png", {"some": steps, "again": steps, "none": steps[:16]}, "live")
    monkeypatch.undo()
    tokens, running = [[line.get_data().values for line in ax.patches] for ax in drawn[0].axes[:2]]
    places = [line.get_xydata() for line in drawn[0].axes[2].lines]
    plt.close(drawn[0])
    assert path.stat().st_size > 5000
    assert len(tokens) == len(running) == len(places) == 3
    assert tokens[0] == pytest.approx(50 * [1.0] + 50 * [2.5])
    assert running[0] == pytest.approx(50 * [4.0] + 50 * [2.0]), "a step covers more than one point"
    assert places[0].tolist() == [[1, 1.0], [2, 0.5]] and not len(places[2])


def steps_of(num_running: list[int], seconds: float = 1.0) -> list[StepRecord]:
    """Two replicas, each with these steps one after the other."""
    return [
        StepRecord(
            replica_id=replica_id,
            epoch=0,
            tp_size=2,
            start=100.0 + place * seconds,
            seconds=seconds,
            num_running=count,
            num_tokens=count,
            drafted=(2, 1),
            accepted=(1, 1),
        )
        for replica_id in range(2)
        for place, count in enumerate(num_running)
    ]


def test_bins_that_are_shorter_than_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 replicas run 1,024 sequences each, in steps that cover many of the picture's points."""
    drawn: list[plt.Figure] = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    draw_switches(tmp_path / "x.png", "a case", {"pat": [*steps_of([1024] * 20), *_short_steps()]}, [], "sim")
    monkeypatch.undo()
    counts = drawn[0].axes[0].patches[0].get_data().values
    plt.close(drawn[0])
    assert counts[:50] == pytest.approx(2048)
    assert counts[-10:] == pytest.approx(1)


def _short_steps() -> list[StepRecord]:
    """Of one replica, in the 20 seconds after those of `steps_of`."""
    counts = {"num_running": 1, "num_tokens": 1}
    return [
        StepRecord(replica_id=0, epoch=0, tp_size=2, start=120 + place / 100, seconds=0.01, **counts)
        for place in range(2000)
    ]


def test_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture says what it shows and its tier; each axis has a unit; no title is cut off or covers another."""
    drawn: list[plt.Figure] = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    steps = steps_of([4, 3, 2, 1])
    rollouts = {"the first of these variants": steps, "the second of these variants": steps}
    rows = [
        {"figure": name, "hosts": 2, "gpus": "a40-qwen3-14b", "cap": 6144, "tokens_per_second": {"TP1": 1, "pat": 2}}
        for name in ("10a", "10b", "10c", "11a", "11b")
    ]
    decodes = [(size, batch, batch * 64 * k, 0.01 * k) for size in (1, 2) for batch in (1, 8) for k in (1, 2)]
    points = [(2, 128, 0.01), (1, 64, 0.01)]
    checks = tuple({"tp_size": size, "what": "draining", "points": points} for size in (1, 2))
    profile = Profile(
        format=1,
        subject={"device": "a device with a name that is long enough to fill a line"},
        torch="",
        decodes=tuple(decodes),
        prefills=(),
        switches=(),
        checks=checks,
    )
    ways = [
        {"name": "TP1 -> TP2", "ms": {"restart": 1, "there": 1}, "parts_s": {"restart": {"a": 9}, "there": {"a": 1}}}
    ]
    run = {"metrics": {"training/global_step": 1, "critic/rewards/mean": 0.5, "timing_s/step": 1, "timing_s/gen": 1}}
    run["lengths"] = {"lengths": [1, 2, 3]}
    for name, row in run.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row)[:-9])  # cut by a kill
    lines = [json.dumps({"training/global_step": 1, **asdict(step)}) for step in steps]
    (tmp_path / "rollout_steps.jsonl").write_text("\n".join([*lines, lines[0][:-9]]))
    bars = {name: {"a task": [2.0, 1.0, 3.0], "another task": [1.0, 1.0, 1.0]} for name in ("static", "context")}
    panels = [(f"Fig. {number}: a title", "seconds", bars) for number in range(5)]
    paths = draw_run(tmp_path, "live")
    paths += [
        draw_timelines(tmp_path / "timelines.png", rollouts, "paced"),
        draw_instances(tmp_path / "instances.png", rollouts, dict.fromkeys(rollouts, 103.0), "paced"),
        draw_drafting(tmp_path / "drafting.png", {"1": {0: {1: 1.5}, 15: {1: 2.5}}}, {"grouped": {1: 3.0}}, "live"),
        draw_drafts(tmp_path / "some.png", rollouts, "gpu"),
        draw_switches(
            tmp_path / "a.png", "a name of a case that is as long as its title may be", rollouts, [101], "sim"
        ),
        draw_throughput(tmp_path / "b.png", rows),
        draw_profile(tmp_path / "c.png", profile, "gpu"),
        draw_tasks(tmp_path / "tasks.png", "what tasks have", panels, "sim"),
        draw_ways(tmp_path / "d.png", ways, {"there": [(0.0, 1.0), (1.0, 2.0)]}, "live"),
    ]
    monkeypatch.undo()
    assert len(paths) == len(drawn) == 15
    assert [ax.title.get_text() for ax in drawn[-2].axes] == [f"Fig. {number}: a title (sim)" for number in range(5)]
    for path, figure in zip(paths, drawn, strict=True):
        assert figure._suptitle is not None and figure._suptitle.get_text().endswith(
            ("(live)", "(paced)", "(gpu)", "(sim)")
        )
        lowest = [ax for ax in figure.axes if ax.get_subplotspec() and ax.get_subplotspec().is_last_row()]
        assert all(ax.get_xlabel() for ax in lowest), path
        assert any(ax.get_ylabel() for ax in figure.axes), path
        titles = [one.get_window_extent() for ax in figure.axes if (one := ax.title).get_text()]
        assert not any(a.overlaps(b) for place, a in enumerate(titles) for b in titles[:place]), path
        titles.append(figure._suptitle.get_window_extent())
        width = (max(one.x1 for one in titles) - min(one.x0 for one in titles)) / figure.dpi
        assert plt.imread(path).shape[1] >= 120 * width, path
        plt.close(figure)
