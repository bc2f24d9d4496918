"""Which replica continues which sequence after a switch (PAT, Algorithm 1, line 23). Torch-free.

The paper does not say how; here the numbers of sequences are equal, and then the numbers of tokens nearly so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from engines.coordination.views import SequenceView
from engines.sequence import SequenceId


def redistribute(unfinished: Iterable[SequenceView], replica_ids: Iterable[int]) -> dict[SequenceId, int]:
    """Returns the replica of each sequence that has run, by `balance`. The others stay with the schedule policy."""
    ran = (one for one in unfinished if one.last_replica_id is not None)
    return balance({one.sequence_id: one.num_prompt_tokens + one.num_generated for one in ran}, replica_ids)


def balance(num_tokens: Mapping[SequenceId, int], replica_ids: Iterable[int]) -> dict[SequenceId, int]:
    """Returns the replica of each sequence: longest first, each to the replica with the fewest tokens that has less
    than its share of the sequences, rounded up (ties: the smaller id).

    A step reads the weights once for all sequences of a replica, so that equal batches come before equal lengths.
    """
    ids = sorted(replica_ids)
    most = -(-len(num_tokens) // len(ids))
    loads = [(0, replica_id) for replica_id in ids]
    counts = dict.fromkeys(ids, 0)
    places = {}
    for sequence_id in sorted(num_tokens, key=lambda one: (-num_tokens[one], one)):
        load, replica_id = heapq.heappop(loads)
        places[sequence_id] = replica_id
        counts[replica_id] += 1
        if counts[replica_id] < most:
            heapq.heappush(loads, (load + num_tokens[sequence_id], replica_id))
    return places
