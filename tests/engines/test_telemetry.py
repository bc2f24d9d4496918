"""A rollout's timeline: the Chrome trace's rows, slices and counters; idle shares; the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.rollout.telemetry import Mark, StepRecord, busy_share, chrome_trace, draft_metrics, write_chrome_trace


def step(replica_id: int, start: float, seconds: float, num_running: int = 3, tp_size: int = 1) -> StepRecord:
    return StepRecord(
        replica_id=replica_id, epoch=0, tp_size=tp_size, start=start, seconds=seconds, num_running=num_running,
        num_tokens=num_running,
    )  # fmt: skip


STEPS = [step(0, 10.0, 0.5), step(1, 10.1, 0.2), step(0, 10.5, 1.5, num_running=1, tp_size=2)]


def test_replicas_are_rows_and_steps_are_slices(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", STEPS, [Mark(name="regroup", time=10.6, detail="epoch 1")])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"], event["name"]) for event in slices] == [
        (0, 0.0, 5e5, "TP1"),
        (1, 1e5, 2e5, "TP1"),
        (0, 5e5, 1.5e6, "TP2"),
    ]
    assert [event["args"]["sequences"] for event in events if event["ph"] == "C"] == [3, 3, 1]
    assert [(event["name"], event["ts"]) for event in events if event["ph"] == "i"] == [("regroup", 6e5)]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["replica 0", "replica 1"]


def test_a_trace_of_nothing_is_empty() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_draft_metrics() -> None:
    """Four sequences of which two have drafts of 2 and 1 tokens; then one whose draft of 2 is accepted; one without."""
    steps = [
        replace(step(0, 0.0, 1.0, num_running=4), drafted=(2, 1), accepted=(1,)),
        replace(step(1, 0.5, 1.0, num_running=1), drafted=(1, 1), accepted=(1, 1)),
        step(0, 1.0, 1.0, num_running=1),
    ]
    assert draft_metrics(steps) == {
        "num_drafted": 5.0,
        "draft_acceptance": 3 / 5,
        "draft_length": 5 / 3,
        "acceptance_length": 1 + 3 / 3,
        "tokens_per_step": 9 / 6,
    }
    plain = {"num_drafted": 0.0, "draft_acceptance": 0.0, "draft_length": 0.0, "acceptance_length": 1.0}
    plain["tokens_per_step"] = 1.0
    assert draft_metrics([]) == draft_metrics(STEPS) == plain


def test_busy_share_is_of_the_whole_span() -> None:
    # From 10.0 to 12.0: replica 0 works all the time, replica 1 a tenth of it, replica 2 never.
    assert busy_share(STEPS, range(3)) == pytest.approx({0: 1.0, 1: 0.1, 2: 0.0})


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    from experiments.figures import draw_timelines

    path = draw_timelines(tmp_path / "timeline.png", {"one": STEPS, "nothing": []}, "live")
    assert path.read_bytes().startswith(b"\x89PNG")
