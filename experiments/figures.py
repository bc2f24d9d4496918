"""Pictures of runs and rollouts. Each is titled with what it shows and its tier: live, paced, gpu or sim."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from engines.json_files import read_jsonl
from engines.rollout.telemetry import StepRecord
from experiments.comparison.rollouts import makespan, over_time

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
Bars = Mapping[Any, Sequence[float]]
"""Heights by what they are of, and where there is one the range: the height, or the height, the least and the most."""
TIMES_OF_TURNS = {"generate_sequences": "on replicas", "queue": "waiting for a replica", "tool_calls": "in tool calls"}
PHASES = ("gen", "reward", "update_actor", "update_weights", "testing")


def draw_run(folder: Path, tier: str) -> list[Path]:
    """Writes PNGs of the files in a run's folder under `folder`/figures; returns their paths."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    lengths = read_jsonl(folder / "lengths.jsonl")
    rollout = _last_rollout(folder / "rollout_steps.jsonl")
    target = folder / "figures"
    target.mkdir(exist_ok=True)
    pictures: dict[str, tuple[Callable[[Axes, list[Any]], str], list[Any]]] = {
        "reward": (_reward, metrics),
        "phases": (_phases, [row for row in metrics if "timing_s/step" in row]),
        "response_length": (_lengths, lengths),
        "live_batch": (_live_batch, rollout),
        "turns": (_turns, [row for row in metrics if "num_turns/mean" in row]),
    }
    written = [_figure(target / f"{name}.png", draw, rows, tier) for name, (draw, rows) in pictures.items() if rows]
    if rollout:
        written.append(draw_timelines(target / "timeline.png", {"last rollout": rollout}, tier))
    if any(step.num_drafted for step in rollout):
        written.append(draw_drafts(target / "drafts.png", {"last rollout": rollout}, tier))
    return written


def draw_timelines(path: Path, rollouts: Mapping[str, Sequence[StepRecord]], tier: str) -> Path:
    """Draws one panel per rollout, with replicas as rows and steps coloured by batch size, on a common time axis.

    Where a replica begins to run with a new TP degree above 1 (after regrouping), the degree is written.
    """
    figure, axes = plt.subplots(
        len(rollouts), 1, figsize=(9, 1 + 1.6 * len(rollouts)), sharex=True, layout="constrained", squeeze=False
    )
    largest = max((step.num_running for steps in rollouts.values() for step in steps), default=1)
    colours = plt.get_cmap("viridis")
    for ax, (name, steps) in zip(axes[:, 0], rollouts.items(), strict=True):
        origin = min((step.start for step in steps), default=0.0)
        rows = sorted({step.replica_id for step in steps})
        for row in rows:
            own = sorted((step for step in steps if step.replica_id == row), key=lambda step: step.start)
            ax.broken_barh(
                [(step.start - origin, step.seconds) for step in own],
                (row - 0.4, 0.8),
                facecolors=[colours(step.num_running / largest) for step in own],
                antialiaseds=False,
            )
            for before, step in zip([None, *own], own, strict=False):
                if step.tp_size > 1 and (before is None or before.tp_size != step.tp_size):
                    ax.annotate(f"TP{step.tp_size}", (step.start - origin, row + 0.4), fontsize=7)
        ax.set(title=name.replace("_", " "), ylabel="replica", yticks=rows)
    axes[-1, 0].set_xlabel("seconds")
    scale = plt.cm.ScalarMappable(cmap=colours, norm=plt.Normalize(0, largest))
    figure.colorbar(scale, ax=axes[:, 0].tolist(), label="sequences in the step")
    return save(figure, path, "Steps of each replica", tier)


def draw_over_time(
    axes: Mapping[str, Axes], rollouts: Mapping[str, Sequence[StepRecord]], span: tuple[float, float] | None = None
) -> None:
    """Draws the means of each hundredth of the time, by the names of `over_time`: a line per rollout, each from its
    first step on, or in the same `span`."""
    for name, steps in rollouts.items():
        points = over_time(steps, 100, span)
        seconds = [0.0, *(point["second"] for point in points)]
        for key, ax in axes.items():
            ax.stairs([point[key] for point in points], seconds, label=name, baseline=None)
            ax.set_ylabel(key)


