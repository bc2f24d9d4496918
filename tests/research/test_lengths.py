import pytest

from research.workloads.lengths import LogNormalLengths


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
