"""The engine's options on a command line: `EngineConfig`, each option with its own words; sizes are in MiB there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from engines.config import EngineConfig
from engines.sequence import is_int64

MIB = 2**20


def _mib(name: str, word: Literal["auto", "None"] | None = None) -> tuple[PrimitiveConstructorSpec[Any], object]:
    """An option `name` of whole MiB, or of that word, for a field of bytes."""

    def read(told: list[str]) -> int | str | None:
        if word is not None and told[0] == word:
            return None if word == "None" else word
        try:
            return int(told[0]) * MIB
        except ValueError:
            or_word = "" if word is None else f", or {word}"
            raise ValueError(f"{told[0]!r}: give a whole number of MiB{or_word}") from None

    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs=1,
        metavar="MIB" if word is None else f"{{{word}}}|MIB",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, int | str),
        str_from_instance=lambda value: [f"{value / MIB:g}" if isinstance(value, int) else str(value)],
    )
    return spec, tyro.conf.arg(name=name)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineConfig):
    """How a rank's engine runs."""

    kv_cache_bytes: Annotated[int | Literal["auto"], *_mib("kv-cache-mib", "auto")] = EngineConfig.kv_cache_bytes
    kv_host_bytes: Annotated[int | None, *_mib("kv-host-mib", "None")] = EngineConfig.kv_host_bytes
    kv_disk_bytes: Annotated[int, *_mib("kv-disk-mib")] = EngineConfig.kv_disk_bytes
    seed: tyro.conf.Suppress[int] = EngineConfig.seed  # each command has one of its own

    def __post_init__(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens == EngineConfig.max_num_batched_tokens and is_int64(self.max_num_seqs):
            # Every running sequence must be able to decode; a budget that was given is not changed.
            object.__setattr__(self, "max_num_batched_tokens", max(tokens, self.max_num_seqs))
        super().__post_init__()
