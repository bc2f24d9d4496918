"""Runs random schedules and prints a JSON line of what happened for each kind of them:
`python -m tests.faults --world 200 --outside 200 --relay 200`.

A schedule that fails names its seed; `--first-seed` replays it. What a seed draws is fixed; when it strikes depends on
the clock, so run one that failed several times.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    import torch

    from tests.faults.oracle import make_oracle
    from tests.faults.outside import run_outside_schedules
    from tests.faults.relay import run_relay_schedules
    from tests.faults.world import run_world_schedules

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=0, help="schedules in a world of four ranks")
    parser.add_argument("--outside", type=int, default=0, help="schedules of replicas outside a world, with kills")
    parser.add_argument("--relay", type=int, default=0, help="schedules of weights by a relay, with kills")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        oracle = Path(directory)
        if arguments.world or arguments.outside:
            make_oracle(oracle)
        kinds = {"world": run_world_schedules, "outside": run_outside_schedules, "relay": run_relay_schedules}
        for name, run in kinds.items():
            count = getattr(arguments, name)
            if count:
                seeds = list(range(arguments.first_seed, arguments.first_seed + count))
                print(json.dumps({"kind": name, "first_seed": seeds[0], **run(oracle, seeds)}), flush=True)


if __name__ == "__main__":
    main()
