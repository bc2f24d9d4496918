"""What the papers report, beside what we measure: the rows that docs/reproduction.md shows.

    python experiments/reproduce.py                     # reads docs/results/, writes nothing
    python experiments/reproduce.py 1 2 --run           # measures rows anew, into --results
    python experiments/reproduce.py --markdown > docs/reproduction.md

Each row has the paper's value, a band that was set before anything was run, the command that measures it, its tier,
and whether the result is inside. A row without a result says "not run"; one that is an input of our models is not
scored. Exits with 0 also where a row is outside its band: that is a finding.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from engines.constraints import check_fields
from experiments import launch
from experiments.comparison.results import check_folders
from experiments.comparison.turns import in_columns, short
from experiments.reproduce_rose import LEASE, REPLICAS, SHARING, Measured, lease_and_density, replicas, sharing

ROOT = Path(__file__).parents[1]


def _bands(figures: tuple[str, ...]) -> Callable[[dict[str, Any]], Measured]:
    """Reads the rows of the paper's figures from `seer_sim.py`, which has the bands."""

    def read(result: dict[str, Any]) -> Measured:
        rows = [one for row in result["rows"] for one in row["paper"] if one["figure"] in figures]
        return {f"{one['task']}, {one['name']}": (one["ours"], one["inside"]) for one in rows}

    return read


def _acceptance(result: dict[str, Any]) -> Measured:
    """Tokens per step by references and paths; each must be above the one before."""
    table = result["acceptance_length"]["1"]
    found: Measured = {}
    before = 0.0
    for references, row in table.items():
        found[f"{references} references"] = (row["1"], row["1"] > before)
        before = row["1"]
        paths = [row[key] for key in sorted(row, key=int)]
        rises = all(less < more for less, more in itertools.pairwise(paths))
        found[f"{references} references, {max(row, key=int)} paths"] = (paths[-1], rises)
    return found


def _generation_cut(result: dict[str, Any]) -> Measured:
    """The share of generation's time that PAT saves over TP1, TP2 and the best static size."""
    found: Measured = {}
    for row in result["rows"]:
        for size in ("TP1", "TP2"):
            cut = 1 - 1 / row["pat_over"][size]
            found[f"{row['figure']}, over {size}"] = (short(cut), 0.2 <= cut <= 0.45)
        best = 1 - 1 / row["vs_best_static"]["pat"]
        found[f"{row['figure']}, over the best ({row['best_static']})"] = (short(best), None)
    return found


def _switch(result: dict[str, Any]) -> Measured:
    """How many times as long new processes take, which are timed once, as a switch in place (the median)."""
    return {row["name"]: (short(row["ms"]["restart"] / row["ms"]["all_to_all"]), None) for row in result["rows"]}


def _predictor(result: dict[str, Any]) -> Measured:
    return {
        f"TP{one['tp_size']}, {one['what']}": (short(one["error"]), one["error"] <= 0.1)
        for one in result["predictor_error"]
    }


def _ablation(result: dict[str, Any]) -> Measured:
    """The speed of each rung of SpecActor's ablation over another; the paper's is of DAPO alone."""
    return {
        f"{row['case'].split('-')[0]}, {one['name']}": (
            one["ours"],
            one["inside"] if row["case"].startswith("DAPO") else None,
        )
        for row in result["rows"]
        for one in row["paper"]
    }


def _planners(result: dict[str, Any]) -> Measured:
    """The DP against all partitions, times at the paper's size, and Algorithm 2 against all allocations."""
    return {
        "the best of all partitions (1: yes)": (float(result["dp_exact"]), result["dp_exact"]),
        "milliseconds for 6400 x 16": (result["dp_ms"], result["dp_ms"] <= 50),
        "milliseconds of the planner of our rollouts": (result["planner_ms"], result["planner_ms"] <= 50),
        "Algorithm 2 above the best of 969": (result["annealing_gap"], result["annealing_gap"] <= 0.01),
    }


def _heddle(result: dict[str, Any]) -> Measured:
    """Seconds of what Heddle replaces over Heddle's: 14B, all agents; then whole systems."""
    found: Measured = {}
    parts = {
        "Fig. 14": ("schedulers", ("fcfs", "rr", "sjf")),
        "Fig. 15": ("placement", ("least_load", "cache_aware")),
        "Fig. 16": ("allocation", ("fix1", "fix8")),
    }
    for figure, (part, names) in parts.items():
        for agent, row in result[part].get("14b", {}).items():
            found |= {f"{figure}, {agent}, {name}": (row[name], row[name] > 1) for name in names}
            if part == "allocation":
                found[f"{figure}, {agent}, Algorithm 2 alone"] = (row["unequal"], None)
    for model, agents in result["systems"].items():
        for agent, row in agents.items():
            found |= {f"Fig. 12, {model}, {agent}, {name}": (ours, None) for name, ours in row.items()}
    return found


