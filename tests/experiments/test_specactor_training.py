"""SpecActor in the main job: who drafts in the next rollout, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.rollout.telemetry import StepRecord
from experiments.specactor_training import acceptance_of, first_layout
from tests.experiments.test_train import model, runs, train  # noqa: F401
from tests.worlds import refused_by


def record(drafted: list[int], accepted: list[int]) -> StepRecord:
    output = StepOutput(num_running=1, num_tokens=1, num_context_tokens=1, drafted=drafted, accepted=accepted)
    return StepRecord.of(ReplicaSpec(id=0, ranks=(0,)), 0, 0.0, 1.0, output, 0.0)


def test_guesses_behind_a_wrong_one_were_compared_with_nothing() -> None:
    """Ten drafts of three tokens: of seven the first was right, of four of these the second, of all four the third."""
    assert acceptance_of([record([10, 10, 10], [7, 4, 4]), record([], []), record([5], [])]) == (15, 10 + 7 + 4 + 5)


def test_the_last_replica_drafts() -> None:
    assert [spec.role for spec in first_layout(6, 2).replicas] == ["rollout", "rollout", "draft"]
    with pytest.raises(ValueError, match="no rank is left to draft beside 1 replica"):
        first_layout(2, 2)


def test_roles_are_planned_by_what_was_measured(model: Path, runs: Path) -> None:  # noqa: F811
    """A model that drafts for itself is no faster than the verifier: nobody drafts from the second rollout on."""
    small = ["--speculation", "specactor", "--rollout.drafter", "model", "--rollout.draft-model", str(model)]
    result = train(model, runs, "--name", "roles", *small, "--steps", "2")
    folder = Path(result["run_dir"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["rollout/num_draft_ranks"] for step in steps] == [1, 0]
    (planned,) = [one for one in map(json.loads, (folder / "decisions.jsonl").open()) if "num_drafters" in one]
    assert planned["training/global_step"] == 2 and planned["mode"] in ("off", "coupled")
    assert planned["tokens_per_second"] > planned["present"] > 0 < planned["acceptance"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deterministic", "--rollout.draft-lengths", "fixed"], "deterministic=True: does not go with speculation"),
        (["--dispatch", "static"], "dispatch='static': does not go with speculation='specactor'"),
        (["--rollout.drafter", "none"], "rollout.drafter='none': speculation='specactor' drafts with a small model"),
        ([], "no rank is left to draft beside 1 replica"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    drafter = [] if "--rollout.drafter" in options else ["--rollout.drafter", "model", "--rollout.draft-model", "x"]
    assert message in refused_by("train", ["--speculation", "specactor", *drafter, *options])
