"""The command line of every bench: its options, its table and its JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engines.constraints import Count
from experiments import launch
from experiments.comparison.machine import this_tier
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import table

C = TypeVar("C", bound="BenchConfig")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ResultOptions):
    """Options of all benches."""

    turns: Count = 5
    """Interleaved measurements of each variant; medians are reported."""


def run(kind: type[C], measure: Callable[[C], dict[str, Any]]) -> None:
    """Reads the command line, measures, prints a table to stderr and the JSON object as the last line of stdout.

    `measure` returns `rows` made by `make_row`, and other fields of the result.
    """

    def main() -> dict[str, Any] | None:
        config = launch.options(kind)
        measured = measure(config)
        if launch.rank() > 0:
            return None
        print(table(measured["rows"]), file=sys.stderr, flush=True)
        return report(f"bench/{Path(sys.argv[0]).stem}", config, {"tier": this_tier(), **measured})

    launch.run(main)
