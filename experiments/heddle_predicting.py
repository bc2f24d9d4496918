"""How well the lengths of trajectories are predicted: before the first turn, after one, after two. Heddle, Fig. 13.

    python experiments/heddle_predicting.py --gsm8k train.jsonl --gsm8k-held-out test.jsonl
    python experiments/heddle_predicting.py --lookup-problems 1000 --held-out 500       # lookup alone

The trajectories are demonstrations: the annotated solutions of GSM8K, whose calls the calculator computes, and chains
of `lookup`. A predictor is fitted on those of the training problems, and judged on those of held-out ones, by total
lengths. `linear` is least squares on plain counts. `remaining` are the figures of both by remaining lengths, `shuffled`
those of the same predictor fitted on shuffled labels, means over several shuffles. `lookup` says nothing before its
first answer: no predictor can be better than 0 until turn 2.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos.tasks.gsm8k import Gsm8kTask
from algos.tasks.lookup import LookupTask
from algos.tasks.task import Demonstrated, Problem
from algos.trajectory_lengths import Trajectory, pearson, plain_counts, recall
from engines.constraints import Count, WholeNumber, check_fields
from experiments import launch
from experiments.comparison.machine import this_tier
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import short
from experiments.heddle_options import check_gsm8k
from experiments.trained import trained

if TYPE_CHECKING:
    import numpy as np

    from engines.models.chat import ChatTemplate

NUM_QUANTILES = 41
"""From the smallest residual to the largest one, at equal distances."""
STAGES = (0, 1, 2)
"""Ended turns."""
_NUM_SHUFFLES = 8
_NUM_ASKS = 100
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class PredictingConfig(ResultOptions):
    """Fit length predictors, and measure their errors on prompts that they have not seen."""

    gsm8k: Path | None = None
    """GSM8K's training file; without it only `lookup` is measured."""
    gsm8k_held_out: Path | None = None
    """GSM8K's test file."""
    gsm8k_problems: Count = 7473
    """Training problems of GSM8K that are learnt from."""
    lookup_problems: Count = 4000
    """Training problems of `lookup` that are learnt from."""
    held_out: Count = 1319
    """Problems of each task that are predicted."""
    models: Path = Path("runs/models")
    """Folder of the embedded models, which are made there if they are missing."""
    seed: WholeNumber = 0
    """Of the problems and the fits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        check_gsm8k(self.gsm8k, self.gsm8k_held_out)


def tasks(config: PredictingConfig) -> dict[str, tuple[Demonstrated, int]]:
    found: dict[str, tuple[Demonstrated, int]] = {"lookup": (LookupTask(seed=config.seed), config.lookup_problems)}
    if config.gsm8k is not None:
        held_out = None if config.gsm8k_held_out is None else str(config.gsm8k_held_out)
        found["gsm8k"] = (
            Gsm8kTask(
                data=str(config.gsm8k), held_out_data=held_out, calculator=True, prompt_template="{question}\\n",
                seed=config.seed,
            ),
            config.gsm8k_problems,
        )  # fmt: skip
    return found


def demonstrated(template: ChatTemplate, task: Demonstrated, problems: Iterable[Problem]) -> list[Trajectory]:
    """The demonstrations as finished trajectories."""
    from algos.warmstart import example_of
    from engines.sequence import Completion

    found = []
    for problem in problems:
        example = example_of(template, task, problem)
        mask, first = example.loss_mask, example.num_prompt_tokens
        edges = [place for place, (a, b) in enumerate(pairwise([True, *mask, True])) if a != b]
        completion = Completion(
            index=0, token_ids=example.tokens[first:], logprobs=[0.0] * len(mask), versions=[0] * len(mask),
            finish_reason="stop", observed=[(0, 0), *zip(edges[::2], edges[1::2], strict=True)],
        )  # fmt: skip
        found.append(Trajectory.of((0, problem.uid, 0), example.tokens[:first], completion))
    return found


def shuffled(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """Each place gets the remaining length of another one."""
    import numpy as np

    lengths = [place.remaining for one in trajectories for place in one.places]
    taken = iter(np.random.default_rng(seed).permutation(lengths).tolist())
    return [replace(one, places=[replace(at, remaining=next(taken)) for at in one.places]) for one in trajectories]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Held-out trajectories at all of their places."""

    turns: np.ndarray
    generated: np.ndarray
    remaining: np.ndarray

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> Judged:
        import numpy as np

        places = [place for one in trajectories for place in one.places]
        columns = np.array([(at.num_turns, at.num_generated, at.remaining) for at in places], dtype=np.float64)
        return Judged(turns=columns[:, 0], generated=columns[:, 1], remaining=columns[:, 2])

    def figures(self, predicted: np.ndarray, *, of_total: bool = True) -> Figures:
        """By ended turns: correlation of the predicted length with the true one, and recall of the long tail; of the
        total length, of which the generated tokens are known, or of the remaining one."""
        found, known = {}, self.generated if of_total else 0.0
        for stage in STAGES:
            here = self.turns == stage
            guess, true = (known + predicted)[here].tolist(), (known + self.remaining)[here].tolist()
            found[str(stage)] = {"pearson": short(pearson(guess, true)), "recall": short(recall(guess, true))}
        return found

    def residuals(self, predicted: np.ndarray) -> dict[str, list[float]]:
        """By ended turns: quantiles of log((1 + true) / (1 + predicted)) of the remaining tokens."""
        import numpy as np

        ratios = np.log((1 + self.remaining) / (1 + predicted))
        shares = np.linspace(0, 1, NUM_QUANTILES)
        return {str(one): [short(x) for x in np.quantile(ratios[self.turns == one], shares)] for one in STAGES}

    def spread(self) -> dict[str, float]:
        """By ended turns: the deviation of log(1 + true), with which residuals of other lengths compare."""
        import numpy as np

        return {str(one): short(float(np.log1p(self.remaining[self.turns == one]).std())) for one in STAGES}


