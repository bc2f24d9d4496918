import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import pytest

from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from algos.rewards.arithmetic import exact_answer
from algos.rewards.math import math_verify_reward
from algos.tasks.arithmetic import ArithmeticTask, solution
from algos.tasks.gsm8k import Gsm8kTask
from algos.tasks.jsonl import JsonlTask
from algos.tasks.lookup import LookupTask
from algos.tasks.rows import read_rows
from algos.tasks.task import Problem, Task
from tests.algos.test_environments import Engine

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def operands(problem: Problem) -> frozenset[int]:
    a, b = problem.prompt.removesuffix("=").split("+")
    return frozenset((int(a), int(b)))


class TestArithmetic:
    def test_the_documented_example(self):
        problem = Problem(uid=0, prompt="123+989=", columns={"answer": "1112"})
        assert solution(problem) == "3+9+0=12;2+8+1=11;1+9+1=11;#1112"

    def test_solutions_are_right_and_rewarded(self):
        for problem in ArithmeticTask(seed=3).held_out_problems(200):
            a, b = (int(number) for number in problem.prompt.removesuffix("=").split("+"))
            assert problem.columns == {"answer": str(a + b)}
            completion, carry, total = solution(problem), 0, 0
            for place, (x, y, carry_in, s) in enumerate(re.findall(r"(\d)\+(\d)\+(\d)=(\d+);", completion)):
                assert int(carry_in) == carry and int(x) + int(y) + carry == int(s)
                carry, digit = divmod(int(s), 10)
                total += digit * 10**place
            assert total + carry * 10 ** len(str(a)) == a + b
            assert exact_answer([problem.prompt], [completion], answer=[problem.columns["answer"]]) == [1.0]

    def test_a_problem_depends_on_seed_and_index_only(self):
        backwards = [ArithmeticTask(seed=5).train_problem(index) for index in reversed(range(50))]
        task = ArithmeticTask(seed=5)
        task.held_out_problems(7)
        assert [task.train_problem(index) for index in range(50)] == backwards[::-1]
        assert [ArithmeticTask(seed=6).train_problem(index) for index in range(50)] != backwards[::-1]

    def test_draws_do_not_change_between_versions(self):
        # A resumed run and a cached model rely on it.
        prompts = [ArithmeticTask(seed=0).train_problem(index).prompt for index in range(3)]
        assert prompts == ["696+689=", "11+58=", "3+1="]

    def test_no_sum_is_in_both_splits_whatever_the_seeds(self):
        # One and two digits: so few operands that draws alone would collide at once.
        tasks = [ArithmeticTask(seed=seed, median_digits=1, sigma=0.5, max_digits=2) for seed in (0, 1)]
        train = {operands(task.train_problem(index)) for task in tasks for index in range(3000)}
        held_out = {operands(problem) for problem in tasks[0].held_out_problems(1000)}
        assert not train & held_out
        # Both splits have operands of either length, in many digits' combinations.
        for split in (train, held_out):
            assert min(sum(max(pair) < 10 for pair in split), sum(min(pair) >= 10 for pair in split)) >= 4

    def test_both_splits_have_the_same_long_tail(self):
        task = ArithmeticTask()
        splits = [task.train_problem(index) for index in range(4000)], task.held_out_problems(4000)
        for problems in splits:
            lengths = sorted(len(solution(problem)) for problem in problems)
            assert 20 <= median(lengths) <= 40
            assert lengths[3960] > 5 * median(lengths)  # the 99th percentile
            assert lengths[-1] <= 10 * task.max_digits + task.max_digits + 2
        counts = [Counter(len(problem.columns["answer"]) for problem in problems) for problems in splits]
        assert abs(counts[0][2] - counts[1][2]) < 200

    def test_uids_never_meet(self):
        task = ArithmeticTask()
        uids = [task.train_problem(index).uid for index in range(100)]
        uids += [problem.uid for problem in task.held_out_problems(100)]
        assert len(set(uids)) == 200

    @pytest.mark.parametrize("field", [{"median_digits": 0.0}, {"sigma": -1.0}, {"max_digits": 0}])
    def test_a_bad_field_is_named(self, field):
        with pytest.raises(ValueError, match=rf"ArithmeticTask\.{next(iter(field))}=.*must be"):
            ArithmeticTask(**field)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("1+1+0=2;#2", 1.0),
        ("#2", 1.0),
        ("#3#2", 1.0),
        ("#2#3", 0.0),
        ("#2 ", 0.0),
        ("#02", 0.0),
        ("#", 0.0),
        ("2", 0.0),
        ("", 0.0),
    ],
)
def test_exact_answer_reads_what_follows_the_last_hash(completion, reward):
    assert exact_answer(["1+1="], [completion], answer=["2"], uid=[0]) == [reward]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"Question {index}?", "answer": f"So\n#### {index},000"} for index in range(count)]


