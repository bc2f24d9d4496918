"""Weights by a relay: the trainer's bits in every shard, bytes and seconds of a transfer, and the main job. Tier: live.

    torchrun --standalone --nproc-per-node 2 experiments/relay.py --output relay.json --figure relay.png

`weights` trains by GRPO at every ZeRO stage, and compares the bits of replicas of TP 1, 2 and 4 with the trainer's;
`density` is the share of weights that a step changes; `bytes` are counted at the socket. `transfer` is Fig. 10a's
ladder over throttled links: from two trainer ranks, with a link each, to a replica outside. `job` is train.py with
`--weights relay` and with direct copies, in turns: the tokens must be the same. Prints one JSON object.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from engines.constraints import Count
from engines.json_files import read_jsonl
from experiments import launch
from experiments.comparison.results import ResultOptions, check_figure, report
from experiments.comparison.turns import short

Part = Literal["weights", "density", "transfer", "job"]
PARTS: tuple[Part, ...] = ("weights", "density", "transfer", "job")
GIGABITS = (0.5, 1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class RelayConfig(ResultOptions):
    """Measure weights that travel by a relay."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] = PARTS
    """What to measure."""
    ranks: Count = 2
    """Processes to start; under torchrun, its number of processes applies instead."""
    steps: Count = 20
    """GRPO steps at ZeRO-1; three at the other stages."""
    turns: Count = 3
    """Interleaved measurements of each variant; medians count."""
    job_steps: Annotated[int, Meta(ge=2, description="an integer of at least 2")] = 6
    """Steps of each run of train.py."""
    model: str = "tiny"
    """Model of these runs, as for train.py."""
    figure: Path | None = None
    """Draw the transfer to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_figure(self.figure)


def main() -> dict[str, Any] | None:
    config = launch.options(RelayConfig)
    start = time.monotonic()
    world = launch.join_world(config.ranks)
    if world.size < 2:
        raise ValueError(f"ranks={world.size}: parts of the weights come from several ranks; give at least 2")
    measured: dict[str, Any] = {}
    if "density" in config.parts:
        from experiments.relay_transfer import density_part

        measured |= density_part()
    if "transfer" in config.parts:
        from experiments.relay_transfer import transfer_part

        measured |= transfer_part(world, turns=config.turns, gigabits=GIGABITS)
    if "weights" in config.parts:
        from experiments.relay_training_steps import weights_part

        measured |= weights_part(world, steps=config.steps)
    if world.rank:
        return None
    if "job" in config.parts:
        measured |= _job_part(config)
    equal = [measured[name] for name in ("weights_equal", "tokens_equal") if name in measured]
    first: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if equal:
        first["tokens_equal"] = all(equal)
    if config.figure is not None and "transfer" in measured:
        _draw(config.figure, measured["transfer"])
    return report("relay", config, {**measured, **first})


def _job_part(config: RelayConfig) -> dict[str, Any]:
    """Runs of the main job in turns; one with the relay is resumed in its middle."""
    script = str(Path(__file__).with_name("train.py"))
    common = ["--ranks", "2", "--model", config.model, "--deterministic", "--wandb", "off", "--eval-every", "0"]
    steps_s: dict[str, list[float]] = {"direct": [], "relay": []}
    waits, digests = [], set()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)

        def run(name: str, weights: str, *more: str) -> list[dict[str, Any]]:
            places = ["--runs", folder, "--name", name, "--weights", weights]
            launch.result_of([script, *common, *places, *more])
            digests.add(tuple(one["digest"] for one in read_jsonl(runs / name / "lengths.jsonl")))
            return read_jsonl(runs / name / "metrics.jsonl")

        for turn in range(config.turns):
            for weights in sorted(steps_s, reverse=bool(turn % 2)):
                rows = run(f"{weights}-{turn}", weights, "--steps", str(config.job_steps), "--save-every", "0")
                steps_s[weights].append(statistics.median(row["timing_s/step"] for row in rows[1:]))
                waits += [row["timing_s/relay_wait"] for row in rows[1:] if "timing_s/relay_wait" in row]
        begun = ["--runs", folder, "--name", "resumed", "--weights", "relay", "--steps", str(config.job_steps // 2)]
        launch.result_of([script, *common, *begun])
        run("resumed", "relay", "--steps", str(config.job_steps), "--resume")
        last = read_jsonl(runs / "relay-0" / "metrics.jsonl")[-1]
    ratios = [with_it / without for with_it, without in zip(steps_s["relay"], steps_s["direct"], strict=True)]
    return {
        "tokens_equal": len(digests) == 1,
        "step_ratio": short(statistics.median(ratios)),
        "step_ratios": [short(one) for one in ratios],
        "step_s": {name: short(statistics.median(some)) for name, some in steps_s.items()},
        "training_wait_s": short(max(waits)),
        "job_metrics": {name: short(value) for name, value in last.items() if "relay" in name},
    }


def _draw(path: Path, transfer: dict[str, Any]) -> None:
    """Seconds of each rung by bandwidth, and of sparse by density."""
    from matplotlib import pyplot as plt

    from experiments.comparison.machine import this_tier
    from experiments.figures import save

    figure, (ladder, densities) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = [name for name in next(iter(transfer.values())) if name in ("batch", "async", "shards", "sparse")]
    for number, name in enumerate(names):
        places = [at + 0.2 * number for at in range(len(transfer))]
        ladder.bar(places, [row[name] for row in transfer.values()], 0.2, label=name)
    ladder.set_xticks([at + 0.3 for at in range(len(transfer))], [f"{rate} Gb/s" for rate in transfer])
    ladder.set(ylabel="seconds until the replica runs")
    ladder.legend()
    for number, (rate, row) in enumerate(transfer.items()):
        at = [float(one) for one in row["by_density"]]
        densities.plot(at, [*row["by_density"].values()], marker="o", color=f"C{number}", label=f"{rate} Gb/s, sparse")
        densities.axhline(row["shards"], color=f"C{number}", linestyle=":")
    densities.set(xlabel="changed weights, %", ylabel="seconds (dotted: shards, dense)", ylim=(0, None))
    densities.legend()
    save(figure, path, "Weights by relay", this_tier())


if __name__ == "__main__":
    launch.run(main)
