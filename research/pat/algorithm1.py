"""PAT's online switch mechanism as printed (§4.2, Algorithm 1, lines 4 to 15). Torch-free.

What the paper leaves open, and what is chosen here:

- The first TP size is an input of the algorithm. Here: the one with the least estimated time, without a T_switch.
- est_rem_time has no body. §4.2: every sequence runs to its maximum length. Here each has its own, contexts grow by one
  token per step, and the time is the sum of the predicted steps; of several DP groups it is that of the slowest. What
  prompts take that are not computed yet is added.
- rbs_list is not merged for the present size (line 4) and is for the candidates (line 7): a switch is credited with the
  balance that it brings, and the present size is no candidate.
- tp_list: sizes wider than the present one, since DP groups are merged; narrower ones, too, once sequences were added,
  as when a rollout begins in the layout that another has left. Otherwise line 4 makes it go to and fro.
- compute_merged_bs: equal shares, rounded up. Sequences that have not run yet are dealt to the DP groups in turn.
- T_switch: min(T_move, T_recomp) of §4.3 with weights and control, as for our own plan (`switch_cost.py`).
- How often the loop goes round: see `PatController`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from research.pat.deployment import Deployment
from research.pat.lookahead import Plan, Prompts, WorkLeft
from research.pat.switch_cost import Tokens, switch_price


def one_switch(
    deployment: Deployment,
    contexts: Tokens,
    remaining: Tokens,
    dp_groups: NDArray[np.int64],
    tp_size: int | None,
    prompts: Prompts | None = None,
    *,
    may_narrow: bool = True,
) -> Plan:
    """Returns a plan of one stage for unfinished sequences with these tokens, tokens up to their limits, and DP groups,
    all [sequences], not empty. `tp_size`: the present one, or None at the start.
    `prompts`: those to compute first. Without `may_narrow` only wider sizes are candidates."""
    work = WorkLeft.of(deployment, contexts, remaining, prompts)
    sizes = [size for size in sorted(deployment.steps) if may_narrow or tp_size is None or size >= tp_size]
    seconds = {size: float(work.seconds(size).sum()) + work.prefill_seconds(size) for size in sizes}
    if tp_size is not None:
        alone = replace(deployment, num_ranks=tp_size)
        seconds[tp_size] = max(
            float(WorkLeft.of(alone, contexts[mine], remaining[mine]).seconds(tp_size).sum())
            for mine in (dp_groups == group for group in np.unique(dp_groups))
        ) + work.prefill_seconds(tp_size)
        for size in seconds.keys() - {tp_size}:
            seconds[size] += float(switch_price(deployment, tp_size, size, work.num_tokens[:1], work.num_pairs[:1])[0])
    best = min(seconds, key=lambda size: (seconds[size], size != tp_size))
    kept = np.inf if tp_size is None else seconds[tp_size]
    return Plan(stages=((len(contexts), best),), seconds=seconds[best], kept_seconds=kept)
