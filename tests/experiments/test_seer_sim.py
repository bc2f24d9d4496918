"""`seer_sim.py` as users run it, on a small part of its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from experiments.seer_baseline import BoundName
from tests.worlds import refused_by, run_main

SMALL = ["--seeds", "1", "--shrink", "16", "--token-scale", "256", "--processes", "1"]


def test_every_variant_rolls_out_the_same_sequences(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    cases = ["moonlight", "kv for all"]
    figure = tmp_path / "figure.png"
    options = [*SMALL, "--drafts", "--output", str(output), "--figure", str(figure)]
    result = run_main("seer_sim", ["--cases", *cases, *options])
    assert figure.stat().st_size > 20_000
    assert output.is_file() and result["tier"] == "sim" and [row["case"] for row in result["rows"]] == cases
    for row in result["rows"]:
        variants = row["variants"]
        drafting = {"drafts", "drafts, ungrouped", "drafts, no adaptation"}
        chunked = {"divided", "divided, in turns", "context", "oracle", *drafting}
        assert variants.keys() == {*get_args(BoundName), *chunked}
        assert variants["oracle"]["of_oracle"] == variants["context"]["over_context"] == [1, 1, 1]
        middle, low, high = variants["group static"]["throughput"]
        assert middle == 1 and low < 1 < high  # assignments differ
        assert row["tuned"].keys() == {*get_args(BoundName)}
        for one in row["tuned"].values():
            assert len(one["sweep_s"]) == 10 and min(one["sweep_s"], key=one["sweep_s"].get) == one["setting"]
        for name, one in variants.items():
            assert all(low <= median <= high for median, low, high in one.values())
            assert one["tail"][0] > 0 and one["seconds"][1] > 0
            assert (one["kv_share"][0] > 0) == (name in chunked)
            assert not one["preempted"][2] or name in get_args(BoundName)
        assert variants["drafts"]["over_context"][0] > max(1.1, variants["drafts, ungrouped"]["over_context"][0])
    rows = {one["name"]: one for one in result["rows"][0]["paper"]}
    assert rows["context"]["paper"] == 1.33 and rows["drafts"]["paper"] == 1.77 and not result["rows"][1]["paper"]
    assert rows["drafts"]["ours"] == result["rows"][0]["variants"]["drafts"]["throughput"][0]
    tight, roomy = (row["variants"]["group static"]["preempted"][0] for row in result["rows"])
    assert tight > roomy == 0


def test_slow_links_make_replicas_wait_for_kv(tmp_path: Path) -> None:
    """And policies that are named, ours or a user's, come beside those of the paper."""
    small = ["--cases", "moonlight", "--seeds", "1", "--processes", "1", "--shrink", "16", "--token-scale", "256"]
    (tmp_path / "own.py").write_text("from research.seer.context_aware import ContextAware\n")
    own = f"{tmp_path}/own.py:ContextAware"
    both = [
        run_main("seer_sim", [*small, "--kv-bandwidth", gbs, "--also", "seer", own])["rows"][0]["variants"]
        for gbs in ("50", "5")
    ]
    fast, slow = (one["context"] for one in both)
    same = {key: value for key, value in fast.items() if key != "simulated_in"}
    assert {key: value for key, value in both[0]["seer"].items() if key != "simulated_in"} == same
    assert own in both[0] and both[0][own]["seconds"] != fast["seconds"], "it has its own chunks"
    assert slow["kv_share"][0] > 5 * fast["kv_share"][0] and slow["seconds"][0] > fast["seconds"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-bandwidth", "0"], "--kv-bandwidth=0"),
        (
            ["--chunk-tokens", "64"],
            "--chunk-tokens=64: must be from 256, a block of KV at token_scale=16, to 65536, what a sequence of",
        ),
        (
            ["--chunk-tokens", "99999"],
            "--chunk-tokens=99999: must be from 256, a block of KV at token_scale=16, to 65536",
        ),
        (["--token-scale", "1025"], "--token-scale=1025: a prompt has 1024 tokens, and needs one; give at most 1024"),
        (["--shrink", "9"], "shrink=9: the smallest case has 8 instances; give at most as many"),
        (["--output", "/nowhere/result.json"], "output='/nowhere/result.json': there is no folder '/nowhere'"),
        (["--figure", "seer.foo"], "figure='seer.foo': must end in .png, .pdf or .svg"),
        (["--cases"], "cases=(): must be one or more cases"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    assert message in refused_by("seer_sim", options)
