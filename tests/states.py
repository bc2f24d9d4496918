"""New sequences for tests."""

from __future__ import annotations

from collections.abc import Sequence

from engines.sequence import SamplingParams, SequenceKey, SequenceState

PLAIN = SamplingParams()


def make_state(
    uid: int, prompt: Sequence[int], params: SamplingParams = PLAIN, *, index: int = 0, version: int = 0
) -> SequenceState:
    """Sample `index` of prompt `uid`; run seed 0."""
    key = SequenceKey(run_seed=0, policy_step=version, prompt_uid=uid, sample_index=index)
    return SequenceState(key=key, group_id=uid, tokens=list(prompt), num_prompt_tokens=len(prompt), params=params)
