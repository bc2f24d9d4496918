"""wandb, with its own settings and environment; offline if nobody is logged in or it cannot be reached."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.config import TrainConfig
    from experiments.run_folder import RunFolder


def start_run(name: str, config: dict[str, Any], *, folder: Path | None = None, id_: str | None = None) -> Any:
    """Starts a run of wandb, or continues the one with this id. Its files are in `folder`, by default where wandb puts
    them."""
    import wandb

    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    given = wandb.setup(quiet).settings  # by WANDB_PROJECT and the like, `wandb login`, `wandb offline`
    start = partial(
        wandb.init,
        project=given.project or "curtail",
        name=given.run_name or name,
        id=id_,
        resume="allow",
        dir=folder,
        config=config,
        settings=quiet,
    )
    nobody = given.mode == "online" and not wandb.login(prompt=False, verify=False)
    try:
        return start(mode="offline" if nobody else None)
    except wandb.errors.CommError as error:
        warnings.warn(f"wandb cannot be reached, so the run is kept offline ({error})", stacklevel=2)
        wandb.teardown()  # otherwise the id is still in use
        return start(mode="offline")


class Tracker:
    """Sends a step's metrics to wandb from the writing rank."""

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        self._run: Any = None
        if config.wandb != "off" and folder.is_writer:
            self._run = start_run(folder.path.name, asdict(config), folder=folder.path, id_=_run_id(folder))

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
