"""Heddle in the main job (`train.py --dispatch heddle`): its policy, and the predictor that learns from each rollout.

The first rollout has no predictions, and dispatches by least load. Behind it the predictor is fitted on the collected
trajectories, and again as training changes the model.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np

from algos.collect import Group
from algos.length_predictor import identify
from algos.predictor_messages import Fitted
from algos.predictor_process import LengthPredictorProcess
from algos.trajectory_lengths import Trajectory, pearson, recall
from algos.workers.process import WorkerError
from engines import LLM
from engines.coordination.views import ReplicaView
from engines.rollout.prediction import Context
from engines.rollout.telemetry import TurnSpan
from engines.sequence import SequenceId
from experiments.heddle_options import HeddleConfig
from experiments.heddle_report import exposed_s
from experiments.heddle_times import PassTimes
from research.heddle.migration import Groups
from research.heddle.planning import Planner
from research.heddle.policy import Counters, HeddlePolicy
from research.heddle.ranks import Expected

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


class HeddleRollouts:
    """On all ranks, which make the same calls; the policy decides, and the predictor answers, on rank 0."""

    def __init__(self, config: HeddleConfig, num_sequences: int) -> None:
        self.config, self._num_sequences = config, num_sequences
        self.times = PassTimes()
        self.policy = HeddlePolicy(self._plan, self.times.costs, config.options())
        self.predictor: Remembered | None = None
        self._process: LengthPredictorProcess | None = None
        self._history: deque[Trajectory] = deque(maxlen=config.history)
        self._fit: Future[Fitted] | None = None
        self._fit_s = 0.0
        self._before = Counters()
        """The policy's, when this rollout began."""
        self._num_rollouts = 0
        self._errors = [0.0]
        """Quantiles of the logarithms of true over predicted lengths before the first turn, in the last rollout."""

    def start(self, trunk: Path, saved: Path) -> None:
        """On rank 0: starts the predictor's process. Raises ValueError for what it cannot use."""
        self._process = LengthPredictorProcess(trunk, saved)
        self.predictor = Remembered(self._process)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _plan(self, expected: Sequence[Expected], replicas: Sequence[ReplicaView]) -> Groups | None:
        if any(one.spec.tp_size not in self.times.steps for one in replicas):
            return None
        return Planner(server_of=self.times.server_of, errors=self._errors)(expected, replicas)

    def begin(self, llm: LLM) -> None:
        """Before a rollout: what passes take is measured once; a predictor that was lost starts again; a fit ends."""
        if not self.times.steps:
            self.times.measure(llm, self._num_sequences)
        self._before, self._fit_s = replace(self.policy.counters), 0.0
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
        """After a rollout: learns from it; returns what was decided and predicted in it, on rank 0."""
        if self._process is None or self.predictor is None:
            return {}
        trajectories = [
            Trajectory.of((policy_version, group.problem.uid, one.index), group.prompt_token_ids, one)
            for group in groups
            for one in group.completions
        ]
        metrics = self._metrics(trajectories)
        self._history.extend(trajectories)
        self._num_rollouts += 1
        if self._num_rollouts == 1 or self._num_rollouts % self.config.refit_every == 0:
            self._fit = self._process.fit(list(self._history), seed=self._num_rollouts)
        now, before, exposed = self.policy.counters, self._before, exposed_s(spans)
        answers = [one.seconds for one in spans if one.kind == "prediction"]
        return metrics | {
            "rollout/num_migrations": float(now.num_migrations - before.num_migrations),
            "rollout/num_moves_cancelled": float(now.num_cancelled - before.num_cancelled),
            "rollout/num_placements_yielded": float(now.num_yielded - before.num_yielded),
            "timing_s/predictor/answer/mean": float(np.mean(answers)) if answers else 0.0,
            "timing_s/predictor/exposed/mean": exposed["prediction"],
            "timing_s/predictor/fit": self._fit_s,
        }

    def _metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Of the estimates before the first turn, after one and after two."""
        assert self.predictor is not None
        metrics: dict[str, float] = {}
        for turn in range(3):
            pairs = [
                (said, place.remaining)
                for one in trajectories
                for place in one.places
                if place.num_turns == turn
                and math.isfinite(said := self.predictor.said.get((one.sequence_id, turn), math.nan))
            ]
            if len(pairs) < 2:
                continue
            predicted, true = zip(*pairs, strict=True)
            if not turn:
                self._errors = np.quantile(np.log1p(true) - np.log1p(np.maximum(predicted, 0)), QUANTILES).tolist()
            metrics |= {
                f"predictor/pearson/{turn}": pearson(predicted, true),
                f"predictor/recall/{turn}": recall(predicted, true),
                f"predictor/mae/{turn}": float(np.mean(np.abs(np.subtract(predicted, true)))),
            }
        return metrics
