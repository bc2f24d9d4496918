"""What could have been, had the lengths been known: a policy that knows them, and a floor that no policy beats.

Each system adds its own here. Torch-free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items

from engines.coordination.views import Dispatch, ScheduleView
from engines.sequence import SequenceId
from research.simulator.latency import LatencyProfile


class LongestFirst:
    """Longest processing time first, with the true lengths: the longest waiting sequence goes to the replica that has
    the fewest tokens left to generate. A `SchedulePolicy` for the simulator only."""

    def __init__(self, lengths: Mapping[SequenceId, int]) -> None:
        self._lengths = lengths
        self._order: list[tuple[int, int, SequenceId]] = []
        self._work: dict[SequenceId, tuple[int, int]] = {}
        """Where each dispatched sequence is, and the tokens that it had left then."""
        self._load: dict[int, int] = {}

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.entered:
            self._forget(sequence.sequence_id)
            left = self._lengths[sequence.sequence_id] - sequence.num_generated
            heapq.heappush(self._order, (-left, sequence.index, sequence.sequence_id))
        for ended in view.ended:
            self._forget(ended.sequence_id)
        while self._order and self._order[0][2] not in view.waiting:
            heapq.heappop(self._order)
        if not self._order:
            return None
        left, first = -self._order[0][0], view.waiting[self._order[0][2]]
        roomy = [replica for replica in view.replicas.values() if replica.room_for(first)]
        if not roomy:
            return None
        best = min(roomy, key=lambda replica: (self._load.get(replica.spec.id, 0), replica.spec.id))
        self._work[first.sequence_id] = best.spec.id, left
        self._load[best.spec.id] = self._load.get(best.spec.id, 0) + left
        return Dispatch(sequence_id=first.sequence_id, replica_id=best.spec.id)

    def _forget(self, sequence_id: SequenceId) -> None:
        if sequence_id in self._work:
            replica_id, left = self._work.pop(sequence_id)
            self._load[replica_id] -= left


def floor_seconds(
    profile: LatencyProfile,
    sequences: Iterable[tuple[int, int]],
    *,
    num_replicas: int,
    max_num_seqs: int,
    tool_s: Items[float] = (),
) -> float:
    """Seconds that no policy can beat: for pairs of prompt and response tokens on replicas of a profile.

    It is the larger of two bounds. The longest sequence cannot end before a replica that runs nothing else could end
    it. And all replicas together must read each token's context, multiply for each token, and read the weights in each
    of the fewest steps that can hold all tokens. `tool_s`, one for each trajectory, are the seconds of its tools, to
    which come a step for each of its tokens; the prefills of what it observes are left out.
    """
    pairs = list(sequences)
    num_prompt, longest = max(pairs, key=lambda pair: pair[1])
    alone = sum(profile.step_seconds(1, 1, num_prompt + place) for place in range(1, longest))
    alone += profile.prefill_seconds(1, num_prompt)
    step_s = profile.step_seconds(1, 1, 1)
    alone = max([alone, *(seconds + length * step_s for (_, length), seconds in zip(pairs, tool_s, strict=False))])
    # The prefill draws a response's first token; decode number j attends to the prompt and j tokens.
    num_decoded = sum(length - 1 for _, length in pairs)
    num_read = sum((length - 1) * prompt + (length - 1) * length // 2 for prompt, length in pairs)
    read_s = _slope(lambda count: profile.step_seconds(1, 1, count))
    row_s = _slope(lambda count: profile.step_seconds(count, count, count, pairs=count)) - read_s
    steps_s = step_s * num_decoded / max_num_seqs
    return max(alone, (num_read * read_s + max(steps_s, num_decoded * row_s)) / num_replicas)


def _slope(seconds: Callable[[int], float], many: int = 10**6) -> float:
    return (seconds(2 * many) - seconds(many)) / many
