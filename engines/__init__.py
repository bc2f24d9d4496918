"""Curtail's rollout engine. The public names load on first use, so that torch-free callers stay torch-free."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.config import EngineConfig, ModelConfig
    from engines.llm import LLM
    from engines.parallel.groups import GroupCache
    from engines.sequence import Completion, RequestOutput, SamplingParams, SequenceKey, SequenceState

_HOME = {
    "LLM": "engines.llm",
    "EngineConfig": "engines.config",
    "GroupCache": "engines.parallel.groups",
    "ModelConfig": "engines.config",
    "Completion": "engines.sequence",
    "RequestOutput": "engines.sequence",
    "SamplingParams": "engines.sequence",
    "SequenceKey": "engines.sequence",
    "SequenceState": "engines.sequence",
}

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "GroupCache",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "SequenceKey",
    "SequenceState",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engines' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
