"""The sampler against Hugging Face's logits warpers, and its draws against the exact distribution."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engines.memory.plan import rows_sampled_at_once
from engines.native.library import choose_library
from engines.sampling import sampler
from engines.sampling.sampler import Draw, SamplingBatch, draw_natively, make_sampling_batch, process_logits, sample

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def columns(rows: int, start: int = 0, **setting: float) -> SamplingBatch:
    def full(name: str, off: float, dtype: type = np.float64) -> np.ndarray:
        return np.full(rows, setting.get(name, off), dtype=dtype)

    return make_sampling_batch(
        keys=np.arange(start, start + rows),
        positions=np.arange(rows) % 97,
        temperature=full("temperature", 1.0),
        top_k=full("top_k", -1, np.int64),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        device=torch.device("cpu"),
    )


def compiled(dtype: torch.dtype) -> Draw:
    library = choose_library("auto", dtype, torch.device("cpu"))
    if library is None:
        pytest.skip("no C++ compiler here")
    return partial(draw_natively, library)


def huggingface(logits: torch.Tensor, setting: dict[str, float]) -> torch.Tensor:
    warpers = LogitsProcessorList()
    warpers.append(TemperatureLogitsWarper(float(setting.get("temperature", 1.0))))
    if "top_k" in setting:
        warpers.append(TopKLogitsWarper(int(setting["top_k"])))
    if "top_p" in setting:
        warpers.append(TopPLogitsWarper(setting["top_p"]))
    if "min_p" in setting:
        warpers.append(MinPLogitsWarper(setting["min_p"]))
    return warpers(None, logits)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_processed_logits_are_huggingface_s(setting: dict[str, float]) -> None:
    logits = torch.randn(40, 131, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(process_logits(logits, columns(40, **setting)), huggingface(logits, setting))


def test_rows_of_one_batch_may_differ() -> None:
    logits = torch.randn(len(SETTINGS), 50, generator=torch.Generator().manual_seed(2)) * 3

    def column(name: str, off: float, dtype: type = np.float64) -> np.ndarray:
        return np.array([setting.get(name, off) for setting in SETTINGS], dtype=dtype)

    batch = make_sampling_batch(
        keys=np.arange(len(SETTINGS)),
        positions=np.arange(len(SETTINGS)),
        temperature=column("temperature", 1.0),
        top_k=column("top_k", -1, np.int64),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        device=torch.device("cpu"),
    )
    expected = torch.cat([huggingface(logits[i : i + 1], s) for i, s in enumerate(SETTINGS)])
    assert torch.equal(process_logits(logits, batch), expected)


@pytest.mark.parametrize("vocab", [1, 2, 1000, 150_000, 2**18])
def test_top_p_by_sums_that_have_no_order(vocab: int) -> None:
    """Of tokens that are all as likely just the half is kept: sums are exact, and of a large vocabulary still fit."""
    for logit in (0.0, -3.7):
        kept = process_logits(torch.full((2, vocab), logit), columns(2, top_p=0.5)).isfinite()
        assert kept.sum(-1).tolist() == [(vocab + 1) // 2] * 2


@pytest.mark.parametrize("way", ["dense", "sparse", "compiled"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(
    setting: dict[str, float], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "sparse":
        monkeypatch.setattr(sampler, "_DENSE_VOCAB", 0)
    draw = compiled(torch.float32) if way == "compiled" else None
    rows = 50_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    exact = huggingface(logits, setting).softmax(-1)[0].double().numpy()
    drawn = sample(logits.expand(rows, -1), columns(rows, **setting), draw)
    counts = np.bincount(drawn.tokens.numpy(), minlength=40)
    assert not counts[exact == 0].any(), "an excluded token was drawn"
    expected = exact * rows
    rare = (expected < 5) & (expected > 0)
    pooled_counts = np.append(counts[expected >= 5], counts[rare].sum())
    pooled_expected = np.append(expected[expected >= 5], expected[rare].sum())
    keep = pooled_expected > 0
    scaled = pooled_expected[keep] * rows / pooled_expected[keep].sum()
    assert stats.chisquare(pooled_counts[keep], scaled).pvalue > 1e-3
    exact_logprobs = np.log(exact[drawn.tokens.numpy()])
    assert np.abs(drawn.logprobs.numpy() - exact_logprobs).max() < 1e-5


@pytest.mark.parametrize("scale", [0.5, 4.0, 30.0])
def test_leaving_out_hopeless_candidates_changes_no_token(scale: float) -> None:
    logits = torch.randn(300, 5000, generator=torch.Generator().manual_seed(4)) * scale
    batch = columns(300)
    assert torch.equal(
        sampler._draw_sparse(logits, batch.keys, batch.positions),
        sampler._draw_dense(logits, batch.keys, batch.positions),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 17, 131, 5000, 8192, 8193, 30000])
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_the_compiled_draw_gives_the_same_tokens(dtype: torch.dtype, vocab: int, scale: float) -> None:
    draw, rows = compiled(dtype), 15
    logits = (torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(8)) * scale).to(dtype)[:, :vocab]
    for setting in ({}, {"temperature": 0.7}, {"top_k": 20, "min_p": 0.01}, {"top_p": 0.9, "temperature": 2.0}):
        batch = replace(columns(rows, **setting), any_greedy=True)
        batch.temperatures[::7] = 0
        theirs, mine = sample(logits, batch), sample(logits, batch, draw)
        assert torch.equal(mine.tokens, theirs.tokens)
        assert mine.logprobs.dtype == theirs.logprobs.dtype
        tolerance = 1e-12 if dtype is torch.float64 else 2e-5
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=tolerance, atol=tolerance)
        alone = [sample(logits[i : i + 1], batch.rows(slice(i, i + 1)), draw) for i in range(rows)]
        assert torch.equal(mine.logprobs, torch.cat([one.logprobs for one in alone]))
    ties = torch.zeros(2, vocab, dtype=dtype)
    ties[:, vocab // 2 :] = 5.0
    assert sample(ties, columns(2, temperature=0.0), draw).tokens.tolist() == [vocab // 2] * 2


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_extreme_temperatures_keep_to_the_vocabulary(temperature: float, is_compiled: bool) -> None:
    """Large logits swallow the noise's bound in float32: the leaders must stay candidates."""
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(7)) * 5 + 10
    draw = compiled(torch.float32) if is_compiled else None
    drawn = sample(logits * 100, columns(64, temperature=temperature), draw)
    assert int(drawn.tokens.min()) >= 0 and int(drawn.tokens.max()) < 5000
    assert drawn.logprobs.isfinite().all()
    if temperature < 1:
        assert torch.equal(drawn.tokens, logits.argmax(-1))


