"""How every bench measures: named variants take turns, and their medians go into one table and one JSON object.

A turn runs each variant once, every second turn in reverse order, so that a machine that becomes slower or faster
favours no variant. A ratio is of two times of the same turn, and the median over the turns is reported. The first
variant is the baseline. It runs twice in a turn: its ratio to itself (A/A) shows the effect of noise alone.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from engines.constraints import Count, check_fields
from experiments import launch

AGAIN = " again"
"""Suffix of the name of the baseline's second run in a turn."""

Row = dict[str, Any]
T = TypeVar("T")
C = TypeVar("C", bound="BenchConfig")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of all benches."""

    turns: Count = 5
    """Interleaved measurements of each variant; medians are reported."""
    output: Path | None = None
    """Also write the JSON result to this file."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        check_folders(self)


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


def interleave(
    variants: Mapping[str, Callable[[], T]],
    turns: int,
    *,
    name: str = "",
    warm_up: bool = True,
    most_turns: Mapping[str, int] | None = None,
) -> dict[str, list[T]]:
    """Returns each variant's results, one per turn; the baseline's second runs are under its name and `AGAIN`.

    `most_turns` limits the turns of slow variants. Results of the warm-up are discarded. In a world all ranks call this
    together, with the same variants.
    """
    base = next(iter(variants))
    order = {**variants, base + AGAIN: variants[base]}
    if warm_up:
        for call in variants.values():
            call()
    results: dict[str, list[T]] = {one: [] for one in order}
    for turn in tqdm(range(turns), desc=name, unit="turn", disable=launch.rank() > 0):
        for one in reversed(order) if turn % 2 else order:
            if turn < (most_turns or {}).get(one, turns):
                results[one].append(order[one]())
    return results


def compare(name: str, seconds: Mapping[str, Items[float]], **facts: object) -> Row:
    """Makes a row of the result from seconds per turn: medians in milliseconds, ratios to the baseline, A/A."""
    base = next(iter(seconds))
    ratios = {
        one: short(statistics.median(mine / its for mine, its in zip(values, seconds[base], strict=False)))
        for one, values in seconds.items()
        if one != base
    }
    return {
        "name": name,
        "ms": {one: short(1e3 * statistics.median(times)) for one, times in seconds.items() if not one.endswith(AGAIN)},
        "a_a": ratios.pop(base + AGAIN),
        "ratios": ratios,
        **facts,
        "turns_ms": {one: [short(1e3 * time) for time in times] for one, times in seconds.items()},
    }


def short(value: float) -> float:
    """Rounds to four significant digits."""
    return float(f"{value:.4g}")


def run(kind: type[C], measure: Callable[[C], dict[str, Any]]) -> None:
    """Reads the command line, measures, prints a table to stderr and the JSON object as the last line of stdout.

    `measure` returns `rows` made by `compare`, and other fields of the result.
    """

    def main() -> dict[str, Any] | None:
        config = launch.options(kind)
        measured = measure(config)
        if launch.rank() > 0:
            return None
        print(table(measured["rows"]), file=sys.stderr, flush=True)
        return report(f"bench/{Path(sys.argv[0]).stem}", config, {"tier": tier(), **measured})

    launch.run(main)


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


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs `count` processes that each keep a core busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def tier() -> str:
    """The tier of what this machine does at its own speed."""
    return "live" if machine()["device"] == "cpu" else "gpu"


def machine() -> dict[str, Any]:
    """The machine that the figures are from."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def table(rows: Items[Row]) -> str:
    """One line per variant, and one per fact that is a number or a string."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        base, *others = row["ms"]
        ratios = {base: f"A/A {row['a_a']:g}", **{one: f"{row['ratios'][one]:g} x the time" for one in others}}
        lines += [(row["name"], one, f"{ms:g} ms", ratios[one]) for one, ms in row["ms"].items()]
        facts = {key: value for key, value in row.items() if key not in ("name", "a_a")}
        lines += [(row["name"], key, str(one), "") for key, one in facts.items() if isinstance(one, int | float | str)]
    return in_columns(lines, str.ljust)


def in_columns(lines: Items[Items[str]], justify: Callable[[str, int], str] = str.rjust) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)
