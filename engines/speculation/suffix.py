"""Drafts from suffix trees: of a sequence's own history, or of all that its group has generated (Seer §4.4).

Torch-free.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from engines.sequence import SequenceState
from engines.speculation.client import DraftClient
from engines.speculation.drafter import NO_DRAFT, Ask, Draft, DraftPass, News
from engines.speculation.history import NEW, DraftHistory, age_of
from engines.speculation.suffix_tree import DraftBuffers, SpeculationArgs, SuffixTree, Tokens, batch_speculate

_DEPTH = 24
_PROMPT = 0  # the request that is the prompt; sample i is request i + 1
_EARLIER = 2**62  # requests from here on are completions of earlier rollouts
_Key = tuple[int, ...]


@dataclass
class _Group:
    """A tree, and what is known of the sequences that it holds."""

    tree: SuffixTree
    num_prompt_tokens: int
    prompt_end: list[int]
    """The prompt's last tokens, with which each sibling begins in the tree."""
    age: str = NEW
    """How old the newest completion of an earlier rollout is."""
    known: dict[int, int] = field(default_factory=dict)
    """Request -> the length of the sequence, prompt included, up to which its tokens are in the tree."""
    running: set[int] = field(default_factory=set)
    """Requests for which drafts were proposed and that have not left since."""
    evicted: set[int] = field(default_factory=set)
    """Requests that the tree has dropped: to append them again would drop others, in every step."""
    turn: int = 0
    """Number of the call of `propose` that used it last."""


