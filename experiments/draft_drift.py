"""How acceptance drifts while training changes the model (`drafting.py --parts drift`): one GRPO run per drafter.

The runs generate the same tokens, since drafts change none: in float64, where no rounding changes a draw.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.json_files import read_jsonl
from engines.progress import Bar
from experiments import launch
from experiments.comparison.turns import short

FEW = 5
"""Steps whose mean is compared at both ends."""
OPTIONS = (
    *("--deterministic", "--wandb", "off", "--no-figures"),
    *("--rollout.draft-lengths", "fixed", "--rollout.dtype", "float64"),
    *("--rollout.prompts-per-step", "12", "--rollout.group-size", "16", "--rollout.max-num-seqs", "16"),
    *("--mini-batch-size", "192", "--eval-every", "1000", "--eval-problems", "8", "--eval-samples", "1"),
)


def measure(model: Path, steps: int, drafters: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """{drafter: the share of its drafted tokens that were drawn, by step}, how the ends differ, and whether all runs
    have drawn the same tokens.

    `drafters` are the options of `train.py` that choose each one, by its name. Raises ValueError if training fails; its
    own error is then on stderr.
    """
    found: dict[str, list[float]] = {}
    digests: list[list[str]] = []
    with tempfile.TemporaryDirectory() as runs:
        for drafter, options in Bar(drafters.items(), desc="drift", unit="run"):
            command = [str(Path(__file__).with_name("train.py")), *OPTIONS, "--steps", str(steps)]
            command += ["--model", str(model), "--runs", runs, "--name", drafter, *options]
            folder = Path(launch.result_of(command)["run_dir"])
            metrics = read_jsonl(folder / "metrics.jsonl")
            found[drafter] = [short(one["rollout/draft_acceptance"]) for one in metrics[1:]]
            digests.append([one["digest"] for one in read_jsonl(folder / "lengths.jsonl")])
    change = {
        drafter: {
            "first": short(statistics.fmean(shares[:FEW])),
            "last": short(statistics.fmean(shares[-FEW:])),
            "slope": short(statistics.linear_regression(range(len(shares)), shares).slope),
        }
        for drafter, shares in found.items()
    }
    print(*(f"{drafter}: {one}" for drafter, one in change.items()), sep="\n", file=sys.stderr)
    equal = all(one == digests[0] for one in digests)
    return {"drift": {"acceptance": found, "change": change, "tokens_equal": equal}}
