"""Experiments with two parts, each on ranks of its own: `live`, at this machine's own speed, and then `paced`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from msgspec import Meta

from engines.constraints import Count, Positive, WholeNumber, check_fields
from experiments import launch
from experiments.comparison.results import check_folders, report

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

Part = Literal["live", "paced"]


@dataclass(frozen=True, kw_only=True)
class PartsConfig:
    """Options of all experiments with a live and a paced part."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] = ("live", "paced")
    """What to measure."""
    turns: Count = 3
    """Interleaved measurements of each variant; medians count."""
    ranks: Count = 8
    """Ranks of the paced part."""
    live_ranks: Count = 2
    """Ranks of the live part; under torchrun, its number of processes applies instead."""
    scale: Positive = 1.0
    """Multiplies the time that paced work takes: larger where this machine is too slow to follow."""
    shrink: Count = 1
    """Divides the number of sequences."""
    seed: WholeNumber = 3
    """Of the lengths."""
    wandb: Literal["auto", "off"] = "off"
    """auto: a run for each variant, by wandb's own settings and environment; offline if nobody is logged in."""
    output: Path | None = None
    """Also write the JSON result to this file."""
    figure: Path | None = None
    """Draw figures into this folder."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        check_folders(self, ["output"])
        if self.figure is not None and not self.figure.is_dir():
            raise ValueError(f"figure={str(self.figure)!r}: there is no such folder; make it")


C = TypeVar("C", bound=PartsConfig)
Measure = Callable[[C, "TorchGroup"], dict[str, Any]]


def run_parts(
    experiment: str,
    kind: type[C],
    *,
    live: Measure[C],
    paced: Measure[C],
    summary: Callable[[dict[str, Any]], dict[str, Any]] = lambda measured: {},
) -> dict[str, Any] | None:
    """Reads the command line and measures. All ranks call `live` and `paced`, which return fields of the result on
    rank 0; `paced` returns one field of that name. `summary` makes the first fields from these."""
    config = launch.options(kind)
    start = time.monotonic()
    in_place = config.parts == ("paced",) and launch.num_ranks() in (1, config.ranks)
    world = launch.join_world(config.ranks if in_place else config.live_ranks)
    measured = live(config, world) if "live" in config.parts else {}
    if in_place:
        measured |= paced(config, world)
    if world.rank:
        return None
    if "paced" in config.parts and not in_place:
        measured["paced"] = launch.start_anew("--parts", "paced")["paced"]
    return report(experiment, config, {"seconds": round(time.monotonic() - start, 1), **summary(measured), **measured})
