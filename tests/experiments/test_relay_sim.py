"""`relay_sim.py` as users run it: its numbers are those of the model, for bytes that the codec counts."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from experiments.relay_sim import DENSITIES, RelaySimConfig, codecs_of, deployment_of, measured_sizes
from research.rose.transfer import transfer
from tests.worlds import refused_by, run_main


def test_what_it_prints(tmp_path: Path) -> None:
    figure, options = tmp_path / "figure.png", ["--bandwidths", "1", "20", "--elements", "65536", "--models", "8b"]
    found = run_main("relay_sim", [*options, "--times-as-fast", "1000", "--figure", str(figure)])
    assert found["tier"] == "sim" and found["ladder"]["8b"]["paper"]["total"] == 12.4 and figure.stat().st_size > 10_000
    config = RelaySimConfig(elements=65536)
    for gbit, cell in found["cells"]["8b"].items():
        seconds, codecs = cell["seconds"], cell["codecs"]
        one = deployment_of(config, "8b", float(gbit))
        assert seconds["shards"] == pytest.approx(transfer("shards", one).seconds, rel=1e-3)
        sparse = transfer("sparse", one, codecs_of(config)["ours"].at(0.01))
        assert seconds["sparse, ours"] == pytest.approx(sparse.seconds, rel=1e-3)
        assert codecs["ours"]["gain"] == pytest.approx(seconds["shards"] / sparse.seconds, rel=1e-2)
        assert codecs["ours x1000"]["gain"] > codecs["paper"]["gain"]  # six times its bytes
        assert codecs["ours x1000"]["break_even"] is None
        assert codecs["paper"]["break_even"] == pytest.approx(1 / 3, rel=0.01)
    ladder, seconds = found["ladder"]["8b"]["simulated"], found["cells"]["8b"]["20"]["seconds"]
    ratio = ladder["async"] * ladder["shards"] * ladder["sparse, ours"]
    assert ratio == pytest.approx(ladder["total, ours"], rel=1e-2)
    assert ladder["total, ours"] == pytest.approx(seconds["batch"] / seconds["sparse, ours"], rel=1e-2)


def test_bytes_of_the_codec() -> None:
    """They rise with the density, and lie between the entropy of what changed and the paper's six bytes."""
    sizes = measured_sizes(2**18)
    assert all(low < high for low, high in itertools.pairwise(sizes))
    assert sizes[1] == pytest.approx(0.0060, rel=0.1)  # docs/relay.md
    for size, share in zip(sizes, DENSITIES, strict=True):
        entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share) + share  # places, and up or down
        assert entropy / 16 < size < 3 * share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encode", "1", "2", "3"], "encode"),
        (["--bandwidths", "0"], "bandwidths"),
        (["--density", "0"], "--density=0.0: must be above 0, at most 1"),
        (["--figure", "nowhere/figure.png"], "there is no folder 'nowhere'; make it"),
    ],
)
def test_what_it_refuses(options: list[str], message: str) -> None:
    assert message in refused_by("relay_sim", options)
