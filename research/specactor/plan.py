"""Which GPUs draft, which verify, and how far ahead (SpecActor §4.1, Algorithm 1). Torch-free.

What the paper leaves open, and what is chosen here:

- w_max is circular, since V' and beta depend on w. Windows are tried up to the first one whose w D is at least V, since
  no longer one is faster, and up to 16 where V grows with w as fast as w D.
- Its batch per verifier counts parts of a drafter and a verifier. Here there are whole ones, GPUs may be left over, and
  the batch is the largest of all verifiers.
- Verifiers whose KV cache cannot hold their sequences are no candidates.
- Coupled speculation and plain decoding are candidates, too: decoupling often does not pay.
- D of g_d GPUs is that of g_d drafters, which share the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from engines.constraints import Count, check_fields
from research.specactor.profile import Costs
from research.specactor.throughput import DecoupledMode, Pair, coupled, decoupled, most_per_pass, printed_tau

MAX_WINDOW = 16
Mode = Literal["off", "coupled", "filled", "strict"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What is planned for."""

    num_sequences: Count
    num_gpus: Count
    max_len: Count = 1
    """Tokens of the longest sequence that may come."""
    kv_tokens: Mapping[int, int] | None = None
    """Tokens that the KV cache of a verifier holds, by its GPUs; None: as many as needed."""
    whole_replicas: bool = False
    """Drafters have as many GPUs as verifiers, as replicas that change their role, and one may serve several verifiers.
    Otherwise each verifier has its own, of at most as many GPUs (Algorithm 1, line 3)."""
    max_window: Count = MAX_WINDOW
    """Most guesses of a window."""
    ahead: Count | None = None
    """The window of GPUs that only draft, if it is fixed."""

    def __post_init__(self) -> None:
        check_fields(self)

    def fits(self, verifier_gpus: int, batch: int) -> bool:
        return self.kv_tokens is None or batch * self.max_len <= self.kv_tokens.get(verifier_gpus, 0)


@dataclass(frozen=True)
class Placement:
    """What the GPUs of a cluster do."""

    num_drafters: int
    """Groups of GPUs that only draft; 0 where none does."""
    draft_gpus: int
    """Of each."""
    num_verifiers: int
    verifier_gpus: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    placement: Placement
    batch: int
    """Sequences of a verifier, at most."""
    leftover_gpus: int
    mode: Mode
    method: str | None
    """Of drafting; None with "off"."""
    window: int
    tokens_per_second: float
    """Of all sequences."""


def make_plan(
    costs: Costs,
    rollout: Rollout,
    acceptance: Mapping[str, float],
    modes: tuple[DecoupledMode, ...] = ("filled",),
    *,
    num_drafters: int | None = None,
) -> Plan:
    """Returns the fastest plan. `acceptance`: by method, the probability that a guess is right. `num_drafters`: only
    plans with so many groups of GPUs that draft.

    Raises ValueError if there are too few GPUs, or too little KV cache, for each kind of verifier.
    """
    found = [
        _Candidate.of(costs, rollout, one) for size in sorted(costs.verifiers) for one in placements(rollout, size)
    ]
    candidates = [one for one in found if one is not None and num_drafters in (None, one.placement.num_drafters)]
    best: Plan | None = None
    for one in sorted(candidates, key=lambda one: one.placement.num_drafters > 0):  # coupled ones are soon estimated
        known = best.tokens_per_second / rollout.num_sequences if best else 0.0
        for plan in one.decoupled(acceptance, modes, known) if one.placement.num_drafters else one.coupled(acceptance):
            if best is None or plan.tokens_per_second > best.tokens_per_second:
                best = plan
    if best is None:
        raise ValueError(
            f"kv_tokens={rollout.kv_tokens}: {rollout.num_gpus} GPUs, as verifiers of {sorted(costs.verifiers)} GPUs, "
            f"cannot hold {rollout.num_sequences} sequences of max_len={rollout.max_len} tokens; give more GPUs or KV "
            f"cache, or let replicas preempt sequences, and plan for a smaller max_len"
        )
    return best


