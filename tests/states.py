"""New sequences for tests."""

from __future__ import annotations

from collections.abc import Sequence

from engines.sequence import SamplingParams, SequenceKey, SequenceState
from engines.speculation.drafter import Ask

PLAIN = SamplingParams()


def make_state(
    uid: int, prompt: Sequence[int], params: SamplingParams = PLAIN, *, index: int = 0, version: int = 0
) -> SequenceState:
    """Sample `index` of prompt `uid`; run seed 0."""
    key = SequenceKey(run_seed=0, policy_step=version, prompt_uid=uid, sample_index=index)
    return SequenceState(key=key, group_id=uid, tokens=list(prompt), num_prompt_tokens=len(prompt), params=params)


def asks(states: int | Sequence[SequenceState], limit: int = 4) -> list[Ask]:
    """Asks for drafts of these sequences, or of as many new ones."""
    if isinstance(states, int):
        states = [make_state(uid, [1]) for uid in range(states)]
    return [Ask(state, limit) for state in states]
