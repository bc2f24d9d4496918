"""Predicted lengths of trajectories in the main job, for any dispatch: the predictor learns from each rollout.

The first rollout has no predictions. Behind it the predictor is fitted on the collected trajectories, and again as
training changes the model.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from algos.collect import Group
from algos.length_predictor import identify
from algos.predictor_messages import Fitted
from algos.predictor_process import LengthPredictorProcess
from algos.trajectory_lengths import Trajectory, pearson, recall
from algos.workers.process import WorkerError
from engines.rollout.prediction import Context
from engines.rollout.telemetry import TurnSpan
from engines.sequence import SequenceId
from experiments.heddle_options import HeddleConfig
from experiments.heddle_report import exposed_s

QUANTILES = np.linspace(0.0, 1.0, 21)
MOST_PARAMETERS = 200_000_000
"""Of a model that predicts beside the rollout on this host."""


def predictor_trunk(config: HeddleConfig, model: Path) -> Path:
    """Returns the folder of the model that predicts. Raises ValueError for one of another tokenizer, or a large one."""
    trunk = model if config.predictor is None else Path(config.predictor)
    of_trunk, of_model = identify(trunk, "heddle.predictor"), identify(model, "model")
    for name in ("tokenizer", "vocab_size"):
        if of_trunk[name] != of_model[name]:
            raise ValueError(
                f"heddle.predictor={str(trunk)!r}: has {name} {of_trunk[name]}, and the model {of_model[name]}; give a "
                "small model with the same tokenizer"
            )
    size = 12 * of_trunk["num_hidden_layers"] * of_trunk["hidden_size"] ** 2
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"heddle.predictor={str(trunk)!r}: has about {size // 10**6} million parameters, and predicts beside the "
            f"rollout on this host; give a folder of a model with at most {MOST_PARAMETERS // 10**6} million"
        )
    return trunk


class Remembered:
    """A `LengthPredictor` that asks another one, and keeps what it said in this rollout."""

    def __init__(self, predictor: LengthPredictorProcess) -> None:
        self._predictor = predictor
        self.source = predictor.source
        self.said: dict[tuple[SequenceId, int], float] = {}
        """Trajectory and ended turns -> remaining tokens."""

    def ask(self, contexts: Sequence[Context], answer: Callable[[Sequence[float]], None]) -> None:
        def take(remaining: Sequence[float]) -> None:
            self.said |= {
                (one.sequence_id, one.num_turns): value for one, value in zip(contexts, remaining, strict=True)
            }
            answer(remaining)

        self._predictor.ask(contexts, take)


class LengthPredictions:
    """On all ranks, which make the same calls; the predictor answers on rank 0."""

    def __init__(self, config: HeddleConfig) -> None:
        self._config = config
        self.predictor: Remembered | None = None
        self.errors = [0.0]
        """Quantiles of the logarithms of true over predicted lengths before the first turn, in the last rollout."""
        self._process: LengthPredictorProcess | None = None
        self._history: deque[Trajectory] = deque(maxlen=config.history)
        self._fit: Future[Fitted] | None = None
        self._fit_s = 0.0
        self._num_rollouts = 0

    def start(self, trunk: Path, saved: Path) -> None:
        """On rank 0: starts the predictor's process. Raises ValueError for what it cannot use."""
        self._process = LengthPredictorProcess(trunk, saved)
        self.predictor = Remembered(self._process)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def begin(self) -> None:
        """Before a rollout: a predictor that was lost starts again; a fit ends."""
        self._fit_s = 0.0
        if self._process is None or self.predictor is None:
            return
        if self._fit is not None:
            try:
                self._fit_s = self._fit.result().seconds
            except WorkerError as error:
                warnings.warn(f"{error}; the last fit goes on to predict", stacklevel=2)
            self._fit = None
        self._process.revive()
        self.predictor.said.clear()

    def end(self, groups: Sequence[Group], policy_version: int, spans: Sequence[TurnSpan]) -> dict[str, float]:
        """After a rollout: learns from it; returns how right predictions were, and what they have cost, on rank 0."""
        if self._process is None or self.predictor is None:
            return {}
        trajectories = [
            Trajectory.of((policy_version, group.problem.uid, one.index), group.prompt_token_ids, one)
            for group in groups
            for one in group.completions
        ]
        metrics = self._metrics(trajectories, self.predictor.said)
        self._history.extend(trajectories)
        self._num_rollouts += 1
        if self._num_rollouts == 1 or self._num_rollouts % self._config.refit_every == 0:
            self._fit = self._process.fit(list(self._history), seed=self._num_rollouts)
        answers = [one.seconds for one in spans if one.kind == "prediction"]
        return metrics | {
            "timing_s/predictor/answer/mean": float(np.mean(answers)) if answers else 0.0,
            "timing_s/predictor/exposed/mean": exposed_s(spans)["prediction"],
            "timing_s/predictor/fit": self._fit_s,
        }

    def _metrics(
        self, trajectories: Sequence[Trajectory], said_of: Mapping[tuple[SequenceId, int], float]
    ) -> dict[str, float]:
        """Of the estimates before the first turn, after one and after two."""
        metrics: dict[str, float] = {}
        for turn in range(3):
            pairs = [
                (said, place.remaining)
                for one in trajectories
                for place in one.places
                if place.num_turns == turn and math.isfinite(said := said_of.get((one.sequence_id, turn), math.nan))
            ]
            if len(pairs) < 2:
                continue
            predicted, true = zip(*pairs, strict=True)
            if not turn:
                self.errors = np.quantile(np.log1p(true) - np.log1p(np.maximum(predicted, 0)), QUANTILES).tolist()
            metrics |= {
                f"predictor/pearson/{turn}": pearson(predicted, true),
                f"predictor/recall/{turn}": recall(predicted, true),
                f"predictor/mae/{turn}": float(np.mean(np.abs(np.subtract(predicted, true)))),
            }
        return metrics
