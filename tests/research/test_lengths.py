import math
import statistics

import pytest

from research.workloads.lengths import GroupedLengths, LogNormalLengths


def test_pat_s_anchors() -> None:
    """PAT §2: 10.85 % of responses beyond 8K tokens and 2.18 % beyond 16K lie on one log-normal."""
    lengths = LogNormalLengths(median=2750, sigma=0.884, cap=32768)
    assert lengths.share_beyond(8192) == pytest.approx(0.1085, abs=5e-4)
    assert lengths.share_beyond(16384) == pytest.approx(0.0218, abs=5e-4)


def test_draws_follow_the_closed_form() -> None:
    lengths = LogNormalLengths(median=100, sigma=1.0, cap=1024)
    drawn = lengths.draw(100_000, seed=3)
    for edge in (20, 100, 300, 1000):
        share = sum(length > edge for length in drawn) / len(drawn)
        assert share == pytest.approx(lengths.share_beyond(edge), abs=0.006)
    assert min(drawn) >= 1 and max(drawn) == 1024
    assert drawn == lengths.draw(100_000, seed=3) != lengths.draw(100_000, seed=4)


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match="median"):
        LogNormalLengths(median=0, sigma=1, cap=10)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_members_of_a_group_are_alike(correlation: float) -> None:
    """Each length alone has the plain distribution; logarithms of two members have the correlation asked for."""
    lengths = LogNormalLengths(median=1000, sigma=0.8, cap=10**9)
    groups = GroupedLengths(lengths=lengths, correlation=correlation).draw(8000, 4, seed=1)
    first, second = ([math.log(group[member]) for group in groups] for member in (0, 3))
    assert statistics.correlation(first, second) == pytest.approx(correlation, abs=0.03)
    for edge in (300, 1000, 3000):
        share = statistics.fmean(group[1] > edge for group in groups)
        assert share == pytest.approx(lengths.share_beyond(edge), abs=0.02)


def test_a_group_does_not_depend_on_how_many_are_drawn() -> None:
    lengths = GroupedLengths(lengths=LogNormalLengths(median=1000, sigma=0.8, cap=4000), correlation=0.5)
    groups = lengths.draw(6, 8, seed=2)
    assert groups[:3] == lengths.draw(3, 8, seed=2) != lengths.draw(3, 8, seed=3)
    assert max(map(max, groups)) <= 4000 and len({tuple(group) for group in groups}) == 6
    with pytest.raises(ValueError, match=r"GroupedLengths.correlation=1.5"):
        GroupedLengths(lengths=lengths.lengths, correlation=1.5)


def test_a_spread_beyond_floats_is_capped() -> None:
    lengths = LogNormalLengths(median=1e300, sigma=1000, cap=500)
    drawn = lengths.draw(2000, seed=1)
    assert min(drawn) == 1 and max(drawn) == 500
