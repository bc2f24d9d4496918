"""Weights of a fleet that travel by a relay: its replicas pull what they lack, and a late one reads dense messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.config import EngineConfig, ModelConfig
from engines.models.loader import checked_weights
from engines.models.parameters import logical_shapes
from engines.relay.client import Relay
from engines.relay.flat import FlatModel
from engines.relay.held import Held
from engines.relay.message import dtype_of
from engines.relay.process import RelayProcess, room_for
from engines.relay.push import Pusher
from engines.relay.requests import Version

_MARK = "relay:"


def source_of(version: Version) -> str:
    """Returns how a command to load weights names those of a relay."""
    return _MARK + version.session


def version_of(source: str, number: int) -> Version | None:
    """Returns the version that `source_of` has named; None for a folder."""
    return Version(source.removeprefix(_MARK), number) if source.startswith(_MARK) else None


class RelayedWeights:
    """The weights for rollouts: the checkpoint as version 0, then those that were published last."""

    def __init__(self, model: Path, config: EngineConfig, token: bytes, *, timeout_s: float, patience_s: float) -> None:
        """Starts a relay on the loopback address. Raises ValueError for a dtype that no relay takes."""
        self._sizes, self._dtype = ModelConfig.from_pretrained(model), dtype_of("EngineConfig.dtype", config.dtype)
        self._flat = FlatModel.of(self._sizes, logical_shapes(self._sizes))
        self.source, self.version = str(model), 0
        """What the replicas load for the next rollout, and its version."""
        self.in_use: str | None = None
        self._process = RelayProcess(
            token,
            max_bytes=room_for(self._flat.length, self._dtype),
            model=(self._flat.fingerprint, self._dtype, self._flat.length),
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
        self._held: dict[str, Held] = {}
        self._pusher: Pusher | None = None

    @property
    def relay(self) -> Relay:
        return self._process.relay

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Pushes weights, of which it keeps a copy; returns when the relay has all of them. See `Fleet.publish`."""
        dtype: torch.dtype = getattr(torch, self._dtype)
        held = {
            name: Held(0, tensor.detach().to("cpu", dtype, copy=True).contiguous().view(-1))
            for name, tensor in checked_weights(weights, self._sizes)
        }
        if self._pusher is not None and version <= self.version:
            raise ValueError(f"version={version}: {self.version} was published before; give a higher number")
        self._held, pusher, self._pusher = held, self._pusher, None
        if pusher is None:
            session = secrets.token_hex(8)
            where: dict[str, Any] = {"dtype": self._dtype, "session": session, "deflates": False}  # on this host
            pusher = Pusher(self.relay, self._flat, lambda: self._held, **where)
        try:
            pusher.push(version)
            pusher.finish()
        except BaseException:
            pusher.close()
            raise
        self._pusher = pusher
        self.source, self.version = source_of(pusher.version(version)), version
        return self.source

    def remove_outdated(self) -> None:
        """Does nothing: a relay drops by itself what no replica needs."""

    def close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._process.close()
