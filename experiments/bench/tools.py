"""What tools cost that take their time beside steps, and what a call costs.

    python experiments/bench/tools.py

All trajectories but a few call a sync tool after each of their turns, which blocks its process. The few call none and
generate until the end, so that there is always something to step: a gap between two steps is then the engine's.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import engines
from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from engines.constraints import Count, NonNegative
from engines.rollout.environment import Answer, Environments
from engines.sequence import Finished
from experiments.bench import harness
from experiments.bench.models import random_prompts
from experiments.comparison.turns import interleave, make_row, short


@dataclass(frozen=True, kw_only=True)
class ToolBench(harness.BenchConfig):
    """Time a rollout whose tools take their time against one whose tools return at once. The model is random, 0.8 M."""

    turns: Count = 3
    """Interleaved rollouts of each variant; medians are reported."""
    trajectories: Count = 64
    """Trajectories that call tools; as many worker processes run them."""
    others: Count = 4
    """Trajectories that call none."""
    calls: Count = 3
    """Calls of a trajectory."""
    tool_s: NonNegative = 1.0
    """Seconds of a call."""
    turn_tokens: Count = 20
    """Tokens of a turn."""
    single_calls: Count = 1000
    """Calls of a warm worker, one after another, whose median is reported."""
    long_tokens: Count = 1900
    """Tokens of a trajectory that calls no tool."""


class Sleeps:
    """The tool: each call blocks its process."""

    def reset(self, calls: int, seconds: float) -> str:
        self.left, self.seconds = calls, seconds
        return "go"

    def step(self, text: str) -> str | None:
        if not self.left:
            return None
        self.left -= 1
        time.sleep(self.seconds)
        return "on"


def measure(config: ToolBench) -> dict[str, Any]:
    from algos.warmstart import new_model, tokenizer_of

    limits = EnvironmentConfig(workers=config.trajectories, timeout_s=60.0 + config.tool_s)
    with (
        tempfile.TemporaryDirectory() as folder,
        EnvironmentPool("experiments.bench.tools:Sleeps", limits) as pool,
    ):
        new_model("tiny", seed=0).save_pretrained(folder)
        tokenizer_of("tiny").save_pretrained(folder)
        llm = engines.LLM(folder, dtype="float32", hidden_stop=partial(_ends_turn, config))
        calls = {"at once": 0.0, "takes its time": config.tool_s}
        found = interleave(
            {name: partial(_roll_out, config, llm, pool, seconds) for name, seconds in calls.items()}, config.turns
        )
        single = interleave({"call": partial(_median_call, pool, config.single_calls)}, config.turns)
    if any(one.tokens != found["at once"][0].tokens for some in found.values() for one in some):
        raise ValueError("the rollouts have different tokens")
    seconds = {name: [one.seconds for one in some] for name, some in found.items()}
    later = statistics.median(a - b for a, b in zip(seconds["takes its time"], seconds["at once"], strict=True))
    gaps = {f"longest gap, {name} (s)": short(max(one.longest_gap_s for one in found[name])) for name in calls}
    rows = [make_row("rollout", seconds, **{"later (s)": short(later)}, **gaps), make_row("one call", single)]
    return {"rows": rows}


def _median_call(pool: EnvironmentPool, count: int) -> float:
    """Seconds from a call that returns at once to its answer, through a worker process."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    name = (0, 0, 0)
    pool.begin(name, {"calls": count, "seconds": 0.0}, answers.put)
    answers.get(timeout=60)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        pool.step(name, "text", answers.put)
        assert answers.get(timeout=60).text == "on"
        seconds.append(time.perf_counter() - start)
    pool.end(name, None)
    return statistics.median(seconds)


@dataclass(frozen=True, kw_only=True)
class _RolledOut:
    seconds: float
    """Until the last trajectory that calls tools had ended."""
    longest_gap_s: float
    """Between two steps."""
    tokens: list[list[int]]


def _roll_out(config: ToolBench, llm: engines.LLM, pool: Environments, tool_s: float) -> _RolledOut:
    count = config.trajectories + config.others
    columns = [{"calls": config.calls * (uid < config.trajectories), "seconds": tool_s} for uid in range(count)]
    prompts, params = random_prompts(count, 8), engines.SamplingParams(max_tokens=None, ignore_eos=True)
    started, ended = time.perf_counter(), []

    def note(finished: Finished) -> None:
        if finished.state.key.prompt_uid < config.trajectories:
            ended.append(time.perf_counter())

    outputs = llm.generate(
        prompts, params, prompt_uids=range(count), environment=pool, columns=columns, on_finished=note
    )
    gaps = (later.start - step.start - step.seconds for step, later in itertools.pairwise(llm.step_records))
    tokens = [output.outputs[0].token_ids for output in outputs]
    return _RolledOut(seconds=max(ended) - started, longest_gap_s=max(gaps), tokens=tokens)


def _ends_turn(config: ToolBench, state: engines.SequenceState) -> bool:
    is_short = state.key.prompt_uid < config.trajectories
    return len(state.tokens) - state.turn_start >= (config.turn_tokens if is_short else config.long_tokens)


if __name__ == "__main__":
    harness.run(ToolBench, measure)
