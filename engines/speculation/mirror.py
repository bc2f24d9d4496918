"""What a draft client knows of its groups, sends and learns, without a clock, thread or socket. Torch-free."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engines.speculation.messages import Answer, DraftCacheInfo, Expected, FetchCst, RegisterGroup, Request, UpdateCst


class Grown(NamedTuple):
    """A request of which other replicas have generated tokens."""

    group_id: str
    request_id: int
    tokens: array[int]
    """All generated tokens that are known. It may grow while it is read, and must not be modified."""


@dataclass(kw_only=True)
class _Request:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_sent: int = 0
    """Leading tokens that the server has, as far as is known."""


@dataclass(kw_only=True)
class _Group:
    ttl_seconds: int
    version: int = 0
    running: set[int] = field(default_factory=set)
    """Requests that run on this replica."""
    requests: dict[int, _Request] = field(default_factory=dict)


class Mirror:
    """A client's copy of its groups' tokens, from all replicas. The server gets what it lacks, from any of them."""

    def __init__(self, *, append_tokens: int, append_s: float) -> None:
        self._append_tokens, self._append_s = append_tokens, append_s
        self._groups: dict[str, _Group] = {}
        self._to_register: set[str] = set()
        self._unsent: dict[tuple[str, int], float] = {}
        """(group, request) -> the time since which it has tokens to send; the oldest first."""

    def register_group(self, group_id: str, ttl_seconds: int) -> list[Grown]:
        """Returns what is known of the group already."""
        group = self._groups.setdefault(group_id, _Group(ttl_seconds=ttl_seconds))
        group.ttl_seconds = ttl_seconds
        self._to_register.add(group_id)
        return [Grown(group_id, request_id, request.tokens) for request_id, request in group.requests.items()]

    def forget(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        self._to_register.discard(group_id)
        for request_id in group.requests if group is not None else ():
            self._unsent.pop((group_id, request_id), None)

    def give(self, update: UpdateCst, has_ended: bool, now: float) -> None:
        """Takes tokens of a sequence of this replica. Tokens that are known already are skipped."""
        group = self._groups.get(update.group_id)
        if group is None:
            return
        (group.running.discard if has_ended else group.running.add)(update.request_id)
        if self._merge(group, update):
            self._unsent.setdefault((update.group_id, update.request_id), now)

    @property
    def next_due(self) -> float:
        """Time at which the oldest unsent tokens must be sent; infinite when there are none."""
        return next(iter(self._unsent.values())) + self._append_s if self._unsent else math.inf

    def updates(self, now: float) -> list[Request]:
        """Returns what must be sent now: new groups, and the tokens of requests with enough of them, or old ones."""
        out: list[Request] = []
        for group_id in self._to_register:
            out.append(RegisterGroup(group_id=group_id, ttl_seconds=self._groups[group_id].ttl_seconds))
        self._to_register.clear()
        for (group_id, request_id), since in list(self._unsent.items()):
            request = self._groups[group_id].requests[request_id]
            start, end = request.num_sent, len(request.tokens)
            if end - start >= self._append_tokens or now - since >= self._append_s:
                del self._unsent[group_id, request_id]
                new = request.tokens[start:].tolist()
                out.append(UpdateCst(group_id=group_id, request_id=request_id, prev_token_count=start, new_tokens=new))
                request.num_sent = end
        return out

    def fetch(self, *, everything: bool) -> FetchCst:
        """Asks for the groups with a running sequence. With `everything`, as after a lost connection, it asks for all
        groups, and the server compares all counts."""
        groups = {name: group for name, group in self._groups.items() if everything or group.running}
        infos = [
            DraftCacheInfo(
                version=0 if everything else group.version,
                token_counts={request_id: request.num_sent for request_id, request in group.requests.items()},
            )
            for group in groups.values()
        ]
        return FetchCst(group_ids=list(groups), draft_cache_infos=infos)

    def hear(self, answers: Iterable[Answer], now: float) -> list[Grown]:
        """Returns the requests that have grown."""
        grown = []
        for answer in answers:
            if isinstance(answer, UpdateCst):
                if (one := self._learn(answer)) is not None:
                    grown.append(one)
            elif isinstance(answer, Expected):
                self._fall_back(answer, now)
            else:
                for group_id in answer.versions.keys() & self._groups.keys():
                    self._groups[group_id].version = answer.versions[group_id]
                    if not answer.versions[group_id]:
                        self._to_register.add(group_id)
        return grown

    def _learn(self, update: UpdateCst) -> Grown | None:
        group = self._groups.get(update.group_id)
        if group is None:
            return None
        has_grown = self._merge(group, update)
        request = group.requests[update.request_id]
        known_there = update.prev_token_count + len(update.new_tokens)
        request.num_sent = max(request.num_sent, min(known_there, len(request.tokens)))
        return Grown(update.group_id, update.request_id, request.tokens) if has_grown else None

    def _fall_back(self, expected: Expected, now: float) -> None:
        group = self._groups.get(expected.group_id)
        if group is None or (request := group.requests.get(expected.request_id)) is None:
            return
        request.num_sent = min(request.num_sent, expected.token_count)
        if not expected.token_count:  # the server may have dropped the group
            self._to_register.add(expected.group_id)
        if request.num_sent < len(request.tokens):
            self._unsent.setdefault((expected.group_id, expected.request_id), now)

    def _merge(self, group: _Group, update: UpdateCst) -> bool:
        """Returns whether some of the tokens were new."""
        tokens = group.requests.setdefault(update.request_id, _Request()).tokens
        missing = len(tokens) - update.prev_token_count
        fresh = update.new_tokens[missing:] if missing >= 0 else []
        tokens.extend(fresh)
        return bool(fresh)