def _relay(result: dict[str, Any]) -> Measured:
    """The gain of sparse weights over dense ones, and where it ends; scored where the paper prints a value."""
    found: Measured = {}
    for model, cells in result["cells"].items():
        for gbit, name in itertools.product(("200", "1"), ("ours", "paper")):
            codec, where = cells[gbit]["codecs"][name], f"{model}, {gbit} Gb/s, codec {name}"
            end = 1.0 if codec["break_even"] is None else codec["break_even"]
            found[f"{where}, gain"] = codec["gain"], codec["gain"] > 2.5
            found[f"{where}, break-even"] = end, 0.15 <= round(end, 2) <= 0.33 if gbit == "200" else None
    return found


@dataclass(frozen=True, kw_only=True)
class Row:
    number: int
    target: str
    paper: str
    band: str
    tier: str
    result: str
    """File of the result below the folder of results; empty where nothing is to be measured."""
    command: str
    read: Callable[[dict[str, Any]], Measured] = lambda _: {}
    note: str = ""
    """What explains values outside the band."""


INTRODUCTION = """\
What the papers report, beside what we measure. A *band* is the range in which we count a result as reproduced; bands
were set before anything was run, except the 0.95 of row 4. Rows 10 and 13 are left out: SpecActor's formulas are
tests, ROSE's Table 3 (turns that go where their prefix is) is not measured. Tier *sim* is the simulator, *live* are
real processes on the machine that a result names. Absolute times are never compared: models, lengths and GPUs are not
the papers'.

`python experiments/reproduce.py --markdown` prints this page from the results in `docs/results/`. `--run` repeats the
measurements and overwrites the results: on two cores some minutes for each command, about ten for `seer_sim.py`. Row
8 needs `python experiments/make_model.py runs/models/tiny --widen 8` first."""
SEER = "experiments/seer_sim.py --cases moonlight qwen2-vl-72b kimi-k2 --drafts --seeds 2 --token-scale 128 --shrink 2"
PROFILE = (
    "experiments/pat_profile.py --ranks 2 --model runs/models/tiny-x8 --output runs/x8_checked.json --check --steps 8 "
    "--turns 3 --batches 1 4 16 64 --contexts 16 64 --prefill-tokens 512 --kv-cache-mib 256 --max-num-seqs 64 "
    "--max-model-len 128"
)
ABLATION = """\
Why: the paper prints neither its drafting times nor its acceptance per guess. In ours four GPUs of a worker share the
drafting (2.6 ms for a guess of each of 256 sequences, beside 69 ms for a pass of 4 rows each), so that coupled drafting
gains 28 to 41 %, where the paper's gains 3 %. Decoupled, a fifth of the GPUs only draft, verifiers have 26 %
more sequences, and one GPU drafts for 322 of them (8.7 ms). Whole windows lose a period at each miss. So decoupling is
above plain decoding, but below coupled drafting. Algorithm 2 as printed takes windows for a batch of one, which are too
long for rows that are bound by arithmetic.
"""
PLANNER = """\
Why: the planner of our rollouts weighs a placement, and least load, in 21 scenarios of the predictor's error. The
exact DP alone takes a fifth of that.
"""
HEDDLE = "experiments/heddle_sim.py --models 14b --shrink 2"
UNEQUAL = """\
All values are of one set of lengths, and those near 1 differ by it: over three, with coding, FCFS takes 1.006, round
robin 1.001, and least load 0.97 (`heddle_sim.py --seeds 3`, docs/heddle.md).
Why: half of the paper's trajectories, 50 for each GPU. Priorities matter little where 64 GPUs have KV for nearly all.
Fix-8 is what Heddle chooses with coding and math, since Algorithm 2 promises less over equal sizes than its estimates'
error. Unequal sizes, by Algorithm 2 alone, take 1.03 to 1.20 times as long as Heddle's choice, and no less than equal
ones with true lengths: that unequal sizes are faster is not reproduced.
"""
RELAY = """\
Why: a serving rank pulls 16.4 GB on one core in 8.2 s (2.0 GB/s, an input: live, patching and the checksum of all
weights together have 2.3), while at 200 Gb/s the dense weights are loaded after 5.5 s; one four times as fast would
gain 2.6. The speed of the paper's codec follows from its "at most ~1 s" for adding 16.4 GB, so that its gain at 200
Gb/s is little more than 5.4 s over that second; its break-even is a third, by its bytes (band and value in whole
percent). A break-even of 0: there never is a gain; of 1: there is one up to half of the weights, the last density that
was measured. The paper's seconds at 200 Gb/s (8B: batch about 87, shards 31, sparse 7) are not explained by bytes and
bandwidths, by which dense weights take 6.7 and 5.4. They are not fitted, so that our gains at 1 Gb/s are far above the
paper's.
"""
ROWS = (
    Row(
        number=1, target="Seer, Table 6: speed over group-static of divided, with context, with context and drafts",
        paper="1.27-1.35, 1.33-1.47, 1.77-1.87", band="each above the one before, the last 1.5 to 2.2", tier="sim",
        result="seer_sim.json", command=SEER, read=_bands(("Table 6",)),
    ),
    Row(
        number=2, target="Seer, Fig. 10: throughput of the oracle's, tail of the baseline's",
        paper="0.95, 0.13", band="at least 0.9, at most 0.4", tier="sim",
        result="seer_sim.json", command=SEER, read=_bands(("Fig. 10",)),
    ),
    Row(
        number=3, target="Seer, Table 2: tokens per step by references and paths",
        paper="1.70, 2.04, 2.32, 2.53 for 0, 1, 5, 15; 2.85 with 4 paths", band="rising in both", tier="live",
        result="drafting.json", command="experiments/drafting.py --parts acceptance", read=_acceptance,
    ),
    Row(
        number=4, target="Seer, Fig. 11: drafts over none: grouped, own history, fixed lengths",
        paper="1.30, 1.19, 1.03", band="grouped > own history > fixed lengths, these at least 0.95", tier="sim",
        result="seer_sim.json", command=SEER, read=_bands(("Fig. 11",)),
    ),
    Row(
        number=5, target="PAT, Fig. 4: TP8 wins for one sequence (-37 %) and loses for 128 (+26 %)",
        paper="-0.37, +0.26", band="an input of the latency profiles, not scored", tier="-", result="", command="",
    ),
    Row(
        number=6, target="PAT, Fig. 11c: share of generation's time that is saved",
        paper="0.346, 0.320", band="0.2 to 0.45 over TP1 and TP2; over the best static TP size as it is", tier="sim",
        result="pat_sim.json", command="experiments/pat_sim.py --cells 11a-24K 11b-16K", read=_generation_cut,
    ),
    Row(
        number=7, target="PAT, Fig. 12: times that a switch is faster than new processes",
        paper="10.7 (58.98 to 5.52 s)", band="a check of consistency: reported", tier="live",
        result="switch.json", command="experiments/bench/switch.py --dtype float64 --kv-mib 128 --sequences 5",
        read=_switch,
    ),
    Row(
        number=8, target="PAT, Fig. 14: mean error of the predictor",
        paper="0.0404, 0.0307", band="at most 0.1", tier="live",
        result="pat_profile.json", command=PROFILE, read=_predictor,
    ),
    Row(
        number=9, target="SpecActor, Fig. 13 without best-of-N: speed of each rung over another",
        paper="coupled over plain 1.027 (-2.6 % time), naive over plain 0.75 (+33.4 %), decoupled over coupled 1.3, "
        "reconfigured over decoupled 1.2",
        band="each above or below 1 as in the paper", tier="sim",
        result="specactor_sim.json", command="experiments/specactor_sim.py", read=_ablation, note=ABLATION,
    ),
    Row(
        number=11, target="Heddle, Eq. 3 and Algorithm 2: placement and allocation",
        paper="optimal under its premises; 42 ms for 6400 x 16; about 5 s for an allocation",
        band="equal to brute force, at most 50 ms, a gap of at most 0.01", tier="live",
        result="heddle_planning.json", command="experiments/heddle_planning.py", read=_planners, note=PLANNER,
    ),
    Row(
        number=12, target="Heddle, Fig. 14, 15, 16 (14B), and 12: seconds of what it replaces over its own",
        paper="1.1-1.26 (schedulers), 1.2-1.5 (placements), 1.1-1.3 (Fix-1, Fix-8), 1.1-2.5 (systems)",
        band="above 1 for each scheduler, placement and fixed size (one set of lengths)", tier="sim",
        result="heddle_sim.json", command=HEDDLE, read=_heddle, note=UNEQUAL,
    ),
    Row(
        number=14, target="ROSE, Tables 2 and 1: seconds of the rollout by what is shared, and who breaks an SLO",
        paper="776.7, 591.7, 469.3 s without admission control (8B); with it 496.3 s, 651.7 for changes of the model, "
        "731.7 multiplexed",
        band="each rung above the next; P99 in SLO with admission control only", tier="sim",
        result="rose_sim.json", command="experiments/rose_sim.py", read=sharing, note=SHARING,
    ),
    Row(
        number=15, target="ROSE, Fig. 14: how many times as fast with serving replicas beside the rollout's own",
        paper="1.26, 1.45, 1.69 with 0.5, 1, 2 for each", band="rising, within 0.15", tier="sim",
        result="rose_sim.json", command="experiments/rose_sim.py", read=replicas, note=REPLICAS,
    ),
    Row(
        number=16, target="ROSE, Fig. 10 and 11b: gain of sparse over dense weights at 1 %, and where it ends",
        paper="at 200 Gb/s 4.4 (8B) and 4.6 (32B), at 1 Gb/s 2.8 and 6.6; about 0.2",
        band="gain above 2.5 at 200 and 1 Gb/s; an end of 15 to 33 % at 200 Gb/s", tier="sim",
        result="relay_sim.json", command="experiments/relay_sim.py", read=_relay, note=RELAY,
    ),
    Row(
        number=17, target="ROSE, Tables 4 and 5: the rollout by lease, and TTFT by density of requests",
        paper="496.3, 497.1, 492.2, 502.1 s for 10, 20, 50, 100 s; TTFT P99 338, 335, 371, 492 ms, and by density 338, "
        "380, 459 ms for 1, 1.5, 2",
        band="seconds within 5 % of the first; TTFT rising", tier="sim",
        result="rose_sim.json", command="experiments/rose_sim.py", read=lease_and_density, note=LEASE,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Show what the papers report beside what was measured."""

    rows: Annotated[tuple[int, ...], tyro.conf.Positional] = tuple(row.number for row in ROWS)
    """Rows to show."""
    results: Path = ROOT / "docs/results"
    """Folder of the results that were measured before, as experiments write them."""
    run: bool = False
    """Measure the rows anew; their results replace those in `--results`."""
    markdown: bool = False
    """Print the page docs/reproduction.md instead of a result."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        known = [row.number for row in ROWS]
        if unknown := [number for number in self.rows if number not in known]:
            raise ValueError(f"rows: there is no row {unknown[0]}; give some of {known}")
        if not self.results.is_dir():
            raise ValueError(f"results={str(self.results)!r}: there is no such folder; make it")
        if self.run:
            check_folders(self, (), folders=["results"])


def main() -> dict[str, Any] | None:
    config = launch.options(ReproduceConfig)
    chosen = [row for row in ROWS if row.number in config.rows]
    if config.run:
        for row in {row.result: row for row in chosen if row.result}.values():
            _measure(row, config.results / row.result)
    found = {row.number: _read(row, config.results / row.result) for row in chosen}
    if config.markdown:
        print(_page(chosen, found))
        return None
    lines = [["row", "tier", "what", "ours", "inside"]]
    for row in chosen:
        lines += [[str(row.number), row.tier, *one] for one in _lines(row, found[row.number])]
    print(in_columns(lines, str.ljust), file=sys.stderr)
    return {
        "experiment": "reproduce",
        "rows": {
            str(number): measured
            and {name: {"ours": ours, "inside": inside} for name, (ours, inside) in measured.items()}
            for number, measured in found.items()
        },
    }


def _measure(row: Row, path: Path) -> None:
    """Runs the command of a row. Raises ValueError if it fails; the result of before is then kept."""
    print(f"row {row.number}: python {row.command}", file=sys.stderr, flush=True)
    path.write_text(json.dumps(launch.result_of(shlex.split(row.command), cwd=ROOT)) + "\n")


def _read(row: Row, path: Path) -> Measured | None:
    """Returns what was measured; None where there is no result. Raises ValueError for a file that is none."""
    if not row.result or not path.is_file():
        return None
    try:
        return row.read(json.loads(path.read_text()))
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path}: is no result of {row.command.split(' --')[0]} ({error!r})") from None


def _lines(row: Row, measured: Measured | None) -> list[list[str]]:
    if measured is None:
        return [[row.target, "-", "not scored" if not row.result else "not run"]]
    answers = {True: "in", False: "OUT", None: "reported"}
    return [[name, f"{ours:g}", answers[inside]] for name, (ours, inside) in measured.items()]


def _page(rows: list[Row], found: dict[int, Measured | None]) -> str:
    lines = ["# Reproduction", "", INTRODUCTION]
    for row in rows:
        lines += ["", f"## {row.number}. {row.target}", "", f"Paper: {row.paper}. Band: {row.band}. Tier: {row.tier}."]
        if row.command:
            lines += ["", f"`python {row.command}`"]
        lines += ["", "| | ours | |", "|---|---|---|"]
        lines += [f"| {name} | {ours} | {answer} |" for name, ours, answer in _lines(row, found[row.number])]
        lines += ["", row.note] if row.note and found[row.number] else []
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(main)
