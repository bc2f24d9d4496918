"""Results of experiments: one JSON object, wandb, and files that are checked before any work. Torch-free."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.constraints import check_fields
from experiments.comparison.machine import machine
from experiments.comparison.rollouts import Rollout, over_time
from experiments.comparison.turns import AGAIN, short


def check_folders(config: Any, names: Items[str] = ("output", "figure"), *, folders: Items[str] = ()) -> None:
    """Raises ValueError where a file of these options would be in no folder, is a folder or a device, or cannot be
    written; alike where one of `folders`, which are made where they are missing, is no folder or cannot be written
    into."""
    for name in (*names, *folders):
        path = getattr(config, name, None)
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}; make it")
        if path.is_dir() and name not in folders:
            raise ValueError(f"{name}={str(path)!r}: is a folder; give a file in it")
        if path.exists() and not path.is_dir() and name in folders:
            raise ValueError(f"{name}={str(path)!r}: is a file; give a folder")
        if path.exists() and not path.is_dir() and not path.is_file():
            raise ValueError(f"{name}={str(path)!r}: is no file to write over; give another")
        try:
            if path.is_file():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent).close()
        except OSError as error:
            raise ValueError(f"{name}={str(path)!r}: cannot be written ({error.strerror}); give another") from None


def check_figure(path: Path | None) -> None:
    if path is not None and path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figure={str(path)!r}: must end in .png, .pdf or .svg")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options of all commands that `report`. A `figure` that one adds is a file."""

    output: Path | None = None
    """Also write the JSON result to this file."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        check_folders(self)
        check_figure(getattr(self, "figure", None))


def report(experiment: str, config: Any, measured: Mapping[str, Any], *, hidden: Items[str] = ()) -> dict[str, Any]:
    """Returns the result of an experiment, and writes it to the file that its option `output` names. Its options, less
    files and those that are `hidden`, are the workload."""
    hidden = ("output", "figure", *hidden)
    workload = {name: value for name, value in asdict(config).items() if name not in hidden}
    result = {"experiment": experiment, "machine": machine(), "workload": workload, **measured}
    text = json.dumps(result, indent=2, default=str)
    if config.output is not None:
        try:
            config.output.write_text(text + "\n")
        except OSError as error:
            print(json.dumps(json.loads(text)), flush=True)  # what was measured is not lost
            raise ValueError(f"output={str(config.output)!r}: {error.strerror}; the result is on stdout") from None
    return dict(json.loads(text))


def track(name: str, runs: Mapping[str, Items[Rollout]]) -> None:
    """Makes a run of wandb for each variant: what its replicas did in each hundredth of its first rollout, and medians
    over all of them as the summary."""
    from experiments.tracking import start_run

    for variant, some in runs.items():
        if variant.endswith(AGAIN):
            continue
        title = f"{name}-{variant}".replace(" ", "-")
        with start_run(title, {"comparison": name, "variant": variant}, several=True) as run:
            for point in over_time(some[0].steps, 100):
                run.log(point)
            for key in ("seconds", "tail_seconds", "num_preempted", "tokens_per_step"):
                run.summary[key] = statistics.median(getattr(one, key) for one in some)


MOST_LATE = 0.05
"""Share of the steps that may be late in a paced comparison."""


def longer_than_paced(name: str, runs: Iterable[Rollout]) -> dict[str, Any]:
    """Returns the share of steps that took 10 % longer than they should, and whether this machine has followed the
    pace; where it has not, says so on stderr."""
    steps = [step for run in runs for step in run.steps if step.num_running]
    late = sum(step.seconds > 1.1 * step.paced_seconds for step in steps) / len(steps)
    if late > MOST_LATE:
        told = (
            f"{name}: {late:.0%} of the steps took more than 1.1 times their price: this machine cannot follow the pace"
        )
        print(f"{told}, which changes ratios; give a larger --scale", file=sys.stderr, flush=True)
    return {"steps_longer_than_paced": short(late), "follows_pace": late <= MOST_LATE}
