"""What is kept of each rollout in training: what its replicas did, as metrics, and the files of a step."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from algos.collect import Collector, Group, Rollout
from engines import Completion
from engines.rollout.telemetry import StepRecord, chrome_trace, draft_metrics, turn_metrics
from engines.speculation.history import tokens_per_step
from experiments import launch
from experiments.heddle_allocating import Allocations
from experiments.pat_training import RolloutLayouts
from experiments.policies import Logged
from experiments.run_folder import RunFolder
from experiments.specactor_training import DraftRoles

STEP_FILES = ("metrics.jsonl", "lengths.jsonl", "samples.jsonl", "rollout_steps.jsonl", "decisions.jsonl")
"""Those with a line, or several, for each step."""
SAMPLES_PER_STEP = 4
KV_MOVES = (
    *("num_swapped_out", "num_swapped_in", "swapped_out_bytes", "swapped_in_bytes"),
    *("num_imported", "stored_bytes", "stored_tokens", "loaded_tokens", "fetched_tokens"),
    *("returning_tokens", "reused_tokens"),
)


class RolloutRecord:
    """All ranks call `begin` before a rollout, `metrics` after it, and then `write`."""

    def __init__(
        self,
        folder: RunFolder,
        collector: Collector,
        layouts: RolloutLayouts | DraftRoles | Allocations,
        dispatches: Logged | None,
    ) -> None:
        self._folder, self._llm, self._group = folder, collector.llm, collector.group
        self._layouts, self._dispatches = layouts, dispatches
        self._moves: dict[str, int] = {}
        """At the rollout's begin."""
        self._yields: Counter[str] = Counter()
        """Those of drafts, at the rollout's begin."""
        self._began = 0.0
        self._steps: list[StepRecord] = []
        """Those of all replicas."""

    def begin(self) -> None:
        self._moves, self._began = self._count_moves(), time.monotonic()
        if (history := self._llm.draft_history) is not None:
            self._yields = history.yields.copy()
        if self._dispatches is not None:
            self._dispatches.log.clear()  # those of an evaluation

    def _count_moves(self) -> dict[str, int]:
        """This rank's counts of KV moves and preemptions since the run's start."""
        replica = self._llm.replica
        counts = {f"rollout/{name}": getattr(replica.kv_moves, name) for name in KV_MOVES}
        return counts | {"rollout/num_preemptions": replica.scheduler.num_preemptions}

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Returns what has moved since `begin`, summed over the replicas' first ranks, what drafts yielded, and PAT's
        switches."""
        moves = {name: count - self._moves[name] for name, count in self._count_moves().items()}
        leads = any(replica.ranks[0] == self._group.rank for replica in self._llm.layout.replicas)
        # In all nested layouts the first rank of replica i is rank i.
        led = [step for step in rollout.steps if step.replica_id == self._group.rank]
        history = self._llm.draft_history
        yields = history.yields - self._yields if history is not None and leads else Counter[str]()
        mine = (moves if leads else dict.fromkeys(moves, 0), led, yields)
        everyone = launch.gather(self._group, mine, tuple[dict[str, int], list[StepRecord], dict[str, int]])
        self._steps = [step for _, part, _ in everyone for step in part]
        metrics = {name: float(sum(counts[name] for counts, *_ in everyone)) for name in moves}
        if self._llm.config.drafter != "none":
            metrics |= {f"rollout/{name}": value for name, value in draft_metrics(self._steps).items()}
        by_age = tokens_per_step(sum((Counter(one) for *_, one in everyone), Counter()))
        metrics |= {f"rollout/tokens_per_step/{age}": value for age, value in by_age.items()}
        if rollout.turns:
            metrics |= turn_metrics(rollout.turns)
        return metrics | self._layouts.metrics()

    def write(self, number: int, rollout: Rollout) -> list[dict[str, Any]]:
        """Writes the files of the step of this number; returns its samples. Times in them are seconds (in the timeline:
        microseconds) since `begin`."""
        samples = [_sample(one, self._llm.tokenizer.decode) for one in rollout.groups[:SAMPLES_PER_STEP]]
        if not self._folder.is_writer:
            return samples
        step = {"training/global_step": number}
        everyone = [one for group in rollout.groups for one in group.completions]
        lengths = {
            "lengths": [len(one.token_ids) for one in everyone],
            "finish_reasons": [one.finish_reason for one in everyone],
        }
        self._folder.append("lengths.jsonl", {**step, **lengths, "digest": _digest(rollout)})
        self._folder.append("samples.jsonl", *({**step, **sample} for sample in samples))
        rows = ({**step, **asdict(one), "start": one.start - self._began} for one in self._steps)
        self._folder.append("rollout_steps.jsonl", *rows)
        trace = chrome_trace(self._steps, rollout.marks, rollout.turns, origin=self._began)
        self._folder.replace("timeline.json", json.dumps(trace))
        if self._llm.rollout is not None and (coordinator := self._llm.rollout.coordinator) is not None:
            clock = coordinator.monotonic_time
            log = [*self._layouts.log, *(self._dispatches.log if self._dispatches else ())]
            rows = ({**step, **asdict(one), "now": clock(one.now) - self._began} for one in log)
            self._folder.append("decisions.jsonl", *rows)
        return samples


def trajectory_figures(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """What the lines of metrics.jsonl say of a whole run's trajectories: turns in the last step, seconds of calls, and
    of the tokens that were computed in earlier turns the share that was not computed again (see `KVMoves`)."""
    steps = [row for row in rows if "rollout/returning_tokens" in row]
    returning, reused = (sum(row[f"rollout/{name}_tokens"] for row in steps) for name in ("returning", "reused"))
    return {
        "turns_mean": steps[-1].get("num_turns/mean", 1.0) if steps else None,
        "tool_seconds": round(sum(row["timing_s/tool_calls"] for row in steps), 3),
        "prefix_hit_rate": round(reused / returning, 4) if returning else None,
    }


def _digest(rollout: Rollout) -> str:
    """Digest of all tokens sampled in the step: equal digests mean equal rollouts."""
    tokens = [completion.token_ids for group in rollout.groups for completion in group.completions]
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def _parts(completion: Completion, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The text of a trajectory, part by part: what was observed, and what was generated."""
    spans = sorted([(*one, True) for one in completion.observed] + [(*one, False) for one in completion.turns])
    return [
        {"observed": is_observed, "text": decode(completion.token_ids[start:end])}
        for start, end, is_observed in spans
        if start < end  # a `reset` that returns None
    ]


def _sample(group: Group, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    completion = group.completions[0]
    return {
        **group.problem.columns,
        "prompt": group.problem.prompt,
        "completion": completion.text,
        **({"parts": _parts(completion, decode)} if completion.observed else {}),
        "finish_reason": completion.finish_reason,
        "reward": group.rewards[0],
    }
