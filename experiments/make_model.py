"""Makes the small models that the other experiments roll out: a warm start, and widened copies of it.

    python experiments/make_model.py runs/models/tiny
    python experiments/make_model.py runs/models/tiny --widen 4     # also writes runs/models/tiny-x4

Progress goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from algos.publish import read_record
from algos.warmstart_config import WarmStartConfig
from engines.constraints import Count, check_fields
from engines.models.hugging_face import read_checkpoint
from experiments import launch


@dataclass(frozen=True, kw_only=True)
class MakeModelConfig:
    """Warm-start a small Qwen3 on worked additions and save it as a Hugging Face directory."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Folder for the model. A model that was made there with the same settings is kept."""
    train: Annotated[WarmStartConfig, tyro.conf.arg(name="")] = field(default_factory=WarmStartConfig)
    widen: Count = 1
    """Above 1, also write DIRECTORY-x<N>: the same function with N times the hidden size, heads and MLP."""

    def __post_init__(self) -> None:
        check_fields(self)


def make_model(config: MakeModelConfig) -> dict[str, object]:
    """Returns facts about the model, ready for JSON."""
    from transformers import AutoModelForCausalLM  # not at the top, so that --help and typos do not wait for torch

    from algos.warmstart import warm_start
    from algos.widening import widen

    start = time.monotonic()
    directory = warm_start(config.directory, config.train)
    loss = (read_record(directory) or {}).get("loss")
    if config.widen > 1:
        directory = widen(directory, directory.with_name(f"{directory.name}-x{config.widen}"), config.widen)
    num_parameters = read_checkpoint(AutoModelForCausalLM, directory).num_parameters()
    seconds = round(time.monotonic() - start, 1)
    return {"model": str(directory), "num_parameters": num_parameters, "loss": loss, "seconds": seconds}


def main() -> dict[str, object]:
    config = tyro.cli(MakeModelConfig)
    launch.share_cores()
    return make_model(config)


if __name__ == "__main__":
    launch.run(main)
