"""What a simulated `Replica` has in place of a model: passes that only count, and KV that is only counted. Torch-free.

The tokens that are drawn stand for a response of a known length. Each sequence has a token of its own, so that the
prefix cache tells sequences apart as it does in a live run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from engines.config import Preemption
from engines.kvcache.cost import SwapCost
from engines.replica.kv_moves import KVMoves
from engines.replica.schedule import CachedKV, Drawn, Scheduled, Sequence
from engines.rollout.pace import Path
from engines.sequence import KVHandle, KVPart, SequenceKey

VOCAB_SIZE = 2**62
OBSERVED = 2**32 - 1
"""The token that stands for all that is observed."""
DTYPE = "bfloat16"


def token_of(key: SequenceKey) -> int:
    """The token that stands for all that a sequence generates; prompts have smaller ones."""
    return 2**32 + (key.prompt_uid * 2**16 + key.sample_index) % 2**61


class SimulatedRunner:
    """Draws for each sequence the token that stands for it, also behind each draft token."""

    def run(self, scheduled: list[Scheduled]) -> list[Drawn]:
        drawn: list[Drawn] = []
        for item in scheduled:
            sequence = item.sequence
            sequence.num_table_blocks = len(sequence.blocks)
            if item.samples:
                drawn += [(token_of(sequence.state.key), 0.0)] * (1 + len(item.draft))
        return drawn


class KVPool:
    """The stored KV of a run: which entries each host has in its memory, and their tokens."""

    def __init__(self, *, capacity_tokens: int) -> None:
        """`capacity_tokens`: of each host."""
        self.num_made = 0
        self._capacity_tokens = capacity_tokens
        self._entries = defaultdict[int, dict[str, int]](dict)
        self._num_tokens: Counter[int] = Counter()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens.total()

    def add(self, num_tokens: int, host: int) -> str | None:
        """Returns the location of a new entry, None when there is no room."""
        if self._num_tokens[host] + num_tokens > self._capacity_tokens:
            return None
        location = f"{host}/{self.num_made}"
        self.num_made += 1
        self._entries[host][location] = num_tokens
        self._num_tokens[host] += num_tokens
        return location

    def path(self, part: KVPart, host: int) -> Path | None:
        """Returns the path of the entry to a replica of this host; None when there is no entry."""
        there = _host_of(part)
        if part.location not in self._entries[there]:
            return None
        return "host" if there == host else "network"

    def drop(self, parts: Iterable[KVPart]) -> None:
        """An entry that is gone already is no error."""
        for part in parts:
            host = _host_of(part)
            self._num_tokens[host] -= self._entries[host].pop(part.location, 0)

    def check_integrity(self) -> None:
        """Asserts that the tokens of all entries add up."""
        for host, entries in self._entries.items():
            assert self._num_tokens[host] == sum(entries.values()) <= self._capacity_tokens


def _host_of(part: KVPart) -> int:
    return int(part.location.partition("/")[0])


class SimulatedMover:
    """Answers `engines.replica.mover.Mover`: the rules of `KVMover`, with entries that hold no bytes."""

    def __init__(
        self,
        pool: KVPool,
        preemption: Preemption,
        swap_cost: SwapCost | None,
        host: int,
        *,
        now: Callable[[], float],
        transfer_s: Callable[[int, Path], float],
    ) -> None:
        """Without a cost model, preempted sequences are recomputed when `preemption` is "auto".

        `transfer_s` returns the seconds for this many tokens on a path.
        """
        self.moves = KVMoves()
        self._now, self._transfer_s = now, transfer_s
        self._reading: dict[Sequence, tuple[float, int, int]] = {}
        """When its KV will have been read ahead, behind how many tokens, and how many can be used then."""
        self._read: dict[Sequence, tuple[int, int]] = {}
        self._end_of_reads = 0.0
        self._storing: dict[Sequence, tuple[float, KVHandle | None]] = {}
        """Since when its KV is being stored."""
        self._moved: Counter[Path] = Counter()
        self._waited_s = 0.0
        self._pool, self._host = pool, host
        self._preemption = preemption
        self._swap_cost = swap_cost

    def take_seconds(self) -> float:
        """Returns for how long the replica has waited for KV since the last call."""
        seconds = sum(self._transfer_s(count, path) for path, count in self._moved.items())
        seconds += self.moves.waited_s - self._waited_s
        self._moved, self._waited_s = Counter(), self.moves.waited_s
        return seconds

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        handles = [self._store(cached, policy_version) for cached in leaving]
        return self.moves.left(handles, [cached.stored for cached in leaving])

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        way: str = self._preemption
        if way == "auto" and self._swap_cost is not None:
            way = self._swap_cost.cheaper(cached.num_tokens, cached.num_common)
        if way != "swap" or not cached.num_tokens:
            return None
        handle = self._store(cached, policy_version)
        self.moves.num_swapped_out += handle is not None
        return handle

    def fetch(self, sequence: Sequence, num_known: int, policy_version: int) -> bool:
        paths, num_usable = self._paths(sequence, num_known, policy_version)
        if paths:
            start = max(self._now(), self._end_of_reads)
            self._end_of_reads = start + sum(self._transfer_s(count, path) for path, count in paths.items())
            self._reading[sequence] = self._end_of_reads, num_known, num_usable
        return bool(paths)

    def fetched(self, *, waits: bool) -> list[Sequence]:
        now = self._now()
        if waits:
            first = next(iter(self._reading.values()))[0]
            self.moves.waited_s += max(0.0, first - now)
            now = max(now, first)
        ready = [one for one, (end, *_) in self._reading.items() if end <= now]
        self._read |= {one: self._reading.pop(one)[1:] for one in ready}
        return ready

    def hand_over(self, expected: Sequence, sequence: Sequence) -> None:
        if expected in self._reading:
            self._reading[sequence] = self._reading.pop(expected)
        else:
            self._read[sequence] = self._read.pop(expected)

    def store_later(self, sequence: Sequence, policy_version: int) -> bool:
        """The copy from the device takes its time in this step; the sequence leaves after the next one."""
        cached = sequence.cached
        if cached.num_stored >= cached.num_tokens:
            return False
        self._storing[sequence] = self._now(), self._store(cached, policy_version)
        return True

    def stored(self, *, waits: bool) -> list[tuple[Sequence, KVHandle | None]]:
        ready = [one for one, (start, _) in self._storing.items() if waits or start < self._now()]
        handles = [self._storing.pop(one)[1] for one in ready]
        return list(zip(ready, self.moves.left(handles, [one.kv for one in ready]), strict=True))

    def is_storing(self, sequence: Sequence) -> bool:
        return sequence in self._storing

    def forget(self, sequence: Sequence | None = None) -> None:
        for one in [*self._reading, *self._read, *self._storing] if sequence is None else [sequence]:
            self._reading.pop(one, None)
            self._read.pop(one, None)
            _, handle = self._storing.pop(one, (0.0, None))
            if handle is not None:
                self._pool.drop(handle.parts if one.kv is None else handle.parts[len(one.kv.parts) :])

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[tuple[int, KVHandle | None]]:
        return [self._load(one, policy_version) for one in arriving]

    def drop(self, handle: KVHandle | None) -> None:
        if handle is not None:
            self._pool.drop(handle.parts)

    def _store(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        num_tokens = cached.num_tokens - cached.num_stored
        if num_tokens <= 0:
            return cached.stored
        location = self._pool.add(num_tokens, self._host)
        if location is None:
            return None
        self._moved["host"] += num_tokens
        self.moves.stored_tokens += num_tokens
        first = cached.num_stored
        part = KVPart(
            first_token=first, num_tokens=num_tokens, first_head=0, num_heads=1, location=location, num_bytes=0
        )
        parts = (part,) if cached.stored is None else (*cached.stored.parts, part)
        return KVHandle(policy_version=policy_version, dtype=DTYPE, parts=parts)

    def _load(self, one: Sequence, policy_version: int) -> tuple[int, KVHandle | None]:
        num_known, num_usable = self._read.pop(one, (one.num_computed + 1, 0))
        if was_fetched := num_known <= one.num_computed:
            paths = Counter[Path]()
        else:
            paths, num_usable = self._paths(one, one.num_computed, policy_version)
        self._moved += paths
        num_tokens, kept, freed = self.moves.taken_on(one, num_usable, was_fetched=was_fetched)
        self._pool.drop(freed)
        return num_tokens, kept

    def _paths(self, one: Sequence, num_known: int, policy_version: int) -> tuple[Counter[Path], int]:
        """Returns the tokens by path that a cache lacks which has the first `num_known`, and how many can be used."""
        assert one.kv is not None
        paths, num_usable, last = Counter[Path](), 0, len(one.state.tokens) - 1
        for (part,) in one.kv.ranges if one.kv.policy_version == policy_version else ():
            end = part.first_token + part.num_tokens
            num_lacking = min(end, last) - max(part.first_token, num_known)
            if num_lacking > 0:
                path = self._pool.path(part, self._host)
                if path is None:
                    break
                paths[path] += num_lacking
            num_usable = end
        return paths, num_usable
