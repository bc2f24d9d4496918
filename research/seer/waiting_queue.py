"""Waiting sequences in the order of a key that may change. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Container, Generator, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class WaitingQueue(Generic[Item]):
    """A heap with lazy deletion: an entry that was replaced or removed is dropped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Item]] = []
        self._entries: dict[Item, int] = {}
        """The number of each item's valid entry."""
        self._num_entries = 0

    def put(self, item: Item, key: tuple[int, ...]) -> None:
        """Adds an item, or gives it another key. Of equal keys, the one that was put first comes first."""
        self._num_entries += 1
        self._entries[item] = self._num_entries
        heapq.heappush(self._heap, (key, self._num_entries, item))
        if len(self._heap) > 2 * len(self._entries) + 100:  # a policy may serve thousands of rollouts
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        self._entries.pop(item, None)

    def ordered(self, present: Container[Item]) -> Generator[Item]:
        """Yields the items by their keys, and removes those that are not `present` any more.

        The generator must be closed before the queue is changed.
        """
        passed = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                _, number, item = entry
                if self._entries.get(item) != number:
                    continue
                if item not in present:
                    del self._entries[item]
                    continue
                passed.append(entry)
                yield item
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)
