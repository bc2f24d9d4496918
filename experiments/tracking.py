"""wandb, with its own settings and environment; offline if nobody is logged in or it cannot be reached."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.config import TrainConfig
    from experiments.run_folder import RunFolder

CODE = "code"
"""Folder in a run's folder, and in wandb's files, for copies of the user's own files."""


def check_environment() -> None:
    """Raises ValueError for a variable that wandb refuses."""
    import wandb

    try:
        wandb.Settings().update_from_env_vars(dict(os.environ))
    except (wandb.errors.UsageError, ValueError) as error:
        raise ValueError(f"a variable WANDB_...: {' '.join(str(error).split())}") from None


def start_run(
    name: str,
    config: dict[str, Any],
    *,
    several: bool = False,
    project: str | None = None,
    **options: Any,
) -> Any:
    """Starts a run of wandb, or continues the one whose `id` is among wandb's `options`. WANDB_NAME replaces the name;
    for one of `several` runs of a command it comes before the name."""
    import wandb

    check_environment()
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    given = wandb.setup(quiet).settings  # by WANDB_PROJECT and the like, `wandb login`, `wandb offline`
    start = partial(
        wandb.init,
        project=project or given.project or "curtail",
        name=f"{given.run_name}-{name}" if given.run_name and several else given.run_name or name,
        resume="allow",
        config=config,
        settings=quiet,
        **options,
    )
    nobody = given.mode == "online" and not wandb.login(prompt=False, verify=False)
    try:
        return start(mode="offline" if nobody else None)
    except wandb.errors.CommError as error:
        warnings.warn(f"wandb cannot be reached, so the run is kept offline ({error})", stacklevel=2)
        wandb.teardown()  # otherwise the id is still in use
        return start(mode="offline")


class Tracker:
    """Sends a run to wandb from the writing rank: each step's metrics and samples, the user's own files, figures."""

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        self._run: Any = None
        if config.wandb == "off" or not folder.is_writer:
            return
        self._run = start_run(
            folder.path.name,
            asdict(config),
            project=config.wandb_project,
            entity=config.wandb_entity,
            group=config.wandb_group,
            tags=config.wandb_tags or None,
            dir=folder.path,
            id=_run_id(folder),
        )
        if (folder.path / CODE).is_dir():
            own = Path(self._run.dir)
            shutil.copytree(folder.path / CODE, own / CODE, dirs_exist_ok=True)
            self._run.save(str(own / CODE / "*"), base_path=str(own), policy="now")

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[dict[str, Any]] = ()) -> None:
        if self._run is None:
            return
        from wandb import Table

        columns: list[str | int] = [*samples[0]] if samples else []
        rows = [[row.get(str(name)) for name in columns] for row in samples]
        table = {"samples": Table(columns=columns, data=rows, allow_mixed_types=True)} if rows else {}
        self._run.log(metrics | table, step=step)

    def close(self, figures: Sequence[str] = ()) -> None:
        """Adds the figures, ends the run, and says on stderr where it is."""
        if self._run is None:
            return
        from wandb import Image

        self._run.log({f"figures/{Path(path).stem}": Image(path) for path in figures})
        self._run.finish()
        where = self._run.settings.sync_dir
        told = f"offline in {where}; to upload it: wandb login; wandb sync {shlex.quote(where)}"
        print(f"wandb: {told if self._run.offline else self._run.url}", file=sys.stderr, flush=True)


def _run_id(folder: RunFolder) -> str:
    """An id of this run alone, kept when it is resumed. The folder's name could also be another run's elsewhere."""
    path = folder.path / "wandb_id"
    if not path.exists():
        folder.replace(path.name, secrets.token_hex(4))
    return path.read_text()
