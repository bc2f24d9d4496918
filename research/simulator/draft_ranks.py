"""Ranks that only draft, in virtual time: the passes of a `Desk`, and its messages. Torch-free."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from engines.parallel.layout import ReplicaSpec
from engines.speculation.desk import Answers, Desk
from engines.speculation.drafter import Drafter
from engines.speculation.posts import ToDrafter, ToVerifier
from research.simulator.events import STEP_END, TO_WORKER, TURN

if TYPE_CHECKING:
    from research.simulator.cluster import Cluster
    from research.simulator.rank import Rank


class VirtualLink:
    """A `Link` of a verifier to a draft rank, whose messages take the time of all messages.

    A simulated step is computed when it begins; so what its end posts is sent by `flush`, which is called then.
    """

    def __init__(self, cluster: Cluster, verifier: Rank, epoch: int, to: int) -> None:
        self.name = f"{verifier.number}-{epoch}"
        self._cluster, self._verifier, self._to = cluster, verifier, to
        self._posted: list[ToDrafter] = []
        self._came: list[ToVerifier] = []

    @property
    def is_up(self) -> bool:
        return self._to in self._cluster.desks

    def post(self, posts: list[ToDrafter]) -> None:
        self._posted += posts

    def take(self, *, waits: bool) -> list[ToVerifier]:
        """Does not wait: a rank whose sequences all wait for drafts begins a turn when one comes."""
        came, self._came = self._came, []
        return came

    def flush(self, delay_s: float = 0.0) -> None:
        if self._posted:
            self._send(self._posted, delay_s)
            self._posted = []

    def close(self) -> None:
        self._send(None, 0.0)

    def _send(self, posts: list[ToDrafter] | None, delay_s: float) -> None:
        def arrive() -> None:
            if (desk := self._cluster.desks.get(self._to)) is not None:
                desk.hear(self, posts)

        self._cluster.at_arrival((TO_WORKER, self._to, self._verifier.number), delay_s, arrive)

    def answer(self, posts: list[ToVerifier]) -> None:
        def arrive() -> None:
            self._came += posts
            self._verifier.hear_drafts()

        self._cluster.at_arrival((TO_WORKER, self._verifier.number, self._to), 0.0, arrive)


class DraftingRank:
    """A rank's drafter and its loop, as `DraftLoop` is a live one: between two passes it takes what has come."""

    def __init__(self, cluster: Cluster, spec: ReplicaSpec, number: int, drafter: Drafter) -> None:
        self._cluster, self._number = cluster, number
        self._spec = ReplicaSpec(id=spec.id, ranks=(number,), role="draft")
        self.desk = Desk(drafter, max_num_seqs=cluster.config.engine.max_num_seqs)
        self._inbox: deque[tuple[VirtualLink, list[ToDrafter] | None]] = deque()
        self._links: dict[str, VirtualLink] = {}
        self._is_free = True
        """Whether no turn or pass of it is scheduled."""

    def hear(self, link: VirtualLink, posts: list[ToDrafter] | None) -> None:
        """Messages have come; None: the verifier is gone."""
        self._inbox.append((link, posts))
        if self._is_free:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._is_free = False
        self._cluster.queue.at(self._cluster.queue.now, (TURN, self._number), self._turn)

    def _turn(self) -> None:
        cluster = self._cluster
        while self._inbox:
            link, posts = self._inbox.popleft()
            if posts is None:
                self._links.pop(link.name, None)
                self.desk.lose(link.name)
                continue
            self._links[link.name] = link
            if answers := self.desk.hear(link.name, posts):
                link.answer(answers)
        drafted = self.desk.draft()
        passes, config = self.desk.passes, cluster.config
        seconds = config.pace.draft(self._spec, config.engine.draft_method, passes) if passes else 0.0
        cluster.queue.at(cluster.queue.now + seconds, (STEP_END, self._number), partial(self._end_pass, drafted))

    def _end_pass(self, drafted: Answers) -> None:
        if self._cluster.desks.get(self._number) is not self:
            return  # the rank has another place
        for name, posts in drafted.items():
            self._links[name].answer(posts)
        self._is_free = True
        if self._inbox or self.desk.has_work:
            self._begin_turn()
