"""Which TP size to use while how many sequences are unfinished: a dynamic programme over all later switches.

PAT's Algorithm 1 weighs one switch against none, as if all sequences ran to the limit. Here lengths are what they are
expected to be, a switch may be followed by others, and prompts take time, too. With the true lengths the same programme
is hindsight. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.pat.deployment import Deployment
from research.pat.switch_cost import Tokens, switch_price

_MOST_RUNGS = 128
Prompts = tuple[Tokens, Tokens]
"""Tokens of each prompt that is not computed yet, and the number of sequences that wait with it, both [prompts]."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best TP size from now on."""

    stages: tuple[tuple[int, int], ...]
    """(unfinished sequences at its start, TP size) of each stage, the present one first."""
    seconds: float
    """Until the last sequence has ended, with the switches."""
    kept_seconds: float
    """The same without a switch; infinite if there is no present TP size."""
    stage_seconds: float = np.inf
    """Until the next stage begins, or the last sequence has ended."""


def make_plan(
    deployment: Deployment,
    contexts: Tokens,
    remaining: Tokens,
    tp_size: int | None,
    first: int | None = None,
    prompts: Prompts | None = None,
) -> Plan:
    """Returns the plan for unfinished sequences of these lengths and tokens to come, both [sequences], not empty.

    `tp_size` is the present one; None at the start, when the first choice costs no switch. `first` is the one in which
    the rollout began, by default the present one: a deployment with `way_back_seconds` goes back to it at the end.
    `prompts` are by default all contexts at the start, and none later. TP sizes in which a sequence does not fit in the
    KV cache are avoided; if none is left, `seconds` is infinite.
    """
    if prompts is None and tp_size is None:
        prompts = contexts, np.ones(len(contexts))
    work = WorkLeft.of(deployment, contexts, remaining, prompts)
    sizes = sorted(deployment.steps)
    begun = np.array([work.begun(size) for size in sizes]).T  # [rungs, sizes]
    prefill_s = np.array([work.prefill_seconds(size) for size in sizes])
    switches = _switches(work, sizes)
    # A wider batch after a switch begins with what had to wait before it; [rungs, before, after].
    switches[1:] += np.maximum(0.0, begun[:-1, None, :] - begun[:-1, :, None]) * prefill_s
    costs = np.array([work.seconds(size) for size in sizes]).T + np.diff(begun, axis=0, prepend=0.0) * prefill_s
    if tp_size is not None:
        place = sizes.index(tp_size)
        way_back = _way_back(deployment, sizes, first or tp_size)
        onward, choices = _descend(costs, switches, way_back)
        totals = switches[0][place] + onward
        places = [int(totals.argmin())]
        seconds, kept = float(totals[places[0]]), float(costs[:, place].sum() + way_back[place])
    else:
        found = [_descend(costs, switches, _way_back(deployment, sizes, size)) for size in sizes]
        starts = [float(onward[start]) for start, (onward, _) in enumerate(found)]
        places = [int(np.argmin(starts))]
        seconds, kept = starts[places[0]], np.inf
        choices = found[places[0]][1]
    for choice in choices[1:]:
        places.append(int(choice[places[-1]]))
    num_rungs = next((rung for rung, place in enumerate(places) if place != places[0]), len(places))
    stage_seconds = float(costs[:num_rungs, places[0]].sum())
    stages: list[tuple[int, int]] = []
    for count, place in zip(work.num_unfinished.tolist(), places, strict=True):
        if not stages or stages[-1][1] != sizes[place]:
            stages.append((count, sizes[place]))
    return Plan(stages=tuple(stages), seconds=seconds, kept_seconds=kept, stage_seconds=stage_seconds)


