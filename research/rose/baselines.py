"""What ROSE is compared with where two models share a GPU: no admission control, or changes of the model.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.constraints import Seconds, check_fields
from engines.serving.policies import ServingView


def _is_busy(view: ServingView) -> bool:
    return bool(view.queued or view.last_token_times)


class Alternating:
    """An `AdmissionPolicy` without any SLO: while both models have work, each has every second step.

    It stands for spatial sharing in equal parts, as in the paper's Table 2: two passes that share a GPU take as long as
    one after the other.
    """

    def __init__(self) -> None:
        self._is_next = True

    def admits(self, view: ServingView, seconds: float) -> bool:
        admitted, self._is_next = not _is_busy(view) or self._is_next, not self._is_next
        return admitted


@dataclass
class IdleFor:
    """An `AdmissionPolicy`: the rollout runs only where no request has been here for `idle_s` seconds.

    With `ServingSetup.change_s` it stands for the change of models of the paper's Table 1 (ServerlessLLM). What was
    before it was first asked does not count.
    """

    idle_s: Seconds
    _busy_at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def admits(self, view: ServingView, seconds: float) -> bool:
        if self._busy_at is None or _is_busy(view):
            self._busy_at = view.now
        return view.now - self._busy_at >= self.idle_s
