"""A drafter that works for verifiers on other ranks: what it drafts next, and what it answers (SpecActor §4.1).

Its rules, without a clock or a connection: the caller brings the messages, and waits as long as the passes take.
Torch-free.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import Ask, Draft, Drafter, DraftPass, News
from engines.speculation.posts import Enter, Guessed, Lacks, Leave, ToDrafter, ToVerifier
from engines.speculation.window import Guesses

Answers = dict[str, list[ToVerifier]]
"""Messages by verifier."""


@dataclass(eq=False)
class _Entry:
    """A sequence of a verifier."""

    peer: str
    state: SequenceState
    """A copy: its tokens are those that are known to be drawn."""
    guesses: Guesses
    number: int
    """That of its last `Enter`."""
    is_stuck: bool = False
    """Whether the drafter had nothing to add: at a token that ends the sequence, or without memory."""
    has_news: bool = True
    """Whether the verifier has not been sent the present guesses yet."""


class Desk:
    """One small model, or another drafter, and the sequences that it drafts for. Each pass adds a token to each."""

    def __init__(self, drafter: Drafter, *, max_num_seqs: int) -> None:
        """A pass has at most `max_num_seqs` sequences: those with the fewest guesses, and of these the ones that have
        waited longest."""
        self._drafter, self._max_num_seqs = drafter, max_num_seqs
        self._entries: dict[SequenceId, _Entry] = {}
        """Those that have waited longest come first."""
        self.num_wasted = 0
        """Guesses behind a wrong one."""
        self.most_over = -math.inf
        """The most guesses that were in vain at once, less 2 w - 1: at most 0."""
        self.num_drafted = 0
        self.passes: Items[DraftPass] = ()
        """Of the last `draft`; nothing if no sequence could be drafted for."""

    @property
    def has_work(self) -> bool:
        return any(self._has_work(entry) for entry in self._entries.values())

    @staticmethod
    def _has_work(entry: _Entry) -> bool:
        return entry.guesses.room > 0 and not entry.is_stuck

    def hear(self, peer: str, posts: Iterable[ToDrafter]) -> list[ToVerifier]:
        """Takes a verifier's messages; returns what must be answered at once."""
        answers: list[ToVerifier] = []
        for post in posts:
            if isinstance(post, Leave):
                self._forget([id_ for id_ in post.sequence_ids if id_ in self._entries and self._of(id_) == peer])
            elif isinstance(post, Enter):
                self._enter(peer, post)
            elif (entry := self._entries.get(post.sequence_id)) is None or entry.peer != peer:
                answers.append(Lacks(sequence_id=post.sequence_id, num_known=0))
            elif post.start > entry.guesses.num_known:
                answers.append(Lacks(sequence_id=post.sequence_id, num_known=entry.guesses.num_known))
            else:
                self._commit(entry, post.tokens[entry.guesses.num_known - post.start :], post.window, post.ahead)
        return answers

    def lose(self, peer: str) -> None:
        """The verifier is gone."""
        self._forget([id_ for id_, entry in self._entries.items() if entry.peer == peer])

    def clear(self) -> None:
        self._forget([*self._entries])

    def _of(self, sequence_id: SequenceId) -> str:
        return self._entries[sequence_id].peer

    def _forget(self, sequence_ids: Items[SequenceId]) -> None:
        if sequence_ids:
            self._drafter.follow(News(ended=[self._entries.pop(id_).state for id_ in sequence_ids]))

    def _enter(self, peer: str, post: Enter) -> None:
        state = SequenceState(
            key=post.key,
            group_id=post.group_id,
            tokens=post.tokens,
            num_prompt_tokens=post.num_prompt_tokens,
            params=post.params,
        )
        entry = self._entries.get(state.sequence_id)
        if entry is not None and entry.peer == peer:
            known, length = entry.state.tokens, min(len(entry.state.tokens), len(post.tokens))
            if post.tokens[:length] == known[:length]:
                entry.number = post.number
                self._commit(entry, post.tokens[length:], post.window, post.ahead)
                return
        if entry is not None:
            self._forget([state.sequence_id])
        guesses = Guesses(len(post.tokens), post.window, post.ahead)
        self._entries[state.sequence_id] = _Entry(peer, state, guesses, post.number)

    def _commit(self, entry: _Entry, drawn: Items[int], window: int, ahead: bool) -> None:
        guesses = entry.guesses
        most = guesses.most
        wasted = guesses.commit(drawn)
        if wasted:
            self.num_wasted += wasted
            self.most_over = max(self.most_over, wasted - (most - 1))
        entry.state.tokens += drawn
        guesses.window, guesses.ahead = window, ahead
        entry.is_stuck, entry.has_news = False, True

    def draft(self) -> Answers:
        """Runs a pass, if a sequence may be drafted for; returns the guesses that verifiers have not been sent yet."""
        ready = [entry for entry in self._entries.values() if self._has_work(entry)]
        if len(ready) > self._max_num_seqs:
            ready.sort(key=lambda entry: len(entry.guesses.tokens))
            ready = ready[: self._max_num_seqs]
            for entry in ready:
                id_ = entry.state.sequence_id
                self._entries[id_] = self._entries.pop(id_)
        self.passes = ()
        if ready:
            asks = [Ask(entry.state, len(entry.guesses.tokens) + 1) for entry in ready]
            for entry, draft in zip(ready, self._drafter.propose(asks, len(ready), len(ready)), strict=True):
                self._add(entry, draft)
            self.passes = self._drafter.passes
        answers: Answers = defaultdict(list)
        for id_, entry in self._entries.items():
            if entry.has_news and (entry.guesses.tokens or entry.is_stuck):
                entry.has_news = False
                guesses = entry.guesses
                answers[entry.peer].append(
                    Guessed(
                        sequence_id=id_,
                        number=entry.number,
                        num_known=guesses.num_known,
                        tokens=[*guesses.tokens],
                        shares=[*guesses.shares],
                        is_all=entry.is_stuck,
                    )
                )
        return answers

    def _add(self, entry: _Entry, draft: Draft) -> None:
        known = len(entry.guesses.tokens)
        new = draft.tokens[known : known + 1]
        if not new or draft.tokens[:known] != entry.guesses.tokens:
            entry.is_stuck = entry.has_news = True  # until the next tokens come
            return
        before = draft.probabilities[known - 1] if known else 1.0
        entry.guesses.add(new, [min(1.0, draft.probabilities[known] / max(before, 1e-30))])
        entry.has_news = True
        self.num_drafted += 1