def _descend(
    costs: NDArray[np.float64], switches: NDArray[np.float64], way_back: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the least seconds from the start in each size, [sizes], and by the size of the rung before, the best one
    of each rung, [rungs, sizes]."""
    later, choices = way_back, np.zeros(costs.shape, dtype=np.int64)
    for rung in reversed(range(len(costs))):
        onward = costs[rung] + later
        totals = switches[rung] + onward
        choices[rung], later = totals.argmin(axis=1), totals.min(axis=1)
    return onward, choices


def _way_back(deployment: Deployment, sizes: list[int], first: int) -> NDArray[np.float64]:
    """Returns the seconds from each TP size back to `first`, [sizes]."""
    seconds = deployment.way_back_seconds
    return np.array([0.0 if seconds is None or size == first else seconds(size, first) for size in sizes])


def _switches(work: WorkLeft, sizes: list[int]) -> NDArray[np.float64]:
    """Returns the seconds of a switch, [rungs, before, after]."""
    seconds = np.zeros((len(work.num_tokens), len(sizes), len(sizes)))
    for b, before in enumerate(sizes):
        for a, after in enumerate(sizes):
            if a != b:
                seconds[:, b, a] = switch_price(work.deployment, before, after, work.num_tokens, work.num_pairs)
    return seconds


@dataclass(frozen=True, kw_only=True)
class WorkLeft:
    """The steps until all sequences have ended, in rungs: within one, few sequences end. Arrays are [rungs]."""

    deployment: Deployment
    num_unfinished: NDArray[np.int64]
    """At the start of each rung."""
    num_tokens: Tokens
    """Their context tokens at that time."""
    num_pairs: Tokens
    """The pairs of a token and a token that it attends to, within these contexts."""
    _starts: NDArray[np.int64]
    """Of each rung, among the intervals from one end of a sequence to the next."""
    _steps: Tokens
    _running: Tokens
    _tokens: Tokens
    """Of each interval: its steps, the unfinished sequences, their context tokens in its middle."""
    _prompts: Prompts

    @classmethod
    def of(
        cls, deployment: Deployment, contexts: Tokens, remaining: Tokens, prompts: Prompts | None = None
    ) -> WorkLeft:
        order = np.argsort(remaining, kind="stable")
        ends, contexts = remaining[order], contexts[order]
        steps = np.diff(ends, prepend=0.0)
        running = np.arange(len(ends), 0, -1).astype(float)
        grown = ends - steps
        sums, squares = (values[::-1].cumsum()[::-1] for values in (contexts, contexts**2))
        at_start = sums + running * grown
        counts = np.unique(np.geomspace(1, len(ends), _MOST_RUNGS).round().astype(int))[::-1]
        starts = len(ends) - counts
        return cls(
            deployment=deployment,
            num_unfinished=counts,
            num_tokens=at_start[starts],
            num_pairs=(squares + 2 * grown * sums + running * grown**2 + at_start)[starts] / 2,
            _starts=starts,
            _steps=steps,
            _running=running,
            _tokens=at_start + running * steps / 2,
            _prompts=prompts or (np.zeros(0), np.zeros(0)),
        )

    def seconds(self, tp_size: int) -> Tokens:
        """Returns the seconds of each rung in this TP size; infinite where a sequence does not fit.

        Where not all sequences fit at once, those that do run at full speed, and the others after them.
        """
        one = self.deployment
        batch, tokens, share = self._at_once(tp_size)
        fits = batch * share > 1 - 1e-9  # one slot of 49 is 0.9999999999999999 sequences
        step_seconds = one.steps[tp_size].seconds(batch * share, tokens * share) / np.where(fits, share, 1.0)
        seconds = np.where(fits, self._steps * step_seconds, np.where(self._steps > 0, np.inf, 0.0))
        return np.add.reduceat(seconds, self._starts)

    def prefill_seconds(self, tp_size: int) -> float:
        """Returns the seconds of all prefills, which replicas share equally; a replica computes a prompt once. A pass
        of prompts takes the place of a pass of tokens, so that its constant is not counted."""
        cost = self.deployment.prefills.get(tp_size)
        prompts, waiting = self._prompts
        if cost is None or not len(prompts):
            return 0.0
        num_replicas = self.deployment.num_ranks // tp_size
        times = np.minimum(waiting, num_replicas)
        alone = cost.seconds_per_token * prompts + cost.seconds_per_pair * prompts * (prompts + 1) / 2
        return float((times * alone).sum() / times.sum() * np.ceil(times.sum() / num_replicas))

    def begun(self, tp_size: int) -> Tokens:
        """Returns the share of the prefills that have begun once a rung has: those of sequences that have room."""
        num_waiting = self._prompts[1].sum()
        behind = self.num_unfinished * (1 - self._at_once(tp_size)[2][self._starts])
        return 1.0 - np.clip(behind / max(1.0, num_waiting), 0.0, 1.0)

    def _at_once(self, tp_size: int) -> tuple[Tokens, Tokens, Tokens]:
        """Returns the sequences of a replica in each interval, their tokens, and the share that fits at once."""
        one = self.deployment
        batch = np.ceil(self._running * tp_size / one.num_ranks)
        tokens = self._tokens / self._running * batch
        return batch, tokens, np.minimum(1.0, np.minimum(one.num_kv_tokens[tp_size] / tokens, one.max_num_seqs / batch))
