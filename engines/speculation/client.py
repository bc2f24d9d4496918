"""A replica's connection to the draft server. No step waits for it: only its thread waits. Torch-free."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.control.transport import Client
from engines.speculation.messages import Fetched, UpdateCst, decode_answers, encode
from engines.speculation.mirror import Grown, Mirror

_POLL_S = 0.1
_CHECK_S = 1.0
_LONGEST_PAUSE_S = 30.0
_Call = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class DraftTimes:
    """How often a client sends and fetches."""

    append_tokens: int = 16
    """Number of a sequence's new tokens at which they are sent."""
    append_s: float = 0.05
    """Seconds after which they are sent, even if they are fewer."""
    fetch_s: float = 0.1
    """Seconds between two fetches of the other replicas' tokens."""
    ttl_seconds: int = 600
    """Seconds without use after which a group is forgotten, here and on the server."""
    patience_s: float = 5.0
    """Seconds without an answer after which the server counts as lost."""
    retry_s: float = 1.0
    """Pause before the first attempt to connect again; each further one is twice as long, up to 30 s."""


@dataclass(kw_only=True)
class _Given:
    """What the step's thread has given of a group."""

    ttl_seconds: int
    used: float
    counts: dict[int, int] = field(default_factory=dict)


class DraftClient:
    """Sends what this replica generates, and fetches what others generate for the same prompts (Seer, Tables 3 and 4).

    Only one thread may use it. Its methods, but `close`, only touch queues: a thread of its own talks to the server.
    While the server is gone, groups get nothing from others; when it is back, it gets all tokens that it lacks.
    """

    def __init__(self, address: str, token: bytes, times: DraftTimes | None = None) -> None:
        self._times = times or DraftTimes()
        self._grown: queue.SimpleQueue[Grown] = queue.SimpleQueue()
        self._given: dict[str, _Given] = {}
        self._check_due = 0.0
        self._link = _Link(address, token, self._times, self._grown.put)

    def register_group(self, group_id: str, ttl_seconds: int | None = None) -> None:
        """From now on `take` returns the group's requests, at first those that are known already.

        The group is fetched while one of this replica's sequences in it runs, and forgotten when no tokens were given
        for `ttl_seconds`.
        """
        ttl_seconds = ttl_seconds or self._times.ttl_seconds
        given = self._given.setdefault(group_id, _Given(ttl_seconds=ttl_seconds, used=time.monotonic()))
        given.ttl_seconds = ttl_seconds
        self._link.put(self._link.register_group, group_id, ttl_seconds)

    def give(
        self, group_id: str, request_id: int, tokens: list[int], num_prompt_tokens: int, *, has_ended: bool = False
    ) -> None:
        """Takes note of a sequence of this replica; its new tokens leave with the next `flush`."""
        if group_id not in self._given:
            self.register_group(group_id)
        given = self._given[group_id]
        count = given.counts.get(request_id, 0)
        new = tokens[num_prompt_tokens + count :]
        if new or has_ended:
            given.used = now = time.monotonic()
            given.counts[request_id] = count + len(new)
            update = UpdateCst(group_id=group_id, request_id=request_id, prev_token_count=count, new_tokens=new)
            self._link.put(self._link.mirror.give, update, has_ended, now)

    def flush(self) -> None:
        """Hands what was given over to the thread."""
        now = time.monotonic()
        if now >= self._check_due:
            self._check_due = now + _CHECK_S
            for group_id in [one for one, given in self._given.items() if now - given.used > given.ttl_seconds]:
                del self._given[group_id]
                self._link.put(self._link.mirror.forget, group_id)
        self._link.flush()

    def take(self) -> list[Grown]:
        """Returns the requests of other replicas that have grown since the last call."""
        grown = []
        with contextlib.suppress(queue.Empty):
            while True:
                grown.append(self._grown.get_nowait())
        return grown

    def close(self) -> None:
        """Ends the thread. Tokens that were not sent are lost. May be called twice."""
        self._link.close()


class _Link:
    """The thread that talks to the server. Other threads call only `put`, `flush` and `close`."""

    def __init__(self, address: str, token: bytes, times: DraftTimes, report: Callable[[Grown], None]) -> None:
        self._address, self._token, self._times, self._report = address, token, times, report
        self.mirror = Mirror(append_tokens=times.append_tokens, append_s=times.append_s)
        self._pending: list[_Call] = []  # of the caller's thread
        self._todo: queue.SimpleQueue[list[_Call]] = queue.SimpleQueue()
        self._has_ended = self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="draft-client", daemon=True)
        self._thread.start()

    def put(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queues a call that the thread makes after the next `flush`."""
        self._pending.append((function, arguments))

    def flush(self) -> None:
        if self._pending:
            self._todo.put(self._pending)
            self._pending = []

    def close(self) -> None:
        self._has_ended = True
        self._todo.put([])  # wakes the thread
        self._thread.join()

    # -- of the thread

    def register_group(self, group_id: str, ttl_seconds: int) -> None:
        for grown in self.mirror.register_group(group_id, ttl_seconds):
            self._report(grown)

    def _run(self) -> None:
        pause_s = self._times.retry_s
        while not self._has_ended:
            is_connected = False
            try:
                name, patience_s = f"drafts-{secrets.token_hex(8)}", self._times.patience_s
                with contextlib.closing(Client(name, self._address, self._token, patience_s=patience_s)) as client:
                    is_connected, pause_s = True, self._times.retry_s
                    self._serve(client)
            except (OSError, ValueError, RuntimeError) as error:
                if not is_connected:  # at the end of a run the server leaves first: a lost connection is no news
                    self._warn(error)
            until = time.monotonic() + pause_s
            while not self._has_ended and time.monotonic() < until:
                self._obey(until)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _serve(self, client: Client) -> None:
        """Exchanges tokens until `close`. Raises ConnectionError when the server is lost."""
        is_new, has_sent, due = True, False, 0.0
        while not self._has_ended:
            if requests := self.mirror.updates(time.monotonic()):
                client.send(encode(requests))
                has_sent = True
            if time.monotonic() >= due:
                fetch = self.mirror.fetch(everything=is_new)
                if fetch.group_ids or has_sent:  # the answers to what was sent come before those to the fetch
                    client.send(encode([fetch]))
                    self._hear(client)
                is_new = has_sent = False
                due = time.monotonic() + self._times.fetch_s
            self._obey(min(due, self.mirror.next_due))

    def _hear(self, client: Client) -> None:
        """Takes the answers up to those to the last fetch."""
        until = time.monotonic() + self._times.patience_s
        while not self._has_ended:
            payload = client.receive(_POLL_S)
            if payload is None:
                if time.monotonic() > until:
                    raise ConnectionError(f"{self._address}: no answer for {self._times.patience_s:g} s")
                continue
            answers = decode_answers(payload)
            for grown in self.mirror.hear(answers, time.monotonic()):
                self._report(grown)
            if answers and isinstance(answers[-1], Fetched):
                return

    def _obey(self, until: float) -> None:
        """Makes the calls that were put; waits for the first ones, at most until then."""
        try:
            calls = self._todo.get(timeout=max(0.0, until - time.monotonic()))
            while True:
                for function, arguments in calls:
                    function(*arguments)
                calls = self._todo.get_nowait()
        except queue.Empty:
            return

    def _warn(self, error: Exception) -> None:
        if not self._has_warned and not self._has_ended:
            self._has_warned = True
            warnings.warn(
                f"draft server {self._address}: is gone ({error}); replicas draft from their own sequences meanwhile",
                stacklevel=2,
            )
