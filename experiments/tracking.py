"""wandb, with its own settings and environment; offline if nobody is logged in or it cannot be reached."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import asdict
from functools import partial
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

        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        given = wandb.setup(quiet).settings  # by WANDB_PROJECT and the like, `wandb login`, `wandb offline`
        start = partial(
            wandb.init,
            project=given.project or "curtail",
            name=given.run_name or folder.path.name,
            id=_run_id(folder),
            resume="allow",
            dir=folder.path,
            config=asdict(config),
            settings=quiet,
        )
        nobody = given.mode == "online" and not wandb.login(prompt=False, verify=False)
        try:
            self._run = start(mode="offline" if nobody else None)
        except wandb.errors.CommError as error:
            warnings.warn(f"wandb cannot be reached, so the run is kept offline ({error})", stacklevel=2)
            wandb.teardown()  # otherwise the id is still in use
            self._run = start(mode="offline")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is not None:
            self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _run_id(folder: RunFolder) -> str:
    """An id of this run alone, kept when it is resumed. The folder's name could also be another run's elsewhere."""
    path = folder.path / "wandb_id"
    if not path.exists():
        folder.replace(path.name, secrets.token_hex(4))
    return path.read_text()
