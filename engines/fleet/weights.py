"""Weights published for replicas to load: folders that appear whole or not at all, removed when not in use."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engines.adapter_config import base_folder
from engines.config import ModelConfig
from engines.models.loader import checked_weights
from engines.parallel.owned_files import new_name, reclaim

SHARD_BYTES = 2**30


class PublishedWeights:
    """The weights for rollouts: the checkpoint as version 0, then the weights published last."""

    def __init__(self, model: Path, parent: str | Path | None) -> None:
        """Makes a new folder in `parent`, by default the temporary folder; removes what killed processes left there."""
        self._model = model
        self.source, self.version = model, 0
        """Folder and version of the weights for the next rollout."""
        self.in_use: str | None = None
        """Folder that the replicas of the open phase load from."""
        self.folder = _make_weights_folder(parent)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """See `Fleet.publish`."""
        partial = self.folder / ".partial"
        partial.mkdir()
        try:
            _write_shards(partial, checked_weights(weights, ModelConfig.from_pretrained(self._model)))
            shutil.copyfile(base_folder(self._model) / "config.json", partial / "config.json")
            for path in partial.iterdir():
                _flush(path)
            names = (f"version-{version}" + f"-{count}" * (count > 1) for count in itertools.count(1))
            target = next(folder for name in names if not (folder := self.folder / name).exists())
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.source, self.version = target, version
        self.remove_outdated()
        return target

    def remove_outdated(self) -> None:
        """Removes the weights that were published earlier, unless they are in use."""
        for folder in self.folder.iterdir():
            if folder != self.source and str(folder) != self.in_use:
                shutil.rmtree(folder)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_weights_folder(parent: str | Path | None) -> Path:
    parent = Path(parent or tempfile.gettempdir()).resolve()
    reclaim([parent])
    folder = parent / new_name("weights")
    folder.mkdir(mode=0o700)
    return folder


def _write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes files of about `SHARD_BYTES`, one in memory at a time, and their index."""
    places: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    num_files = 0

    def flush() -> None:
        nonlocal num_files
        num_files += 1
        filename = f"model-{num_files:05}.safetensors"
        save_file(pending, folder / filename, metadata={"format": "pt"})
        places.update(dict.fromkeys(pending, filename))
        pending.clear()

    for name, tensor in weights:
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(one.nbytes for one in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
