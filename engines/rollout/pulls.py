"""New weights of an LLM's engine from relays: all ranks of the world pull the same version."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engines.decoding import from_msgpack
from engines.parallel.collectives import Communicator
from engines.relay.client import Relay
from engines.relay.pull import Puller, PullRecord
from engines.relay.requests import Version
from engines.replica.engine import LocalEngine


class WeightPulls:
    """This rank's connection to the relay that was named last."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._puller: Puller | None = None

    @property
    def records(self) -> list[PullRecord]:
        """What was pulled from that relay, one entry per version."""
        return [] if self._puller is None else self._puller.records

    def loading(self, source: Relay, version: Version | None) -> Callable[[LocalEngine], int]:
        """Returns what gives an engine a version, None: the newest whole one, and returns the checksum. All ranks call
        that together; it raises as `Puller.pull`."""
        if self._puller is None or self._puller.relay != source:
            self.close()
            self._puller = Puller(source)
        puller = self._puller
        return lambda engine: engine.pull(puller, version or self._newest(puller))

    def _newest(self, puller: Puller) -> Version:
        """Returns rank 0's newest whole version on every rank."""
        if self._world.rank:
            if not (data := self._world.broadcast_bytes(None)):
                raise RuntimeError("update_weights: rank 0 has found no version at the relay")
            return from_msgpack(data, Version)
        found = b""
        try:
            found = msgspec.msgpack.encode(version := puller.wait_for_one())
        finally:
            self._world.broadcast_bytes(found)
        return version

    def close(self) -> None:
        if self._puller is not None:
            self._puller.close()
        self._puller = None
