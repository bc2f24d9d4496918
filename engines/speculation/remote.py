"""Drafts from drafters on other ranks, which run ahead of this verifier (SpecActor §4.1). Torch-free.

No draft is asked for: what has come by the time of a pass is used, and what was drawn is posted after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from engines.config import DraftMode
from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import HELD, NO_DRAFT, Ask, Draft, DraftPass, News, share_of
from engines.speculation.posts import Commit, Enter, Guessed, Leave, ToDrafter, ToVerifier
from engines.speculation.window import Heard

PATIENCE_S = 2.0
"""After so long without news of a sequence, its drafter counts as silent: the sequence is entered there again, and
decodes plainly meanwhile."""


class Link(Protocol):
    """A connection to one drafter. None of its methods waits, but `take` with `waits`."""

    @property
    def is_up(self) -> bool:
        """Whether the drafter is there. After it was gone, it knows no sequence."""
        ...

    def post(self, posts: list[ToDrafter]) -> None: ...

    def take(self, *, waits: bool) -> list[ToVerifier]:
        """Returns what has come; with `waits` it may wait a moment for the first message."""
        ...


@dataclass(eq=False)
class _Followed:
    """A sequence of this replica."""

    link: int
    number: int
    """What its drafter's guesses must say: those for a sequence of an earlier rollout may still be on their way."""
    window: int
    ahead: bool
    asked: int = 0
    """Number of the call of `propose` that asked for it last."""
    num_posted: int = 0
    """Its first tokens, which the drafter has if no message is lost; 0: it must be entered."""
    posted: int = 0
    """The window that its drafter has heard of last."""
    news_at: float = 0.0
    """When its drafter last told something new, or had all reason to begin."""
    entered_at: float = 0.0
    heard: Heard = field(default_factory=Heard)


class RemoteDrafter:
    """The verifier's side: a `Drafter` that never drafts itself.

    - "filled": a sequence takes what has come, and without drafts decodes plainly.
    - "strict": it waits for a whole window of w guesses and sits out passes meanwhile. w - 1 of them are rows of the
      pass, which draws w tokens: the last draw verifies the last guess.
    - "naive": the same with w rows and w + 1 draws, where nothing is drafted ahead: drafting is on other ranks, and
      drafter and verifier wait for each other.

    A sequence always has the same drafter of the links. Late, doubled, reordered and lost messages, and a drafter that
    is silent or gone, cost time only.
    """

    def __init__(
        self,
        links: Items[Link],
        mode: DraftMode,
        *,
        window: int,
        clock: Callable[[], float],
        vocab_size: int = 2**62,
    ) -> None:
        """`window`: of sequences for which no draft was asked yet. `clock` returns seconds. Guesses that are no tokens
        of the vocabulary are dropped."""
        self._links, self._mode, self._clock, self._window = links, mode, clock, window
        self._vocab_size = vocab_size
        self._followed: dict[SequenceId, _Followed] = {}
        self._num_asked = self._num_entered = 0
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self._num_asked += 1
        now = self._clock()
        self._hear(now, waits=False)
        drafts = [self._draft(ask, now) for ask in asks]
        if len(asks) == num_tokens and all(draft.holds for draft in drafts):  # the pass would be empty
            self._hear(now, waits=True)
            drafts = [self._draft(ask, now) for ask in asks]
        return drafts

    def _draft(self, ask: Ask, now: float) -> Draft:
        state, limit, ahead = ask
        one = self._followed.get(state.sequence_id) or self._enter(state)
        one.window, one.ahead, one.asked = limit, ahead and self._mode != "naive", self._num_asked
        if not self._links[one.link].is_up:
            return NO_DRAFT
        draft = one.heard.draft(state.tokens, limit)
        if self._mode == "filled":
            return draft
        if not one.posted:
            return NO_DRAFT
        window = min(limit, one.posted)
        if len(draft.tokens) >= window or one.heard.is_waiting(len(state.tokens)):
            return draft.cut(window - 1 if one.ahead else window)
        return HELD if now < one.news_at + PATIENCE_S else NO_DRAFT

    def follow(self, news: News) -> None:
        posts: dict[int, list[ToDrafter]] = defaultdict(list)
        now = self._clock()
        for state, *_ in news.drawn:
            one = self._followed.get(state.sequence_id) or self._enter(state)
            if self._links[one.link].is_up:
                posts[one.link].append(self._post(one, state, now))
            else:
                one.num_posted = one.posted = 0
        ended: dict[int, list[SequenceId]] = defaultdict(list)
        for state in news.ended:
            gone = self._followed.pop(state.sequence_id, None)
            if gone is not None:
                ended[gone.link].append(state.sequence_id)
        for link, ids in ended.items():
            posts[link].append(Leave(sequence_ids=ids))
        for link, some in posts.items():
            self._links[link].post(some)

    def _enter(self, state: SequenceState) -> _Followed:
        link = share_of(state, len(self._links))
        self._num_entered += 1
        ahead = self._mode != "naive"
        one = _Followed(link, self._num_entered, self._window, ahead, news_at=self._clock())
        self._followed[state.sequence_id] = one
        return one

    def _post(self, one: _Followed, state: SequenceState, now: float) -> Commit | Enter:
        one.posted = window = one.window if one.asked in (0, self._num_asked) else 0
        start, one.num_posted = one.num_posted, len(state.tokens)
        is_silent = now >= max(one.news_at, one.entered_at) + PATIENCE_S
        if start and not is_silent:
            new = state.tokens[start:]
            return Commit(sequence_id=state.sequence_id, start=start, tokens=new, window=window, ahead=one.ahead)
        one.entered_at = now
        if not start:
            one.news_at = now  # where it was silent, nobody waits for it again before it says something
        return Enter(
            number=one.number,
            key=state.key,
            group_id=state.group_id,
            params=state.params,
            num_prompt_tokens=state.num_prompt_tokens,
            tokens=[*state.tokens],
            window=window,
            ahead=one.ahead,
        )

    def _hear(self, now: float, *, waits: bool) -> None:
        for number, link in enumerate(self._links):
            for post in link.take(waits=waits and number == self._num_asked % len(self._links)):
                one = self._followed.get(post.sequence_id)
                if one is None:
                    continue
                if isinstance(post, Guessed):
                    if post.number != one.number or max(post.tokens, default=0) >= self._vocab_size:
                        continue
                    one.heard.hear(post.num_known, post.tokens, post.shares, is_all=post.is_all)
                    one.news_at = now
                else:
                    one.num_posted = min(one.num_posted, post.num_known)
