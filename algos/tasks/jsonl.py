"""A user's own data: prompts, and columns for the reward, from a file or a folder. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from algos.tasks.gsm8k import HeldOutFraction
from algos.tasks.rows import Row, check_template, column, draw, fill, read_rows, split, text
from algos.tasks.task import Problem
from engines.constraints import check_fields
from engines.models.chat import Messages, check_messages


@dataclass(frozen=True, kw_only=True)
class JsonlTask:
    """Prompts of a data set. Every column but the prompt's goes to the reward under its name.

    The first call reads the files. It raises ValueError, with file and line number, for a file that cannot be used.
    """

    data: str
    """JSONL or parquet file, or folder that `datasets` has saved, to train on."""
    held_out_data: str | None = None
    """The same with held-out prompts, which are never trained on; None holds out a part of `data`."""
    held_out_fraction: HeldOutFraction = 0.05
    """Share of the prompts of `data` that is held out without `held_out_data`; a hash of the prompt picks them."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages, the same on all rows."""
    prompt_template: str | None = None
    """The prompt as text from one or more columns: {column} is replaced, {{ and }} are braces, \\n is a new line."""
    answer_column: str | None = None
    """Column with the right answer, text or a number, which the reward gets as `answer`. Without --reward a completion
    gets 1 if its final answer equals it, as math-verify compares, else 0 (algos/rewards/math.py)."""
    seed: int = 0
    """Seed of the order of the training problems in each epoch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prompt_template is not None:
            check_template("JsonlTask.prompt_template", self.prompt_template)

    @property
    def reward(self) -> str | None:
        return "algos.rewards.math:math_verify_reward" if self.answer_column else None

    def train_problem(self, index: int) -> Problem:
        return self._problem(index, draw(self._splits[0], index, self.seed))

    def held_out_problems(self, count: int) -> list[Problem]:
        return [self._problem(-1 - index, row) for index, row in enumerate(self._splits[1][:count])]

    def _problem(self, uid: int, row: Row) -> Problem:
        columns = {name: value for name, value in row.values.items() if name != self.prompt_column}
        if self.answer_column:
            columns["answer"] = text(row, self.answer_column, "--answer-column")
        return Problem(uid=uid, prompt=self._prompt(row), columns=columns)

    def _prompt(self, row: Row) -> str | Messages:
        given = self.prompt_template
        prompt = column(row, self.prompt_column, "--prompt-column") if given is None else fill(given, row)
        if prompt == "":
            raise ValueError(f"{row.place}: the prompt is empty; give some text, or leave the row out")
        where = f"{row.place}: column {self.prompt_column!r}"
        if not isinstance(prompt, str | list):
            raise ValueError(f"{where} must hold text or a list of messages, not {repr(prompt)[:80]}")
        if isinstance(prompt, list):
            check_messages(prompt, where)
        return prompt

    @cached_property
    def _splits(self) -> tuple[list[Row], list[Row]]:
        held_out = None if self.held_out_data is None else self._read("held_out_data", self.held_out_data)
        rows = self._read("data", self.data)
        return split(rows, held_out, self.held_out_fraction, self._key, self.data)

    def _key(self, row: Row) -> str:
        return json.dumps(self._prompt(row))

    def _read(self, option: str, path: str) -> list[Row]:
        rows = read_rows(option, path)
        if taken := {"prompts", "completions"} & rows[0].values.keys():
            raise ValueError(f"{path}: column {min(taken)!r} has the name of a reward's argument; rename it")
        is_text = [isinstance(self._problem(0, row).prompt, str) for row in rows]  # makes each problem once: a check
        if len(set(is_text)) > 1:
            place = rows[is_text.index(not is_text[0])].place
            raise ValueError(f"{place}: column {self.prompt_column!r} is of another type than in the rows before it")
        return rows
