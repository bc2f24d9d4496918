"""What drafts gain from the completions of earlier epochs (`drafting.py --parts epochs`): GRPO runs over few prompts.

All runs generate the same tokens: `batch_invariant` gives rows the same bits in any batch, so that drafts change none.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, TypeVar

from algos.tasks.arithmetic import ArithmeticTask
from engines.json_files import read_jsonl
from engines.progress import Bar
from experiments import launch
from experiments.comparison.turns import short

T = TypeVar("T")
EPOCHS, PROMPTS, PROMPTS_PER_STEP, GROUP = 3, 64, 8, 16
OPTIONS = (
    *("--deterministic", "--wandb", "off", "--no-figures", "--eval-every", "0", "--save-every", "0", "--task", "jsonl"),
    *("--reward", "algos.rewards.arithmetic:exact_answer", "--rollout.batch-invariant"),
    *("--rollout.group-size", str(GROUP), "--rollout.max-num-seqs", "16"),
)
DRAFTS = ("--rollout.drafter", "grouped_suffix", "--rollout.draft-lengths", "fixed")
VARIANTS: dict[str, Sequence[str]] = {
    "plain": (),
    "group": DRAFTS,
    "history": (*DRAFTS, "--rollout.draft-history-mib", "64"),
    "group again": DRAFTS,
}
"""The group's own samples alone, or with what earlier epochs have generated. A/A: the same once more."""


def measure(
    model: Path,
    turns: int,
    *,
    num_prompts: int = PROMPTS,
    per_step: int = PROMPTS_PER_STEP,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Tokens of a sequence and step, and the rollouts' seconds, by variant and epoch; tokens of a sequence and step by
    the age of the newest earlier completion; and whether all runs have drawn the same tokens. A rollout does the same
    work in each of the interleaved turns, so the least of its times counts: others may have used the cores meanwhile.

    `options` are further ones of `train.py`. Raises ValueError if training fails; its own error is then on stderr.
    """
    steps = num_prompts // per_step
    rows: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    digests: list[list[str]] = []
    with tempfile.TemporaryDirectory() as runs:
        data, held_out = Path(runs, "train.jsonl"), Path(runs, "held_out.jsonl")
        write_problems(data, held_out, num_prompts)
        always = [*OPTIONS, "--data", str(data), "--held-out-data", str(held_out), "--model", str(model)]
        always += ["--runs", runs, "--steps", str(EPOCHS * steps), "--rollout.prompts-per-step", str(per_step)]
        for turn, name in Bar(list(product(range(turns), VARIANTS)), desc="epochs", unit="run"):
            command = [str(Path(__file__).with_name("train.py")), *always, *options, *VARIANTS[name]]
            run = f"{name.replace(' ', '-')}-{turn}"
            folder = Path(launch.result_of([*command, "--name", run])["run_dir"])
            rows[name] = read_jsonl(folder / "metrics.jsonl")
            seconds[name].append([row["timing_s/gen"] for row in rows[name]])
            digests.append([one["digest"] for one in read_jsonl(folder / "lengths.jsonl")])
    least = {name: [min(times) for times in zip(*some, strict=True)] for name, some in seconds.items()}
    spent = {name: [short(sum(part)) for part in by_epoch(some)] for name, some in least.items()}
    result = {
        "tokens_equal": all(one == digests[0] for one in digests),
        "tokens_per_step": {name: tokens_per_step(some) for name, some in rows.items()},
        "by_age": ages(rows["history"]),
        "rollout_seconds": spent,
        "speedup": ratios(spent["group"], spent["history"]),
        "a_a": ratios(spent["group"], spent["group again"]),
    }
    print(*(f"{name}: {value}" for name, value in result.items()), sep="\n", file=sys.stderr)
    return {"epochs": result}


def by_epoch(steps: Sequence[T]) -> list[Sequence[T]]:
    size = len(steps) // EPOCHS
    return [steps[first : first + size] for first in range(0, len(steps), size)]


def tokens_per_step(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The mean of each epoch's steps; without a drafter a sequence gets one token a step."""
    name = "rollout/tokens_per_step"
    return [short(statistics.fmean(row.get(name, 1.0) for row in part)) for part in by_epoch(rows)]


def write_problems(data: Path, held_out: Path, num_prompts: int) -> None:
    """Additions that are all different, and another one that is held out: a task needs it."""
    task, problems = ArithmeticTask(), dict[str, str]()
    for index in count():
        problem = task.train_problem(index)
        problems[str(problem.prompt)] = problem.columns["answer"]
        if len(problems) > num_prompts:
            break
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in problems.items()]
    data.write_text("".join(lines[:-1]))
    held_out.write_text(lines[-1])


def ages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over the steps in which there were sequences of this age."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix := "rollout/tokens_per_step/"):
                found.setdefault(name.removeprefix(prefix), []).append(value)
    return {name: short(statistics.fmean(values)) for name, values in sorted(found.items())}


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    return [short(one / two) for one, two in zip(base, other, strict=True)]
