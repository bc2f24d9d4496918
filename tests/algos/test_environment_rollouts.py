"""Rollouts whose environments are in processes of their own, against the same ones in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from engines import LLM, SamplingParams
from engines.rollout.environment import Environments
from tests.algos.test_environments import CLASSES
from tests.environments import Local

PROMPTS = ["a question", "another one", "third", "and the last question"]
PARAMS = SamplingParams(max_tokens=80, n=3, stop_token_ids=tuple(range(100, 124)), max_turns=5)


def facts(model: str, environment: Environments, marks: str = "") -> Any:
    """Returns what a rollout gives: tokens, observed spans, ends, rewards, and log-probs to 9 digits."""
    columns: list[dict[str, Any]] = [{"greeting": f"<{i}>" if i else None, "most": 2 + i} for i in range(len(PROMPTS))]
    if marks:
        columns = [{**one, "marks": marks} for one in columns]
    llm = LLM(model, dtype="float64", kv_cache_bytes=2**22)
    outputs = llm.generate(PROMPTS, PARAMS, environment=environment, columns=columns, prompt_uids=range(len(PROMPTS)))
    completions = [one for output in outputs for one in output.outputs]
    return [
        (one.token_ids, [round(p, 9) for p in one.logprobs], one.observed, one.finish_reason, one.reward)
        for one in completions
    ]


@pytest.fixture(scope="module")
def plain(text_model: str) -> Any:
    with Local() as environments:
        found = facts(text_model, environments)
    assert sum(len(observed) > 2 for _, _, observed, _, _ in found) > 3, "few trajectories have several turns"
    assert len({reward for *_, reward in found}) > 4
    return found


def test_processes_of_their_own_change_no_token(text_model: str, plain: Any) -> None:
    with EnvironmentPool(f"{Path(__file__).parents[1]}/environments.py:Echo", EnvironmentConfig(workers=2)) as pool:
        assert facts(text_model, pool) == plain
        assert not pool.failures and pool.num_calls > 2 * len(plain)


def test_kills_of_workers_change_no_token(text_model: str, plain: Any, tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    config = EnvironmentConfig(workers=2, writable=(str(tmp_path / "marks"),))
    with EnvironmentPool(f"{CLASSES}:MortalEcho", config) as pool:
        assert facts(text_model, pool, marks=str(tmp_path / "marks")) == plain
        assert not pool.failures
    assert len([*(tmp_path / "marks").iterdir()]) > 3, "few workers were killed"
