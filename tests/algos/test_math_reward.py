r"""The mathematical reward: what it takes for an answer, and that no answer can stop a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_verify import parse, verify

from algos.rewards.math import final_answer, math_verify_reward
from algos.rewards.runner import RewardConfig, RewardRunner
from tests.algos.test_rewards import score

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
SPEC = "algos.rewards.math:math_verify_reward"


def reward(completion: str, answer: str) -> float:
    (value,) = math_verify_reward(["a problem"], [completion], answer=[answer])
    return value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("She sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### 1,080", "1080"),
        ("#### 1080", "1,080"),
        ("#### 72 clips", "72"),
        ("#### 72\n\nQuestion: what is 5?", "72"),
        ("She has $3.50 left.", "$3.50"),
        ("first $5 and then $6", "6"),
        ("It is 72 clips.", "72"),
        ("It is 72 (seventy-two).", "72"),
        ("72.0", "72"),
        ("007", "7"),
        ("-$5", "-5"),
        ("x = \u22125", "-5"),
        ("It is \u2212$1,080.", "\u22121,080"),
        ("50%", "50"),
        ("3/4", "0.75"),
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{42}", "42"),
        (r"\boxed{72} and then #### 3", "72"),
        (r"\boxed{\$1,234}", "1234"),
        (r"\boxed{\text{72 dollars}}", "72"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{1/2}", "0.5"),
        (r"\boxed{\frac{3}{4}", "0.75"),
        (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"Thus \(2\sqrt{3}\).", r"$\sqrt{12}$"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        ("#### 72", "Natalia sold 48+24 = 72 clips.\n#### 72"),
    ],
)
def test_right_answers(completion: str, answer: str) -> None:
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "72"),
        ("I do not know.", "72"),
        ("#### ", "72"),
        ("72 or 71", "72"),
        ("#### 720", "72"),
        ("#### -72", "72"),
        ("#### 7.2", "72"),
        ("10-3", "-3"),
        ("x = \u22125", "5"),
        ("10\u22123", "-3"),
        ("x = 5", "\u22125"),
        (r"\boxed{}", "72"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}"),
        (r"\boxed{(1,2)}", "12"),
        (r"72, that is \boxed{71}", "72"),
        ("9" * 10_000, "9"),
        (r"\boxed{" + "(" * 1_000_000, "3"),
    ],
)
def test_wrong_answers(completion: str, answer: str) -> None:
    assert reward(completion, answer) == 0.0


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from(["{}", "{:,}", "{}.0"]))
def test_numbers_are_equal_as_math_verify_has_it(stated: int, known: int, form: str) -> None:
    for answer in (stated, known):
        ours = reward(f"so it is {form.format(stated)}", str(answer))
        theirs = verify(parse(str(answer), parsing_timeout=None), parse(f"{stated}", parsing_timeout=None))
        assert ours == float(theirs)


@given(st.text(alphabet="0123456789.,$%/-#\\ {}()[]x\n", max_size=60))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer in text


def test_a_model_cannot_run_code(tmp_path: Path) -> None:
    target = tmp_path / "written"
    code = f"__import__('pathlib').Path('{target}').touch()"
    for completion in (code, f"#### {code}", rf"\boxed{{{code}}}", f"${code} + 3$"):
        reward(completion, "x")
    assert not target.exists()


@pytest.mark.parametrize("answer", ["", "  ", "####", r"\boxed{}"])
def test_an_empty_known_answer_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="must state an answer"):
        reward("72", answer)


def test_malicious_answers_cost_only_themselves() -> None:
    malicious = [r"\boxed{9^{9^{9^9}}}", r"\boxed{99999!!!!!!}"]
    completions = ["#### 72", *malicious, "#### 1,080", r"\boxed{" + r"\frac{1}{" * 100_000]
    with RewardRunner(SPEC, RewardConfig(timeout_s=1.0)) as runner:
        runner.check(columns=["answer"])
        result = score(runner, completions, answer=["72", "3", "3", "1080", "3"])
    assert result.rewards == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert result.failed["timed_out"] >= 1
    assert result.failed["invalid"] == 0


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs {GSM8K}")
def test_gsm8k_solutions_are_right_and_their_neighbours_are_wrong() -> None:
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    answers = [solution.rpartition("#### ")[2] for solution in solutions]
    prompts = [""] * len(solutions)
    assert set(math_verify_reward(prompts, solutions, answer=answers)) == {1.0}
    boxed = [rf"So it is \boxed{{{answer}}}." for answer in answers]
    assert set(math_verify_reward(prompts, boxed, answer=solutions)) == {1.0}
    wrong = [re.sub(r"#### .*", lambda match: match.group() + "1", solution) for solution in solutions]
    assert set(math_verify_reward(prompts, wrong, answer=answers)) == {0.0}
