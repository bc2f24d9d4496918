import math

import pytest
import torch
from scipy import stats

from engines.sampling.noise import gumbel, gumbel_at, splitmix64

# Reference outputs of SplitMix64 seeded with 1234567 (Vigna's splitmix64.c).
KNOWN = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_splitmix64_known_answers() -> None:
    out = splitmix64(torch.tensor([1234567]), torch.arange(1, 6))
    assert [value % 2**64 for value in out.tolist()] == KNOWN


@pytest.mark.parametrize("vocab_size", [1, 2, 131, 264])
def test_single_draws_are_those_of_the_whole_vocabulary(vocab_size: int) -> None:
    keys, positions = torch.tensor([3, -(2**63), 2**62]), torch.tensor([0, 7, 100_000])
    whole = gumbel(keys, positions, vocab_size)
    for row in range(3):
        one = gumbel_at(keys[row].expand(vocab_size), positions[row].expand(vocab_size), torch.arange(vocab_size))
        assert torch.equal(one, whole[row])


def test_rows_do_not_depend_on_their_batch() -> None:
    keys, positions = torch.arange(50), torch.arange(50) * 3
    whole = gumbel(keys, positions, 99)
    assert torch.equal(whole[17:18], gumbel(keys[17:18], positions[17:18], 99))


@pytest.mark.parametrize("axis", ["tokens", "positions", "keys"])
def test_noise_is_standard_gumbel_along_every_axis(axis: str) -> None:
    count = 200_000
    zero, along = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    keys, positions, tokens = (along if name == axis else zero for name in ("keys", "positions", "tokens"))
    noise = gumbel_at(keys, positions, tokens)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3
    assert abs(torch.corrcoef(torch.stack((noise[1:], noise[:-1])))[0, 1]) < 5 / math.sqrt(count)


def test_streams_of_neighbouring_positions_are_unrelated() -> None:
    noise = gumbel(torch.full((400,), 9), torch.arange(400), 500)
    correlation = torch.corrcoef(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(500)