def least_squares(known: Sequence[Trajectory], unseen: Sequence[Trajectory]) -> np.ndarray:
    """The baseline: a linear fit on plain counts, one for each number of ended turns."""
    import numpy as np

    counts, wanted = (
        np.column_stack([(table := plain_counts([c for one in group for c in one.contexts])), np.ones(len(table))])
        for group in (known, unseen)
    )
    remaining = Judged.of(known).remaining
    predicted = np.full(len(wanted), remaining.mean())
    for stage in np.unique(wanted[:, 4]):
        here = counts[:, 4] == stage
        if here.sum() > counts.shape[1]:
            weights = np.linalg.lstsq(counts[here], remaining[here], rcond=None)[0]
            predicted[wanted[:, 4] == stage] = wanted[wanted[:, 4] == stage] @ weights
    return np.maximum(predicted, 0.0)


def measure(config: PredictingConfig) -> dict[str, Any]:
    """Returns the figures of all tasks: of the predictor, of the baseline, and of a predictor of shuffled labels."""
    import numpy as np

    from algos.length_predictor import apply_head, features_of, fit_head, read_trunk
    from algos.warmstart import template_of

    template, folder = template_of("draft-2l"), trained(config.models, "draft-2l")
    trunk = read_trunk(folder)
    names = ("predictor", "linear", "shuffled", "remaining", "mae", "residuals", "spread", "train_s")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    sample = list[Trajectory]()
    for name, (task, count) in tasks(config).items():
        known = demonstrated(template, task, (task.train_problem(index) for index in range(count)))
        unseen = demonstrated(template, task, task.held_out_problems(config.held_out))
        sample, judged, start = unseen, Judged.of(unseen), time.perf_counter()
        features = features_of(trunk, known)
        head, _ = fit_head(features, known, config.seed)
        found["train_s"][name] = short(time.perf_counter() - start)
        wanted = features_of(trunk, unseen)
        guesses = {"predictor": apply_head(head, wanted), "linear": least_squares(known, unseen)}
        for way, guess in guesses.items():
            found[way][name] = judged.figures(guess)
        found["remaining"][name] = {way: judged.figures(guess, of_total=False) for way, guess in guesses.items()}
        found["mae"][name] = {way: short(float(abs(one - judged.remaining).mean())) for way, one in guesses.items()}
        found["residuals"][name] = judged.residuals(guesses["predictor"])
        found["spread"][name] = judged.spread()
        heads = [fit_head(features, shuffled(known, seed), seed)[0] for seed in range(_NUM_SHUFFLES)]
        tables = [judged.figures(apply_head(one, wanted), of_total=False) for one in heads]
        found["shuffled"][name] = {
            stage: {figure: short(float(np.mean([one[stage][figure] for one in tables]))) for figure in row}
            for stage, row in tables[0].items()
        }
    return {**found, "ask_ms": ask_ms(folder, sample)}


def ask_ms(trunk: Path, trajectories: Sequence[Trajectory]) -> float:
    """Median milliseconds from an ask of one context to its answer, by a process that has nothing else to do."""
    from algos.predictor_process import LengthPredictorProcess

    contexts = [context for one in trajectories for context in one.contexts][:_NUM_ASKS]
    took = []
    with tempfile.TemporaryDirectory() as folder, LengthPredictorProcess(trunk, Path(folder) / "saved") as predictor:
        predictor.fit(trajectories[:100]).result()
        for context in contexts:
            has_come, start = threading.Event(), time.perf_counter()
            predictor.ask([context], lambda _, has_come=has_come: has_come.set())  # type: ignore[misc]
            has_come.wait()
            took.append(1000 * (time.perf_counter() - start))
    return short(statistics.median(took))


def main() -> dict[str, object]:
    config = launch.options(PredictingConfig)
    import torch  # not before, so that --help and typos do not wait for it

    torch.set_num_threads(1)  # as in the predictor's process
    start = time.perf_counter()
    measured = measure(config)
    measured |= {"tier": this_tier(), "seconds": short(time.perf_counter() - start)}
    return report("heddle_predicting", config, measured, hidden=("gsm8k", "gsm8k_held_out", "models"))


if __name__ == "__main__":
    launch.run(main)
