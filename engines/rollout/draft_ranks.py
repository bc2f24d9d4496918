"""Ranks that only draft (SpecActor §4.1): their threads, and the links by which verifiers exchange messages with them.

A draft rank's own thread waits for commands, as that of a replica without work does, while another one drafts.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Items

from engines.config import EngineConfig
from engines.control.ends import Joined, Lost, Received
from engines.control.sealing import new_token
from engines.control.transport import Client, Server
from engines.decoding import DecodeError
from engines.parallel.collectives import together
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout, ReplicaSpec, drafters_of
from engines.rollout.pace import Pace
from engines.speculation.desk import Desk
from engines.speculation.drafter import Drafter, DraftPass
from engines.speculation.posts import Serves, ToDrafter, ToVerifier, decode_to_drafter, decode_to_verifier, encode
from engines.speculation.remote import RemoteDrafter

_POLL_S = 0.05
_WAIT_S = 0.005
_PATIENCE_S = 5.0
_WAKING_S = 0.002
_RETRY_S = 0.2
_LONGEST_PAUSE_S = 10.0


class DraftRanks:
    """This rank's part. All ranks make it together, and any of them may draft in some layout."""

    def __init__(self, groups: GroupCache, config: EngineConfig, pace: Pace | None) -> None:
        self._config, self._pace = config, pace
        self._world, world = groups.world, groups.world
        token = world.broadcast_bytes(new_token() if world.rank == 0 else None)
        with together(world, "LLM"):
            self._server = Server(token, host=groups.address)
        self._token = token
        self._addresses = [data.decode() for data in world.all_gather_bytes(self._server.address.encode())]
        self._links: list[LiveLink] = []
        self._loop: DraftLoop | None = None
        self.counts: dict[str, float] = {}
        """Of this rank's last drafting: guesses, those in vain, and the most at once less 2 w - 1; empty once the rank
        has another place."""

    def connect(self, layout: Layout, spec: ReplicaSpec, vocab_size: int) -> RemoteDrafter | None:
        """Returns the drafter of a rollout replica's first rank; None where the layout has no draft ranks. Closes the
        links of the layout before."""
        self._close_links()
        self.counts = {}
        ranks = drafters_of(layout, spec)
        if not ranks:
            return None
        if self._world.rank == spec.ranks[0]:
            name = f"verifier-{self._world.rank}-{layout.epoch}"
            self._links = [LiveLink(name, self._addresses[rank], self._token) for rank in ranks]
        return RemoteDrafter(
            self._links,
            self._config.draft_mode,
            window=self._config.max_draft_tokens,
            clock=time.monotonic,
            vocab_size=vocab_size,
        )

    def start(self, drafter: Drafter, spec: ReplicaSpec) -> None:
        """Begins to draft, in a thread, for all verifiers that ask."""
        price: Callable[[Items[DraftPass]], float] | None = None
        if (pace := self._pace) is not None:
            alone = ReplicaSpec(id=spec.id, ranks=(self._world.rank,), role="draft")
            price = lambda passes: pace.draft(alone, self._config.draft_method, passes)  # noqa: E731
        self._loop = DraftLoop(self._server, Desk(drafter, max_num_seqs=self._config.max_num_seqs), price)

    def stop(self) -> None:
        """Ends drafting, if this rank does; the drafter has no sequence then."""
        if self._loop is not None:
            self.counts = self._loop.stop()
            self._loop = None

    def flush(self) -> None:
        """Sends the draft ranks what is new for them. Called after each step, once its time has passed: a drafter must
        not hear of tokens before they are drawn."""
        for link in self._links:
            link.flush()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()
        self._links = []

    def close(self) -> None:
        self.stop()
        self._close_links()
        self._server.close()


