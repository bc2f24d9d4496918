"""When requests arrive at a serving replica, and how many tokens they have: from a trace, or drawn. Torch-free."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from engines.constraints import Positive, check_fields
from research.workloads.lengths import LogNormalLengths

TRACE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
"""Those of the Azure LLM inference traces of 2023 (github.com/Azure/AzurePublicDataset)."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a serving workload."""

    time_s: float
    """Since the start of the workload."""
    num_prompt_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, kw_only=True)
class PoissonArrivals:
    """Requests that come independently of each other, `rate` of them a second on average."""

    rate: Positive
    prompt: LogNormalLengths
    generated: LogNormalLengths

    def __post_init__(self) -> None:
        check_fields(self)

    def draw(self, seconds: float, seed: int) -> list[Arrival]:
        """The requests of the first `seconds`. A longer draw begins with those of a shorter one."""
        rng = random.Random(seed)
        arrivals = []
        time_s = rng.expovariate(self.rate)
        while time_s < seconds:
            num_prompt, num_generated = self.prompt.at(rng.gauss(0, 1)), self.generated.at(rng.gauss(0, 1))
            arrivals.append(Arrival(time_s=time_s, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated))
            time_s += rng.expovariate(self.rate)
        return arrivals


def read_trace(path: Path, *, start_s: float = 0.0, seconds: float = math.inf) -> list[Arrival]:
    """The requests of an Azure LLM trace that come within `seconds` from `start_s` after its first; then is time 0.

    Raises ValueError naming file and line for one that is no request, or that is earlier than the one before it; and
    for a window without requests.
    """
    window = [
        replace(arrival, time_s=arrival.time_s - start_s)
        for arrival in _read(path)
        if 0 <= arrival.time_s - start_s < seconds
    ]
    if not window:
        raise ValueError(f"{path}: has no request from {start_s:g} s on within {seconds:g} s; give another window")
    return window


def _read(path: Path) -> list[Arrival]:
    arrivals: list[Arrival] = []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if (header := next(rows, [])) != TRACE_COLUMNS:
            raise ValueError(f"{path}:1: {','.join(header)!r}: the first line must be {','.join(TRACE_COLUMNS)}")
        first: datetime | None = None
        for row in rows:
            where = f"{path}:{rows.line_num}: {','.join(row)!r}"
            try:
                stamp, num_prompt, num_generated = row[0], int(row[1]), int(row[2])
                now = datetime.fromisoformat(stamp[:26])  # of seven decimals datetime takes six
            except (ValueError, IndexError):
                raise ValueError(f"{where}: is no request; give {','.join(TRACE_COLUMNS)}") from None
            if min(num_prompt, num_generated) < 1:
                raise ValueError(f"{where}: has no tokens; give at least 1 of each kind")
            first = first or now
            time_s = (now - first).total_seconds()
            if arrivals and time_s < arrivals[-1].time_s:
                raise ValueError(f"{where}: is earlier than the line before; sort the trace by {TRACE_COLUMNS[0]}")
            arrivals.append(Arrival(time_s=time_s, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated))
    return arrivals
