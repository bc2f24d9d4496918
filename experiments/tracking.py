"""wandb, offline unless a key says otherwise, and never in the way of a run."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import Any

from experiments.config import TrainConfig
from experiments.run_folder import RunFolder


class Tracker:
    """Sends a step's metrics to wandb from the writing rank."""

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        self._run: Any = None
        if config.wandb == "off" or not folder.is_writer:
            return
        import wandb

        self._run = wandb.init(
            project="curtail",
            name=folder.path.name,
            id=re.sub(r"[^\w.-]", "-", folder.path.name),
            resume="allow",
            dir=folder.path,
            mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
            config=asdict(config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is not None:
            self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
