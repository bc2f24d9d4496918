"""Compares runs of `train.py`, finished or not, on one page: curves, last values, and the options that differ.

    python experiments/compare_runs.py runs/one runs/other

The page is one file that needs no network; any browser shows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from engines.json_files import flat, read_json, read_jsonl
from experiments import launch
from experiments.comparison.results import check_folders

MAIN = (
    *("critic/rewards/mean", "val-core/reward/mean", "val-core/pass@1", "response_length/mean", "actor/entropy"),
    *("actor/grad_norm", "rollout_corr/kl", "timing_s/step", "perf/throughput"),
)
"""Metrics that the page shows first, and in its table."""
PAGE = Path(__file__).with_name("compare_runs.html")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare runs of train.py, finished or not, on one HTML page."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of the runs."""
    output: Path = Path("compare.html")
    """The page."""
    figures: bool = False
    """Also draw the figures of each run into its folder, as a run itself does at its end."""

    def __post_init__(self) -> None:
        check_folders(self)
        if not self.runs:
            raise ValueError("runs=(): give the folder of at least one run, as runs/NAME")


def read_run(folder: Path) -> dict[str, Any]:
    """Returns the run's options, each metric as [step, value] pairs, and how far it is. Raises ValueError if it has no
    step, or if one of its two files is missing or damaged."""
    path, config = folder / "metrics.jsonl", folder / "config.json"
    rows = read_jsonl(path)
    if not rows:
        raise ValueError(f"runs={str(folder)!r}: there is no step in {path}; give a run's folder")
    if not config.is_file():
        raise ValueError(f"runs={str(folder)!r}: {config} is missing; restore it, or leave the run out")
    options = flat(read_json(config, dict[str, Any]))
    curves: dict[str, list[tuple[int, float]]] = {}
    step = 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("training/global_step"), int):
            raise ValueError(f"runs={str(folder)!r}: {path}:{number} has no `training/global_step`; restore the file")
        step = row.pop("training/global_step")
        for metric, value in row.items():
            curves.setdefault(metric, []).append((step, value))
    return {"step": step, "steps": options.get("steps"), "options": options, "curves": curves}


def compare(folders: tuple[Path, ...]) -> dict[str, Any]:
    """Returns what the page shows."""
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    runs = dict(zip(names, map(read_run, folders), strict=True))
    options = [run.pop("options") for run in runs.values()]
    given = dict.fromkeys(name for some in options for name in some if name not in ("name", "resume"))
    differ = {name: [some.get(name) for some in options] for name in given}
    metrics = dict.fromkeys(metric for run in runs.values() for metric in run["curves"])
    return {
        "runs": [{"name": name, **run} for name, run in runs.items()],
        "main": [one for one in MAIN if one in metrics],
        "others": sorted({*metrics} - {*MAIN}),
        "differ": {name: values for name, values in differ.items() if any(one != values[0] for one in values)},
    }


def main() -> dict[str, Any]:
    config = launch.options(CompareConfig)
    data = compare(config.runs)
    text = json.dumps(data).replace("<", "\\u003c")  # NaN and Infinity are JavaScript's, too
    config.output.write_text(PAGE.read_text().replace("{DATA}", text))
    drawn: list[str] = []
    if config.figures:
        from experiments.comparison.machine import this_tier
        from experiments.figures import draw_run

        drawn = [str(path) for run in config.runs for path in draw_run(run, this_tier())]
    last = {
        run["name"]: {metric: run["curves"][metric][-1][1] for metric in data["main"] if metric in run["curves"]}
        for run in data["runs"]
    }
    return {
        "experiment": "compare_runs",
        "page": str(config.output),
        "last": last,
        "differ": data["differ"],
        "figures": drawn,
    }


if __name__ == "__main__":
    launch.run(main)