class TestGsm8k:
    def test_epochs_are_different_permutations_of_the_training_rows(self, tmp_path):
        task = Gsm8kTask(data=write_jsonl(tmp_path / "a.jsonl", rows(40)), held_out_fraction=0.25, seed=1)
        epochs = [[task.train_problem(30 * epoch + index).prompt for index in range(30)] for epoch in range(3)]
        assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) and len(set(epochs[0])) == 30
        assert epochs[0] != epochs[1] != epochs[2]
        held_out = {problem.prompt for problem in task.held_out_problems(1000)}
        assert len(held_out) == 10 and not held_out & set(epochs[0])
        assert len({task.train_problem(index).uid for index in range(90)}) == 90

    def test_another_process_or_seed(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", rows(40))
        first, again, other = (Gsm8kTask(data=path, seed=seed) for seed in (1, 1, 2))
        order = [[task.train_problem(index) for index in (9, 50, 3)] for task in (first, again, other)]
        assert order[0] == order[1] != order[2]
        assert first.held_out_problems(9) == other.held_out_problems(9)

    def test_answer_and_template(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", [rows(1)[0], {"question": "B {x}?", "answer": "#### $1,234 "}])
        task = Gsm8kTask(data=path, prompt_template="Q {question} in \\boxed{}:", held_out_fraction=0.5)
        problems = [task.train_problem(0), *task.held_out_problems(2)]
        assert {(problem.prompt, problem.columns["answer"]) for problem in problems} == {
            ("Q Question 0? in \\boxed{}:", "0000"),
            ("Q B {x}? in \\boxed{}:", "$1234"),
        }

    def test_repeated_questions_stay_on_one_side(self, tmp_path):
        task = Gsm8kTask(data=write_jsonl(tmp_path / "a.jsonl", rows(10) * 3), held_out_fraction=0.4)
        held_out = {problem.prompt for problem in task.held_out_problems(100)}
        assert len(held_out) == 4
        assert not held_out & {task.train_problem(index).prompt for index in range(18)}

    def test_a_held_out_file_is_not_trained_on(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", rows(10))
        held_out_path = write_jsonl(tmp_path / "b.jsonl", [*rows(4), {"question": "New?", "answer": "#### 5"}])
        task = Gsm8kTask(data=path, held_out_data=held_out_path)
        assert len(task.held_out_problems(99)) == 5
        held_out = {problem.prompt for problem in task.held_out_problems(5)}
        train = {task.train_problem(index).prompt for index in range(6)}
        assert len(train) == 6 and not train & held_out

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"question": "Q?", "ans', "not valid JSON"),
            ('{"question": "Q?"}', "'answer'"),
            ('{"answer": "#### 1"}', "'question'"),
            ('{"question": 7, "answer": "#### 1"}', "'question'"),
            ("[1, 2]", "holds a list; give an object"),
            ('{"question": "Q?", "answer": "42"}', "####"),
            ('{"question": "Q?", "answer": "so #### "}', "####"),
            ("\udcff", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
        ],
    )
    def test_an_unreadable_line_is_named(self, tmp_path, line, message):
        path = tmp_path / "bad.jsonl"
        good = json.dumps(rows(1)[0])
        path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
            Gsm8kTask(data=str(path)).train_problem(0)

    def test_missing_empty_and_too_small_files(self, tmp_path):
        with pytest.raises(ValueError, match=r"nowhere\.jsonl.*cannot be read"):
            Gsm8kTask(data=str(tmp_path / "nowhere.jsonl")).train_problem(0)
        with pytest.raises(ValueError, match=r"empty\.jsonl': is empty"):
            Gsm8kTask(data=write_jsonl(tmp_path / "empty.jsonl", [])).train_problem(0)
        with pytest.raises(ValueError, match=r"one\.jsonl: no question is left"):
            Gsm8kTask(data=write_jsonl(tmp_path / "one.jsonl", rows(1))).train_problem(0)

    def test_a_row_without_a_column_of_the_template_is_named_at_the_start(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", [{**row, "hint": "h"} for row in rows(30)] + rows(1))
        with pytest.raises(ValueError, match=r"a\.jsonl:31: has no column 'hint'"):
            Gsm8kTask(data=path, prompt_template="{question} {hint}").train_problem(0)

    @pytest.mark.parametrize("field", [{"held_out_fraction": 1.0}, {"prompt_template": "no place"}])
    def test_a_bad_field_is_named(self, tmp_path, field):
        path = write_jsonl(tmp_path / "a.jsonl", rows(4))
        with pytest.raises(ValueError, match=rf"Gsm8kTask\.{next(iter(field))}="):
            Gsm8kTask(data=path, **field)

    @pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k")
    def test_the_real_files(self):
        task = Gsm8kTask(data=str(GSM8K / "train.jsonl"), held_out_data=str(GSM8K / "test.jsonl"))
        problems = [task.train_problem(index) for index in range(7473)]
        held_out = task.held_out_problems(10_000)
        assert len({problem.prompt for problem in problems}) > 7400 and len(held_out) == 1319
        for problem in problems + held_out:
            float(problem.columns["answer"])
        assert not {problem.prompt for problem in problems} & {problem.prompt for problem in held_out}


OWN = [{"question": f"What is {n} + {n}?", "solution": 2 * n, "level": n % 3} for n in range(20)]
CHAT = [{"prompt": [{"role": "user", "content": f"{n}?"}], "best": [n, None]} for n in range(20)]


class TestJsonl:
    def test_every_other_column_goes_to_the_reward(self, tmp_path):
        task = JsonlTask(
            data=write_jsonl(tmp_path / "a.jsonl", OWN), prompt_column="question", answer_column="solution",
            held_out_fraction=0.25,
        )  # fmt: skip
        problems = [task.train_problem(index) for index in range(15)] + task.held_out_problems(99)
        assert len(problems) == 20 and len({problem.prompt for problem in problems}) == 20
        want = {row["question"]: {"answer": str(row["solution"]), **row} for row in OWN}
        for problem in problems:
            expected = {name: value for name, value in want[problem.prompt].items() if name != "question"}
            assert problem.columns == expected
            assert math_verify_reward([""], [f"so {problem.columns['answer']}"], **{
                name: [value] for name, value in problem.columns.items()
            }) == [1.0]  # fmt: skip
        assert task.reward == "algos.rewards.math:math_verify_reward"

    def test_messages_and_no_answer(self, tmp_path):
        task = JsonlTask(data=write_jsonl(tmp_path / "a.jsonl", CHAT))
        assert task.reward is None
        problem = task.train_problem(3)
        assert {"prompt": problem.prompt, **problem.columns} in CHAT
        assert not [one.prompt for one in task.held_out_problems(9) if one.prompt == problem.prompt]

    @pytest.mark.parametrize(
        ("template", "prompt"),
        [
            ("Level {level}: {question}", "Level 1: What is 1 + 1?"),
            (r"{question}\nAnswer:\t\\boxed{} {{x}}", "What is 1 + 1?\nAnswer:\t\\boxed{} {x}"),
            (r"{question} in \boxed{}", r"What is 1 + 1? in \boxed{}"),
        ],
    )
    def test_a_template_takes_columns_and_nothing_else(self, tmp_path, template, prompt):
        path = write_jsonl(tmp_path / "a.jsonl", [OWN[1], OWN[2]])
        task = JsonlTask(data=path, prompt_template=template, held_out_fraction=0.5)
        problems = [task.train_problem(0), *task.held_out_problems(1)]
        assert prompt in [problem.prompt for problem in problems]
        assert all("question" in problem.columns for problem in problems), "it is no prompt column, so a column"

    def test_what_a_template_fills_in_is_not_filled_again(self, tmp_path):
        rows = [{"a": "{b} \\n {a.__class__}", "b": n} for n in range(2)]
        task = JsonlTask(data=write_jsonl(tmp_path / "a.jsonl", rows), prompt_template="{a}{b}")
        assert task.train_problem(0).prompt[:-1] == "{b} \\n {a.__class__}"

    def test_duplicates_stay_on_one_side_and_missing_values_are_none(self, tmp_path):
        rows = [{"prompt": f"p{n % 5}", **({"hint": n} if n > 5 else {})} for n in range(20)]
        task = JsonlTask(data=write_jsonl(tmp_path / "a.jsonl", rows), held_out_fraction=0.4)
        held_out = {problem.prompt for problem in task.held_out_problems(99)}
        train = [task.train_problem(index) for index in range(12)]
        assert len(held_out) == 2 and not held_out & {problem.prompt for problem in train}
        assert Counter(problem.prompt for problem in train) == dict.fromkeys({f"p{n}" for n in range(5)} - held_out, 4)
        assert all("hint" in problem.columns for problem in train)

    @pytest.mark.parametrize(
        ("line", "options", "message"),
        [
            ('{"q": "x"}', {}, "no column 'prompt', only ['q']; give its name by --prompt-column"),
            ('{"prompt": null}', {}, "no column 'prompt', only []"),
            ('{"prompt": "x", "best": 1}', {"answer_column": "gold"}, "no column 'gold', only ['prompt', 'best']"),
            ('{"prompt": "x", "gold": [1]}', {"answer_column": "gold"}, "column 'gold' holds a list; it must be text"),
            ('{"prompt": "x", "gold": true}', {"answer_column": "gold"}, "column 'gold' holds true or false"),
            ('{"prompt": 7, "gold": 1}', {}, "column 'prompt' must hold text or a list of messages, not 7"),
            ('{"prompt": [{"role": "user"}]}', {}, "column 'prompt': message 0 (user) needs `content`"),
            ('{"prompt": [{"role": "user", "content": "x"}]}', {}, "column 'prompt' is of another type than"),
            ('{"prompt": "x", "gold": 1}', {"prompt_template": "{prompt} {level}"}, "has no column 'level', only"),
            ('"x"', {}, "holds text; give an object"),
            ('{"prompt": "x"', {}, "not valid JSON"),
            ('{"prompt": "x", "gold": 36893488147419103232}', {}, "holds no plain text and numbers of 64 bits"),
            ('{"prompt": "x", "gold": NaN}', {}, "not valid JSON (NaN is no finite number)"),
            ('{"prompt": "x", "gold": -Infinity}', {}, "not valid JSON (-Infinity is no finite number)"),
            ('{"prompt": "x", "gold": 1e999}', {}, "not valid JSON (1e999 is no finite number)"),
            ('{"prompt": "", "gold": 1}', {}, "the prompt is empty; give some text, or leave the row out"),
            (
                '{"prompt": ""}',
                {"prompt_column": "gold", "prompt_template": "{prompt}"},
                "the prompt is empty; give some text",
            ),
            ('{"prompt": "half a pair: \\ud83d"}', {}, "holds no plain text and numbers of 64 bits"),
        ],
    )
    def test_an_unusable_row_is_named(self, tmp_path, line, options, message):
        path = tmp_path / "bad.jsonl"
        good = json.dumps({"prompt": "p", "gold": "1", "level": 1})
        path.write_text(f"{good}\n\n{line}\n")
        with pytest.raises(ValueError, match=r"bad\.jsonl:3: ") as error:
            JsonlTask(data=str(path), **options).train_problem(0)
        assert message in str(error.value)

    def test_unusable_files_and_options(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", OWN)
        taken = write_jsonl(tmp_path / "taken.jsonl", [{"prompt": "x", "completions": 1}])
        for options, message in (
            ({"data": str(tmp_path / "nowhere")}, "data='.*/nowhere': cannot be read .No such file"),
            ({"data": write_jsonl(tmp_path / "e.jsonl", [])}, "data='.*/e.jsonl': is empty"),
            ({"data": path, "held_out_data": str(tmp_path / "e.jsonl")}, "held_out_data='.*/e.jsonl': is empty"),
            ({"data": taken}, "column 'completions' has the name of a reward's argument"),
            ({"data": path, "prompt_template": "no place"}, "JsonlTask.prompt_template='no place': must contain"),
            ({"data": path, "held_out_data": path}, "no question is left"),
        ):
            with pytest.raises(ValueError, match=message):
                column = {} if "taken" in options["data"] else {"prompt_column": "question"}
                JsonlTask(**column, **options).train_problem(0)

    @pytest.mark.parametrize("kind", ["parquet", "folder"])
    def test_tables_are_read_as_the_same_rows(self, tmp_path, kind):
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(OWN)
        path = tmp_path / f"own.{kind}"
        getattr(table, {"parquet": "to_parquet", "folder": "save_to_disk"}[kind])(str(path))
        options = {"prompt_column": "question", "held_out_fraction": 0.25}
        tasks = [JsonlTask(data=one, **options) for one in (str(path), write_jsonl(tmp_path / "a.jsonl", OWN))]
        for problems in zip(*([task.train_problem(i) for i in range(15)] for task in tasks), strict=True):
            assert problems[0] == problems[1]
        assert tasks[0].held_out_problems(9) == tasks[1].held_out_problems(9)

    def test_structs_of_a_table_have_the_fields_of_their_row_alone(self, tmp_path):
        """Arrow gives all structs of a column the same fields."""
        datasets = pytest.importorskip("datasets")
        calls = [[{"name": "f", "arguments": one}] for one in ({"city": "Rome"}, {"days": [3, None]})]
        rows = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": one}], "hint": hint}
            for one, hint in zip(calls, (None, "h"), strict=True)
        ]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
        assert [row.values for row in read_rows("data", str(tmp_path / "a.parquet"))] == rows

    @pytest.mark.parametrize("text", ['[\n {"prompt": "x"}\n]', '[{"prompt": "x"}]', "prompt,answer\nx,1\n"])
    def test_an_array_or_csv_is_told_the_right_form(self, tmp_path, text):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=r"a\.json:1: .*must have one JSON object on each line"):
            read_rows("data", str(tmp_path / "a.json"))

    def test_dates_of_pandas_are_text(self, tmp_path):
        pandas = pytest.importorskip("pandas")
        dates = pandas.to_datetime(["2026-01-02 03:04", "2026-05-06 00:00"]).as_unit("ns")
        pandas.DataFrame({"prompt": ["a", "b"], "date": dates}).to_parquet(tmp_path / "a.parquet")
        rows = read_rows("data", str(tmp_path / "a.parquet"))
        assert [row.values["date"] for row in rows] == ["2026-01-02 03:04:00", "2026-05-06 00:00:00"]

    @pytest.mark.parametrize("text", ["[]", "{", '{"_data_files": 3}'])
    def test_a_damaged_folder_is_named(self, tmp_path, text):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(OWN).save_to_disk(str(tmp_path / "own"))
        (tmp_path / "own" / "state.json").write_text(text)
        with pytest.raises(ValueError, match="own: is no parquet file or folder that `datasets` has saved"):
            read_rows("data", str(tmp_path / "own"))

    def test_splits_and_broken_tables_are_told(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        datasets.DatasetDict(test=datasets.Dataset.from_list(OWN)).save_to_disk(str(tmp_path / "both"))
        (tmp_path / "x.parquet").write_text("no table")
        with pytest.raises(ValueError, match=r"both: holds the splits \['test'\]; give the folder of one: .*both/test"):
            JsonlTask(data=str(tmp_path / "both")).train_problem(0)
        for name in ("x.parquet", ""):
            with pytest.raises(ValueError, match="is no parquet file or folder that `datasets` has saved"):
                JsonlTask(data=str(tmp_path / name)).train_problem(0)

    def test_without_the_library_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ValueError, match=r"is read by the library datasets, which is missing .*; pip install"):
            JsonlTask(data=str(tmp_path)).train_problem(0)


def test_all_are_tasks(tmp_path):
    gsm8k, own = (write_jsonl(tmp_path / f"{name}.jsonl", data) for name, data in (("a", rows(4)), ("b", CHAT)))
    tasks: list[Task] = [ArithmeticTask(), Gsm8kTask(data=gsm8k), JsonlTask(data=own)]
    assert [task.reward and task.reward.count(":") for task in tasks] == [1, 1, None]


def walk(problem: Problem) -> list[str]:
    """What queries find, by a walk through the table: keys, and the word at the end."""
    table, found = dict(problem.columns["rows"]), [problem.prompt.removeprefix("key ").removesuffix("\n")]
    while found[-1].isdigit():
        found.append(table[int(found[-1])])
    return found[1:]


class TestLookup:
    def test_demonstrations_follow_the_chain(self):
        for problem in LookupTask(seed=3).held_out_problems(100):
            start, found, guess = problem.prompt[4:7], walk(problem), problem.columns["guess"]
            queries = [f"SELECT v FROM t WHERE k={key}" for key in (start, *found[:-1])]
            answers = [f"\n{guess} {found[0]}\n", *(f"\n{one}\n" for one in found[1:])]
            parts = LookupTask().demonstration(problem)
            assert [part.text for part in parts if not part.observed] == [*queries, f"={problem.columns['answer']}"]
            assert [part.text for part in parts if part.observed] == answers
            assert [part.observed for part in parts] == [False, True] * len(found) + [False]
            assert (
                found[-1] == problem.columns["answer"] and 1 <= len(found) <= 9 and len(problem.columns["rows"]) == 24
            )

    def test_hops_are_log_normal_with_a_tail_that_is_cut(self):
        task = LookupTask(num_rows=1)
        splits = [task.train_problem(index) for index in range(2000)], task.held_out_problems(2000)
        for problems in splits:
            hops, logarithm = Counter(len(walk(problem)) for problem in problems), NormalDist(math.log(2.0), 0.8)
            for most in range(1, 9):
                share = sum(hops[number] for number in range(1, most + 1)) / 2000
                assert share == pytest.approx(logarithm.cdf(math.log(most + 0.5)), abs=0.03)
            assert hops[9] > 30 and max(hops) == 9

    def test_four_guesses_in_five_are_right(self):
        guesses = Counter()
        for problem in LookupTask(num_rows=1).held_out_problems(2000):
            hops = len(walk(problem))
            guesses["short" if hops <= 2 else "medium" if hops <= 4 else "long", problem.columns["guess"]] += 1
        assert len(guesses) == 9
        assert sum(count for (right, guess), count in guesses.items() if right == guess) == pytest.approx(1600, abs=50)

    def test_no_word_is_in_both_splits_whatever_the_seeds(self):
        tasks = [LookupTask(seed=seed, num_rows=1) for seed in (0, 1)]
        train = {task.train_problem(index).columns["answer"] for task in tasks for index in range(1000)}
        held_out = {problem.columns["answer"] for problem in tasks[0].held_out_problems(1000)}
        assert not train & held_out and min(len(train), len(held_out)) > 700
        uids = {problem.uid for problem in [*tasks[0].held_out_problems(9), *map(tasks[0].train_problem, range(9))]}
        assert len(uids) == 18

    def test_draws_do_not_change_between_versions(self):
        problems = [LookupTask(seed=0).train_problem(index) for index in range(3)]
        assert [(problem.prompt, problem.columns["answer"]) for problem in problems] == [
            ("key 373\n", "pca"),
            ("key 188\n", "aje"),
            ("key 627\n", "div"),
        ]

    def test_the_real_tool_answers_as_demonstrated_and_rewards_the_right_word(self):
        task = LookupTask()
        with EnvironmentPool(task.environment, EnvironmentConfig(workers=2)) as pool:
            engine = Engine(pool)
            for problem in task.held_out_problems(12):
                assert engine.begin(problem.uid, **problem.columns).text is None
                *parts, last = task.demonstration(problem)
                for turn, answer in zip(parts[::2], parts[1::2], strict=True):
                    assert engine.step(problem.uid, turn.text).text == answer.text
                is_right = problem.uid % 2 == 0
                engine.step(problem.uid, last.text if is_right else f"{last.text}x")
                assert engine.end(problem.uid) == float(is_right)
            first = task.train_problem(0)
            engine.begin(1, **first.columns)
            for query, answer in [
                ("SELECT v FRO t", "\nshort error: near"),
                ("SELECT v FROM t WHERE k=99", "\nno rows\n"),
                ("SELECT 1; SELECT 2", "\nerror: You can only execute one statement"),
                ("SELECT '\0'", "\nerror: "),
                ("UPDATE t SET v='abc'", "\nerror: not authorized"),
                ("373", "\nerror: near"),
                ("SELECT count(*) FROM t", "\n24\n"),
            ]:
                assert engine.step(1, query).text.startswith(answer)
            assert engine.step(1, "=pca").done and engine.end(1) == 1.0 and not pool.failures

    @pytest.mark.parametrize("field", [{"median_hops": 0.0}, {"sigma": -1.0}, {"max_hops": 0}, {"num_rows": 901}])
    def test_a_bad_field_is_named(self, field):
        with pytest.raises(ValueError, match=rf"LookupTask\.{next(iter(field))}=.*must be"):
            LookupTask(**field)
