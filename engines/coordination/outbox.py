"""Commands on their way out, and the answers that they wait for. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from engines.control.messages import Command
from engines.coordination.records import ReplicaRecord
from engines.coordination.requests import Result


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """An answer that must come before `deadline`, in seconds on the caller's clock."""

    replica: ReplicaRecord | None
    """None: an idle rank, or nobody in particular."""
    who: str
    what: str
    deadline: float


class Outbox:
    """Gives commands their envelopes and one ascending order, and keeps what is awaited."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.phase = -1
        self.now = 0.0
        self.awaited: dict[Hashable, Awaited] = {}
        """By the `seq` of the command; readiness by ("ready", replica id, epoch)."""
        self._num_commands = 0
        self._messages: list[Command | Result] = []

    def _next_seq(self) -> int:
        self._num_commands += 1
        return self._num_commands - 1

    def send(self, kind: Callable[..., Command], replica: ReplicaRecord, awaits: str = "", **fields: Any) -> int:
        """Sends to a replica's leader, which relays; returns the command's `seq`. `awaits` names the answer."""
        seq = self._next_seq()
        spec = replica.spec
        address = {"replica_id": spec.id, "rank": spec.ranks[0], "epoch": replica.epoch}
        self._messages.append(kind(**address, phase=self.phase, seq=seq, **fields))
        if awaits:
            self.wait_for(seq, replica, str(replica), awaits)
        return seq

    def send_idle(self, kind: Callable[..., Command], rank: int, epoch: int, awaits: str = "", **fields: Any) -> int:
        """Sends to an idle rank; as `send`."""
        seq = self._next_seq()
        self._messages.append(kind(replica_id=None, rank=rank, epoch=epoch, phase=self.phase, seq=seq, **fields))
        if awaits:
            self.wait_for(seq, None, f"rank {rank} (idle)", awaits)
        return seq

    def tell(self, result: Result) -> None:
        self._messages.append(result)

    def wait_for(self, key: Hashable, replica: ReplicaRecord | None, who: str, what: str) -> None:
        """Notes the answer as awaited from now on, unless it is already."""
        if key not in self.awaited:
            self.awaited[key] = Awaited(replica=replica, who=who, what=what, deadline=self.now + self.timeout_s)

    def answered(self, key: Hashable, replica: ReplicaRecord | None) -> bool:
        """Takes an answer; False when nobody waits for it, or not from this replica."""
        if key not in self.awaited or self.awaited[key].replica is not replica:
            return False
        del self.awaited[key]
        return True

    def is_awaited_of(self, replica: ReplicaRecord) -> bool:
        return any(awaited.replica is replica for awaited in self.awaited.values())

    def forget(self, replica: ReplicaRecord) -> None:
        """Waits for this replica no more."""
        for key in [key for key, awaited in self.awaited.items() if awaited.replica is replica]:
            del self.awaited[key]

    def overdue(self) -> Awaited | None:
        late = (awaited for awaited in self.awaited.values() if self.now > awaited.deadline)
        return min(late, key=lambda awaited: awaited.deadline, default=None)

    def drain(self) -> list[Command | Result]:
        messages, self._messages = self._messages, []
        return messages
