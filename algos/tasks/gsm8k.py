"""Grade-school word problems from a GSM8K file (or a file of the same form). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta

from algos.tasks.rows import Row, check_template, draw, fill, read_rows, split
from algos.tasks.task import Problem
from engines.constraints import check_fields

HeldOutFraction = Annotated[float, Meta(gt=0, lt=1, description="between 0 and 1")]


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
    seed: int = 0
    """Seed of the order of the training problems in each epoch."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_template("Gsm8kTask.prompt_template", self.prompt_template)

    def train_problem(self, index: int) -> Problem:
        return self._problem(index, draw(self._splits[0], index, self.seed))

    def held_out_problems(self, count: int) -> list[Problem]:
        return [self._problem(-1 - index, row) for index, row in enumerate(self._splits[1][:count])]

    def _problem(self, uid: int, row: Row) -> Problem:
        columns = {name: value for name, value in row.values.items() if name != "question"}
        return Problem(uid=uid, prompt=fill(self.prompt_template, row), columns=columns)

    @cached_property
    def _splits(self) -> tuple[list[Row], list[Row]]:
        held_out = None if self.held_out_data is None else self._read("held_out_data", self.held_out_data)
        rows = self._read("data", self.data)
        return split(rows, held_out, self.held_out_fraction, lambda row: row.values["question"], self.data)

    def _read(self, option: str, path: str) -> list[Row]:
        rows = [_with_final_answer(row) for row in read_rows(option, path)]
        fill(self.prompt_template, rows[0])
        return rows


def _with_final_answer(row: Row) -> Row:
    for name in ("question", "answer"):
        if not isinstance(row.values.get(name), str):
            raise ValueError(f"{row.place}: no text field {name!r}; expected an object with 'question' and 'answer'")
    _, marker, final = row.values["answer"].rpartition("####")
    # GSM8K groups thousands: "#### 1,000".
    final = final.strip().replace(",", "")
    if not marker or not final:
        raise ValueError(f"{row.place}: field 'answer' does not end in '#### <final answer>'; add it, or drop the line")
    return Row(row.place, row.values | {"answer": final})
