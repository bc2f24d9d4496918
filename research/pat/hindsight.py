"""What could have been, had the lengths been known: a plan of `make_plan` for the true lengths, played. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from engines.coordination.views import LayoutChange, LayoutView
from engines.parallel.layout import Layout, nested_layout
from research.pat.lookahead import Plan
from research.pat.redistribute import redistribute


class PlayedPlan:
    """A `LayoutPolicy` that begins each stage of a plan when no more sequences are unfinished than the plan says.

    With `tp_size` all stages have that size: the sequences are redistributed when the plan would switch, and nothing
    else changes. The ids of the replicas tell the stage, so that such a layout, too, is another one. It has no state.
    """

    def __init__(self, plan: Plan, num_ranks: int, *, tp_size: int | None = None) -> None:
        self._counts = [count for count, _ in plan.stages]
        self._sizes = [size if tp_size is None else tp_size for _, size in plan.stages]
        self._num_ranks = num_ranks

    def layout(self, stage: int = 0, *, epoch: int = 0) -> Layout:
        """Returns the layout of a stage: the rollout begins in that of the first one."""
        nested = nested_layout(range(self._num_ranks), self._sizes[stage], epoch=epoch)
        first = stage * self._num_ranks
        return replace(nested, replicas=tuple(replace(spec, id=first + spec.id) for spec in nested.replicas))

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if not view.num_unfinished:
            return None
        stage = max([0, *(place for place, count in enumerate(self._counts) if view.num_unfinished <= count)])
        if view.layout.replicas[0].id // self._num_ranks == stage:
            return None
        layout = self.layout(stage, epoch=view.layout.epoch + 1)
        return LayoutChange(layout=layout, places=redistribute(view.unfinished.values(), view.layout, layout))
