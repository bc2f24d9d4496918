"""What steps did, over time. A step may cover many bins, and a bin many steps. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from engines.rollout.telemetry import StepRecord

Floats = NDArray[np.float64]


def spread(steps: Collection[StepRecord], amounts: Floats, edges: Floats) -> Floats:
    """Returns the amounts of the steps, [steps, ...], by bins of time, [bins, ...]: of each step, every bin gets the
    share that it has of the step's time. `edges`: rising, on the clock of the steps."""
    starts, seconds = np.array([(step.start, step.seconds) for step in steps], float).T
    done = np.clip((edges[:, None] - starts) / np.maximum(seconds, 1e-12), 0.0, 1.0)
    return np.diff(done, axis=0) @ amounts
