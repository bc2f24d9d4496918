"""What Seer's paper prints of its throughput and tails, and the bands in which ours should lie. Torch-free.

The paper's models, lengths and GPUs are not ours, so that only directions and rough sizes can be compared. The bands
were set before anything was run: each rung of Table 6 above the one before, the last at 1.5 to 2.2; of Fig. 10 at least
90 % of the oracle's throughput, and at most 40 % of the baseline's tail; the order of Fig. 11. That its fixed drafts
may lose 5 % was added later: the paper's 1.03 is "about 1".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from experiments.comparison.turns import in_columns, short

DIVIDED, CONTEXT, DRAFTS = TABLE_6 = ("divided", "context", "drafts")
TAIL, OF_ORACLE = "context, tail", "context, of the oracle"
ADAPTIVE, UNGROUPED, FIXED = FIG_11 = (
    "drafts over none",
    "drafts over none, ungrouped",
    "drafts over none, no adaptation",
)
FIGURES = {
    **dict.fromkeys(TABLE_6, "Table 6"),
    **dict.fromkeys((TAIL, OF_ORACLE), "Fig. 10"),
    **dict.fromkeys(FIG_11, "Fig. 11"),
}
PAPER: dict[str, dict[str, float]] = {
    "moonlight": {DIVIDED: 1.27, CONTEXT: 1.33, DRAFTS: 1.77},
    "qwen2-vl-72b": {
        DIVIDED: 1.31, CONTEXT: 1.44, DRAFTS: 1.87, TAIL: 0.13, OF_ORACLE: 0.95, ADAPTIVE: 1.30, UNGROUPED: 1.19,
        FIXED: 1.03,
    },
    "kimi-k2": {DIVIDED: 1.35, CONTEXT: 1.47, DRAFTS: 1.77},
}  # fmt: skip


def compare(task: str, measured: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Returns a row for each of our figures that is not None: the paper's for this task, None where it prints none; the
    band, whose bounds may be None; and whether ours is inside."""
    ours = {name: value for name, value in measured.items() if value is not None}
    above = {
        DIVIDED: 1.0,
        CONTEXT: ours.get(DIVIDED, 1.0),
        DRAFTS: ours.get(CONTEXT, 1.0),
        ADAPTIVE: max(ours.get(UNGROUPED, 1.0), ours.get(FIXED, 1.0)),
        UNGROUPED: ours.get(FIXED, 1.0),
    }
    least = {DRAFTS: 1.5, OF_ORACLE: 0.9, FIXED: 0.95}
    most = {DRAFTS: 2.2, TAIL: 0.4}
    ends = {name: [*filter(None, (above.get(name), least.get(name)))] for name in ours}
    return [
        {
            "task": task,
            "figure": FIGURES[name],
            "name": name,
            "paper": PAPER.get(task, {}).get(name),
            "band": [max(ends[name], default=None), most.get(name)],
            "ours": short(value),
            "inside": above.get(name, -math.inf) < value
            and least.get(name, -math.inf) <= value <= most.get(name, math.inf),
        }
        for name, value in ours.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["task", "figure", "", "paper", "band", "ours", "inside"]]
    for row in rows:
        low, high = row["band"]
        band = f"{low:g} to {high:g}" if None not in (low, high) else f">= {low:g}" if high is None else f"<= {high:g}"
        paper = "-" if row["paper"] is None else f"{row['paper']:g}"
        answer = "yes" if row["inside"] else "NO"
        lines.append([row["task"], row["figure"], row["name"], paper, band, f"{row['ours']:g}", answer])
    return in_columns(lines)
