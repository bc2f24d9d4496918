"""`pat_profile.py` on real engines, what it refuses, and what a profile is good for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
from algos.collect import Collector, PromptLimit
from algos.grpo import GRPO
from algos.tasks.task import Problem
from engines import SamplingParams
from engines.models.chat import Messages
from engines.parallel.collectives import SingleRank
from experiments.pat_measuring import Passes
from experiments.pat_training import RolloutLayouts
from research.pat.controller import PatController
from research.pat.profile import Profile
from tests.research.test_pat_controller import deployment
from tests.worlds import refused_by, run_main

SMALL = [
    "--batches", "1", "2", "--contexts", "8", "32", "--max-num-seqs", "4", "--max-model-len", "512", "--steps", "2",
    "--turns", "2", "--kv-cache-mib", "8", "--prefill-tokens", "16", "--switch-tokens", "256",
]  # fmt: skip
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512}


@pytest.fixture(scope="module")
def path(text_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pat") / "profile.json"
    given = ["--model", text_model, "--output", str(path), "--figure", str(path.with_suffix(".png"))]
    result = run_main("pat_profile", [*given, *SMALL, "--check"], num_ranks=2)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert result["tier"] == "live" and result["output"] == str(path)
    checks = result["predictor_error"]
    assert [(one["tp_size"], one["what"]) for one in checks] == [
        (size, what) for size in (1, 2) for what in ("held out", "draining")
    ]
    assert all(one["error"] > 0 and one["a_a"] > 0 for one in checks)
    draining = [one["points"] for one in Profile.load(path).checks if one["what"] == "draining"]
    assert [[batch for batch, _, _ in points] for points in draining] == [[1, 2, 3, 4]] * 2, "one by one"
    return path


@pytest.mark.parametrize(("max_model_len", "batch", "sizes"), [(24, 4, 4), (128, 24, 24), (16, 24, 11)])
def test_a_batch_drains_one_by_one_also_where_sequences_are_short(
    text_model: str, max_model_len: int, batch: int, sizes: int
) -> None:
    """Eight steps between two ends would reach beyond the model's length, and all that are left would end together."""
    llm = engines.LLM(text_model, max_model_len=max_model_len, max_num_seqs=24, kv_cache_bytes=2**24)
    points = Passes(llm, SingleRank(), 4 if max_model_len == 16 else 8).drain(batch)
    llm.close()
    assert [size for size, _, _ in points] == [*range(1, sizes + 1)]


def test_each_size_has_its_points_and_each_pair_its_switches(path: Path) -> None:
    profile = Profile.load(path)
    assert {row[0] for row in profile.decodes} == {1, 2}
    for size in (1, 2):
        batches = {batch for tp_size, batch, _, _ in profile.decodes if tp_size == size}
        assert batches == {1, 2, 4}, "the most sequences are added"
        longest = max(tokens for tp_size, _, tokens, _ in profile.decodes if tp_size == size)
        assert 4 * 450 < longest <= 4 * 512, "as far as a sequence may grow"
        assert {row[1:3] for row in profile.prefills if row[0] == size} == {(1, 8)}
    assert {row[:2] for row in profile.switches} == {(1, 2), (2, 1)}
    assert {row[2] for row in profile.switches} == {3 * 21, 3 * 85}
    assert profile.subject["num_ranks"] == 2 and profile.subject["dtype"] == "float32"


def test_its_deployment_has_its_times(path: Path) -> None:
    profile = Profile.load(path)
    here = profile.deployment(profile.subject, num_kv_tokens={1: 512, 2: 1024}, **LIMITS)
    for size, batch, num_tokens, seconds in profile.decodes:
        assert float(here.steps[size].seconds(batch, num_tokens)) == pytest.approx(seconds)
    rows = ((1, 2, 10, 1.0), (1, 2, 30, 3.0), (1, 2, 30, 5.0), (2, 1, 10, 4.0), (2, 1, 30, 2.0))
    lines = replace(profile, switches=rows).deployment(profile.subject, num_kv_tokens={1: 512, 2: 512}, **LIMITS)
    assert lines.switch_seconds(1, 2, 20.0) == pytest.approx(2.5)
    assert lines.switch_seconds(2, 1, 99.0) == pytest.approx(3.0), "it never falls"
    assert lines.switch_seconds(2, 4, 1.0) == float("inf")


@pytest.mark.parametrize(
    ("subject", "limits", "message"),
    [
        ({"dtype": "bfloat16"}, {}, "dtype='float32', and this run has 'bfloat16'; make one for this run"),
        ({"model.num_layers": 7}, {}, "model.num_layers="),
        ({"device": "abacus"}, {}, "this run has 'abacus'"),
        ({"transport": "gloo"}, {}, "transport='shared memory'"),
        ({"num_ranks": 4}, {}, "num_ranks=2, and this run has 4"),
        ({}, {"num_kv_tokens": {4: 512}}, "no points of TP size 4"),
        ({}, {"num_kv_tokens": {1: 512}, "max_model_len": 4096}, ""),
        ({}, {"num_kv_tokens": {1: 9999}, "max_model_len": 4096}, "may have max_num_seqs=4 and 9999 tokens"),
        ({}, {"max_num_seqs": 5}, "reach 4 sequences"),
    ],
)
def test_another_deployment_is_refused(
    path: Path, subject: dict[str, Any], limits: dict[str, Any], message: str
) -> None:
    profile = Profile.load(path)
    asked = {"num_kv_tokens": {1: 512, 2: 512}, **LIMITS, **limits}
    if not message:
        assert profile.deployment(profile.subject, **asked).num_ranks == 2
        return
    with pytest.raises(ValueError, match=r"^profile: ") as error:
        profile.deployment({**profile.subject, **subject}, **asked)
    assert message in str(error.value)


