"""GSM8K's calculator: what a turn's call observes, what is rewarded, and the demonstrations of it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from algos.tasks.gsm8k import Gsm8kTask
from algos.tasks.task import Part
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


ROWS = [
    ("Clips?", "He sold 48/2 = <<48/2=24>>24 clips.\nAll are 48+24 = $<<48+24=72>>72.\n#### 72"),
    ("A house?", "It costs 80,000+50,000=$<<80000+50000=130000>>130,000.\n#### 130,000"),
    (
        "Shares?",
        "<<3/4=3/4>>3/4 of $<<20*.50=10>>10.00 is <<(3/4)*10=7.50>>7.50, or -<<2.5=2.5>>2.5, not 5.\n#### 7.50",
    ),
    ("Trees?", "<<560//10=56>>56 and <<5-66=-61>>-61, 5 less.\n#### -5"),
    ("None?", "It takes no time.\n#### 0"),
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"question": one, "answer": other}) + "\n" for one, other in ROWS))
    return str(path)


def test_a_demonstration_has_calls_and_what_the_calculator_says(data: str) -> None:
    task = Gsm8kTask(data=data, held_out_data=data.replace("gsm8k", "held"), calculator=True)
    Path(data.replace("gsm8k", "held")).write_text('{"question": "Else?", "answer": "<<1+1=2>>2\\n#### 2"}\n')
    assert task.demonstration(*task.held_out_problems(2)) == [
        Part(text="<<1+1>>"),
        Part(text="2", observed=True),
        Part(text="\n#### 2"),
    ]
    shown = {}
    for problem in map(task.train_problem, range(2 * len(ROWS))):
        shown[problem.prompt.removeprefix("Question: ").partition("\n")[0]] = task.demonstration(problem)
    assert {question: [part.text for part in parts] for question, parts in shown.items()} == {
        "Clips?": ["He sold 48/2 = <<48/2>>", "24", " clips.\nAll are 48+24 = $<<48+24>>", "72", ".\n#### 72"],
        "A house?": ["It costs 80,000+50,000=$<<80000+50000>>", "130000", ".\n#### 130,000"],
        "Shares?": [
            *("<<3/4>>", "0.75", " of $<<20*.50>>", "10", " is <<(3/4)*10>>", "7.5"),
            *(", or -<<2.5>>", "2.5", ", not 5.\n#### 7.50"),
        ],
        "Trees?": ["<<560//10=56>>56 and <<5-66>>", "-61", ", 5 less.\n#### -5"],
        "None?": ["It takes no time.\n#### 0"],
    }
    for question, answer in ROWS:
        observed = [Fraction(part.text) for part in shown[question] if part.observed]
        assert observed == [Fraction(value) for value in re.findall(r"=([^=>]*)>>", answer.replace("//10=56", ""))]


def test_demonstrations_are_rewarded_in_full(engine: Engine, data: str) -> None:
    task = Gsm8kTask(data=data, calculator=True)
    for problem in [*map(task.train_problem, range(2 * len(ROWS))), *task.held_out_problems(9)]:
        parts = task.demonstration(problem)
        turns = [part.text for part in parts if not part.observed]
        observed, reward = play(engine, problem.columns["answer"], *turns)
        assert observed == [*(part.text for part in parts if part.observed), None]
        assert reward == 1 + 0.1 * (len(turns) > 1)


def test_without_a_calculator_annotations_are_left_out(data: str) -> None:
    task = Gsm8kTask(data=data)
    assert task.environment is None
    shown = {task.demonstration(task.train_problem(index))[0].text for index in range(9)}
    assert {re.sub(r"<<.*?>>", "", answer) for _, answer in ROWS} >= shown and len(shown) == len(ROWS) - 1
