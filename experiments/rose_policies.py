"""What rose.py and rose_sim.py share: requests, admission policies, and the latencies of what is served. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, Literal, Protocol

from engines.serving.policies import AdmissionPolicy
from experiments.comparison.turns import short
from research.rose.admission import DualSLO, EqualTurns, Form, QueueDebt, ServingTimes
from research.workloads.arrivals import PoissonArrivals
from research.workloads.lengths import LogNormalLengths

Cell = Literal["conversation", "code", "full"]
Policy = Literal["none", "ttft", "tpot", "dual_printed", "dual_cumulative", "dual", "static_split", "half_slo"]
FILES: dict[Cell, str] = {
    "conversation": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "full": "AzureLLMInferenceTrace_conv.csv",
}
DRAWN: dict[Cell, PoissonArrivals] = {
    "conversation": PoissonArrivals(
        rate=5.5,
        prompt=LogNormalLengths(median=1000, sigma=0.6, cap=8000),
        generated=LogNormalLengths(median=130, sigma=0.9, cap=1000),
    ),
    "code": PoissonArrivals(
        rate=2.6,
        prompt=LogNormalLengths(median=1450, sigma=0.9, cap=7500),
        generated=LogNormalLengths(median=13, sigma=1.1, cap=1000),
    ),
}
DRAWN["full"] = DRAWN["conversation"]
"""About the traces', whose bursts these lack. Requests come faster in `full`."""
SLOTS = 16
"""Most sequences of the rollout on a GPU (Appendix A)."""
_TTFT, _TPOT = 1.6, 4.0
"""SLOs over serving alone: over its P99 of TTFT, and over its median gap between tokens."""
_RESERVE = 0.1
"""Of the TTFT SLO, what the bound on a queue leaves: a second model makes passes longer, and the P99 is measured."""
ALIKE = 1.3
"""A cell whose halves differ by more is void; and one in which serving alone misses an SLO."""


class Timed(Protocol):
    """Latencies of requests, in seconds."""

    @property
    def ttft(self) -> list[float]: ...

    @property
    def gaps(self) -> list[list[float]]:
        """Between two tokens, by request."""
        ...


def check_traces(traces: Path | None) -> None:
    """Raises ValueError for a folder without the traces; None: arrivals are drawn."""
    for name in FILES.values() if traces is not None else ():
        if not (traces / name).is_file():  # type: ignore[operator]
            raise ValueError(f"traces={str(traces)!r}: has no {name}; name the folder of the traces")


def admission_of(policy: str, times: ServingTimes, ttft_s: float, tpot_s: float, guard_s: float) -> AdmissionPolicy:
    """`static_split` is `dual`: its memory differs. Raises KeyError for an unknown policy."""

    def slo(share: float = 1.0, *, ttft: bool = True, tpot: bool = True, form: Form = "cumulative") -> DualSLO:
        slos = share * ttft_s if ttft else None, share * tpot_s if tpot else None
        return DualSLO(times=times, ttft_s=slos[0], tpot_s=slos[1], form=form, guard_s=guard_s)

    def dual(share: float = 1.0) -> QueueDebt:
        return QueueDebt(slo(share), (1 - _RESERVE) * share * ttft_s - ttft_s / _TTFT)

    made: dict[str, Callable[[], AdmissionPolicy]] = {
        "none": EqualTurns,
        "ttft": lambda: EqualTurns(slo(tpot=False)),
        "tpot": lambda: EqualTurns(slo(ttft=False)),
        "dual_printed": lambda: slo(form="printed"),
        "dual_cumulative": slo,
        "dual": dual,
        "static_split": dual,
        "half_slo": lambda: dual(0.5),
    }
    return made[policy]()


def slo_of(alone: Items[Timed]) -> tuple[float, float]:
    """TTFT and TPOT SLOs in seconds, from serving alone."""
    ttft = percentile([one for result in alone for one in result.ttft], 0.99)
    tpot = statistics.median(gap for result in alone for gaps in result.gaps for gap in gaps)
    return _TTFT * ttft, _TPOT * tpot


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of them does not exceed."""
    ranked = sorted(values)
    return ranked[math.ceil(share * len(ranked)) - 1]


def latencies(results: Items[Timed], ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """In milliseconds. TPOT is held to its SLO gap by gap; 1 % beyond an SLO counts as held."""
    ttft = [one for result in results for one in result.ttft]
    gaps = [gap for result in results for of_request in result.gaps for gap in of_request]
    ttft_p99, tpot_p99 = percentile(ttft, 0.99), percentile(gaps, 0.99)
    return {
        "ttft_p99": short(1e3 * ttft_p99),
        "tpot_p99": short(1e3 * tpot_p99),
        "ttft_mean": short(1e3 * statistics.mean(ttft)),
        "tpot_mean": short(1e3 * statistics.mean(gaps)),
        "ok": ttft_p99 <= 1.01 * ttft_s and tpot_p99 <= 1.01 * tpot_s,
    }


def halves(results: Items[Timed]) -> float:
    """The larger P99 over the smaller one of every second request and of the others: of TTFT or of gaps, whichever
    differ more."""
    ratios = []
    for kind in ("ttft", "gaps"):
        found = []
        for half in (0, 1):
            values = [one for result in results for one in getattr(result, kind)[half::2]]
            found.append(percentile(values if kind == "ttft" else [gap for some in values for gap in some], 0.99))
        ratios.append(max(found) / min(found))
    return max(ratios)
