"""Grade-school word problems from a GSM8K file (or a file of the same form). Torch-free."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar

from msgspec import Meta

from algos.tasks.task import Problem
from engines.constraints import check_fields

Row = tuple[str, str]
"""Question, and final answer."""


@dataclass(frozen=True, kw_only=True)
class Gsm8kTask:
    """Problems of a JSONL file with a `question` and an `answer` that ends in `#### 42`.

    The constructor reads the files. It raises ValueError, with file and line number, for a file that cannot be used.
    """

    reward: ClassVar[str] = "algos.rewards.math:math_verify_reward"

    path: str
    """JSONL file to train on."""
    held_out_path: str | None = None
    """JSONL file of held-out problems, whose questions are never trained on; None holds out a part of `path`."""
    held_out_fraction: Annotated[float, Meta(gt=0, lt=1, description="between 0 and 1")] = 0.05
    """Share of `path`'s questions held out when there is no `held_out_path`; a hash of the question picks them."""
    template: str = "Question: {question}\nReason step by step, then write the final answer in \\boxed{}.\nAnswer:"
    """The prompt; only `{question}` is replaced, other braces stay as they are."""
    seed: int = 0
    """Seed of the order of the training problems in each epoch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if "{question}" not in self.template:
            raise ValueError(f"Gsm8kTask.template={self.template!r}: must contain {{question}}")
        self._splits  # noqa: B018 - a bad file is an error here, not in the middle of a run

    def train_problem(self, index: int) -> Problem:
        rows, _ = self._splits
        epoch, position = divmod(index, len(rows))
        return self._problem(index, rows[_permutation(self.seed, epoch, len(rows))[position]])

    def held_out_problems(self, count: int) -> list[Problem]:
        _, rows = self._splits
        return [self._problem(-1 - index, row) for index, row in enumerate(rows[:count])]

    def _problem(self, uid: int, row: Row) -> Problem:
        question, answer = row
        # Not str.format, since the template contains literal braces (\boxed{}).
        return Problem(uid=uid, prompt=self.template.replace("{question}", question), columns={"answer": answer})

    @cached_property
    def _splits(self) -> tuple[list[Row], list[Row]]:
        """Training and held-out rows. A question is in one of them only, however often the files repeat it."""
        rows = _read(self.path)
        if self.held_out_path is not None:
            held_out = _read(self.held_out_path)
            questions = {question for question, _ in held_out}
        else:
            by_hash = sorted({question for question, _ in rows}, key=_hash)
            questions = set(by_hash[: max(1, round(len(by_hash) * self.held_out_fraction))])
            held_out = [row for row in rows if row[0] in questions]
        train = [row for row in rows if row[0] not in questions]
        if not train:
            raise ValueError(f"{self.path}: no question is left to train on beside the held-out ones; add more")
        return train, held_out


def _read(path: str) -> list[Row]:
    """Raises ValueError for a file that is missing, empty or unreadable, naming the line where there is one."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"path={path!r}: cannot be read ({error.strerror}); give a GSM8K JSONL file") from None
    rows = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path}: is empty; expected one JSON object per line with 'question' and 'answer'")
    return rows


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); the file may be truncated") from None
    for name in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(name), str):
            raise ValueError(f"{where}: no text field {name!r}; expected an object with 'question' and 'answer'")
    _, marker, final = row["answer"].rpartition("####")
    # GSM8K groups thousands: "#### 1,000".
    final = final.strip().replace(",", "")
    if not marker or not final:
        raise ValueError(f"{where}: field 'answer' does not end in '#### <final answer>'; add it, or drop the line")
    return row["question"], final


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order


def _hash(question: str) -> bytes:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()
