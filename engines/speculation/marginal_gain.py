"""Adaptive lengths of drafts: as many draft tokens, the likeliest first, as raise the tokens per second. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engines.config import EngineConfig
from engines.constraints import NonNegative, check_value
from engines.sequence import SequenceState
from engines.speculation.calibration import Calibration
from engines.speculation.drafter import NO_DRAFT, Ask, Draft
from engines.speculation.policy import DraftPolicy, Prices, RowTable
from engines.speculation.verify import num_accepted


def check_draft_policy(config: EngineConfig, policy: DraftPolicy) -> None:
    """Raises ValueError for what makes no policy, or another one than `MarginalGain` where it would decide nothing."""
    if not callable(policy):
        raise ValueError(f"draft_policy={policy!r}: give a function that makes a SpeculationPolicy")
    if policy is MarginalGain:
        return
    if config.drafter == "none":
        raise ValueError("draft_policy: EngineConfig.drafter='none' drafts nothing; give a drafter, or leave it out")
    if config.draft_lengths == "fixed":
        raise ValueError("draft_policy: EngineConfig.draft_lengths='fixed' asks no policy; leave one of them out")


class _Branch(NamedTuple):
    """The beginning of another path of a draft."""

    draft: int
    path: int
    length: int
    gain: float
    """Expected tokens beyond those of the paths before it."""


class MarginalGain:
    """A `SpeculationPolicy`: the drafts that make the expected tokens per second of the pass as many as possible.

    A pass of n tokens with k draft tokens takes `seconds(n + k)` and yields a token for each sequence that draws in it,
    with a draft or without, and each draft token with the probability of its path (`Calibration`). A path's
    probabilities do not rise, so that the k likeliest draft tokens are whole beginnings of drafts: all k are tried out,
    none included. Where k = 0 was best for some passes, drafts are looked up in fewer and fewer of them, until the
    batch is smaller by an eighth; and what was learnt is slowly forgotten, so that they are tried again. Another path
    of a draft is taken whole or not at all: it adds the probabilities of the tokens that no path before it has, for a
    row per token and one more.

    A small model takes a pass for each token of the longest draft, before anybody knows its estimates. How many are
    worth that is decided by the mean acceptance so far.
    """

    _PATIENCE, _MOST_SKIPPED, _FORGOTTEN, _SMALLER = 8, 64, 0.02, 7 / 8
    _HOPE, _WEIGHT = 0.8, 0.01  # of the mean acceptance: where nothing is known, and a draft token's in it

    def __init__(self, prices: Prices, *, margin: float = 0.1) -> None:
        """Drafts must promise a gain of more than `margin`, since times and probabilities are estimates, and a draft
        takes some time outside the pass.

        Raises ValueError for a negative one.
        """
        check_value("MarginalGain.margin", margin, NonNegative)
        self._table, self._draft_seconds = RowTable(prices.verify), prices.draft
        self._acceptance = self._HOPE
        self._margin = margin
        self._calibration = Calibration()
        self._num_vain = 0
        """Passes in a row for which no draft was worth it."""
        self._num_skipped = 0
        self._vain_tokens = 0
        """Tokens of the smallest of these passes."""

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        if not self._tries(num_tokens):
            return []
        count, most = len(asks), max(ask.limit for ask in asks)
        if self._draft_seconds(count, most) <= self._draft_seconds(count, 1):
            return asks
        length = self._length(count, most, num_tokens, num_draws)
        if not length:
            self._give_up(num_tokens)
        return [ask._replace(limit=min(ask.limit, length)) for ask in asks] if length else []

    def _length(self, num_sequences: int, most: int, num_tokens: int, num_draws: int) -> int:
        """Returns the length that makes the tokens per second of this pass and of drafting before it the most."""
        lengths = np.arange(most + 1)
        yields = num_draws + num_sequences * np.concatenate([[0.0], np.cumsum(self._acceptance ** lengths[1:])])
        drafting = [0.0, *(self._draft_seconds(num_sequences, length) for length in range(1, most + 1))]
        ends = num_tokens + num_sequences * lengths
        rates = yields / (self._table.upto(int(ends[-1]))[ends] + drafting)
        best = int(rates.argmax())
        return best if rates[best] > (1 + self._margin) * rates[0] else 0

    def _tries(self, num_tokens: int) -> bool:
        """Whether to look drafts up for this pass, as far as passes before it say."""
        if self._num_vain < self._PATIENCE or num_tokens < self._SMALLER * self._vain_tokens:
            return True
        self._num_skipped += 1
        if self._num_skipped < min(self._MOST_SKIPPED, 2 ** (self._num_vain - self._PATIENCE)):
            return False
        self._num_skipped = 0
        return True

    def shorten(self, states: list[SequenceState], drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        if not any(draft.tokens for draft in drafts):
            return drafts
        paths = self._calibration.paths(drafts)
        gains = paths.ravel()
        order = np.argsort(-gains, kind="stable")[: np.count_nonzero(gains)]
        owners, gains, rows = order // paths.shape[1], gains[order], np.ones(len(order), np.int64)
        branches = self._branches(drafts)
        if branches:
            owners = np.concatenate([owners, -1 - np.arange(len(branches))])
            gains = np.concatenate([gains, [one.gain for one in branches]])
            rows = np.concatenate([rows, [1 + one.length for one in branches]])
            order = np.argsort(-gains / rows, kind="stable")
            owners, gains, rows = owners[order], gains[order], rows[order]
        yields = num_draws + np.concatenate([[0.0], np.cumsum(gains)])
        ends = num_tokens + np.concatenate([[0], np.cumsum(rows)])
        rates = yields / self._table.upto(int(ends[-1]))[ends]
        best = int(rates.argmax())
        if rates[best] <= (1 + self._margin) * rates[0]:
            best = 0
        if not best:
            self._give_up(num_tokens)
            return [NO_DRAFT] * len(drafts)
        self._num_vain = 0
        chosen = owners[:best]
        lengths = np.bincount(chosen[chosen >= 0], minlength=len(drafts)).tolist()
        others = [[0] * len(draft.others) for draft in drafts]
        for number in (-1 - chosen[chosen < 0]).tolist():
            others[branches[number].draft][branches[number].path] = branches[number].length
        return [draft.cut(length, more) for draft, length, more in zip(drafts, lengths, others, strict=True)]

    def _give_up(self, num_tokens: int) -> None:
        """Notes that no draft was worth it for a pass of this many tokens."""
        self._num_vain += 1
        self._vain_tokens = num_tokens if self._num_vain <= 1 else min(self._vain_tokens, num_tokens)
        self._calibration.forget(self._FORGOTTEN)
        self._acceptance += self._FORGOTTEN * (self._HOPE - self._acceptance)

    def _branches(self, drafts: list[Draft]) -> list[_Branch]:
        """Returns for each other path the beginning with the most expected tokens per row."""
        places = [(number, path) for number, draft in enumerate(drafts) for path in range(len(draft.others))]
        if not places:
            return []
        found = []
        chances = self._calibration.paths([drafts[number].others[path] for number, path in places])
        for (number, path), probabilities in zip(places, chances, strict=True):
            draft = drafts[number]
            tokens = draft.others[path].tokens
            shared = max(num_accepted(tokens, one.tokens) for one in (draft, *draft.others[:path]))
            if shared < len(tokens):
                gains = probabilities[shared : len(tokens)].cumsum()
                length = shared + 1 + int((gains / np.arange(shared + 2, len(tokens) + 2)).argmax())
                found.append(_Branch(number, path, length, float(gains[length - shared - 1])))
        return found

    def observe(self, state: SequenceState, probabilities: list[float], num_accepted: int) -> None:
        self._calibration.observe(probabilities, num_accepted)
        for place in range(min(len(probabilities), num_accepted + 1)):
            self._acceptance += self._WEIGHT * ((place < num_accepted) - self._acceptance)
