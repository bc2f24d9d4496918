"""What reproduce.py reads of rose_sim.py, and why values are outside their bands. Torch-free."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.comparison.turns import short

Measured = dict[str, tuple[float, bool | None]]
"""Name -> our value, and whether it is inside the band; None where it is only reported."""
FIG_14 = {4: 1.26, 8: 1.45, 16: 1.69}
SHARING = """\
Why: here a rollout is one phase. Its budget is the pool less the most that serving used in a minute, less a fifth;
bursts halve it, and it does not grow again. In the conversation, half of the memory, which no burst cuts, is more,
and the requests pay for it: their P99 of TTFT is 4.6 times the SLO. Steps of the two models alternate in all three
rungs, so that gaps between tokens about double; the paper's static partition has gaps nine times as long as its
memory preemption. A change of models hardly ever finds a second without requests in the conversation, and the
rollout's sequences wait for nothing; with the requests for code it gains nothing, and breaks the TTFT of those that
find the other model.
"""
REPLICAS = """\
Why: 5.5 requests a second of a conversation leave a GPU's serving model idle for a thousandth of the time, since a
few sequences always decode: what is lent is slack within SLOs. The paper's serving GPUs use a fifth of their compute.
The requests for code leave 56 % of the time, and with these the values are in the band. Four GPUs that serve nothing
gain 1.53: a few long trajectories bound the rest.
"""
LEASE = """\
Leases of 10 s and more give the same rollout: no page that is used again has been idle for as long, and serving takes
pages back without waiting for a lease to end. A lease of 0.2 s makes the rollout 4 % longer. So our TTFT does not
rise with the lease, as the paper's does (338 to 492 ms). Most of the rise with the density is that of serving alone,
and at twice the requests next to nothing is lent: the rollout takes as long as on its own replicas.
"""


def sharing(result: dict[str, Any]) -> Measured:
    """Table 2's order of the rollout's seconds; who breaks an SLO: the largest P99 over its SLO, 1 % is held."""
    found: Measured = {}
    for cell, rungs in result["sharing"].items():
        for before, after in itertools.pairwise(("static", "preempt", "prefix")):
            ratio = short(rungs[before]["rollout_s"] / rungs[after]["rollout_s"])
            found[f"{cell}, seconds of {before} over {after}"] = ratio, ratio > 1
        engines = result["engines"][cell]
        for name in ("swap", "multiplex"):
            ratio = short(engines[name]["rollout_s"] / engines["rose"]["rollout_s"])
            found[f"{cell}, seconds of {name} over ROSE"] = ratio, None
        limits = result["limits"][cell]
        for name, row in {**rungs, "swap": engines["swap"], "ROSE": engines["rose"]}.items():
            worst = max(row[f"{kind}_p99"] / limits[f"{kind}_slo_ms"] for kind in ("ttft", "tpot"))
            found[f"{cell}, P99 over SLO, {name}"] = (
                short(worst),
                None if name == "swap" else row["ok"] == (name == "ROSE"),
            )
    return found


def replicas(result: dict[str, Any]) -> Measured:
    """Fig. 14, whose rollout has eight replicas, by serving replicas for each of the rollout's."""
    found: Measured = {}
    per_dedicated = {count / 8: speed for count, speed in FIG_14.items()}
    for cell, rows in result["replicas"].items():
        before = 1.0
        for count, row in rows.items():
            share = int(count) / result["workload"]["dedicated"]
            near = abs(row["speedup"] - per_dedicated[share]) <= 0.15 if share in per_dedicated else None
            found[f"{cell}, {share:g} for each"] = row["speedup"], near and row["speedup"] > before
            before = row["speedup"]
    return found


def lease_and_density(result: dict[str, Any]) -> Measured:
    """Table 4: seconds of the rollout over those with the first lease. Table 5: TTFT over that of the least density."""
    leases, found = result["lease"], Measured()
    first = next(iter(leases.values()))["rollout_s"]
    for lease, row in leases.items():
        ratio = short(row["rollout_s"] / first)
        found[f"lease {lease} s, seconds"] = ratio, abs(ratio - 1) <= 0.05
    lent = {name: row for name, row in result["density"].items() if "alone" not in name}
    least, before = next(iter(lent.values())), 0.0
    for density, row in lent.items():
        found[f"density {density}, TTFT P99"] = short(row["ttft_p99"] / least["ttft_p99"]), row["ttft_p99"] > before
        found[f"density {density}, TTFT P99 of serving alone"] = (
            short(result["density"][f"{density}, alone"]["ttft_p99"] / least["ttft_p99"]),
            None,
        )
        found[f"density {density}, seconds"] = short(row["rollout_s"] / least["rollout_s"]), None
        before = row["ttft_p99"]
    return found
