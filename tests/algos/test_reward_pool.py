"""Rewards beside a rollout: the same scores in whatever order completions come, with the runner's limits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algos.rewards.pool import Item, RewardPool
from algos.rewards.runner import RewardRunner
from tests.algos.test_rewards import wait_until


def items(texts: list[str], **columns: Any) -> list[Item]:
    return [
        Item(key=(i // 4, i % 4), prompt="prompt", completion=text, columns=columns) for i, text in enumerate(texts)
    ]


def score(runner: RewardRunner, beside: list[Item], rest: list[Item]) -> tuple[dict[tuple[int, int], float], Any]:
    """`beside` come while the rollout goes on and are all waited for, `rest` are left."""
    with RewardPool(runner) as pool:
        for item in beside:
            pool.add(item)
        wait_until(lambda: not pool._waiting, "the pool to take everything")
        taken = pool.stop()
        assert sorted(taken) == sorted(item.key for item in beside)
        return pool.finish(rest)


@pytest.mark.parametrize("num_beside", [0, 1, 23, 40])
def test_scores_do_not_depend_on_the_order(make: Callable[..., RewardRunner], tmp_path: Path, num_beside: int) -> None:
    texts = ["a" * (i % 9) for i in range(40)]
    bad = {7: "raise", 12: "os._exit", 31: "kill"}
    texts = [bad.get(i, text) for i, text in enumerate(texts)]
    shuffled = items(texts, log=str(tmp_path / "log"))
    random.Random(num_beside).shuffle(shuffled)
    rewards, failed = score(make("misbehaves"), shuffled[:num_beside], shuffled[num_beside:])
    assert rewards == {(i // 4, i % 4): 0.0 if i in bad else 1.0 for i in range(40)}
    assert failed == {"raised": 3}


def test_calls_begin_at_once_are_bounded_and_ordered(make: Callable[..., RewardRunner], tmp_path: Path) -> None:
    log, hold = tmp_path / "log", tmp_path / "log.hold"
    hold.touch()
    runner = make("log_calls", chunk_size=4)
    texts = [chr(ord("a") + i) for i in range(11)]
    everything = items(texts, log=str(log))
    with RewardPool(runner) as pool:
        pool.add(everything[10])
        wait_until(lambda: log.exists() and log.read_text(), "a call while the rollout goes on")
        for item in reversed(everything[1:10]):
            pool.add(item)
        assert log.read_text().count("\n") == 1, "adding waits for no call"
        hold.unlink()
        wait_until(lambda: log.read_text().count("\n") == 4, "the rest")
        pool.stop()
        assert pool.seconds_beside > 0
        rewards, _ = pool.finish(everything[:1])
    assert rewards == {item.key: 1.0 for item in everything}
    # In the order in which they came, at most four at a time, those of a call by their keys.
    calls = ['["k"]', '["g", "h", "i", "j"]', '["c", "d", "e", "f"]', '["b"]', '["a"]']
    assert log.read_text().splitlines() == calls


def test_stop_drops_what_has_not_begun(make: Callable[..., RewardRunner], tmp_path: Path) -> None:
    log, hold = tmp_path / "log", tmp_path / "log.hold"
    hold.touch()
    everything = items(["x"] * 9, log=str(log))
    runner = make("log_calls", chunk_size=2, timeout_s=1.0)
    with RewardPool(runner) as pool:
        for item in everything:
            pool.add(item)
        wait_until(lambda: log.exists() and log.read_text(), "the first call")
        taken = pool.stop()  # the runner's limit ends the call that hangs
        assert 1 <= len(taken) <= 2
        hold.unlink()
        rewards, failed = pool.finish([item for item in everything if item.key not in taken])
    assert rewards == {item.key: float(item.key not in taken) for item in everything}
    assert failed["timed_out"] == len(taken)


def test_hangs_are_allowed_for_once_and_not_per_call(
    make: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture
) -> None:
    everything = items(["x"] * 50)
    rewards, failed = score(
        make("always_hangs", timeout_s=0.4, max_failures=3, chunk_size=1), everything[:25], everything[25:]
    )
    assert set(rewards.values()) == {0.0} and len(rewards) == 50
    assert failed["timed_out"] == 50
    assert "gave up on 47 of 50 completions" in caplog.text
    assert len(caplog.records) == 3, "the first timeout, and one report for all calls"


def test_async_failures_cost_only_the_culprits(make: Callable[..., RewardRunner]) -> None:
    runner = make("misbehaves_async", chunk_size=1, timeout_s=2.0)
    everything = items(["a", "raise", "b", "c", "hang", "d", "e", "f"])
    rewards, failed = score(runner, everything[:5], everything[5:])
    assert [rewards[item.key] == 0 for item in everything] == [
        text in ("raise", "hang") for text in ["a", "raise", "b", "c", "hang", "d", "e", "f"]
    ]
    assert failed == {"raised": 1, "timed_out": 1}


def test_errors_that_no_completion_is_to_blame_for_reach_the_rollout(make: Callable[..., RewardRunner]) -> None:
    pool = RewardPool(make("declared"))
    pool.add(items(["a"], answer=object())[0])
    wait_until(lambda: not pool._waiting, "the pool's thread")
    with pytest.raises(ValueError, match=r"columns\['answer'\].*plain data"):
        pool.stop()


def test_an_error_of_the_rollout_ends_the_thread(make: Callable[..., RewardRunner]) -> None:
    with pytest.raises(KeyError), RewardPool(make("length")) as pool:
        pool.add(items(["a"])[0])
        raise KeyError("the rollout")
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("reward-pool")), "exit waits for no call"
    wait_until(lambda: not any(t.name.startswith("reward-pool") for t in threading.enumerate()), "the thread to end")
