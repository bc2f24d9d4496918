"""One length for all drafts, by thresholds of concurrency (Seer §4.4, "adaptive speculation range"; §5). Torch-free.

The paper gives neither the thresholds' values nor the algorithm; this is one reading of it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from engines.constraints import Count, check_value
from engines.sequence import SequenceState
from engines.speculation.drafter import Ask, Draft
from engines.speculation.policy import Prices, RowTable

Slack = Annotated[float, Meta(ge=1, description="at least 1")]


class Thresholds:
    """A `SpeculationPolicy`: all drafts have one length, by the number of sequences and the acceptance so far.

    The knee is the most rows whose pass takes at most `slack` times as long as a pass without drafts. The length is the
    sequences' share of the rows below the knee, times the average acceptance rate; below 1 nothing is drafted. Other
    paths of the same length take what is left of the share.
    """

    _WEIGHT = 0.02  # of a new draft in the average
    _RECOVERY = 0.002  # of the average in a pass without drafts, so that they are tried again

    def __init__(self, prices: Prices, *, slack: float = 1.1, most: int = 16) -> None:
        """Raises ValueError for a slack below 1 or a length below 1."""
        check_value("Thresholds.slack", slack, Slack)
        check_value("Thresholds.most", most, Count)
        self._table = RowTable(prices.verify)
        self._slack, self._most = slack, most
        self._acceptance = 1.0

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        if self._length(num_tokens, len(asks)) >= 1:
            return asks
        self._acceptance = min(1.0, self._acceptance + self._RECOVERY)
        return []

    def _num_rows(self, num_tokens: int, num_sequences: int) -> int:
        """Returns a sequence's share of the rows below the knee."""
        most = num_tokens + self._most * num_sequences
        seconds = self._table.upto(most)
        knee = int(np.searchsorted(seconds[: most + 1], self._slack * seconds[num_tokens], side="right")) - 1
        return (knee - num_tokens) // num_sequences

    def _length(self, num_tokens: int, num_sequences: int) -> int:
        return int(self._acceptance * self._num_rows(num_tokens, num_sequences))

    def shorten(self, states: list[SequenceState], drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        length = self._length(num_tokens, len(drafts))
        others = [length] * ((self._num_rows(num_tokens, len(drafts)) - length) // (1 + length))
        return [draft.cut(length, others) for draft in drafts]

    def observe(self, state: SequenceState, probabilities: list[float], num_accepted: int) -> None:
        self._acceptance += self._WEIGHT * (num_accepted / len(probabilities) - self._acceptance)
