"""Profiles this machine's engine for PAT (§4.2): seconds of decode steps, prefills and switches, by TP size.

    python experiments/pat_profile.py --model 25m --output runs/25m.json
    python experiments/pat_profile.py --ranks 2 --model FOLDER --output FILE --check

For each TP size that the ranks and the model's heads allow, all replicas run batches of dummy sequences, whose KV is
zeros and so needs no prefill. Points take turns; each is the median of its steps. Switches are those of rollouts, KV
included, from the command to the ready replica. `--check` also measures points between the profiled ones, and batches
whose sequences end one by one, and compares them with the predictor. The file is for `train.py --layout-policy pat`
with the same engine options. Prints one JSON object.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import engines
from experiments import launch
from experiments.bench.models import checkpoint
from experiments.comparison.machine import machine, this_tier
from experiments.pat_measuring import PatProfileConfig, measure, nested_layouts

SHAPE_POSITIONS = 8192
"""Longest sequence of a model that is named by its shape."""


def main() -> dict[str, Any]:
    config = launch.options(PatProfileConfig)
    start = time.perf_counter()
    launch.share_cores()
    groups = None
    if config.ranks > 1 or launch.num_ranks() > 1:
        all_ranks = launch.join_world(config.ranks, on_cuda=True)
        groups = engines.GroupCache(all_ranks, nested_layouts(all_ranks.size), transport=config.transport)
    world = None if groups is None else groups.world
    positions = config.engine.max_model_len or SHAPE_POSITIONS
    with checkpoint(config.model, max_positions=positions, dtype=config.engine.dtype, world=world) as folder:
        profile = measure(config, folder, groups)
    if launch.rank() == 0:
        profile.save(config.output)
        if config.figure is not None:
            from experiments.pat_figures import draw_profile

            draw_profile(config.figure, profile, this_tier())
        for one in profile.checks:
            print(f"TP{one['tp_size']}, {one['what']}: error {one['error']:.1%}, A/A {one['a_a']:.1%}", file=sys.stderr)
    if groups is not None:
        groups.close()
    return {
        "experiment": "pat_profile",
        "tier": this_tier(),
        "machine": machine(),
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "output": str(config.output),
        "num_points": len(profile.decodes),
        "switches": profile.switches,
        "predictor_error": [
            {name: one[name] for name in ("tp_size", "what", "error", "a_a")} for one in profile.checks
        ],
    }


if __name__ == "__main__":
    launch.run(main)
