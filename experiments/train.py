"""The main job: RL on a task with our own rollout engine and DeepSpeed.

    python experiments/train.py --ranks 2
    torchrun --standalone --nproc-per-node 2 experiments/train.py --algo dapo --task gsm8k --data train.jsonl

Every option is explained by `--help`. Progress goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from engines.lifetime import imports
from experiments import launch


def main() -> dict[str, Any]:
    start = time.perf_counter()
    from experiments.config import parse  # not at the top, so that an interrupt prints one line

    with launch.told_once():
        config = parse(sys.argv[1:])
    if config.ranks > 1:
        launch.start_under_torchrun(config.ranks)
    launch.end_on_signals(lambda: "interrupted before training began: the same command starts again")
    with imports():
        from experiments.training import train  # its imports take seconds; --help and typos need not wait

    return train(config, start)


if __name__ == "__main__":
    launch.run(main)
