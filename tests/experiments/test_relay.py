"""`relay.py`: what it compares, on real ranks; and its arithmetic."""

from __future__ import annotations

import torch

from experiments.relay_transfer import _crossing, changed, closed_form
from tests.worlds import refused_by, run_main


def test_every_shard_has_the_trainer_s_bits() -> None:
    """At every ZeRO stage, with a killed relay, a trainer that starts again and a late replica among eight steps."""
    found = run_main("relay", ["--parts", "weights", "density", "--steps", "8"], num_ranks=2)
    assert found["weights_equal"] and found["tokens_equal"] and found["wrong"] == []
    # Versions 0 to 8 at ZeRO-1 and 0 to 3 at the others: all for TP 1, every second for TP 2, every third for TP 4, and
    # one of the late replica; on two ranks.
    assert found["num_compared"] == 2 * (9 + 5 + 3 + 1 + 3 * (4 + 2 + 2))
    for one in found["density"].values():
        assert abs(one["measured"] - one["closed_form"]) < 0.01 * one["closed_form"]
    moved = [value for name, value in found["density_of_grpo_steps"].items() if name != "learning_rate"]
    assert all(0.001 < value < 0.9 for value in moved)


def test_parts_come_from_several_ranks() -> None:
    assert "ranks=1: parts of the weights come from several ranks" in refused_by("relay", ["--ranks", "1"])


def test_weights_that_are_to_change_do() -> None:
    weights = {"one": (torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()}
    for percent in (0.1, 4.0, 50.0):
        moved = (changed(weights, percent, seed=1)["one"] != weights["one"]).float().mean() * 100
        assert 0.9 * percent < moved < 1.1 * percent


def test_a_step_as_large_as_every_gap_changes_all() -> None:
    assert closed_form(1.0) > 0.999 and closed_form(1e-12) < 1e-4


def test_where_sparse_stops_paying() -> None:
    times = {1.0: 1.0, 10.0: 2.0, 50.0: 6.0}
    assert _crossing(times, 4.0) == 30.0
    assert _crossing(times, 6.0) is None and _crossing(times, 0.5) == 1.0