def test_without_switches_only_one_size_can_be_planned(path: Path) -> None:
    profile = replace(Profile.load(path), switches=())
    assert profile.deployment(profile.subject, num_kv_tokens={2: 512}, **LIMITS)
    with pytest.raises(ValueError, match="no times of switches; profile again, with --switch-tokens"):
        profile.deployment(profile.subject, num_kv_tokens={1: 512, 2: 512}, **LIMITS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:100], "not valid JSON"),
        (lambda text: text.replace('"format":1', '"format":2'), "of another kind"),
        (lambda text: json.dumps({**json.loads(text), "decodes": [[1, 1, 8, float("nan")]]}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "decodes": [[1, 1, 8, 0.1]]}), "give two batch sizes or more"),
        (lambda text: "{}", "missing required field"),
        (lambda text: json.dumps({**json.loads(text), "subject": {}}), "subject: has no device, num_ranks; the file"),
    ],
)
def test_a_damaged_file_is_one_error(path: Path, tmp_path: Path, damage: Any, message: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=f"^{broken}: ") as error:
        Profile.load(broken)
    assert message in str(error.value)
    with pytest.raises(FileNotFoundError, match="make it with experiments"):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "model='/nowhere': give a Hugging Face folder, or one of"),
        (["--output", "/nowhere/x.json"], "output='/nowhere/x.json': there is no folder '/nowhere'"),
        (["--drafter", "suffix"], "drafter='suffix': the profile has no times of drafts"),
        (["--check", "--turns", "1"], "turns=1: --check compares turns"),
        (["--kv-cache-mib", "1", "--max-num-seqs", "1", "--batches", "1"], "fewer than two batch sizes fit"),
        # What it would write, the run with these very limits would refuse.
        (["--steps", "60", "--max-model-len", "256", "--max-num-seqs", "2"], "steps=60: contexts grow by a token"),
    ],
)
def test_what_it_refuses(options: list[str], message: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert message in refused_by("pat_profile", ["--model", "0.8m", "--output", str(output), *options])
    assert not output.exists()


def test_a_resumed_run_recalls_the_lengths_of_its_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    steps = ([3, 5], ["stop", "length"]), ([7, 8], ["length", "abort"])
    path.write_text("".join(json.dumps({"lengths": one, "finish_reasons": why}) + "\n" for one, why in steps))
    controller = PatController(deployment(), ended=[(9, False)])
    layouts = RolloutLayouts(controller, None)  # type: ignore[arg-type]
    layouts.recall(tmp_path / "missing.jsonl")
    layouts.recall(path)
    assert list(controller._lifetimes._ended) == [(9, False), (3, False), (5, True), (7, True)]


class Refused:
    """A task with a problem that the chat template refuses, and one that is too long."""

    reward = None

    def train_problem(self, index: int) -> Problem:
        messages: Messages = [{"role": "user", "content": "a" * (90 if index == 3 else index + 1)}]
        return Problem(uid=index, prompt=[{"role": "system", "content": "b"}, *messages] if index == 1 else messages)

    def held_out_problems(self, count: int) -> list[Problem]:
        return []


def test_a_rollout_begins_for_the_prompts_that_it_will_have(text_model: str, recwarn: pytest.WarningsRecorder) -> None:
    llm = engines.LLM(text_model, kv_cache_bytes=2**22)
    llm.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    collector = Collector(
        llm=llm, task=Refused(), algorithm=GRPO(), reward=None, group=SingleRank(),
        params=SamplingParams(max_tokens=8, n=2), prompts_per_step=3, limit=PromptLimit(max_tokens=60),
    )  # fmt: skip
    asked: list[list[float]] = []

    class Asked:
        def first_tp_size(self, lengths: np.ndarray, limits: np.ndarray, group_size: int) -> int:
            asked.append(lengths.tolist())
            return 1

    assert RolloutLayouts(Asked(), collector)._first_size(0) == 1  # type: ignore[arg-type]
    assert not [one for one in recwarn if "passed over" in str(one.message)], "they are the rollout's"
    with pytest.warns(UserWarning, match=r"problem \d is passed over"):
        problems, _ = collector._draw(0)
    lengths = [len(tokens) for tokens in llm.encode([one.prompt for one in problems])]
    llm.close()
    assert [one.uid for one in problems] == [0, 2, 4] and asked == [[float(one) for one in lengths for _ in range(2)]]