def test_nan_logits_show_in_the_log_prob() -> None:
    for vocab in (131, 5000):
        assert sample(torch.full((3, vocab), torch.nan), columns(3)).logprobs.isnan().all()


@pytest.mark.parametrize("token", [0, 7, 130, 4999])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_logit_shows_in_the_compiled_log_prob(token: int, bad: float) -> None:
    for vocab in (131, 5000):
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(9))
        logits[1, token % vocab] = bad
        drawn = sample(logits, columns(3), compiled(torch.float32))
        assert drawn.logprobs.isfinite().tolist() == [True, False, True]
        assert int(drawn.tokens.min()) >= 0 and int(drawn.tokens.max()) < vocab


@pytest.mark.parametrize("draw", [sampler._draw_dense, sampler._draw_sparse])
def test_ties_go_to_the_lowest_id(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "gumbel", lambda keys, positions, vocab: torch.zeros(len(keys), vocab))
    monkeypatch.setattr(sampler, "gumbel_at", lambda keys, positions, tokens: torch.zeros(len(keys)))
    logits = torch.zeros(3, 20).index_fill_(1, torch.tensor([7, 11, 19]), 5.0)
    assert draw(logits, torch.arange(3), torch.arange(3)).tolist() == [7, 7, 7]


def test_greedy_is_argmax_with_unscaled_logprobs() -> None:
    logits = torch.randn(50, 131, generator=torch.Generator().manual_seed(5))
    drawn = sample(logits, columns(50, temperature=0.0))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1).amax(-1))


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(20, 131, generator=torch.Generator().manual_seed(6)).bfloat16()
    low, high = sample(logits, columns(20)), sample(logits.float(), columns(20))
    assert low.logprobs.dtype == torch.float32
    assert torch.equal(low.tokens, high.tokens)


def mixed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of rows that each use some of the processors."""
    rng = np.random.default_rng(seed)
    return {
        "keys": rng.integers(-(2**62), 2**62, rows),
        "positions": rng.integers(0, 1000, rows),
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.7], rows),
        "top_k": rng.choice([-1, -1, 1, 20], rows),
        "top_p": rng.choice([1.0, 1.0, 0.5, 0.95], rows),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.2], rows),
    }


def draw_rows(
    logits: torch.Tensor, columns: dict[str, np.ndarray], rows: list[int], draw: Draw | None
) -> sampler.Sampled:
    picked = {name: column[rows] for name, column in columns.items()}
    return sample(logits[rows], make_sampling_batch(**picked, device=torch.device("cpu")), draw)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "vocab"), [(60, 131), (60, 4097), (9, 40_001)])
def test_a_row_has_the_same_bits_in_any_batch_and_piece_and_with_any_threads(
    dtype: torch.dtype, rows: int, vocab: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = compiled(dtype) if is_compiled else None
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(8)).to(dtype)
    columns = mixed(rows)
    whole = draw_rows(logits, columns, list(range(rows)), draw)
    rng, before = np.random.default_rng(1), torch.get_num_threads()
    try:
        for count in (1, 1, 1, 2, 3, 5, rows // 2, rows):
            torch.set_num_threads(int(rng.integers(1, 4)))
            step = int(rng.integers(1, 5))
            monkeypatch.setattr(sampler, "rows_sampled_at_once", lambda vocab, device, step=step: step)
            picked = rng.permutation(rows)[:count].tolist()
            mine = draw_rows(logits, columns, picked, draw)
            assert torch.equal(mine.tokens, whole.tokens[picked])
            assert torch.equal(mine.logprobs.view(torch.uint8), whole.logprobs[picked].view(torch.uint8))
    finally:
        torch.set_num_threads(before)


def test_memory_is_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    process = sampler.process_logits
    monkeypatch.setattr(
        sampler, "process_logits", lambda logits, batch: seen.append(len(logits)) or process(logits, batch)
    )
    logits = torch.randn(100, 70_000, generator=torch.Generator().manual_seed(9))
    sample(logits, columns(100, top_p=0.9))
    assert sum(seen) == 100 and max(seen) == rows_sampled_at_once(70_000, "cpu") < 100
