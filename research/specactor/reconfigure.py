"""Windows and modes of single sequences while they are generated (SpecActor §4.1, Algorithm 2). Torch-free.

What the paper leaves open, and what is chosen here:

- Its rates are those of a batch of one, although sequences run beside others, so that windows are too long where rows
  are dear. Here the batch is the one that runs, as if all its sequences were like this one.
- It decides for sequences below the mean acceptance. Here for all, since drafts may be worse than planned for all.
- A sequence may leave speculation. Since nothing is learnt of it then, drafts are tried again, ever more rarely.
- ProfileProbability has no body. Here: the mean over the last guesses of the sequence that were compared, by outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engines.constraints import Count, check_value
from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import Ask, Draft
from research.specactor.plan import MAX_WINDOW, Plan
from research.specactor.profile import Costs
from research.specactor.throughput import Pair, coupled, decoupled

Mode = Literal["off", "coupled", "decoupled"]


class Acceptance:
    """The probability that a guess of a sequence is right if all before it were: a moving mean over `span` guesses."""

    def __init__(self, span: int = 1000) -> None:
        self._kept = 1 - 1 / span
        self._accepted = self._compared = 0.0

    def observe(self, num_tried: int, num_accepted: int) -> None:
        """Guesses behind the first wrong one were compared with nothing."""
        kept = self._kept**num_accepted
        gained = (1 - kept) / (1 - self._kept)
        self._accepted = self._accepted * kept + gained
        self._compared = self._compared * kept + gained
        if num_accepted < num_tried:
            self._accepted *= self._kept
            self._compared = self._compared * self._kept + 1

    @property
    def estimate(self) -> float | None:
        """None before the first guess."""
        return self._accepted / self._compared if self._compared else None


@dataclass(frozen=True)
class Choice:
    """How a sequence is drafted for."""

    mode: Mode
    """Coupled where drafters are elsewhere: the drafter waits while its guesses are verified."""
    window: int
    tokens_per_second: float


def choices(costs: Costs, plan: Plan, p: float, batch: int) -> list[Choice]:
    """Returns those of a sequence in a verifier's batch, where the GPUs are placed as planned; plain decoding first."""
    one, method = plan.placement, plan.method
    found = [Choice("off", 0, 1 / costs.verifiers[one.verifier_gpus](batch, 1))]
    if method is None:
        return found

    def verify(rows: float) -> float:
        return costs.verifiers[one.verifier_gpus](batch, rows)

    def add_coupled(drafted: int, num_gpus: int) -> None:
        for window in range(1, MAX_WINDOW + 1):
            drafting_s = costs.whole_drafts(method, drafted, num_gpus, window)
            found.append(Choice("coupled", window, coupled(p, window, drafting_s, verify(window + 1))))

    if plan.mode == "off" or plan.mode == "coupled":
        add_coupled(batch, one.verifier_gpus)
        return found
    drafted = math.ceil(batch * one.num_verifiers / one.num_drafters)
    if plan.mode == "strict":
        add_coupled(drafted, one.draft_gpus)
    draft_s = costs.draft(method, drafted, one.draft_gpus)
    pair = Pair(draft_s, verify, batch, costs.delay_s)
    for ahead in (True,) if plan.mode == "strict" else (False, True):
        for window in range(1, MAX_WINDOW + 1):
            rate = decoupled(pair, p, window, plan.mode, ahead=ahead)
            found.append(Choice("decoupled" if ahead else "coupled", window, rate.tokens_per_second))
            if window * draft_s >= verify(window if plan.mode == "strict" else rate.rows):
                break
    return found


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An entry of the log."""

    sequence_id: SequenceId
    num_generated: int
    acceptance: float
    mean_acceptance: float
    """Of the sequences of the replica."""
    batch: int
    choice: Choice
    off: Choice
    """Plain decoding."""


@dataclass
class _Known:
    acceptance: Acceptance
    choice: Choice
    due: int
    """Generated tokens at which it is decided again."""
    num_off: int = 0
    """Times in a row that plain decoding was chosen."""


class Reconfiguration:
    """A `SpeculationPolicy`: Algorithm 2 for the sequences of one replica that verifies.

    The plan's window holds for the first interval of each. A sequence that decodes plainly tries drafts again after an
    interval, for a thirty-second part of one; in vain, then after two, four and more.
    """

    def __init__(self, costs: Costs, plan: Plan, *, interval_tokens: int = 1000, printed: bool = False) -> None:
        """`printed`: for a batch of one, and only for sequences below the mean. Raises ValueError for an interval of
        less than a token."""
        check_value("Reconfiguration.interval_tokens", interval_tokens, Count)
        self.decisions: list[Decision] = []
        self._costs, self._plan, self._interval, self._printed = costs, plan, interval_tokens, printed
        mode: Mode = plan.mode if plan.mode == "off" or plan.mode == "coupled" else "decoupled"
        rate = plan.tokens_per_second / (plan.batch * plan.placement.num_verifiers)
        self._planned = Choice(mode, plan.window, rate)
        self._known: dict[SequenceId, _Known] = {}
        self._choices: dict[tuple[float, int], tuple[Choice, Choice]] = {}

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        chosen = self._update({ask.state.sequence_id: ask.state.num_generated for ask in asks}, num_draws)
        return [
            ask._replace(limit=min(ask.limit, choice.window), ahead=choice.mode == "decoupled")
            for ask, choice in zip(asks, chosen, strict=True)
            if choice.window
        ]

    def shorten(self, states: list[SequenceState], drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        return drafts

    def observe(self, state: SequenceState, probabilities: list[float], num_accepted: int) -> None:
        if state.sequence_id in self._known:
            self._known[state.sequence_id].acceptance.observe(len(probabilities), num_accepted)

    def _update(self, generated: Mapping[SequenceId, int], batch: int) -> list[Choice]:
        """Returns what holds for each of these sequences, by its tokens so far, in a batch of so many."""
        if len(self._known) > 2 * len(generated) + 64:
            self._known = {one: known for one, known in self._known.items() if one in generated}
        for one, count in generated.items():
            if one not in self._known:
                self._known[one] = _Known(Acceptance(), self._planned, count + self._interval)
        due = [one for one, count in generated.items() if count >= self._known[one].due]
        if due:
            estimates = [self._known[one].acceptance.estimate for one in generated]
            seen = [estimate for estimate in estimates if estimate is not None]
            mean = sum(seen) / max(1, len(seen))
            for one in due:
                self._decide(one, generated[one], mean, batch)
        return [self._known[one].choice for one in generated]

    def _decide(self, sequence_id: SequenceId, num_generated: int, mean: float, batch: int) -> None:
        known = self._known[sequence_id]
        known.due = num_generated + self._interval
        estimate = known.acceptance.estimate
        if known.choice.mode == "off" and self._planned.mode != "off":
            known.acceptance, known.choice = Acceptance(), self._planned
            known.due = num_generated + math.ceil(self._interval / 32)
            return
        if estimate is None or (self._printed and estimate >= mean):
            known.choice = self._planned
            return
        known.choice, off = self._best(round(estimate, 2), 1 if self._printed else batch)
        known.num_off = known.num_off + 1 if known.choice.mode == "off" else 0
        known.due = num_generated + self._interval * 2 ** max(0, known.num_off - 1)
        self.decisions.append(
            Decision(
                sequence_id=sequence_id,
                num_generated=num_generated,
                acceptance=estimate,
                mean_acceptance=mean,
                batch=batch,
                choice=known.choice,
                off=off,
            )
        )

    def _best(self, p: float, batch: int) -> tuple[Choice, Choice]:
        """Returns the best choice, of equal ones the one with the least drafting, and plain decoding."""
        if (p, batch) not in self._choices:
            found = choices(self._costs, self._plan, p, batch)
            self._choices[p, batch] = max(found, key=lambda one: one.tokens_per_second), found[0]
        return self._choices[p, batch]