class DraftLoop:
    """The thread of a rank that drafts. If the drafter fails, the verifiers decode plainly until `stop`."""

    def __init__(self, server: Server, desk: Desk, price: Callable[[Items[DraftPass]], float] | None) -> None:
        """`price`: see `Pace.draft`; a pass that takes less time waits until it has passed."""
        self._server, self._desk, self._price = server, desk, price
        self._has_ended, self._end = False, 0.0
        self._say_to_all(is_so=True)
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._has_ended = True
        self._server.wake()
        self._thread.join()
        self._say_to_all(is_so=False)
        desk = self._desk
        return {"num_drafted": desk.num_drafted, "num_wasted": desk.num_wasted, "most_over": desk.most_over}

    def _run(self) -> None:
        try:
            while not self._has_ended:
                # Passes back to back follow each other without the host's time between them, as on an accelerator.
                was_busy, start = self._desk.has_work, max(self._end, time.monotonic() - _WAKING_S)
                self._hear()
                if not self._has_ended:
                    self._draft(start if was_busy else time.monotonic())
        except Exception as error:
            self._say_to_all(is_so=False)
            warnings.warn(f"a draft rank has failed ({error}); its verifiers decode plainly", stacklevel=2)
        finally:
            with contextlib.suppress(Exception):  # the drafter itself may be what has failed
                self._desk.clear()
        with contextlib.suppress(Exception):  # or the server
            self._refuse()

    def _refuse(self) -> None:
        while not self._has_ended:
            notice = self._server.receive(_POLL_S)
            if isinstance(notice, Joined):
                self._send(notice.peer, [Serves(is_so=False)])

    def _hear(self) -> None:
        notice = self._server.receive(0.0 if self._desk.has_work else _POLL_S)
        while notice is not None:
            if isinstance(notice, Received):
                try:
                    posts = decode_to_drafter(notice.payload)
                except DecodeError:
                    posts = []
                self._send(notice.peer, self._desk.hear(notice.peer, posts))
            elif isinstance(notice, Joined | Lost):
                self._desk.lose(notice.peer)
                if isinstance(notice, Joined):
                    self._send(notice.peer, [Serves(is_so=True)])
            notice = self._server.receive(0.0)

    def _draft(self, start: float) -> None:
        answers = self._desk.draft()
        if self._price is not None and (passes := self._desk.passes):
            self._end = start + self._price(passes)
            time.sleep(max(0.0, self._end - time.monotonic()))
        for peer, posts in answers.items():
            self._send(peer, posts)

    def _say_to_all(self, *, is_so: bool) -> None:
        for peer in self._server.peers():
            self._send(peer, [Serves(is_so=is_so)])

    def _send(self, peer: str, posts: Items[ToVerifier | Serves]) -> None:
        if posts:
            with contextlib.suppress(ConnectionError):  # its `Lost` comes, too
                self._server.send(peer, encode(posts))


class LiveLink:
    """A `Link` over a connection, which a thread makes again when it is lost."""

    def __init__(self, name: str, address: str, token: bytes) -> None:
        self._name, self._address, self._token = name, address, token
        self._client: Client | None = None
        self._is_served = False
        self._posts: list[ToDrafter] = []
        self._has_ended = threading.Event()
        self._num_connections = 0
        self._connecting: threading.Thread | None = None
        self._connect()

    @property
    def is_up(self) -> bool:
        return self._client is not None and self._is_served

    def post(self, posts: list[ToDrafter]) -> None:
        """They leave with the next `flush`."""
        self._posts += posts

    def flush(self) -> None:
        posts, self._posts = self._posts, []
        if posts and (client := self._client) is not None:
            try:
                client.send(encode(posts))
            except ConnectionError:
                self._lose()

    def take(self, *, waits: bool) -> list[ToVerifier]:
        found: list[ToVerifier] = []
        client = self._client
        if client is None:
            return found
        try:
            data = client.receive(_WAIT_S if waits else 0.0)
            while data is not None:
                with contextlib.suppress(DecodeError):
                    for post in decode_to_verifier(data):
                        if isinstance(post, Serves):
                            self._is_served = post.is_so
                        else:
                            found.append(post)
                data = client.receive(0.0)
        except ConnectionError:
            self._lose()
        return found

    def _lose(self) -> None:
        if (client := self._client) is not None:
            self._client, self._is_served = None, False
            client.close()
            self._connecting = threading.Thread(target=self._connect_again, name="draft-link", daemon=True)
            self._connecting.start()

    def _connect_again(self) -> None:
        pause_s = _RETRY_S
        while not self._has_ended.wait(pause_s) and not self._connect():
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _connect(self) -> bool:
        self._num_connections += 1
        name = f"{self._name}-{self._num_connections}"
        with contextlib.suppress(OSError, ValueError):
            client = Client(name, self._address, self._token, patience_s=_PATIENCE_S)
            if self._has_ended.is_set():
                client.close()
            else:
                self._client = client
            return True
        return False

    def close(self) -> None:
        self._has_ended.set()
        if self._connecting is not None:
            self._connecting.join()
        if self._client is not None:
            self._client.close()
            self._client = None
