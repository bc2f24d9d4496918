"""Checks what a `Fleet` is given, before anything is made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from engines.config import EngineConfig, ModelConfig, longest_sequence
from engines.constraints import Count, Positive, WholeNumber, check_value
from engines.memory.free_memory import FreeMemory, Memory, free_memory
from engines.models.loader import check_adapter
from engines.models.tokenizer import check_draft_tokenizer, load_tokenizer, with_end_token
from engines.parallel.layout import nested_layout
from engines.replica.capacity import Capacity
from engines.replica.engine import kv_capacity
from engines.replica.preflight import check_engine
from engines.replica.sequence_limits import SequenceLimits


def plan(
    model: str | Path, config: EngineConfig, device: torch.device, num_replicas: int
) -> tuple[EngineConfig, SequenceLimits, Any]:
    """Returns the options with all sizes set, the limits of a sequence, and the tokenizer, or None. Raises ValueError
    if a replica could not be made here, or not all fit.

    An accelerator's free memory is not checked here, where no engine runs: each replica checks it for itself.
    """
    if config.draft_server:
        raise ValueError("EngineConfig.draft_server=True: is for a torchrun world; leave it out of a Fleet's options")
    if config.draft_history_bytes:
        raise ValueError(
            f"EngineConfig.draft_history_bytes={config.draft_history_bytes}: is kept by an LLM; leave it "
            "out of a Fleet's options"
        )
    if config.drafter == "own":
        raise ValueError("EngineConfig.drafter='own': is of LLM's own_drafter; give a Fleet another drafter")
    sizes = ModelConfig.from_pretrained(model)
    check_adapter(model)
    check_engine(config, sizes, device)
    mine = free_memory(device) if device.type == "cpu" else Memory(str(device), None)
    free = FreeMemory(names=(mine.name,) * num_replicas, num_bytes={mine.name: mine.free})
    capacity = Capacity(model=sizes, config=config, device=device, free=free).with_kv_bytes([1])
    tokenizer = load_tokenizer(model, sizes)
    check_draft_tokenizer(config, tokenizer)
    limits = SequenceLimits(
        vocab_size=sizes.vocab_size,
        max_model_len=longest_sequence(config, sizes),
        num_kv_tokens=kv_capacity(sizes, capacity.config, 1),
        eos_token_ids=with_end_token(sizes, tokenizer).eos_token_ids,
        has_tokenizer=tokenizer is not None,
    )
    capacity.check(nested_layout(range(num_replicas), 1))
    return capacity.config, limits, tokenizer


def check_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        hint = {"num_threads": Count, "timeout_s": Positive, "patience_s": Positive}
        check_value(f"Fleet.{name}", number, hint.get(name, WholeNumber))


def check_folders(**folders: str | Path | None) -> None:
    for name, folder in folders.items():
        if folder is None:
            continue
        if not isinstance(folder, str | os.PathLike):
            raise ValueError(f"Fleet.{name}={folder!r}: must be a path")
        if not Path(folder).is_dir():
            raise ValueError(f"Fleet.{name}={str(folder)!r}: is no folder; make it first")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"Fleet.{name}={str(folder)!r}: cannot be written to ({error.strerror}); give another"
            ) from None
