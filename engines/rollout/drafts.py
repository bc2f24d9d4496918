"""Where the replicas of a torchrun world share what they generate for each other's drafts."""

from __future__ import annotations

import msgspec

from engines.control.sealing import new_token
from engines.decoding import from_msgpack
from engines.parallel.collectives import together
from engines.parallel.groups import GroupCache
from engines.speculation.client import DraftClient
from engines.speculation.server import DraftServer


class _Meeting(msgspec.Struct, frozen=True):
    """What rank 0 sends the other ranks so that they can connect to its server."""

    address: str
    token: bytes


class DraftSharing:
    """The draft server, on rank 0, and this rank's client if it is a replica's first. All ranks make it together."""

    def __init__(self, groups: GroupCache, *, max_bytes: int) -> None:
        self.server: DraftServer | None = None
        self.client: DraftClient | None = None
        meeting = None
        with together(groups.world, "LLM"):
            if groups.world.rank == 0:
                token = new_token()
                self.server = DraftServer(token, host=groups.address, max_bytes=max_bytes)
                meeting = msgspec.msgpack.encode(_Meeting(address=self.server.address, token=token))
        self._meeting = from_msgpack(groups.world.broadcast_bytes(meeting), _Meeting)

    def connect(self, is_first: bool) -> DraftClient | None:
        """Returns a new client if this rank is a replica's first, else None. Closes the one of the layout before."""
        if self.client is not None:
            self.client.close()
        self.client = DraftClient(self._meeting.address, self._meeting.token) if is_first else None
        return self.client

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close()