def draw_instances(
    path: Path, rollouts: Mapping[str, Sequence[StepRecord]], tails: Mapping[str, float], tier: str
) -> Path:
    """Draws, a column per rollout and a line per replica, KV use, running sequences, preemptions so far (Seer, Figs. 3
    and 9) and tokens per step (Fig. 12) over time. The time from `tails` on, on the clock of the steps, is shaded."""
    keys = ("kv use", "running sequences", "preemptions", "tokens per sequence and step")
    figure, axes = plt.subplots(
        4, len(rollouts), figsize=(3 * len(rollouts), 8), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, (name, steps) in zip(axes.T, rollouts.items(), strict=True):
        origin = min(step.start for step in steps)
        span = origin, origin + makespan(steps)
        draw_over_time(dict(zip(keys, column, strict=True)), _by_replica(steps), span)
        column[0].set_ylabel("share of KV in use")
        for ax in column:
            ax.axvspan(tails[name] - origin, span[1] - origin, color="grey", alpha=0.2, linewidth=0)
            ax.label_outer()
        column[0].set_title(textwrap.fill(name, 20))
        column[3].set_xlabel("seconds")
    return save(figure, path, "Replicas over time, the tail shaded", tier)


def draw_drafting(
    path: Path,
    acceptance: Mapping[str, Mapping[int, Mapping[int, float]]],
    speedup: Mapping[str, Mapping[int, float]],
    tier: str,
) -> Path:
    """Draws tokens per step over the number of references, a line per number of paths and a panel per temperature
    (Seer, Table 2 and Fig. 12); and, as bars, the speed-up of each drafter by batch size."""
    num_panels = len(acceptance) + bool(speedup)
    figure, axes = plt.subplots(1, num_panels, figsize=(4 * num_panels, 3.2), layout="constrained", squeeze=False)
    for ax, (temperature, table) in zip(axes[0], acceptance.items(), strict=False):
        for paths in next(iter(table.values())):
            label = f"{paths} path{'s' if paths > 1 else ''}"
            ax.plot([str(count) for count in table], [row[paths] for row in table.values()], marker="o", label=label)
        ax.set(title=f"temperature {temperature}", xlabel="references", ylabel="tokens per sequence and step", ylim=0)
        ax.legend()
    if speedup:
        ax = axes[0][-1]
        _bars(ax, {name: {batch: [value] for batch, value in row.items()} for name, row in speedup.items()})
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set(xlabel="sequences at a time", ylabel="times as fast as without drafts")
    return save(figure, path, "Drafts from groups: acceptance and speed-up", tier)


def draw_tasks(path: Path, title: str, panels: Sequence[tuple[str, str, Mapping[str, Bars]]], tier: str) -> Path:
    """Draws panels, each with a title, a unit and bars: a group of them per task, in it one per variant."""
    figure, axes = plt.subplots(2, -(-len(panels) // 2), figsize=(15, 8), layout="constrained", squeeze=False)
    for ax, (name, unit, values) in zip(axes.flat, panels, strict=False):
        _bars(ax, values)
        ax.set(title=f"{name} ({tier})", ylabel=unit, xlabel="task")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    return save(figure, path, title, tier)


def _bars(ax: Axes, rows: Mapping[str, Bars]) -> None:
    """Draws a group of bars for each key, in it one for each of the `rows`."""
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    width = 0.8 / len(rows)
    for place, (name, row) in enumerate(rows.items()):
        places = [keys.index(key) + (place + 0.5) * width - 0.4 for key in row]
        ax.bar(places, [value[0] for value in row.values()], width, label=name)
        for at, value in zip(places, row.values(), strict=True):
            ax.plot([at] * len(value[1:]), value[1:], color="black", linewidth=0.8)
    ax.set_xticks(range(len(keys)), [textwrap.fill(str(key), 12) for key in keys])
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def draw_drafts(path: Path, rollouts: Mapping[str, Sequence[StepRecord]], tier: str) -> Path:
    """Draws, a line per rollout, the tokens per sequence and step and the running sequences over time (Seer, Fig. 12),
    and the share of draft tokens that was accepted by their place in the draft."""
    figure, (tokens, running, places) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    draw_over_time({"tokens per sequence and step": tokens, "running sequences": running}, rollouts)
    for steps in rollouts.values():
        drafted, right = (_by_place([getattr(step, field) for step in steps]) for field in ("drafted", "accepted"))
        shares = [part / whole for whole, part in zip_longest(drafted, right, fillvalue=0)]
        places.plot(range(1, 1 + len(shares)), shares, marker="o")
    tokens.set(xlabel="seconds", ylim=0)
    running.set(xlabel="seconds", ylim=0)
    places.set(xlabel="place in the draft", ylabel="share accepted", ylim=(0, 1))
    places.xaxis.set_major_locator(MaxNLocator(integer=True))
    tokens.legend()
    return save(figure, path, "Drafts over time, and by place", tier)


def save(figure: Figure, path: Path, title: str, tier: str) -> Path:
    """Writes a figure to a file, which is as large as all that is in it, and returns its path."""
    figure.suptitle(f"{title} ({tier})")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def _by_replica(steps: Sequence[StepRecord]) -> dict[str, list[StepRecord]]:
    ids = sorted({step.replica_id for step in steps})
    return {f"replica {id_}": [step for step in steps if step.replica_id == id_] for id_ in ids}


def _by_place(counts: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _last_rollout(path: Path) -> list[StepRecord]:
    """Reads line by line: the file holds every rollout of the run."""
    steps: list[StepRecord] = []
    last = None
    if path.is_file():
        with open(path) as file:
            for line in file:
                if not line.endswith("\n"):
                    break  # as in `read_jsonl`
                row = json.loads(line)
                if (number := row.pop("training/global_step")) != last:
                    last, steps = number, []
                steps.append(StepRecord(**row))
    return steps


def _figure(path: Path, draw: Callable[[Axes, list[Any]], str], rows: list[Any], tier: str) -> Path:
    """`draw` returns the title."""
    figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    title = draw(ax, rows)
    return save(figure, path, title, tier)


def _reward(ax: Axes, metrics: list[dict[str, Any]]) -> str:
    """Draws rewards and pass@1 on one axis if all rewards are in [0, 1]; otherwise each has its own axis."""
    right = ax
    if not all(0 <= row.get("critic/rewards/mean", 0) <= 1 for row in metrics):
        right = ax.twinx()
        right.spines["right"].set_visible(True)
    for key, own, colour, style in (("critic/rewards/mean", ax, "C0", "-"), ("val-core/pass@1", right, "C1", "o-")):
        points = [(row["training/global_step"], row[key]) for row in metrics if key in row]
        own.plot([step for step, _ in points], [value for _, value in points], style, color=colour, label=key, ms=4)
        if right is not ax:
            own.set_ylabel(key, color=colour)
    ax.set_xlabel("step")
    if right is ax:
        ax.set_ylabel("reward, share of correct answers")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylim(0, 1.02)
    if right is ax:
        ax.legend()
    return "Reward in training, pass@1 on held-out problems"


def _phases(ax: Axes, steps: list[dict[str, Any]]) -> str:
    x = [row["training/global_step"] for row in steps]
    series = {phase: [row.get(f"timing_s/{phase}", 0.0) for row in steps] for phase in PHASES}
    series = {phase: values for phase, values in series.items() if any(values)}
    ax.stackplot(x, *series.values(), labels=list(series), alpha=0.85)
    ax.set(xlabel="step", ylabel="seconds")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return "Time per step by phase"


def _turns(ax: Axes, metrics: list[dict[str, Any]]) -> str:
    """One process alone has no queue of its own: only its tools' time is known."""
    right, step = ax.twinx(), "training/global_step"
    for name, label in TIMES_OF_TURNS.items():
        key = f"timing_s/agent_loop/{name}/mean"
        if rows := [row for row in metrics if key in row]:
            ax.plot([row[step] for row in rows], [row[key] for row in rows], "o-", label=label, ms=4)
    turns = [row["num_turns/mean"] for row in metrics]
    right.plot([row[step] for row in metrics], turns, "s--", color="black", label="turns", ms=4)
    right.spines["right"].set_visible(True)
    right.set(ylabel="turns per trajectory", ylim=0)
    ax.set(xlabel="step", ylabel="seconds per trajectory", ylim=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines = [*ax.get_lines(), *right.get_lines()]
    ax.legend(lines, [str(one.get_label()) for one in lines], loc="upper left", bbox_to_anchor=(1.16, 1))
    return "Turns of a trajectory, and what its time goes to"


def _lengths(ax: Axes, lengths: list[dict[str, Any]]) -> str:
    """The share of responses longer than x: the tail, on log axes."""
    for row, label in ((lengths[0], "first step"), (lengths[-1], "last step")):
        values = sorted(row["lengths"])
        share = [1 - i / len(values) for i in range(len(values))]
        ax.step(values, share, where="post", label=f"{label} (median {values[len(values) // 2]}, longest {values[-1]})")
    ax.set(xlabel="tokens", ylabel="share of responses at least as long", xscale="log", yscale="log")
    ax.legend()
    return "Response lengths and their tail"


def _live_batch(ax: Axes, steps: list[StepRecord]) -> str:
    origin = min(step.start for step in steps)
    draw_over_time({"running sequences": ax}, _by_replica(steps), (origin, origin + makespan(steps)))
    ax.set(xlabel="seconds", ylim=0)
    ax.legend()
    return "Live batch over the last rollout"
