"""ROSE's weight transfer between simulated clusters: its ladder, bandwidths, break-even (Figs. 10, 11b). Tier: sim.

    python experiments/relay_sim.py --output relay_sim.json

16 trainers on two nodes, and 16 serving GPUs on two others: Qwen3-8B with TP 1, Qwen3-32B with TP 4 (§6.3). `ladder`
has how many times as fast each rung of Fig. 10a is as the one before. A cell for each model and each bandwidth of a
trainer node has all rungs' seconds until the last replica may start, their bottlenecks, and how long each stage is
busy; for each codec its `gain` over `shards`, and `break_even`, the share of changed weights from which there is none
(0: there never is; null: there is one up to half of the weights).

Codecs: `ours` is engines/relay/codec.py. Its bytes are counted here, with weights from N(0, 0.02), of which a share
moves to a neighbouring value; its speed is an input, as experiments/bench/relay_codec.py measured it on one core.
`ours x4` is four times as fast. `paper` has six bytes for each change, and the speed that follows from "at most ~1 s"
(§4.2) for the 16.4 GB of a rank.

All options are inputs. Seconds are bytes over bandwidths, and codecs; no cost of software is in them, and the paper's
seconds are not fitted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from msgspec import Meta

from engines.constraints import Count, NonNegative, Positive, Share
from engines.relay.codec import encode
from engines.relay.message import Bucket
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import in_columns, short
from research.rose.transfer import DENSE_RUNGS, Codec, Coding, Deployment, break_even, transfer
from research.simulator.datasheets import BYTES_PER_ELEMENT, QWEN3_8B, QWEN3_32B, ModelShape
from research.simulator.links import HostLinks, Link

ModelName = Literal["8b", "32b"]
SHAPES: Mapping[ModelName, tuple[ModelShape, int]] = {"8b": (QWEN3_8B, 1), "32b": (QWEN3_32B, 4)}
"""And the TP size of the serving replicas."""
PAPER: Mapping[ModelName, dict[str, float]] = {
    "8b": {"async": 1.6, "shards": 1.8, "sparse": 4.4, "total": 12.4},
    "32b": {"async": 1.5, "shards": 1.3, "sparse": 4.6, "total": 9.1},
}
"""Fig. 10a, at 200 Gb/s."""
PAPER_S = {
    "8b": {"200": {"shards": 31, "sparse": 7}, "1": {"shards": 109, "sparse": 39}},
    "32b": {"200": {"shards": 96, "sparse": 21}, "1": {"shards": 584, "sparse": 89}},
}
"""Seconds by Gb/s, Fig. 10b."""
DENSITIES = (0.001, 0.01, 0.04, 0.5)
COO_BYTES, COO_RATE = 6, 16.4e9
Numbers = Annotated[tuple[Positive, ...], Meta(min_length=1, description="one or more numbers above 0")]
Rates = Annotated[tuple[Positive, ...], Meta(min_length=4, max_length=4, description="four numbers above 0")]


@dataclass(frozen=True, kw_only=True)
class RelaySimConfig(ResultOptions):
    """Simulate ROSE's weight transfer."""

    models: Annotated[tuple[ModelName, ...], Meta(min_length=1, description="one or more models")] = get_args(ModelName)
    bandwidths: Numbers = (0.5, 1, 4, 5, 20, 200)
    """Gb/s of each trainer node to the relay; the ladder has the last one."""
    density: Share = 0.01
    """Share of weights that changed."""
    local: Positive = 200
    """Gb/s of each node's NIC within its cluster."""
    relay: Positive = 400
    """Gb/s that the relay takes in, and gives out: two nodes of it."""
    latency_ms: NonNegative = 0.5
    """Between the clusters; assumed."""
    load: Positive = HostLinks().host.bandwidth / 1e9
    """GB/s at which dense weights come into a GPU."""
    encode: Rates = (2.2, 1.3, 0.62, 0.04)
    """GB/s of weights that a trainer rank encodes where 0.1, 1, 4 and 50 % of them changed (docs/relay.md)."""
    decode: Rates = (2.9, 2.0, 1.2, 0.10)
    """Alike, that a serving rank decodes."""
    times_as_fast: Numbers = (4, 16)
    """Faster codecs of ours to compare with: more cores for each rank, or C++."""
    elements: Count = 2**22
    """Weights that are encoded to count bytes."""
    figure: Path | None = None
    """Draw the paper's Figs. 10 and 11b to this file."""


def deployment_of(config: RelaySimConfig, model: ModelName, gbit: float) -> Deployment:
    shape, tp_size = SHAPES[model]
    return Deployment(
        model_bytes=shape.num_parameters * BYTES_PER_ELEMENT,
        tp_size=tp_size,
        cross=Link(bandwidth=gbit * 1e9 / 8, latency_s=config.latency_ms / 1e3),
        local=Link(bandwidth=config.local * 1e9 / 8, latency_s=HostLinks().network.latency_s),
        relay=Link(bandwidth=config.relay * 1e9 / 8),
        load_rate=config.load * 1e9,
    )


def codecs_of(config: RelaySimConfig) -> dict[str, Codec]:
    sizes = measured_sizes(config.elements)

    def ours(times: float) -> Codec:
        rows = zip(DENSITIES, sizes, config.encode, config.decode, strict=True)
        unit = 1e9 * times
        return Codec(
            tuple((at, Coding(size=size, encode_rate=e * unit, decode_rate=d * unit)) for at, size, e, d in rows)
        )

    ends = ((at, at * COO_BYTES / BYTES_PER_ELEMENT) for at in (1e-6, 1.0))  # in proportion to the density
    paper = Codec(tuple((at, Coding(size=size, encode_rate=COO_RATE, decode_rate=COO_RATE)) for at, size in ends))
    return {"ours": ours(1), **{f"ours x{times:g}": ours(times) for times in config.times_as_fast}, "paper": paper}


