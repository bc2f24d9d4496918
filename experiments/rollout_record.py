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
COUNTS = (
    *("num_swapped_out", "num_swapped_in", "swapped_out_bytes", "swapped_in_bytes"),
    *("num_imported", "stored_bytes", "stored_tokens", "loaded_tokens", "fetched_tokens"),
    *("returning_tokens", "reused_tokens", "num_preemptions"),
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
        self._counts = Counter[str]()
        """At the rollout's begin."""
        self._began = 0.0
        self._steps: list[StepRecord] = []
        """Those of all replicas."""

    def begin(self) -> None:
        self._counts, self._began = self._llm.led_counts, time.monotonic()
        if self._dispatches is not None:
            self._dispatches.log.clear()  # those of an evaluation

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Returns what replicas moved and drafts yielded since `begin`, and what is said by who chooses layouts."""
        # In all nested layouts the first rank of replica i is rank i.
        led = [step for step in rollout.steps if step.replica_id == self._group.rank]
        mine = (led, self._llm.led_counts - self._counts)
        everyone = launch.gather(self._group, mine, tuple[list[StepRecord], dict[str, float]])
        self._steps = [step for part, _ in everyone for step in part]
        counts = sum((Counter(one) for _, one in everyone), Counter[str]())
        metrics = {f"rollout/{name}": float(counts[name]) for name in COUNTS}
        if self._llm.config.drafter != "none":
            metrics |= {f"rollout/{name}": value for name, value in draft_metrics(self._steps).items()}
        yields = {name.removeprefix("yields/"): count for name, count in counts.items() if name.startswith("yields/")}
        metrics |= {f"rollout/tokens_per_step/{age}": value for age, value in tokens_per_step(yields).items()}
        if rollout.turns:
            metrics |= turn_metrics(rollout.turns)
        return metrics | self._layouts.metrics(self._steps)

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
            log = (*self._layouts.log, *(self._dispatches.log if self._dispatches else ()))
            decisions: list[dict[str, Any]] = [step | asdict(one) for one in log]
            for one in decisions:
                if "now" in one:  # roles are chosen before the rollout
                    one["now"] = coordinator.monotonic_time(one["now"]) - self._began
            self._folder.append("decisions.jsonl", *decisions)
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
