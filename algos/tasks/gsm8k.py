"""Grade-school word problems from a GSM8K file (or a file of the same form). Torch-free."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta

from algos.environments.builtin import calculator
from algos.tasks.rows import Row, check_template, draw, fill, read_rows, split
from algos.tasks.task import Part, Problem
from engines.constraints import check_fields

HeldOutFraction = Annotated[float, Meta(gt=0, lt=1, description="between 0 and 1")]
_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)(?:/\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Gsm8kTask:
    """Problems of rows with a `question` and an `answer` that ends in `#### 42`; other columns go to the reward.

    The first call reads the files. It raises ValueError, with file and line number, for a file that cannot be used.
    """

    reward: ClassVar[str] = "algos.rewards.math:math_verify_reward"

    data: str
    """JSONL or parquet file, or folder that `datasets` has saved, to train on."""
    held_out_data: str | None = None
    """The same with held-out problems, whose questions are never trained on; None holds out a part of `data`."""
    held_out_fraction: HeldOutFraction = 0.05
    """Share of the questions of `data` that is held out without `held_out_data`; a hash of the question picks them."""
    prompt_template: str = (
        "Question: {question}\nReason step by step, then write the final answer in \\boxed{}.\nAnswer:"
    )
    """The prompt: {column} is replaced, {{ and }} are braces, \\n is a new line."""
    calculator: bool = False
    """Completions are trajectories: `<<48/2>>` at the end of a turn calls a calculator, whose result is observed. A
    call that it can compute is rewarded by 0.1. Without --model the tiny model is first shown such trajectories."""
    seed: int = 0
    """Seed of the order of the training problems in each epoch."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_template("Gsm8kTask.prompt_template", self.prompt_template)

    @property
    def environment(self) -> str | None:
        return "algos.environments.gsm8k:Gsm8kCalculator" if self.calculator else None

    def train_problem(self, index: int) -> Problem:
        return self._problem(index)

    def held_out_problems(self, count: int) -> list[Problem]:
        return [self._problem(-1 - index) for index in range(min(count, len(self._splits[1])))]

    def demonstration(self, problem: Problem) -> list[Part]:
        """The row's answer without its annotations, or with calls in their place, and what the calculator says in place
        of the number behind them. An annotation that the calculator cannot compute stays as it is."""
        answer, parts, start = self._row(problem.uid).values["answer"], list[Part](), 0
        if not self.calculator:
            return [Part(text=_ANNOTATION.sub("", answer))]
        for found in _ANNOTATION.finditer(answer):
            with contextlib.suppress(ValueError, ZeroDivisionError):
                value = calculator(found[1])
                call = f"{answer[start : found.start()]}<<{found[1]}>>"
                parts += [Part(text=call), Part(text=value, observed=True)]
                number = _NUMBER.match(answer, found.end())
                start = number.end() if number else found.end()
        return [*parts, Part(text=answer[start:])]

    def _row(self, uid: int) -> Row:
        train, held_out = self._splits
        return draw(train, uid, self.seed) if uid >= 0 else held_out[-1 - uid]

    def _problem(self, uid: int) -> Problem:
        row = self._row(uid)
        columns = {name: value for name, value in row.values.items() if name != "question"}
        columns["answer"] = _final_answer(row)
        return Problem(uid=uid, prompt=fill(self.prompt_template, row), columns=columns)

    @cached_property
    def _splits(self) -> tuple[list[Row], list[Row]]:
        held_out = None if self.held_out_data is None else self._read("held_out_data", self.held_out_data)
        rows = self._read("data", self.data)
        return split(rows, held_out, self.held_out_fraction, lambda row: row.values["question"], self.data)

    def _read(self, option: str, path: str) -> list[Row]:
        rows = read_rows(option, path)
        for row in rows:  # a check of each
            _final_answer(row)
            fill(self.prompt_template, row)
        return rows


def _final_answer(row: Row) -> str:
    for name in ("question", "answer"):
        if not isinstance(row.values.get(name), str):
            raise ValueError(f"{row.place}: no text field {name!r}; expected an object with 'question' and 'answer'")
    _, marker, final = row.values["answer"].rpartition("####")
    # GSM8K groups thousands: "#### 1,000".
    final = final.strip().replace(",", "")
    if not marker or not final:
        raise ValueError(f"{row.place}: field 'answer' does not end in '#### <final answer>'; add it, or drop the line")
    return final
