"""What ROSE is compared with: a GPU whose memory has one model at a time. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engines.constraints import Seconds, check_fields
from engines.serving.policies import ServingView


@dataclass(frozen=True)
class IdleFor:
    """An `AdmissionPolicy`: the rollout runs only where no request has been here for `idle_s` seconds.

    With `ServingSetup.change_s` it stands for the change of models of the paper's Table 1 (ServerlessLLM).
    """

    idle_s: Seconds

    def __post_init__(self) -> None:
        check_fields(self)

    def admits(self, view: ServingView, seconds: float) -> bool:
        return view.now - view.busy_at >= self.idle_s
