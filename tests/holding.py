"""Rollouts of real processes that go on until something has happened in them: a regroup, a move, a death.

Otherwise a busy machine decides what comes first, that or the end. Nothing here can hold a rollout for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from engines import LLM, RequestOutput, SamplingParams
from engines.coordination.policies import OnDemand
from engines.coordination.views import Dispatch, ScheduleView
from engines.sequence import SequenceId, SequenceState

MOST_TOKENS = 210
"""Of a held sequence; its prompt may have 46 tokens, as the tiny models' context has 256."""
LONGEST_S = 60.0


class Held:
    """A hidden stop: the sequences of some prompts have at least `num_tokens`, and end `num_more` tokens after
    `happened()` is true.

    The ranks of a replica call it at the same steps, and `happened` must answer the same on each: by the epoch of
    their layout, say, but by a clock or a file only where a replica is one rank. A replica must have more slots than
    there are held sequences: the others go on meanwhile, and what is waited for may need their ends.
    """

    def __init__(self, uids: Collection[int], num_tokens: int, num_more: int = 0) -> None:
        self._uids, self._num_tokens, self._num_more = uids, num_tokens, num_more
        self._lengths: dict[SequenceId, int] = {}
        """Of each sequence, when it was first seen to have happened."""
        self.happened: Callable[[], bool]
        """Set once there is an LLM to ask."""

    def until_epoch(self, llm: LLM, epoch: int) -> None:
        def has_come() -> bool:
            assert llm.rollout is not None
            return llm.rollout.layout.epoch >= epoch

        self.happened = has_come

    def __call__(self, state: SequenceState) -> bool:
        num_over = state.num_generated - self._num_tokens
        if state.key.prompt_uid not in self._uids or num_over < 0:
            return False
        if self.happened():
            first = self._lengths.setdefault(state.sequence_id, state.num_generated)
            return state.num_generated >= first + self._num_more
        time.sleep(min(0.005 * num_over, 0.5))  # all of its tokens together take a minute and more
        return False


def held_params(params: SamplingParams) -> SamplingParams:
    """For the prompts that are held, in the rollout and in the plain run that it is compared with."""
    return replace(params, max_tokens=MOST_TOKENS, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def check_tokens(tokens: list[list[list[int]]], plain: list[list[list[int]]], uids: Collection[int] = ()) -> None:
    """Prompt by prompt, sample by sample; of the held ones the plain run may have more."""
    assert len(tokens) == len(plain)
    for uid, (some, expected) in enumerate(zip(tokens, plain, strict=True)):
        if uid in uids:
            assert min(map(len, some)) > 0
            expected = [whole[: len(one)] for one, whole in zip(some, expected, strict=True)]
        assert some == expected, f"prompt {uid}"


class LastWaits(OnDemand):
    """Keeps one sequence from every replica until `happened`; `index` is its place in the order of submission."""

    def __init__(self, index: int, happened: Callable[[ScheduleView], bool] = lambda _: True) -> None:
        super().__init__()
        self._index, self._since = index, 0.0
        self.happened = happened

    def next(self, view: ScheduleView) -> Dispatch | None:
        if view.entered:
            self._since = view.now
        dispatch = super().next(view)
        if dispatch is None or view.waiting[dispatch.sequence_id].index != self._index:
            return dispatch
        return dispatch if self.happened(view) or view.now > self._since + LONGEST_S else None
