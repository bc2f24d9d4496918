"""Which replica continues which sequence after a switch (PAT, Algorithm 1, line 23). Torch-free.

The paper does not say how; here the numbers of sequences are equal, and then the numbers of tokens nearly so. Ranks
exchange KV within groups (`joint_groups`): only what a group has too many of leaves it, since that KV takes a longer
way.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping

from engines.coordination.views import SequenceView
from engines.parallel.layout import Layout, joint_groups
from engines.sequence import SequenceId

_UNKNOWN: Mapping[SequenceId, float] = {}


def redistribute(
    unfinished: Iterable[SequenceView], before: Layout, after: Layout, remaining: Mapping[SequenceId, float] = _UNKNOWN
) -> dict[SequenceId, int]:
    """Returns the replica of `after` for each sequence that has run. The others stay with the schedule policy.

    With `remaining`, the tokens that each is expected to generate, numbers stay equal while sequences end: they are
    equal for the longest, for the longest and the next, and so on, in classes that differ by a factor of 2.
    """
    groups = [
        (set(ranks), [spec.id for spec in after.replicas if spec.ranks[0] in ranks])
        for ranks in joint_groups(before, after)
    ]
    places: dict[SequenceId, int] = {}
    if not groups:
        return places
    ran = {one.sequence_id: one for one in unfinished if one.last_replica_id is not None}
    num_tokens = {id_: one.num_tokens for id_, one in ran.items()}
    leaders = {spec.id: spec.ranks[0] for spec in before.replicas}
    homes = {id_: leaders.get(one.last_replica_id) for id_, one in ran.items() if one.last_replica_id is not None}
    classes = {id_: -math.frexp(remaining.get(id_, 0.0))[1] for id_ in ran}
    num_replicas = sum(len(replicas) for _, replicas in groups)
    for _, ids in itertools.groupby(sorted(ran, key=lambda id_: (classes[id_], -num_tokens[id_], id_)), classes.get):
        placing = [*ids]
        held = [[(places[id_], num_tokens[id_]) for id_ in places if places[id_] in replicas] for _, replicas in groups]
        rooms = [
            -(-(len(places) + len(placing)) * len(replicas) // num_replicas) - len(mine)
            for mine, (_, replicas) in zip(held, groups, strict=True)
        ]
        for share, mine, (_, replicas) in zip(_shares(placing, homes, groups, rooms), held, groups, strict=True):
            places |= balance({id_: num_tokens[id_] for id_ in share}, replicas, mine)
    return places


def _shares(
    placing: list[SequenceId],
    homes: Mapping[SequenceId, int | None],
    groups: list[tuple[set[int], list[int]]],
    rooms: list[int],
) -> list[list[SequenceId]]:
    """Returns the sequences of each group: those that are at home there as far as there is room, and others."""
    shares = [
        [id_ for id_ in placing if homes[id_] in ranks][:room] for (ranks, _), room in zip(groups, rooms, strict=True)
    ]
    stay = {id_ for share in shares for id_ in share}
    for id_ in placing:
        if id_ not in stay:
            number = max(range(len(groups)), key=lambda number: (rooms[number] - len(shares[number]), -number))
            shares[number].append(id_)
    return shares


def balance(
    num_tokens: Mapping[SequenceId, int], replica_ids: Iterable[int], held: Iterable[tuple[int, int]] = ()
) -> dict[SequenceId, int]:
    """Returns the replica of each sequence: longest first, each to the replica with the fewest tokens that has less
    than its share of the sequences, rounded up (ties: the smaller id). `held`: (replica, tokens) of each sequence that
    has its place already.

    A step reads the weights once for all sequences of a replica, so that equal batches come before equal lengths.
    """
    counts = dict.fromkeys(sorted(replica_ids), 0)
    tokens = counts.copy()
    for replica_id, count in held:
        counts[replica_id] += 1
        tokens[replica_id] += count
    most = -(-(len(num_tokens) + sum(counts.values())) // len(counts))
    loads = [(tokens[replica_id], replica_id) for replica_id in counts if counts[replica_id] < most]
    heapq.heapify(loads)
    places = {}
    for sequence_id in sorted(num_tokens, key=lambda one: (-num_tokens[one], one)):
        load, replica_id = heapq.heappop(loads)
        places[sequence_id] = replica_id
        counts[replica_id] += 1
        if counts[replica_id] < most:
            heapq.heappush(loads, (load + num_tokens[sequence_id], replica_id))
    return places
