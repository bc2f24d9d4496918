"""SpecActor in the main job: which replicas draft in the next rollout (§4.1, Algorithm 1).

In the first rollout one replica drafts. D and V are measured once, after it; the acceptance is that of the rollouts so
far. Where another placement promises enough, replicas change their roles, which moves no weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from algos.collect import Collector
from engines import LLM
from engines.config import EngineConfig
from engines.parallel.layout import Layout, nested_layout
from engines.rollout.telemetry import StepRecord, guesses
from experiments import launch
from experiments.config import TrainConfig
from research.specactor.plan import Plan, Rollout, make_plan
from research.specactor.profile import Costs, Pieces, Point
from research.specactor.throughput import DecoupledMode

MARGIN = 1.05
"""Gain in planned tokens per second from which roles change."""
FIRST_ACCEPTANCE = 0.7
"""Before anything was drafted."""


def first_layout(num_ranks: int, tp_size: int) -> Layout:
    """Returns the one in which the last replica drafts. Raises ValueError where there is only one."""
    return with_drafters(nested_layout(range(num_ranks), tp_size), 1)


def with_drafters(layout: Layout, count: int) -> Layout:
    """Returns the layout whose last `count` replicas draft. Raises ValueError if no other is left."""
    if count >= len(layout.replicas):
        raise ValueError(
            f"speculation='specactor': no rank is left to draft beside {len(layout.replicas)} replica(s); give more "
            f"--ranks, or a smaller --tensor-parallel-size"
        )
    first = len(layout.replicas) - count
    roles = [replace(spec, role="rollout" if place < first else "draft") for place, spec in enumerate(layout.replicas)]
    return replace(layout, replicas=tuple(roles))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An entry of decisions.jsonl."""

    acceptance: float
    num_drafters: int
    mode: str
    window: int
    tokens_per_second: float
    """Of all sequences, as planned."""
    present: float
    """What the present placement promises."""
    verify_s: list[Point]
    """Rows of a pass of the target, and its seconds, as measured after the first rollout."""
    draft_s: list[Point]
    """The same of the draft model."""


@dataclass(frozen=True)
class Passes:
    """What passes of the target and of the draft model take on `tp_size` ranks: their rows, and seconds."""

    tp_size: int
    verify_s: list[Point]
    draft_s: list[Point]

    @property
    def costs(self) -> Costs:
        rows_s, draft_s = Pieces.fit(self.verify_s), Pieces.fit(self.draft_s)
        return Costs(drafts={"model": draft_s}, verifiers={self.tp_size: lambda batch, rows: rows_s(batch * rows)})


def measure_passes(llm: LLM, num_sequences: int) -> Passes:
    """Times passes of as many rows as a rollout of `num_sequences` has. All ranks call it together; the last one
    drafts."""
    engine, world = llm._engine, llm._world
    batches = [2**power for power in range(num_sequences.bit_length() + 1)]
    sizes = [*batches, 4 * batches[-1]]
    verify = [engine.row_times(rows) for rows in sizes]
    small = engine._model_drafter
    draft = [] if small is None else [small.hosted.row_times(rows) for rows in batches]
    times = launch.gather(world, (verify, draft), tuple[list[float], list[float]])
    return Passes(
        engine.spec.tp_size,
        [(rows, seconds) for rows, seconds in zip(sizes, times[0][0], strict=True)],
        [(rows, seconds) for rows, seconds in zip(batches, times[-1][1], strict=True)],
    )


def choose_plan(
    costs: Costs, rollout: Rollout, acceptance: float, mode: DecoupledMode, num_now: int
) -> tuple[Plan, Plan]:
    """Returns the plan of the next rollout, and the best one with the present `num_now` drafters: the same one where
    another gains less than MARGIN. `mode`: of replicas for which others draft."""
    best = make_plan(costs, rollout, {"model": acceptance}, (mode,))
    present = make_plan(costs, rollout, {"model": acceptance}, (mode,), num_drafters=num_now)
    return best if best.tokens_per_second > MARGIN * present.tokens_per_second else present, present


class DraftRoles:
    """Chooses who drafts in each rollout. All ranks make the same calls."""

    def __init__(self, config: TrainConfig, collector: Collector) -> None:
        self.log = deque[Planned]()
        """On rank 0 the plan of the last `begin`."""
        rollout = config.rollout
        self._num_sequences = rollout.prompts_per_step * rollout.group_size
        self._engine: EngineConfig = rollout.engine
        self._llm, self._group = collector.llm, collector.group
        self._passes: Passes | None = None
        self._accepted = self._compared = 0.0
        self._num_rollouts = 0

    def recall(self, path: Path) -> None:
        """Acceptance is learnt anew in a resumed run."""

    def begin(self, index: int, *, keep_weights: bool) -> float:
        """Changes roles, if that pays, for a rollout after an update (`keep_weights` is False); returns the seconds."""
        if keep_weights or not self._num_rollouts:
            return 0.0
        start = time.perf_counter()
        self.log.clear()
        if self._passes is None:
            self._passes = measure_passes(self._llm, self._num_sequences)
        count = int(launch.on_rank_0(self._group, self._num_drafters))
        if count != self._num_now:
            layout = nested_layout(
                range(self._group.size), self._llm.layout.replicas[0].tp_size, epoch=self._llm.layout.epoch + 1
            )
            self._llm.regroup(with_drafters(layout, count), keep_weights=False)
        return time.perf_counter() - start

    @property
    def _num_now(self) -> int:
        return sum(spec.role == "draft" for spec in self._llm.layout.replicas)

    def _num_drafters(self) -> int:
        assert self._passes is not None
        p = (self._accepted + 10 * FIRST_ACCEPTANCE) / (self._compared + 10)
        engine = self._engine
        assert engine.draft_mode != "naive"
        rollout = Rollout(
            num_sequences=self._num_sequences,
            num_gpus=self._group.size,
            whole_replicas=True,
            max_window=engine.max_draft_tokens,
            ahead=engine.max_draft_tokens,
        )
        plan, present = choose_plan(self._passes.costs, rollout, p, engine.draft_mode, self._num_now)
        self.log.append(
            Planned(
                acceptance=p,
                num_drafters=plan.placement.num_drafters,
                mode=plan.mode,
                window=plan.window,
                tokens_per_second=plan.tokens_per_second,
                present=present.tokens_per_second,
                verify_s=self._passes.verify_s,
                draft_s=self._passes.draft_s,
            )
        )
        return plan.placement.num_drafters

    def metrics(self, steps: Collection[StepRecord]) -> dict[str, float]:
        """Learns from the steps of all replicas in the last rollout."""
        self._num_rollouts += 1
        accepted, compared = guesses(steps)
        self._accepted, self._compared = 0.5 * self._accepted + accepted, 0.5 * self._compared + compared
        metrics = {"rollout/num_draft_ranks": float(self._num_now * self._llm.layout.replicas[0].tp_size)}
        if compared:
            metrics["rollout/spec_token_acceptance"] = accepted / compared
        return metrics
