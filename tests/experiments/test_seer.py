"""`seer.py` on small rollouts, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from algos.publish import RECORD_FILE
from algos.warmstart_config import WarmStartConfig
from tests.worlds import refused_by, run_main

SMALL = ["--parts", "paced", "--ranks", "2", "--shrink", "24", "--turns", "1", "--scale", "0.1", "--others", "oracle"]
LADDER = ["divided", "context", "speculation"]


@pytest.fixture
def models(text_model: str, tmp_path: Path) -> Path:
    """As if the warm start had been made there."""
    folder = tmp_path / "models" / "tiny"
    shutil.copytree(text_model, folder)
    (folder / RECORD_FILE).write_text(json.dumps({"warm_start": asdict(WarmStartConfig())}))
    return folder.parent


def test_the_ladder_draws_the_same_tokens_and_only_its_first_rung_preempts(models: Path, tmp_path: Path) -> None:
    options = [*SMALL, "--models", str(models), "--figure", str(tmp_path)]
    found = run_main("seer", options, num_ranks=2)["paced"]
    assert found["tokens_equal"] is True and found["num_sequences"] == 32
    assert list(found["throughput"]) == list(found["tail"]) == LADDER
    preempted = found["preemptions"]
    assert preempted["static"] > 0 and not any(preempted[one] for one in (*LADDER, "oracle"))
    assert found["of_oracle"] > 0 and list(found["variants"]) == ["oracle"]
    assert (tmp_path / "seer_paced_1.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk-tokens", "8"], "chunk_tokens=8: must be at least a block of KV"),
        (["--chunk-tokens", "321"], "give a number from 16 to 320"),
        (["--figure", "/nowhere"], "figure='/nowhere': is no folder"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("seer", options)
