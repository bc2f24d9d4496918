"""What trajectories have waited for, from the spans of a rollout. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items

from engines.rollout.telemetry import TurnSpan
from experiments.comparison.rollouts import Rollout


def queue_of_longest(rollout: Rollout) -> float:
    """Returns the seconds that the trajectory with the most generated tokens has waited for replicas and in their own
    queues, over all of its turns (Heddle, §7.2)."""
    longest = max(rollout.lengths, key=lambda id_: rollout.lengths[id_])
    return sum(span.seconds for span in rollout.turns if span.sequence_id == longest and span.kind == "queue")


def exposed_s(spans: Items[TurnSpan]) -> dict[str, float]:
    """Returns the mean seconds per gap for which trajectories have waited, behind their tool, for a prediction and for
    KV from another replica (Heddle, Table 1). A gap is the time between two turns."""
    by_sequence = defaultdict[object, list[TurnSpan]](list)
    for span in spans:
        by_sequence[span.sequence_id].append(span)
    num_gaps = sum(max(0, sum(one.kind == "tool" for one in own) - 2) for own in by_sequence.values())
    waits = {"prediction": 0.0, "migration": 0.0}
    for own in by_sequence.values():
        parts = {kind: [one for one in own if one.kind == kind] for kind in ("prediction", "move", "queue", "replica")}
        waiting = [one for one in parts["queue"] if one.replica_id is None]
        waits["prediction"] += sum(_overlap(one, waiting) for one in parts["prediction"][1:])
        waits["migration"] += sum(_overlap(one, parts["replica"]) for one in parts["move"])
    return {name: seconds / max(1, num_gaps) for name, seconds in waits.items()}


def _overlap(one: TurnSpan, others: Iterable[TurnSpan]) -> float:
    end = one.start + one.seconds
    return sum(max(0.0, min(end, other.start + other.seconds) - max(one.start, other.start)) for other in others)