def measured_sizes(elements: int) -> list[float]:
    """Bytes of our codec's messages over those of bfloat16, by `DENSITIES`."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(elements, np.float32) * 0.02).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype(np.uint16)
    bucket = Bucket(model="0" * 32, dtype="bfloat16", start=0, length=elements, version=1, base_version=0)
    sizes = []
    for density in DENSITIES:
        bits, at = base.copy(), np.flatnonzero(rng.random(elements, np.float32) < density)
        bits[at] += rng.choice(np.array([1, 2**16 - 1], np.uint16), len(at))
        sizes.append(len(encode(bits, bucket, base)) / bucket.num_bytes)
    return sizes


def main() -> dict[str, Any]:
    config = launch.options(RelaySimConfig)
    codecs = codecs_of(config)
    cells = {
        model: {
            f"{gbit:g}": describe(deployment_of(config, model, gbit), config.density, codecs)
            for gbit in config.bandwidths
        }
        for model in config.models
    }
    ladder = {
        model: {"simulated": ladder_of([*some.values()][-1]), "paper": PAPER[model]} for model, some in cells.items()
    }
    lines = [["model", "Gb/s", "rung", "seconds", "bottleneck", "over shards", "break-even"]]
    for model, some in cells.items():
        for gbit, cell in some.items():
            for rung, seconds in cell["seconds"].items():
                codec = cell["codecs"].get(rung.removeprefix("sparse, "), {"gain": "", "break_even": ""})
                lines.append([model, gbit, rung, f"{seconds:g}", cell["bottleneck"][rung], *map(str, codec.values())])
    print(in_columns(lines, str.ljust), file=sys.stderr)
    if config.figure is not None:
        draw(config.figure, config, cells, codecs)
    return report("relay_sim", config, {"tier": "sim", "ladder": ladder, "paper_s": PAPER_S, "cells": cells})


def describe(deployment: Deployment, density: float, codecs: Mapping[str, Codec]) -> dict[str, Any]:
    rungs = {str(rung): transfer(rung, deployment) for rung in DENSE_RUNGS}
    rungs |= {f"sparse, {name}": transfer("sparse", deployment, codec.at(density)) for name, codec in codecs.items()}
    ends = {name: break_even(deployment, codec) for name, codec in codecs.items()}
    return {
        "seconds": {name: short(found.seconds) for name, found in rungs.items()},
        "bottleneck": {name: found.bottleneck for name, found in rungs.items()},
        "busy_s": {name: {stage: short(s) for stage, s in found.busy.items()} for name, found in rungs.items()},
        "codecs": {
            name: {
                "gain": short(rungs["shards"].seconds / rungs[f"sparse, {name}"].seconds),
                "break_even": None if end is None else short(end),
            }
            for name, end in ends.items()
        },
    }


def ladder_of(cell: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast each rung is as the one before, and sparse as batch."""
    seconds = cell["seconds"]
    ratios = {"async": seconds["batch"] / seconds["async"], "shards": seconds["async"] / seconds["shards"]}
    ratios |= {f"sparse, {name}": codec["gain"] for name, codec in cell["codecs"].items()}
    ratios |= {f"total, {name}": seconds["batch"] / seconds[f"sparse, {name}"] for name in cell["codecs"]}
    return {name: short(ratio) for name, ratio in ratios.items()}


def draw(path: Path, config: RelaySimConfig, cells: Mapping[ModelName, Any], codecs: Mapping[str, Codec]) -> None:
    import matplotlib.pyplot as plt

    from experiments.figures import save

    figure, axes = plt.subplots(len(cells), 3, figsize=(14, 4 * len(cells)), layout="constrained", squeeze=False)
    densities = np.geomspace(DENSITIES[0], DENSITIES[-1], 40)
    for (model, some), (ladder, seconds, gains) in zip(cells.items(), axes, strict=True):
        gbit, last = [*some.items()][-1]
        ladder.barh(list(last["seconds"]), list(last["seconds"].values()))
        ladder.invert_yaxis()
        ladder.set(title=f"{model}, {gbit} Gb/s (Fig. 10a)", xlabel="seconds")
        for rung in ("shards", *(f"sparse, {name}" for name in codecs)):
            seconds.plot(config.bandwidths, [cell["seconds"][rung] for cell in some.values()], marker="o", label=rung)
        for rung, marker in (("shards", "x"), ("sparse", "+")):
            printed = {float(at): row[rung] for at, row in PAPER_S[model].items()}
            seconds.scatter(printed.keys(), printed.values(), color="black", marker=marker, label=f"the paper's {rung}")
        seconds.set(title=f"{model} (Fig. 10b)", xlabel="Gb/s of a trainer node", ylabel="seconds")
        for place, at in enumerate(config.bandwidths):
            deployment = deployment_of(config, model, at)
            dense = transfer("shards", deployment).seconds
            for name, style in (("ours", "-"), ("paper", ":")):
                line = [dense / transfer("sparse", deployment, codecs[name].at(one)).seconds for one in densities]
                gains.plot(100 * densities, line, style, color=f"C{place}", label=f"{name}, {at:g} Gb/s")
        gains.axhline(1, color="black", linewidth=0.8)
        gains.set(title=f"{model} (Fig. 11b)", xlabel="% of weights changed", ylabel="speed over shards")
        for ax in (seconds, gains):
            ax.set(xscale="log", yscale="log")
            ax.legend(fontsize="x-small", ncols=2)
    save(figure, path, "Weights by relay, between clusters", "sim")


if __name__ == "__main__":
    launch.run(main)
