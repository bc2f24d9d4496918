"""Clients of a trace, those that leave, and those that err, against a server in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines import LLM
from experiments.serving_clients import Timed
from experiments.serving_load import Load, LoadConfig, percentiles, tokens_equal
from tests.serving import serving, until


def test_a_load_counts_what_its_clients_saw(text_model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{index}.0000000,{80 * index + 8},{40 * index + 8}" for index in range(6)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    options = {"model": Path(text_model), "trace": trace, "rate": 20.0, "dtype": "float64"}
    config = LoadConfig(**options, requests=6, killed=2, malformed=8)  # type: ignore[arg-type]
    with serving(LLM(text_model, dtype="float64"), name=text_model) as running:
        result, answered = asyncio.run(Load(config, running.url).run(config.arrivals()))
        until(lambda: sum(running.outcomes.values()) == 1 + 6 + 2 + 8, "the warm-up, the trace, streams, and nonsense")
        # A client that leaves an answer of a few tokens may find that it has been sent as a whole.
        assert running.outcomes.pop("refused") == 8 and running.outcomes["ok"] >= 5
        assert {*running.outcomes} <= {"ok", "client_left", "refused"}
    assert (result["failed"], result["killed"], result["malformed"], result["malformed_wrong"]) == (0, 2, 8, 0)
    assert result["freed_s"] is not None and result["tokens"] == sum(len(one.token_ids) for one in answered)
    lengths = {(1 + 10 * index, max(2, 1 + 5 * index)) for index in range(6)}
    assert len(answered) == 4 and {(len(one.prompt), len(one.token_ids)) for one in answered} <= lengths
    assert tokens_equal(config, answered)
    answered[0].token_ids[-1] += 1
    assert not tokens_equal(config, answered)
    with pytest.raises(ValueError, match="requests=7: there are 6"):
        LoadConfig(**options, requests=7, killed=0).arrivals()  # type: ignore[arg-type]


def test_a_request_without_its_tokens_has_failed() -> None:
    assert Timed(prompt=[1], num_tokens=2, seed=0, token_ids=[5, 6]).outcome == "ok"
    assert Timed(prompt=[1], num_tokens=2, seed=0, token_ids=[5]).outcome == "failed"
    assert Timed(prompt=[1], num_tokens=2, seed=0, token_ids=[5, 6], error="x").outcome == "failed"
    assert Timed(prompt=[1], num_tokens=2, seed=0, token_ids=[5], leaves_at=1).outcome == "killed"
    assert Timed(prompt=[1], num_tokens=2, seed=0, leaves_at=1, error="x").outcome == "failed"
    assert percentiles([one / 1000 for one in range(1, 101)]) == {"p50": 51.0, "p99": 100.0}