class SuffixDrafter:
    """A tree for each sequence, or for each group: then a sequence copies from its prompt and from its siblings, also
    from those that have ended. A group's prompt is in the tree once, and each sibling begins with the prompt's end.

    At `max_bytes` of all trees together the groups used longest ago are dropped, but none that is used in this call or
    was in the last one; if that does not help, sequences that find no room get no drafts. A group that alone exceeds
    the bound loses its oldest sequences (`SuffixTree`), which get no drafts from then on. Drafts are a function of the
    states and of the order of the calls, the same on all shards of a replica, unless a client brings the tokens that
    other replicas' sequences of the groups have generated: these arrive at any time.

    With a `history`, a group's tree begins with the completions of earlier rollouts, the newest first, while all trees
    fill less than half of `max_bytes`: the other half is for running sequences.
    """

    def __init__(
        self,
        *,
        grouped: bool,
        max_draft_tokens: int,
        num_paths: int = 1,
        max_bytes: int,
        client: DraftClient | None = None,
        history: DraftHistory | None = None,
    ) -> None:
        assert grouped or (client is None and history is None)
        self._grouped, self._client, self._history = grouped, client, history
        self._max_bytes = max_bytes
        lengths = range(1, max_draft_tokens + 1)
        self._args = [SpeculationArgs(max_spec_tokens=length, top_k=num_paths) for length in lengths]
        self._num_paths = num_paths
        self._groups: OrderedDict[_Key, _Group] = OrderedDict()  # the one used longest ago first
        self._num_bytes = self._turn = 0
        self._buffers = DraftBuffers.empty(0, num_paths, max_draft_tokens)
        self.passes: Items[DraftPass] = ()
        self.num_evicted = 0
        """Groups that were dropped because of `max_bytes`."""

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes = (DraftPass(len(asks)),)
        states, limits = [ask.state for ask in asks], [ask.limit for ask in asks]
        self._turn += 1
        drafts = [NO_DRAFT] * len(states)
        followed = [(place, group) for place, state in enumerate(states) if (group := self._follow(state)) is not None]
        if self._client is not None:
            self._exchange(self._client, [states[place] for place, _ in followed], [group for _, group in followed])
        if len(self._buffers.tokens) < len(states):
            self._buffers = DraftBuffers.empty(2 * len(states), self._num_paths, len(self._args))
        buffers = self._buffers
        batch_speculate(
            [group.tree for _, group in followed],
            np.array([self._request(states[place]) for place, _ in followed], np.int64),
            [self._args[min(limits[place], len(self._args)) - 1] for place, _ in followed],
            buffers,
        )
        for row, (place, _) in enumerate(followed):
            if paths := buffers.drafts(row):
                drafts[place] = paths[0]._replace(others=tuple(paths[1:]))
        return drafts

    def follow(self, news: News) -> None:
        """Of a group's sequence that has ended the tokens stay, as a reference for its siblings. What drafts yield is
        counted where there is a history."""
        if self._history is not None:
            for state, _, count in news.drawn:
                if (group := self._groups.get(self._key(state))) is not None:
                    self._history.yields[f"{group.age}/passes"] += 1
                    self._history.yields[f"{group.age}/accepted"] += count
        for state in news.ended:
            self._end(state)

    def _end(self, state: SequenceState) -> None:
        key, request = self._key(state), self._request(state)
        group = self._groups.get(key)
        if group is not None and self._grouped:
            self._follow(state)
            group.tree.finish(request)
            group.running.discard(request)
        elif group is not None:
            self._num_bytes -= self._groups.pop(key).tree.num_bytes
        if self._client is not None:
            self._client.give(_name(key), request, state.tokens, state.num_prompt_tokens, has_ended=True)
            self._client.flush()

    def _key(self, state: SequenceState) -> _Key:
        return (state.key.policy_step, state.group_id) if self._grouped else state.sequence_id

    def _request(self, state: SequenceState) -> int:
        return state.key.sample_index + 1

    def _exchange(self, client: DraftClient, states: list[SequenceState], groups: list[_Group]) -> None:
        """Gives the client what these sequences have generated, and takes what other replicas have."""
        for state, own in zip(states, groups, strict=True):
            own.running.add(self._request(state))
            client.give(_name(self._key(state)), self._request(state), state.tokens, state.num_prompt_tokens)
        client.flush()
        for name, request, tokens in client.take():
            group = self._groups.get(key := _key_of(name))
            if group is None or request in group.running:  # one that has come here is followed by its state
                continue
            known = group.known.get(request, 0) if group.tree.length(request) else 0
            start = max(known, group.num_prompt_tokens)
            if not (new := tokens[start - group.num_prompt_tokens :]):
                continue
            if not known:
                new = array("i", group.prompt_end) + new
                start -= len(group.prompt_end)
            self._append(key, request, new, start=start, begin=start)
            group.tree.finish(request)

    def _follow(self, state: SequenceState) -> _Group | None:
        """Returns the sequence's group, whose tree has all of its tokens; None where there is no room for them."""
        key, request = self._key(state), self._request(state)
        group = self._groups.get(key)
        if group is None:
            if not self._make_room():
                return None
            prompt = state.tokens[: state.num_prompt_tokens]
            tree = SuffixTree(max_depth=_DEPTH, max_bytes=self._max_bytes)
            group = self._groups[key] = _Group(tree, len(prompt), prompt[-_DEPTH:])
            if self._grouped:
                group.tree.append(_PROMPT, prompt)
            self._num_bytes += group.tree.num_bytes
            if self._history is not None:
                self._recall(self._history, group, prompt, state.key.policy_step)
            if self._client is not None:
                self._client.register_group(_name(key))
        group.turn = self._turn
        self._groups.move_to_end(key)
        begin = max(0, state.num_prompt_tokens - _DEPTH) if self._grouped else 0
        return group if self._append(key, request, state.tokens, begin=begin) else None

    def _recall(self, history: DraftHistory, group: _Group, prompt: list[int], step: int) -> None:
        """Fills a new group's tree with what earlier rollouts have generated."""
        entries = history.find(prompt)
        group.age = age_of(step, entries)
        for number, tokens in enumerate(one for entry in entries for one in entry.tokens()):
            if not self._make_room(self._max_bytes // 2, older_than=step):
                return
            before = group.tree.num_bytes
            group.tree.append(_EARLIER + number, np.concatenate([group.prompt_end, tokens]))
            group.tree.finish(_EARLIER + number)
            self._num_bytes += group.tree.num_bytes - before

    def _append(self, key: _Key, request: int, tokens: Tokens, *, start: int = 0, begin: int = 0) -> bool:
        """Appends what the tree lacks of a sequence. `tokens` are its tokens from number `start` on; if the tree has
        none of them, it gets those from number `begin` on. Returns False where there is no room."""
        group = self._groups[key]
        known, length = group.known.get(request, 0), start + len(tokens)
        if known and not group.tree.length(request):
            group.evicted.add(request)
        if request in group.evicted or not (known == length or self._make_room()):
            return False
        if known == length:
            return True
        before = group.tree.num_bytes
        if not start <= known <= length or not known:  # a step was taken back, or nothing is known
            group.tree.remove(request)
            known = begin
        group.tree.append(request, tokens[known - start :])
        group.known[request] = length
        self._num_bytes += group.tree.num_bytes - before
        self._make_room()
        return True

    def _make_room(self, max_bytes: int | None = None, *, older_than: int | None = None) -> bool:
        """Drops groups that were not used lately, or, with `older_than`, in this call, and are of a policy step before
        it, while all trees exceed the bound, by default that of the options; returns whether they do not."""
        bound = self._max_bytes if max_bytes is None else max_bytes
        while self._num_bytes > bound:
            key, oldest = next(iter(self._groups.items()))
            last_turn = self._turn - 2 if older_than is None else self._turn - 1
            if oldest.turn > last_turn or (older_than is not None and key[0] >= older_than):
                return False
            del self._groups[key]
            self._num_bytes -= oldest.tree.num_bytes
            self.num_evicted += 1
        return True


def _name(key: _Key) -> str:
    """The group's id among all replicas."""
    return ":".join(map(str, key))


def _key_of(name: str) -> _Key:
    return tuple(map(int, name.split(":")))
