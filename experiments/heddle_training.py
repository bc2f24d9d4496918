"""Heddle's policy in the main job (`train.py --dispatch heddle`).

The first rollout has no predictions, and dispatches by least load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines import LLM
from engines.coordination.views import ReplicaView
from experiments.heddle_options import HeddleConfig
from experiments.heddle_times import PassTimes
from experiments.length_predictions import LengthPredictions
from research.heddle.migration import Groups
from research.heddle.planning import Planner
from research.heddle.policy import Counters, HeddlePolicy
from research.heddle.ranks import Expected


class HeddleRollouts:
    """On all ranks, which make the same calls; the policy decides on rank 0."""

    def __init__(self, config: HeddleConfig, num_sequences: int, predictions: LengthPredictions) -> None:
        self._num_sequences, self._predictions = num_sequences, predictions
        self.times = PassTimes()
        self.policy = HeddlePolicy(self._plan, self.times.costs, config.options())
        self._before = Counters()
        """The policy's, when this rollout began."""

    def _plan(self, expected: Sequence[Expected], replicas: Sequence[ReplicaView]) -> Groups | None:
        if any(one.spec.tp_size not in self.times.steps for one in replicas):
            return None
        return Planner(server_of=self.times.server_of, errors=self._predictions.errors)(expected, replicas)

    def begin(self, llm: LLM) -> None:
        """Before a rollout; what passes take is measured once for each TP size."""
        if any(spec.tp_size not in self.times.steps for spec in llm.layout.replicas):
            self.times.measure(llm, self._num_sequences)
        self._before = replace(self.policy.counters)

    def metrics(self) -> dict[str, float]:
        """Returns what was decided in the rollout that has ended."""
        now, before = self.policy.counters, self._before
        return {
            "rollout/num_migrations": float(now.num_migrations - before.num_migrations),
            "rollout/num_moves_cancelled": float(now.num_cancelled - before.num_cancelled),
            "rollout/num_placements_yielded": float(now.num_yielded - before.num_yielded),
        }
