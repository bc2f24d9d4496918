"""A rollout's timeline: the Chrome trace's rows, slices and counters; idle shares; the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.coordination.views import Passage
from engines.rollout.telemetry import (
    Mark,
    StepRecord,
    busy_share,
    chrome_trace,
    draft_metrics,
    turn_metrics,
    turn_spans,
    write_chrome_trace,
)


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


def test_trajectories_are_rows_that_show_queue_replica_and_tool() -> None:
    """Sequence (0, 7, 1) waits for 1 s, the last half of it for one replica alone, runs, calls a tool and ends."""
    one, other = (0, 7, 1), (0, 3, 0)
    passages = [
        Passage(now=10.0, sequence_id=one, place="waiting"),
        Passage(now=10.0, sequence_id=other, place="parked"),
        Passage(now=10.5, sequence_id=one, place="waiting"),
        Passage(now=11.0, sequence_id=one, place="assigned", replica_id=1),
        Passage(now=12.5, sequence_id=one, place="parked"),
        Passage(now=13.0, sequence_id=one, place="delivered"),
    ]
    spans = turn_spans(passages, lambda now: now + 100)
    assert [(span.kind, span.start, span.seconds) for span in spans] == [
        ("queue", 110, 1.0), ("replica", 111, 1.5), ("tool", 112.5, 0.5),
    ]  # fmt: skip
    assert turn_metrics(spans) == {
        "timing_s/agent_loop/queue/mean": 1.0, "timing_s/agent_loop/generate_sequences/mean": 1.5,
    }  # fmt: skip
    events = chrome_trace([step(1, 111.0, 1.5)], turns=spans)["traceEvents"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"]] == [
        ("queue", 0.0, 1e6), ("replica 1", 1e6, 1.5e6), ("tool", 2.5e6, 5e5),
    ]  # fmt: skip
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["replica 1", "prompt 7, sample 1", "replicas", "trajectories"]


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
