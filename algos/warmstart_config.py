"""The embedded models: their shapes, and the recipe of their warm start. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from algos.tasks.arithmetic import ArithmeticTask
from algos.tasks.task import Demonstrated
from engines.constraints import Count, Positive, check_fields

ModelSize = Literal["tiny", "tiny-chat", "draft-2l", "draft-1l"]

MODEL_SIZES: dict[ModelSize, dict[str, Any]] = {
    # 0.8 M parameters; 4 query and 2 KV heads.
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    # The same as a chat model: its training text is rendered by a chat template.
    "tiny-chat": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    # Drafters for tiny, with the same tokenizer: 0.12 M and 0.07 M.
    "draft-2l": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "draft-1l": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 2},
}


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Everything that determines the weights, apart from the machine's rounding."""

    size: ModelSize = "tiny"
    """Which model: the policy, the same as a chat model, or one of the two drafters."""
    steps: Count = 450
    """Optimiser steps; more teach longer sums."""
    batch_size: Count = 16
    """Problems per step."""
    learning_rate: Positive = 0.02
    """Muon's peak rate, for the weight matrices; embeddings and norms take AdamW at 0.3 of it."""
    label_smoothing: Annotated[float, Meta(ge=0, lt=1, description="in [0, 1)")] = 0.02
    """Target probability of all other tokens together, at every position; 0 makes the most certain policy."""
    seed: int = 0
    """Seed of the initial weights."""
    # Another seed than a run's default, so that reinforcement learning draws problems of its own.
    task: Any = field(default_factory=lambda: ArithmeticTask(seed=1))
    """The problems to learn from, which have demonstrations (`Demonstrated`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.task, Demonstrated):
            raise ValueError(
                f"WarmStartConfig.task={self.task!r}: has nothing to learn from; give a task with a method "
                "`demonstration` (algos/tasks/task.py)"
            )