def placements(rollout: Rollout, verifier_gpus: int) -> Iterator[Placement]:
    """Yields those with verifiers of this size, the one without drafters first."""
    num_groups = rollout.num_gpus // verifier_gpus
    yield Placement(0, 0, num_groups, verifier_gpus)
    if rollout.whole_replicas:
        for drafters in sorted({1, *(math.ceil(num_groups * share / 16) for share in range(1, 9))}):
            if drafters <= num_groups // 2:
                yield Placement(drafters, verifier_gpus, num_groups - drafters, verifier_gpus)
        return
    for draft_gpus in range(1, verifier_gpus + 1):
        count = min(rollout.num_gpus // (draft_gpus + verifier_gpus), rollout.num_sequences)
        yield Placement(count, draft_gpus, count, verifier_gpus)


@dataclass(frozen=True)
class _Candidate:
    """A placement that can hold the sequences."""

    costs: Costs
    rollout: Rollout
    placement: Placement
    batch: int

    @staticmethod
    def of(costs: Costs, rollout: Rollout, placement: Placement) -> _Candidate | None:
        """Returns None for too few GPUs, or too little KV cache."""
        if placement.num_verifiers == 0:
            return None
        batch = math.ceil(rollout.num_sequences / placement.num_verifiers)
        return _Candidate(costs, rollout, placement, batch) if rollout.fits(placement.verifier_gpus, batch) else None

    def verify(self, rows: float) -> float:
        return self.costs.verifiers[self.placement.verifier_gpus](self.batch, rows)

    def plan(self, mode: Mode, method: str | None, window: int, rate: float) -> Plan:
        one = self.placement
        used = one.num_drafters * one.draft_gpus + one.num_verifiers * one.verifier_gpus
        return Plan(
            placement=one,
            batch=self.batch,
            leftover_gpus=self.rollout.num_gpus - used,
            mode=mode,
            method=method,
            window=window,
            tokens_per_second=rate * self.rollout.num_sequences,
        )

    def coupled(self, acceptance: Mapping[str, float]) -> Iterator[Plan]:
        """Yields plain decoding first, which is best where nothing is faster."""
        yield self.plan("off", None, 0, 1 / self.verify(1))
        for method, p in acceptance.items():
            for window in range(1, self.rollout.max_window + 1):
                drafting_s = self.costs.whole_drafts(method, self.batch, self.placement.verifier_gpus, window)
                yield self.plan("coupled", method, window, coupled(p, window, drafting_s, self.verify(window + 1)))

    def decoupled(
        self, acceptance: Mapping[str, float], modes: tuple[DecoupledMode, ...], known: float
    ) -> Iterator[Plan]:
        """Yields what may be faster than `known` tokens per second of a sequence."""
        drafted = math.ceil(self.rollout.num_sequences / self.placement.num_drafters)
        for method, p in acceptance.items():
            draft_s = self.costs.draft(method, drafted, self.placement.draft_gpus)
            pair = Pair(draft_s, self.verify, self.batch, self.costs.delay_s)
            if method in self.costs.lookups or max(1 / draft_s, 1 / self.verify(1)) <= known:
                continue  # a sequence gets no more tokens than there are guesses, or passes
            for mode in modes:
                shortest_s = self.verify(1)
                for window in (fixed,) if (fixed := self.rollout.ahead) else range(1, self.rollout.max_window + 1):
                    most = window if mode == "strict" else min(window, int(self.verify(window + 1) / draft_s))
                    if most_per_pass(p, most) / shortest_s <= known:
                        continue
                    rate = decoupled(pair, p, window, mode)
                    known = max(known, rate.tokens_per_second)
                    yield self.plan(mode, method, window, rate.tokens_per_second)
                    if window * draft_s >= self.verify(window if mode == "strict" else rate.rows):
                        break
                    if mode == "filled":
                        shortest_s = self.verify(rate.rows)  # longer windows have more rows


def printed_plan(costs: Costs, rollout: Rollout, method: str, p: float) -> Plan:
    """Returns the plan of Algorithm 1 as printed, by the printed tau, whatever memory and coupled decoding would say.

    Raises ValueError without a verifier.
    """
    if not costs.verifiers:
        raise ValueError("costs.verifiers: is empty; give the V of one size of verifiers or more")
    plans = []
    for verifier_gpus, verify in costs.verifiers.items():
        for draft_gpus in range(1, verifier_gpus + 1):
            size = draft_gpus + verifier_gpus
            count, leftover = divmod(rollout.num_gpus, size)
            batch = math.ceil(size * rollout.num_sequences / rollout.num_gpus)
            draft_s = costs.draft(method, batch, draft_gpus)
            for window in range(1, MAX_WINDOW + 1):
                verify_s = verify(batch, window)
                rate = printed_tau(p, window) / max(window * draft_s, verify_s)
                plan = Plan(
                    placement=Placement(count, draft_gpus, count, verifier_gpus),
                    batch=batch,
                    leftover_gpus=leftover,
                    mode="strict",
                    method=method,
                    window=window,
                    tokens_per_second=rate * rollout.num_sequences,
                )
                plans.append(plan)
                if window * draft_s >= verify_s:
                    break
    return max(plans, key=lambda one: one.tokens_per_second)
