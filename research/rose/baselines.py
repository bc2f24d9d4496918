"""What ROSE is compared with: a GPU whose memory has one model at a time. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.constraints import Seconds, check_fields
from engines.serving.policies import ServingView


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
        if self._busy_at is None or view.queued or view.last_token_times:
            self._busy_at = view.now
        return view.now - self._busy_at >= self.idle_s
