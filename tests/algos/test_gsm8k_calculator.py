"""GSM8K's calculator: what a turn's call observes, and what is rewarded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from tests.algos.test_environments import Engine

NO_CALCULATION = "error: write numbers with +, -, *, / and parentheses between << and >>"
UIDS = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with EnvironmentPool("algos.environments.gsm8k:Gsm8kCalculator", EnvironmentConfig(workers=1)) as pool:
        yield Engine(pool)


def play(engine: Engine, answer: str, *turns: str) -> tuple[list[str | None], float | None]:
    """What the turns observe, and the reward."""
    uid = next(UIDS)
    engine.begin(uid, answer=answer)
    answers = [engine.step(uid, turn) for turn in turns]
    assert not any(one.failure for one in answers) and not any(one.done for one in answers[:-1])
    return [one.text for one in answers], engine.end(uid)


@pytest.mark.parametrize(
    ("call", "observed"),
    [
        ("48/2 = <<48/2>>", "24"),
        ("<<16-3-4>>\n", "9"),
        ("$<<(1,000+0.5)*2>>", "2001"),
        ("<<1+<<2+3>>", "5"),
        ("<<48/2=24>> <<-3*-3>>", "9"),
        ("<<48/2=24>>", NO_CALCULATION),
        ("<<48/2", NO_CALCULATION),
        ("<<>>", NO_CALCULATION),
        ("<<1e999>>", NO_CALCULATION),
        ("<<٣+1>>", NO_CALCULATION),
        ("<<5−3>>", NO_CALCULATION),
        ("<<" + "9*" * 5000 + "9>>", NO_CALCULATION),
        ("<<" + "(" * 50_000 + ">>", NO_CALCULATION),
        ("<<" * 50_000, NO_CALCULATION),
        ("<<\x00\ud800>>", NO_CALCULATION),
        ("<<1/0>>", "error: division by zero"),
    ],
)
def test_a_call_at_the_end_of_a_turn_is_computed(engine: Engine, call: str, observed: str) -> None:
    turns = [f"Natalia sold {call}", " clips.\n#### 7"]
    is_computed = not observed.startswith("error")
    assert play(engine, "7", *turns) == ([observed, None], 1 + 0.1 * is_computed)
    assert play(engine, "8", *turns)[1] == 0.1 * is_computed


@pytest.mark.parametrize("text", ["", "#### 7", "<<3+4=7>>7 clips", "<<3+4>>7", "3+4>> 7", "<<3+4>>>"])
def test_a_turn_without_a_call_ends_the_trajectory(engine: Engine, text: str) -> None:
    assert play(engine, "7", text) == ([None], float("7" in text))


def test_a_trajectory_that_was_cut_has_no_final_answer(engine: Engine) -> None:
    assert play(engine, "7", "<<3+4>>") == (["7"], 0.1)


def test_the_last_observation_is_a_part_of_the_text(engine: Engine) -> None:
    assert play(engine, "7", "So <<3+4>>", "") == (["7", None], 1.1)
