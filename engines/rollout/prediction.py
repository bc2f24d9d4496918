"""Who estimates how much a trajectory will still generate: what is asked, and what answers. Torch-free.

`algos/length_predictor.py` is one that learns. Heddle, §4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.sequence import SequenceId, SequenceState


@dataclass(frozen=True, kw_only=True)
class Context:
    """A trajectory before its first turn, or at the end of a turn, of which the tool has answered nothing yet."""

    sequence_id: SequenceId
    num_turns: int
    """Turns that it has ended."""
    tokens: tuple[int, ...]
    """With the prompt and all that it has observed."""
    num_prompt_tokens: int
    num_generated: int

    @staticmethod
    def of(state: SequenceState) -> Context:
        """`state` has ended a turn, or has not begun."""
        return Context(
            sequence_id=state.sequence_id,
            num_turns=len(state.observed),
            tokens=tuple(state.tokens),
            num_prompt_tokens=state.num_prompt_tokens,
            num_generated=state.num_generated,
        )


class LengthPredictor(Protocol):
    """Estimates lengths beside the tools."""

    source: str
    """Its name, which policies see beside its estimates."""

    def ask(self, contexts: Sequence[Context], answer: Callable[[Sequence[float]], None]) -> None:
        """Never waits. `answer` is called once, by another thread, with the tokens that each trajectory will still
        generate: NaN where there is no estimate, also when the predictor has failed or is silent for too long."""
        ...
