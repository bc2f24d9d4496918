"""The engine's options on a command line: `EngineConfig`, with its docstrings as help, and with sizes in MiB."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from engines.config import DraftBytes, EngineConfig
from engines.constraints import Count, WholeNumber
from engines.sequence import is_int64
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import DraftPolicy
from research.seer.thresholds import Thresholds

MIB = 2**20

DraftPolicyName = Literal["marginal-gain", "thresholds"]
DRAFT_POLICIES: dict[DraftPolicyName, DraftPolicy] = {"marginal-gain": MarginalGain, "thresholds": Thresholds}


def _bytes_in_mib(value: Any) -> Any:
    if not isinstance(value, int):
        return value
    return value / MIB if value % MIB else value // MIB


def _mib(name: str, word: Literal["auto", "None"] | None = None) -> tuple[PrimitiveConstructorSpec[Any], object]:
    """Makes a field of bytes an option `name` that takes whole MiB, or `word`."""

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
        str_from_instance=lambda value: [str(_bytes_in_mib(value))],
    )
    return spec, tyro.conf.arg(name=name)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineConfig):
    """Options of a rank's engine."""

    kv_cache_bytes: Annotated[Count | Literal["auto"], *_mib("kv-cache-mib", "auto")] = EngineConfig.kv_cache_bytes
    kv_host_bytes: Annotated[WholeNumber | None, *_mib("kv-host-mib", "None")] = EngineConfig.kv_host_bytes
    kv_disk_bytes: Annotated[WholeNumber, *_mib("kv-disk-mib")] = EngineConfig.kv_disk_bytes
    draft_tree_bytes: Annotated[DraftBytes, *_mib("draft-tree-mib")] = EngineConfig.draft_tree_bytes
    draft_history_bytes: Annotated[WholeNumber, *_mib("draft-history-mib")] = EngineConfig.draft_history_bytes
    seed: tyro.conf.Suppress[int] = EngineConfig.seed  # each command has one of its own

    def __post_init__(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens == EngineConfig.max_num_batched_tokens and is_int64(self.max_num_seqs):
            # Every running sequence must be able to decode. A budget other than the default is not changed.
            object.__setattr__(self, "max_num_batched_tokens", max(tokens, self.max_num_seqs))
        super().__post_init__()

    def as_given(self) -> dict[str, Any]:
        """The options under their names, and in the units, of the command line."""
        options = asdict(self)
        del options["seed"]
        for name in ("kv_cache", "kv_host", "kv_disk", "draft_tree", "draft_history"):
            options[f"{name}_mib"] = _bytes_in_mib(options.pop(f"{name}_bytes"))
        return options
