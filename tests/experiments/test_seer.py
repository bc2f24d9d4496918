"""`seer.py` on small rollouts, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from algos.publish import RECORD_FILE
from algos.warmstart_config import WarmStartConfig
from engines.replica.kv_moves import KVMoves
from engines.rollout.telemetry import StepRecord
from experiments import seer_paper, seer_report
from experiments.comparison.results import longer_than_paced
from experiments.comparison.rollouts import Rollout, over_time
from experiments.seer import Negative, SeerConfig, Setting
from research.seer.context_aware import ContextAware
from tests.wandb_files import logged
from tests.worlds import refused_by, run_main

OTHERS = ["oracle", "divided, in turns", "static by sequence", "speculation, no adaptation", "speculation, ungrouped"]
DIVIDES = [*seer_report.LADDER[1:], *OTHERS[:2], *OTHERS[3:]]
SMALL = ["--parts", "paced", "--ranks", "2", "--shrink", "24", "--turns", "1", "--scale", "0.05", "--others", *OTHERS]
SMALL += ["--processes", "1"]
LADDER = ["divided", "context", "speculation"]
NEGATIVES: list[Negative] = ["kv for all"]
NOTHING = Rollout(steps=[], makespan_s=0.0, finish_times={}, lengths={}, num_preempted=0)


@pytest.fixture
def models(text_model: str, tmp_path: Path) -> Path:
    """As if the warm start had been made there."""
    folder = tmp_path / "models" / "tiny"
    shutil.copytree(text_model, folder)
    (folder / RECORD_FILE).write_text(json.dumps({"warm_start": asdict(WarmStartConfig())}))
    return folder.parent


def test_the_ladder_draws_the_same_tokens_and_only_its_first_rung_preempts(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = [*SMALL, "--models", str(models), "--figure", str(tmp_path), "--wandb", "auto"]
    options += ["--negatives", *NEGATIVES]
    found = run_main("seer", options, num_ranks=2)["paced"]
    assert found["tokens_equal"] is True and found["num_sequences"] == 32
    assert list(found["throughput"]) == list(found["tail"]) == LADDER
    preempted = found["preemptions"]
    assert preempted[seer_report.UNTUNED] > 0 and not any(preempted[one] for one in DIVIDES)
    assert found["of_oracle"] > 0 and list(found["variants"]) == [*OTHERS, seer_report.UNTUNED]
    assert found["not_exercised"] == [] and found["a_a"] > 0
    for name in ("group static", "static by sequence"):
        tuned = found["baselines"][name]
        assert len(tuned["sweep_s"]) == 10 and min(tuned["sweep_s"], key=tuned["sweep_s"].get) == tuned["setting"]
        assert tuned["simulated_s"]["assignments"] == 9 and found["sim_over_paced"][name] > 0
    rows = {row["name"]: row for row in found["paper"]}
    assert [(row["figure"], row["paper"]) for row in rows.values()] == [
        *[("Table 6", paper) for paper in (1.31, 1.44, 1.87)],
        *[("Fig. 10", paper) for paper in (0.13, 0.95)],
        *[("Fig. 11", paper) for paper in (1.3, 1.19, 1.03)],
    ]
    assert rows["context"]["ours"] == found["throughput"]["context"]
    assert all(one["recomputed"] == 0 and 0.5 < one["stored_per_token"] < 2 for one in map(found["kv"].get, LADDER))
    untuned = found["kv"][seer_report.UNTUNED]  # it recomputes
    assert untuned["stored_per_token"] == untuned["imported"] == found["kv"]["group static"]["imported"] == 0
    assert 0 < found["kv"]["divided"]["hidden"] <= 1
    for variant in ("group static", *LADDER, *OTHERS):
        assert 0 < found["busy_share"][variant] <= 1 < found["num_steps"][variant]
    assert list(found["negatives"]) == NEGATIVES
    for case in found["negatives"].values():
        assert case["tokens_equal"] and list(case["variants"]) == ["static by sequence", seer_report.UNTUNED]
        assert case["num_sequences"] == 32 and case["mean_length"] == found["mean_length"]
    assert not any(found["negatives"]["kv for all"]["preemptions"].values())
    runs = [*map(logged, tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(runs) == 10
    for variant in ("group static", *DIVIDES):
        (mine,) = [one for one in runs if f'"{variant}"'.encode() in one]
        assert all(key in mine for key in (b"kv use", b"tokens per second", b"tail_seconds"))
    assert (tmp_path / "seer_paced_1.png").stat().st_size > 10_000


def test_variants_of_drafts_differ_in_one_thing() -> None:
    """Fig. 11: none, adaptive and grouped, without the group's context, without adaptation."""
    setting = Setting(
        name="", widen=1, dtype="float64", groups=2, group_size=2, num_kv_tokens=64, chunk_tokens=32, preemption="auto",
        others=(),
    )  # fmt: skip
    variants = setting.variants(SeerConfig(), 2, {})
    drafts = variants["speculation"].options

    def differs(name: str) -> set[str]:
        others = variants[name].options
        return {key for key in drafts.keys() | others.keys() if drafts.get(key) != others.get(key)}

    for name in ("speculation, no adaptation", "speculation, ungrouped", "context"):
        one, full = variants[name], variants["speculation"]
        assert replace(one, schedule=full.schedule, options=full.options) == full
        made = [cast(ContextAware, each.schedule()) for each in (one, full)]
        assert made[0].options == made[1].options and type(made[0]) is type(made[1]) is ContextAware
    assert not variants["context"].options
    assert differs("speculation, no adaptation") == {"draft_lengths"}
    assert differs("speculation, ungrouped") == {"drafter", "draft_server"}


