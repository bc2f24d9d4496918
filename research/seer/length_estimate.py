"""How long the sequences of a group become, by what its members have shown (Seer §4.3, stage 2). Torch-free."""

from __future__ import annotations


class LengthEstimate:
    """Of one group: the longest of its completed members; `cap` while none has completed.

    With `lifts`, an unfinished member that is longer than all completed ones lifts the estimate to its length as last
    seen, which is at the end of a chunk. So the estimate falls once at most, from the cap.
    """

    def __init__(self, *, lifts: bool = True) -> None:
        self._lifts = lifts
        self._longest_completed: int | None = None
        self._longest_unfinished = 0

    def complete(self, num_generated: int) -> bool:
        """A member has completed (Algorithm 1, line 3). Returns whether the estimate has changed."""
        before = self._known()
        self._longest_completed = max(num_generated, self._longest_completed or 0)
        return self._known() != before

    def see(self, num_generated: int) -> bool:
        """An unfinished member has this length. Returns whether the estimate has changed."""
        before = self._known()
        self._longest_unfinished = max(num_generated, self._longest_unfinished)
        return self._known() != before

    def of(self, cap: int) -> int:
        known = self._known()
        return cap if known is None else known

    def _known(self) -> int | None:
        if self._longest_completed is None:
            return None
        return max(self._longest_completed, self._longest_unfinished if self._lifts else 0)
