"""What could have been, had the lengths been known: a plan of `make_plan` for the true lengths, played. Torch-free."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engines.coordination.views import LayoutChange, LayoutView
from engines.parallel.layout import Layout, nested_on_hosts
from research.pat.deployment import Deployment
from research.pat.lookahead import Plan
from research.pat.redistribute import redistribute
from research.pat.switch_cost import moves_kv


class PlayedPlan:
    """A `LayoutPolicy` that begins each stage of a plan when no more sequences are unfinished than the plan says.

    With `tp_size` all stages have that size: the sequences are redistributed when the plan would switch, and nothing
    else changes. The ids of the replicas tell the stage, so that such a layout, too, is another one. It has no state.
    """

    def __init__(self, plan: Plan, deployment: Deployment, *, num_hosts: int = 1, tp_size: int | None = None) -> None:
        """The plan is of this deployment, whose replicas are within hosts of equal numbers of ranks."""
        self._counts = [count for count, _ in plan.stages]
        self._sizes = [size if tp_size is None else tp_size for _, size in plan.stages]
        self._deployment = deployment
        of_host = deployment.num_ranks // num_hosts
        self._hosts = [range(host * of_host, (host + 1) * of_host) for host in range(num_hosts)]

    def layout(self, stage: int = 0, *, epoch: int = 0) -> Layout:
        """Returns the layout of a stage: the rollout begins in that of the first one."""
        nested = nested_on_hosts(self._hosts, [self._sizes[stage]] * len(self._hosts), epoch=epoch)
        first = stage * self._deployment.num_ranks
        return replace(nested, replicas=tuple(replace(spec, id=first + spec.id) for spec in nested.replicas))

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if not view.num_unfinished:
            return None
        stage = max([0, *(place for place, count in enumerate(self._counts) if view.num_unfinished <= count)])
        present = view.layout.replicas[0]
        if present.id // self._deployment.num_ranks == stage:
            return None
        unfinished = view.unfinished.values()
        contexts = np.array([one.num_tokens for one in unfinished], float)
        layout = self.layout(stage, epoch=view.layout.epoch + 1)
        return LayoutChange(
            layout=layout,
            places=redistribute(unfinished, view.layout, layout),
            with_kv=moves_kv(self._deployment, present.tp_size, self._sizes[stage], contexts),
        )