def test_what_was_not_exercised_is_named() -> None:
    step = StepRecord(replica_id=0, epoch=0, tp_size=1, start=0.0, seconds=1.0, num_running=1, num_tokens=1)

    def rollout(accepted: int, imported: int) -> Rollout:
        moves = [KVMoves(num_imported=imported), KVMoves()]
        some = [replace(step, accepted=(accepted,)), step]
        return replace(NOTHING, steps=some, kv_moves=moves)

    idle, busy = rollout(0, 0), rollout(1, 1)
    bound = {name: [idle] for name in ("group static", "group static again", "on demand", seer_report.UNTUNED)}
    assert seer_report.not_exercised({**bound, "divided": [idle, busy], "speculation": [busy]}) == []
    assert seer_report.not_exercised({**bound, "context": [idle], "speculation": [rollout(0, 1)]}) == [
        "context: no sequence went on after a chunk",
        "speculation: no draft token was drawn",
    ]


@pytest.mark.parametrize(("num_late", "follows"), [(1, True), (2, False)])
def test_a_machine_that_cannot_follow_is_named(
    capsys: pytest.CaptureFixture[str], num_late: int, follows: bool
) -> None:
    """Of 20 steps at a price of 1 s, one or two take 1.2 s; the others take 1.05 s."""
    step = StepRecord(
        replica_id=0, epoch=0, tp_size=1, start=0.0, seconds=1.05, num_running=1, num_tokens=1, paced_seconds=1.0
    )
    steps = [replace(step, seconds=1.2)] * num_late + [step] * (20 - num_late) + [replace(step, num_running=0)] * 9
    found = longer_than_paced("a case", [replace(NOTHING, steps=steps)])
    assert found == {"steps_longer_than_paced": num_late / 20, "follows_pace": follows}
    told = "a case: 10% of the steps took more than 1.1 times their price: this machine cannot follow the pace"
    assert (told in capsys.readouterr().err) != follows


@pytest.mark.parametrize(
    ("task", "ours", "inside"),
    [
        ("moonlight", {"divided": 1.47, "context": 1.62, "drafts": 2.5}, [True, True, False]),
        ("moonlight", {"divided": 1.0, "context": 1.0, "drafts": 1.6}, [False, False, True]),
        ("qwen2-vl-72b", dict(zip(seer_paper.FIG_11, (1.0, 1.0, 1.0), strict=True)), [False, False, True]),
        ("kimi-k2", {"divided": 1.2, "context": 1.1, "drafts": 1.6}, [True, False, True]),
        ("qwen2-vl-72b", {"context, tail": 0.5, "context, of the oracle": 0.9}, [False, True]),
        ("qwen2-vl-72b", dict(zip(seer_paper.FIG_11, (1.3, 1.31, 0.9), strict=True)), [False, True, False]),
    ],
)
def test_bands(task: str, ours: dict[str, float], inside: list[bool]) -> None:
    rows = seer_paper.compare(task, ours)
    assert [row["inside"] for row in rows] == inside
    assert [line.split()[-1] == "yes" for line in seer_paper.table(rows).splitlines()[1:]] == inside


def test_points_of_equal_time() -> None:
    """Two steps of one replica, and one of another."""

    def step(replica_id: int, start: float, num_running: int, **fields: Any) -> StepRecord:
        counts = {"num_running": num_running, "num_tokens": num_running}
        return StepRecord(replica_id=replica_id, epoch=0, tp_size=1, start=start, seconds=1.0, **counts, **fields)

    steps = [
        step(0, 10.0, 4, kv_use=0.5),
        step(0, 11.0, 2, kv_use=0.1, num_preempted=1),
        step(1, 10.0, 2, kv_use=0.3, accepted=(1, 1)),
    ]
    assert over_time(steps, 2) == [
        {
            "second": 1.0,
            "running sequences": 6.0,
            "tokens per second": 8.0,
            "tokens per sequence and step": 8 / 6,
            "kv use": 0.4,
            "preemptions": 0,
        },
        {
            "second": 2.0,
            "running sequences": 2.0,
            "tokens per second": 2.0,
            "tokens per sequence and step": 1.0,
            "kv use": 0.1,
            "preemptions": 1,
        },
    ]
    one_replica = over_time(steps[2:], 2, (10.0, 12.0))
    assert [point["running sequences"] for point in one_replica] == [2.0, 0.0]
    assert one_replica[0]["tokens per sequence and step"] == 2.0
    assert math.isnan(one_replica[1]["tokens per sequence and step"]), "it had no step then"
    finer = over_time(steps, 40)  # a step covers 20 of them
    assert [point["running sequences"] for point in finer] == pytest.approx(20 * [6.0] + 20 * [2.0])
    assert [point["tokens per second"] for point in finer] == pytest.approx(20 * [8.0] + 20 * [2.0])
    assert [point["preemptions"] for point in finer] == 20 * [0] + 20 * [1]
    uneven = over_time(steps, 3)  # and here a bin has parts of two
    assert [point["running sequences"] for point in uneven] == pytest.approx([6.0, 4.0, 2.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk-tokens", "8"], "--chunk-tokens=8: must be at least a block of KV"),
        (["--chunk-tokens", "321"], "give a number from 16 to 320"),
        (
            ["--temperatures", "1", "1e9"],
            "SamplingParams.temperature=1000000000.0: must be 0 (greedy), or in [1e-6, 1e6]",
        ),
        (["--figure", "/nowhere"], "figure='/nowhere': there is no such folder"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("seer", options)
