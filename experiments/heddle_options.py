"""Heddle's options in the main job. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.constraints import Count, Fraction, NonNegative, check_fields
from research.heddle.policy import HeddleOptions
from research.heddle.priority import Priority, by_remaining, by_total, first_come, round_robin, shortest_first

PRIORITIES: Mapping[str, Priority] = {
    "remaining": by_remaining,
    "total": by_total,
    "fcfs": first_come,
    "sjf": shortest_first,
    "round-robin": round_robin,
}

OF_PREDICTOR = ("predictor", "refit_every", "history")
"""The options that `--predict-lengths` has, too."""


@dataclass(frozen=True, kw_only=True)
class HeddleConfig:
    """Options of `--dispatch heddle`; those of the predictor hold for `--predict-lengths`, too."""

    priority: Literal["remaining", "total", "fcfs", "sjf", "round-robin"] = "remaining"
    """What a replica runs first: the trajectory with most tokens to come (Heddle, Algorithm 1), of most tokens in all,
    the one submitted first, the one with fewest tokens to come, or all in turn. With fcfs give
    `--rollout.priority-margin inf`."""
    places: bool = True
    """Place trajectories by their predicted length (Heddle, §5.2); else each turn goes to the least loaded replica."""
    migrates: bool = True
    """Move trajectories in tool gaps when their prediction changes (Heddle, §5.3)."""
    hysteresis: Fraction = HeddleOptions.hysteresis
    """Share of the unfinished trajectories by which a rank must lie outside of its group."""
    waits_s: NonNegative = HeddleOptions.waits_s
    """Seconds for which a turn waits for a prediction that takes longer than its tool; 0: the last one stands."""
    predictor: str | None = None
    """Folder of the small model that predicts lengths, with the tokenizer of `--model`; by default that model itself,
    as it was before training."""
    refit_every: Count = 4
    """Steps between two fits of the predictor, behind the first one."""
    history: Count = 1024
    """Latest trajectories that the predictor is fitted on."""

    def __post_init__(self) -> None:
        check_fields(self, "heddle.")

    def options(self) -> HeddleOptions:
        return HeddleOptions(
            places=self.places,
            migrates=self.migrates,
            priority=PRIORITIES[self.priority],
            hysteresis=self.hysteresis,
            waits_s=self.waits_s,
        )


def check_gsm8k(learnt: Path | None, held_out: Path | None) -> None:
    """Raises ValueError unless there are both files, or none."""
    for name, path in (("gsm8k", learnt), ("gsm8k_held_out", held_out)):
        if path is not None and not path.is_file():
            raise ValueError(f"{name}={str(path)!r}: there is no such file; give one of GSM8K's, as JSON lines")
    if (learnt is None) != (held_out is None):
        raise ValueError(f"gsm8k={learnt}, gsm8k_held_out={held_out}: give both files, or none")
