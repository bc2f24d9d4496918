"""Rollouts by real processes, at their own speed or at that of a pace."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import engines
from engines.config import ModelConfig
from engines.coordination.policies import LayoutPolicy
from engines.parallel.layout import Layout
from engines.replica.kv_moves import KVMoves
from engines.rollout.pace import Pace
from engines.rollout.telemetry import StepRecord
from engines.rollout.worker_core import REPORT_EVERY_S
from engines.sequence import Completion, Finished, SequenceId
from experiments import launch
from experiments.comparison.machine import this_tier
from experiments.comparison.rollouts import Rollout, Tier, Variant, Workload, hidden_lengths, makespan
from research.workloads.trajectories import Later, TimedTools


@contextlib.contextmanager
def clock() -> Iterator[Later]:
    """One thread calls all that is due. A `threading.Timer` for each would be a new thread, for whose start the
    coordinator waits several milliseconds where others compute."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tools", daemon=True)
    thread.start()
    try:
        yield lambda seconds, act: loop.call_soon_threadsafe(loop.call_at, loop.time() + seconds, act)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(frozen=True, kw_only=True)
class RealWorld:
    """This job's ranks: tiers live, gpu and paced. All of them make and call it together."""

    model: str
    groups: engines.GroupCache
    pace: Pace | None
    options: Mapping[str, Any]
    """Arguments of `LLM` for all variants, its dtype among them."""

    @property
    def tier(self) -> Tier:
        return this_tier() if self.pace is None else "paced"

    @cached_property
    def _kv_bytes_per_token(self) -> int:
        import torch

        dtype: torch.dtype = getattr(torch, self.options["dtype"])
        return ModelConfig.from_pretrained(self.model).kv_bytes_per_token(dtype.itemsize)

    def roll_out(
        self,
        workload: Workload,
        variant: Variant,
        on_finished: Callable[[Finished], object] = lambda _: None,
        on_end: Callable[[engines.LLM], object] = lambda _: None,
    ) -> Rollout:
        """`on_finished` is called on rank 0, by another thread; `on_end` on all ranks, with the engine, before it is
        closed."""
        layout_policy = variant.layout_policy()
        llm = self._start(workload, variant, layout_policy)
        time.sleep(2 * REPORT_EVERY_S)  # so that the first step is reported, as by a world that has stood for a while
        finish_times: dict[SequenceId, float] = {}

        def hear(finished: Finished) -> None:
            finish_times[finished.state.sequence_id] = time.monotonic()
            on_finished(finished)

        completions, steps = self._generate(llm, workload, variant, hear)
        lengths = hidden_lengths([[one.num_generated for one in group] for group in completions])
        tokens = [[one.token_ids for one in group] for group in completions]
        assert workload.lengths in (None, lengths)
        assert llm.rollout is not None
        turns = llm.rollout.turn_spans
        mine = [mark.time for mark in llm.rollout.marks if mark.name in ("regroup", "resume")]
        marks = launch.on_rank_0(self.groups.world, lambda: mine)
        kv_moves = launch.gather(self.groups.world, llm.replica.kv_moves, KVMoves)
        on_end(llm)
        way_back_s = self._go_back(llm, variant.layout)
        llm.close()
        return Rollout(
            steps=steps,
            makespan_s=makespan(steps),
            finish_times=finish_times,
            switches=[(start, end - start) for start, end in zip(marks[::2], marks[1::2], strict=True)],
            digest=hashlib.sha256(repr(tokens).encode()).hexdigest(),
            layout_policy=layout_policy,
            lengths=lengths,
            num_preempted=sum(step.num_preempted for step in steps),
            turns=turns,
            kv_moves=kv_moves,
            way_back_s=way_back_s,
        )

    def _go_back(self, llm: engines.LLM, first: Layout) -> float:
        """Regroups if the ranks are grouped otherwise than in `first`; returns the seconds of the slowest rank."""
        if {spec.ranks for spec in llm.layout.replicas} == {spec.ranks for spec in first.replicas}:
            return 0.0
        start = time.monotonic()
        llm.regroup(replace(first, epoch=llm.layout.epoch + 1))
        return float(max(launch.gather(self.groups.world, time.monotonic() - start)))

    def _start(self, workload: Workload, variant: Variant, layout_policy: LayoutPolicy | None) -> engines.LLM:
        options = {
            "world": self.groups,
            "layout": variant.layout,
            "schedule": variant.schedule(),
            "layout_policy": layout_policy,
            "pace": self.pace,
            "hidden_stop": None if workload.lengths is None else workload.stops,
            "kv_cache_bytes": variant.num_kv_tokens * self._kv_bytes_per_token,
            **self.options,
            **variant.options,
        }
        return engines.LLM(self.model, **options)

    def _generate(
        self, llm: engines.LLM, workload: Workload, variant: Variant, on_finished: Callable[[Finished], None]
    ) -> tuple[list[list[Completion]], list[StepRecord]]:
        """Returns each prompt's completions, and the steps of all replicas, each's from its first rank. The tools of
        trajectories answer after their time; they need a model whose tokenizer has a token for each character."""
        with clock() as later:
            outputs = llm.generate(
                workload.prompts,
                workload.params,
                prompt_uids=range(len(workload.prompts)),
                on_finished=on_finished,
                environment=None if workload.turns is None else TimedTools(workload.turns, later),
                predictor=None if variant.predictor is None else variant.predictor(later),
            )
        assert llm.rollout is not None
        first: dict[tuple[int, int], int] = {}
        steps = [
            one
            for rank, part in enumerate(launch.gather(self.groups.world, llm.rollout.step_records, list[StepRecord]))
            for one in part
            if first.setdefault((one.epoch, one.replica_id), rank) == rank
        ]
        return [output.outputs for output in outputs], steps
