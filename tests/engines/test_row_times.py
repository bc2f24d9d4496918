"""The measured time of a pass by its rows: once, the same on all ranks, and harmless to what runs."""

from __future__ import annotations

from collections import Counter

import pytest

from engines import LLM, SamplingParams
from engines.config import EngineConfig
from engines.parallel.collectives import SingleRank
from engines.replica import scratch
from engines.replica.row_times import RowTimes
from engines.replica.scratch import Scratch
from engines.speculation.drafter import Draft
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import Prices
from tests.worlds import join, run_world


def make(llm: LLM, num_kv_tokens: int = 10_000) -> RowTimes:
    engine = llm._engine
    config = EngineConfig(drafter="suffix", max_num_seqs=8, max_draft_tokens=7)
    return RowTimes(engine.decoder, engine.kv, config, llm.max_model_len, SingleRank(), num_kv_tokens=num_kv_tokens)


def test_it_is_measured_once_and_interpolated(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**20)
    times = make(llm)
    first = [times(rows) for rows in range(1, 200)]
    points = dict(times._points)
    assert list(points) == [1, 2, 4, 8, 16, 32, 64]
    assert all(times(rows) == pytest.approx(seconds) and seconds > 0 for rows, seconds in points.items())
    for low, high in zip(times._points, times._points[1:], strict=False):
        middle = (low[0] + high[0]) // 2
        share = (middle - low[0]) / (high[0] - low[0])
        assert times(middle) == pytest.approx((1 - share) * low[1] + share * high[1])
    last, before = times._points[-1], times._points[-2]
    slope = (last[1] - before[1]) / (last[0] - before[0])
    assert times(190) == pytest.approx(last[1] + slope * (190 - last[0]))
    assert first == [times(rows) for rows in range(1, 200)]


def test_it_measures_only_as_far_as_it_is_asked(qwen3: str) -> None:
    times = make(LLM(qwen3, kv_cache_bytes=2**20))
    assert times(5) > 0 and [rows for rows, _ in times._points] == [1, 2, 4, 8]
    before = list(times._points)
    assert times(9) > 0 and times(2) == before[1][1] and times._points[:4] == before
    assert [rows for rows, _ in times._points] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("fixed", "per_row", "timed"),
    [
        (0.0, 0.001, {1: 11, 2: 10, 4: 10, 8: 7, 16: 3, 32: 2}),
        (0.03, 0.001, {1: 3, 2: 2, 4: 2, 8: 2, 16: 2, 32: 2, 64: 2}),
        (0.03, 0.020, {1: 3, 2: 2, 4: 2, 8: 2, 16: 2}),  # until four times as long as one row
        (0.0, 0.0001, {1: 11, 2: 10, 4: 10, 8: 10, 16: 10, 32: 10, 64: 9}),
    ],
)
def test_long_passes_are_extrapolated(
    qwen3: str, monkeypatch: pytest.MonkeyPatch, fixed: float, per_row: float, timed: dict[int, int]
) -> None:
    """For passes that take a + b * rows seconds, all times are exact."""
    calls: Counter[int] = Counter()

    def seconds(_: Scratch, rows: int, *__: object) -> float:
        calls[rows] += 1
        return fixed + per_row * rows

    monkeypatch.setattr(Scratch, "_time", seconds)
    times = make(LLM(qwen3, kv_cache_bytes=2**20))
    assert [times(rows) for rows in (1, 3, 50, 2000)] == pytest.approx(
        [fixed + per_row * rows for rows in (1, 3, 50, 2000)]
    )
    assert calls == timed


def test_it_measures_no_more_rows_than_the_memory_plan_counts(qwen3: str) -> None:
    times = make(LLM(qwen3, kv_cache_bytes=2**20), num_kv_tokens=10)
    assert times(64) > 0 and max(rows for rows, _ in times._points) <= 10


def test_without_memory_to_measure_in_nothing_is_drafted(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no memory")

    times = make(LLM(qwen3, kv_cache_bytes=2**20))
    monkeypatch.setattr(scratch, "PagedKVCache", refuse)
    policy = MarginalGain(Prices(times))
    assert policy.shorten([], [Draft([1, 2, 3], [0.9, 0.8, 0.7])] * 4, 4, 4) == [Draft([], [])] * 4


def test_it_leaves_the_kv_cache_alone(qwen3: str) -> None:
    llm = LLM(qwen3, kv_cache_bytes=2**20)
    before = [keys.clone() for keys in llm._engine.kv.keys]
    assert make(llm)(5) > 0
    assert all((keys == old).all() for keys, old in zip(llm._engine.kv.keys, before, strict=True))


def on_two_ranks(model: str) -> tuple[list[float], list[list[int]]]:
    heard: list[list[float]] = []

    class Hearing(MarginalGain):
        def __init__(self, prices) -> None:
            super().__init__(prices)
            self.seconds = prices.verify

        def shorten(self, states, drafts, num_tokens, num_draws):
            heard.append([self.seconds(rows) for rows in range(1, 30)])
            return super().shorten(states, drafts, num_tokens, num_draws)

    llm = LLM(
        model, world=join(), tensor_parallel_size=2, dtype="float64", drafter="suffix", draft_policy=Hearing,
        kv_cache_bytes=2**20,
    )  # fmt: skip
    outputs = llm.generate([[5, 6, 7] * 5], SamplingParams(max_tokens=30, ignore_eos=True))
    llm.close()
    return heard[0], [output.outputs[0].token_ids for output in outputs]


def test_the_shards_of_a_replica_have_the_same_times(qwen3: str) -> None:
    first, second = run_world(on_two_ranks, 2, qwen3)
    assert first == second
    alone = LLM(qwen3, dtype="float64", kv_cache_bytes=2**20)
    outputs = alone.generate([[5, 6, 7] * 5], SamplingParams(max_tokens=30, ignore_eos=True))
    assert first[1] == [output.outputs[0].token_ids for output in outputs]
