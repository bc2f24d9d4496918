"""Commands and results to be sent, and the answers that are awaited. Torch-free."""

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

    who: ReplicaRecord | str
    """A replica; or the name of an idle rank, or of something else that is no replica."""
    what: str
    deadline: float


class Outbox:
    """Addresses and numbers the commands, in one ascending order, and keeps the awaited answers."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.phase = -1
        self.now = 0.0
        self.awaited: dict[Hashable, Awaited] = {}
        """Keyed by the `seq` of the command; readiness by ("ready", replica id, epoch)."""
        self._num_commands = 0
        self._messages: list[Command | Result] = []

    def send(self, kind: Callable[..., Command], replica: ReplicaRecord, awaits: str = "", **fields: Any) -> int:
        """Sends to a replica's leader, which relays; returns the command's `seq`. `awaits` describes the answer."""
        spec = replica.spec
        address = {"replica_id": spec.id, "rank": spec.ranks[0], "epoch": replica.epoch}
        return self._post(kind(**address, phase=self.phase, seq=self._num_commands, **fields), replica, awaits)

    def send_idle(self, kind: Callable[..., Command], rank: int, epoch: int, awaits: str = "", **fields: Any) -> int:
        """Sends to an idle rank; otherwise like `send`."""
        address = {"replica_id": None, "rank": rank, "epoch": epoch}
        command = kind(**address, phase=self.phase, seq=self._num_commands, **fields)
        return self._post(command, f"rank {rank} (idle)", awaits)

    def _post(self, command: Command, who: ReplicaRecord | str, awaits: str) -> int:
        self._num_commands += 1
        self._messages.append(command)
        if awaits:
            self.wait_for(command.seq, who, awaits)
        return command.seq

    def tell(self, result: Result) -> None:
        self._messages.append(result)

    def wait_for(self, key: Hashable, who: ReplicaRecord | str, what: str) -> None:
        """Awaits the answer `key` from now on, unless it is awaited already."""
        if key not in self.awaited:
            self.awaited[key] = Awaited(who=who, what=what, deadline=self.now + self.timeout_s)

    def answered(self, key: Hashable, replica: ReplicaRecord | None) -> bool:
        """Removes an awaited answer; returns False if it is not awaited from `replica` (None: from no replica)."""
        awaited = self.awaited.get(key)
        if awaited is None or (None if isinstance(awaited.who, str) else awaited.who) is not replica:
            return False
        del self.awaited[key]
        return True

    def is_awaited_of(self, replica: ReplicaRecord) -> bool:
        return any(awaited.who is replica for awaited in self.awaited.values())

    def forget(self, replica: ReplicaRecord) -> None:
        """Stops awaiting answers of this replica."""
        self.awaited = {key: awaited for key, awaited in self.awaited.items() if awaited.who is not replica}

    def overdue(self) -> Awaited | None:
        late = (awaited for awaited in self.awaited.values() if self.now > awaited.deadline)
        return min(late, key=lambda awaited: awaited.deadline, default=None)

    def drain(self) -> list[Command | Result]:
        messages, self._messages = self._messages, []
        return messages
