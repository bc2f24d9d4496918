"""Counters and histograms of a server, and their text for Prometheus. For one thread; torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from engines.serving.engine_thread import Load

Outcome = Literal["ok", "refused", "overload", "draining", "failed", "client_left", "stalled"]
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Sample = tuple[str, str, str, list[str]]
"""Name, kind and meaning of a metric, and its values with their labels."""


class Histogram:
    """Seconds, in buckets whose bounds belong to them."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        found, total = [], 0
        for bound, number in zip([*map(str, _SECONDS), "+Inf"], self._counts, strict=True):
            total += number
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[Outcome] = Counter()
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.ttft, self.tpot, self.e2e = Histogram(), Histogram(), Histogram()

    def text(self, load: Load, more: Iterable[Sample] = ()) -> str:
        parts: list[Sample] = [
            ("requests_total", "counter", "Requests for tokens, by how they ended.", self._outcomes()),
            ("prompt_tokens_total", "counter", "Tokens of accepted prompts.", [f" {self.num_prompt_tokens}"]),
            ("generated_tokens_total", "counter", "Tokens that requests were sent.", [f" {self.num_generated_tokens}"]),
            ("sequences_running", "gauge", "Sequences in the forward pass.", [f" {load.num_running}"]),
            ("sequences_waiting", "gauge", "Sequences that wait for room.", [f" {load.num_waiting}"]),
            ("kv_blocks", "gauge", "Blocks of the KV cache.", [f" {load.num_blocks}"]),
            ("kv_blocks_free", "gauge", "Blocks that no sequence holds.", [f" {load.num_free_blocks}"]),
            ("preemptions_total", "counter", "Sequences that lost their blocks.", [f" {load.num_preemptions}"]),
            ("steps_total", "counter", "Steps of the engine.", [f" {load.num_steps}"]),
            *more,
        ]
        lines = []
        for name, kind, what, values in parts:
            lines += [f"# HELP curtail_{name} {what}", f"# TYPE curtail_{name} {kind}"]
            lines += [f"curtail_{name}{value}" for value in values]
        for name, what, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.ttft),
            ("time_per_output_token_seconds", "Between two tokens of a completion, on average.", self.tpot),
            ("request_seconds", "From a request's arrival to its last token.", self.e2e),
        ):
            lines += [f"# HELP curtail_{name} {what}", f"# TYPE curtail_{name} histogram"]
            lines += histogram.lines(f"curtail_{name}")
        return "\n".join(lines) + "\n"

    def _outcomes(self) -> list[str]:
        outcomes: tuple[Outcome, ...] = Outcome.__args__  # type: ignore[attr-defined]
        return [f'{{outcome="{one}"}} {self.requests[one]}' for one in outcomes]
