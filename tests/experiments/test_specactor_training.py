"""SpecActor in the main job: who drafts in the next rollout, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import LLM
from experiments import specactor_training
from experiments.specactor_training import FIRST_ACCEPTANCE, Passes, choose_plan, first_layout, measure_passes
from research.specactor.plan import Rollout
from tests import worlds
from tests.experiments.test_train import model, runs, small  # noqa: F401
from tests.worlds import refused_by, run_world


def test_the_last_replica_drafts() -> None:
    assert [spec.role for spec in first_layout(6, 2).replicas] == ["rollout", "rollout", "draft"]
    with pytest.raises(ValueError, match="no rank is left to draft beside 1 replica"):
        first_layout(2, 2)


def passes(verify_s: list[float], draft_s: list[float]) -> Passes:
    """Those of 1, 8 and 64 rows."""
    return Passes(1, list(zip((1, 8, 64), verify_s, strict=True)), list(zip((1, 8, 64), draft_s, strict=True)))


@pytest.mark.parametrize(
    ("verify_s", "draft_s", "num_now", "num_planned"),
    [
        ([1, 1, 1], [0.1] * 3, 0, 1),  # drafting beside a verifier hides the drafts
        ([1, 1, 1], [9] * 3, 0, 0),  # the same with a slow drafter, whoever drafts now: it is never waited for
        ([1, 1, 1], [9] * 3, 1, 1),
        ([1, 8, 64], [0.01] * 3, 1, 0),  # two verifiers are twice as fast as one
    ],
)
def test_roles_change_where_the_gain_is_more_than_the_margin(
    verify_s: list[float], draft_s: list[float], num_now: int, num_planned: int
) -> None:
    rollout = Rollout(num_sequences=8, num_gpus=2, whole_replicas=True, max_window=8, ahead=8)
    plan, present = choose_plan(passes(verify_s, draft_s).costs, rollout, 0.99, "filled", num_now)
    assert present.placement.num_drafters == num_now and plan.placement.num_drafters == num_planned
    assert (plan == present) == (num_now == num_planned)


def train_with_verifiers_bound_by_rows(arguments: list[str]) -> Any:
    """On a rank: `train.py` where the target's passes are timed, but count as a second for each row."""

    def measured(llm: LLM, num_sequences: int) -> Passes:
        passes = measure_passes(llm, num_sequences)
        return replace(passes, verify_s=[(rows, float(rows)) for rows, _ in passes.verify_s])

    specactor_training.measure_passes = measured
    return worlds._main("train", arguments, "")


def test_roles_are_planned_by_what_was_measured(model: Path, runs: Path) -> None:  # noqa: F811
    """Two verifiers are twice as fast as one: nobody drafts from the second rollout on."""
    options = ["--speculation", "specactor", "--rollout.drafter", "model", "--rollout.draft-model", str(model)]
    arguments = small(model, runs, "--name", "roles", *options, "--steps", "2")
    result = run_world(train_with_verifiers_bound_by_rows, 2, arguments, as_torchrun=True)[0]
    folder = Path(result["run_dir"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["rollout/num_draft_ranks"] for step in steps] == [1, 0]
    records = [json.loads(line) for line in (folder / "rollout_steps.jsonl").read_text().splitlines()]
    of_first = [one for one in records if one["training/global_step"] == 1]
    right, compared = sum(sum(one["accepted"]) for one in of_first), sum(one["num_compared"] for one in of_first)
    assert steps[0].get("rollout/spec_token_acceptance") == (right / compared if compared else None)
    (planned,) = [one for one in map(json.loads, (folder / "decisions.jsonl").open()) if "num_drafters" in one]
    assert planned["training/global_step"] == 2 and planned["mode"] == "off"
    assert planned["tokens_per_second"] > planned["present"] > 0
    assert planned["acceptance"] == (right + 10 * FIRST_ACCEPTANCE) / (compared + 10)
    assert planned["verify_s"] == [[rows, rows] for rows in (1, 2, 4, 8, 16, 32, 128)]
    assert [rows for rows, _ in planned["draft_s"]] == [1, 2, 4, 8, 16, 32]
    assert all(0 < seconds < 60 for _, seconds in planned["draft_s"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deterministic", "--rollout.draft-lengths", "fixed"], "deterministic=True: does not go with speculation"),
        (["--dispatch", "static"], "dispatch='static': does not go with speculation='specactor'"),
        (["--rollout.draft-mode", "naive"], "rollout.draft-mode='naive': does not go with speculation='specactor'"),
        (["--rollout.drafter", "none"], "rollout.drafter='none': speculation='specactor' drafts with a small model"),
        ([], "no rank is left to draft beside 1 replica"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    drafter = [] if "--rollout.drafter" in options else ["--rollout.drafter", "model", "--rollout.draft-model", "x"]
    assert message in refused_by("train", ["--speculation", "specactor", *drafter, *options])
