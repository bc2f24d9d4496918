"""What Seer is compared with: groups bound to replicas (§2.2, §6.1), and divided rollout alone (§6.4.1). Torch-free.

`engines.coordination.policies` has a harder baseline, `OnDemand`: a sequence is bound when a replica has room for it.
"""

from __future__ import annotations

import random
from contextlib import closing
from typing import Literal

from engines.coordination.policies import queued_from
from engines.coordination.views import Dispatch, EndedView, ScheduleView, SequenceView
from engines.sequence import SequenceId
from research.seer.chunks import ChunkOptions, dispatch_chunk
from research.seer.waiting_queue import WaitingQueue


class RandomStatic:
    """Whole groups to random replicas, all at once, to their ends, as veRL does: every replica gets as many groups.

    With `by="sequence"` single sequences, of which every replica gets as many. Nothing is dispatched before all
    replicas of the layout accept. The next replica takes a sequence that its own cannot hold.
    """

    def __init__(self, seed: int = 0, *, by: Literal["group", "sequence"] = "group") -> None:
        self._random = random.Random(seed)
        self._by = by
        self._places: dict[tuple[int, ...], int] = {}
        self._unfinished: dict[tuple[int, ...], set[SequenceId]] = {}
        """The sequences of each place, which goes with the last of them: a policy may serve thousands of rollouts."""
        self._deck: list[int] = []
        """Replicas that have got nothing since the replicas were last shuffled."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        self._note(view)
        sequence = next(iter(view.waiting.values()), None)
        ids = sorted(spec.id for spec in view.layout.replicas if spec.role == "rollout")
        if sequence is None or not ids or not all(view.replicas[id_].accepts for id_ in ids):
            return None
        key = self._key(sequence)
        if self._places.get(key) not in ids:
            if not set(self._deck) & set(ids):
                self._deck = self._random.sample(ids, len(ids))
            self._places[key] = next(id_ for id_ in iter(self._deck.pop, None) if id_ in ids)
        return queued_from(ids, ids.index(self._places[key]), sequence, view)

    def _key(self, sequence: SequenceView | EndedView) -> tuple[int, ...]:
        return (sequence.sequence_id[0], sequence.group_id) if self._by == "group" else sequence.sequence_id

    def _note(self, view: ScheduleView) -> None:
        for one in view.ended:
            key = self._key(one)
            if key in self._unfinished:
                self._unfinished[key].discard(one.sequence_id)
                if not self._unfinished[key]:
                    del self._unfinished[key]
                    self._places.pop(key, None)
        for sequence in view.entered:
            self._unfinished.setdefault(self._key(sequence), set()).add(sequence.sequence_id)


class Divided:
    """Chunks without context, first come, first served: by default a sequence that comes back keeps its place, so that
    what came last starts last. With `takes_turns` it is the last again, and all sequences advance alike.

    The paper does not say which its own is.
    """

    def __init__(self, options: ChunkOptions | None = None, *, takes_turns: bool = False) -> None:
        self.options = options or ChunkOptions()
        self._takes_turns = takes_turns
        self._sequences = WaitingQueue[SequenceId]()
        self._num_chunks = 0

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.entered:
            self._sequences.put(sequence.sequence_id, () if self._takes_turns else (sequence.index,))
        with closing(self._sequences.ordered(view.waiting)) as ordered:
            waiting = (view.waiting[id_] for id_ in ordered)
            dispatch = dispatch_chunk(view, waiting, self.options, self._num_chunks)
        self._num_chunks += dispatch is not None
        return dispatch
