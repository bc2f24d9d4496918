"""Which replica continues which sequence after a switch (PAT, Algorithm 1, line 23). Torch-free.

The paper does not say how; here the numbers of sequences are equal, and then the numbers of tokens nearly so. Ranks
exchange KV within groups (`joint_groups`): only what a group has too many of leaves it, since that KV takes a longer
way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from engines.coordination.views import SequenceView
from engines.parallel.layout import Layout, joint_groups
from engines.sequence import SequenceId


def redistribute(unfinished: Iterable[SequenceView], before: Layout, after: Layout) -> dict[SequenceId, int]:
    """Returns the replica of `after` for each sequence that has run. The others stay with the schedule policy."""
    ran = [one for one in unfinished if one.last_replica_id is not None]
    num_tokens = {one.sequence_id: one.num_prompt_tokens + one.num_generated for one in ran}
    leaders = {spec.id: spec.ranks[0] for spec in before.replicas}
    homes = {one.sequence_id: leaders.get(one.last_replica_id) for one in ran if one.last_replica_id is not None}
    groups = [
        ([spec.id for spec in after.replicas if spec.ranks[0] in ranks], {id_ for id_ in homes if homes[id_] in ranks})
        for ranks in joint_groups(before, after)
    ]
    if not groups:
        return {}
    num_replicas = sum(len(replicas) for replicas, _ in groups)
    spare = set(num_tokens).difference(*(members for _, members in groups))
    rooms = []
    for replicas, members in groups:
        most = -(-len(num_tokens) * len(replicas) // num_replicas)
        too_many = sorted(members, key=lambda id_: (num_tokens[id_], id_))[: max(0, len(members) - most)]
        members -= set(too_many)
        spare |= set(too_many)
        rooms.append(most - len(members))
    for id_ in sorted(spare, key=lambda id_: (-num_tokens[id_], id_)):
        number = max(range(len(groups)), key=lambda number: (rooms[number], -number))
        groups[number][1].add(id_)
        rooms[number] -= 1
    places: dict[SequenceId, int] = {}
    for replicas, members in groups:
        places |= balance({id_: num_tokens[id_] for id_ in num_tokens if id_ in members}, replicas)
    return places


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
