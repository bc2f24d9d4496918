"""Drafters on other ranks: windows, waste, and messages that come late, twice, in another order or never."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engines.config import DraftMode
from engines.sequence import SequenceState
from engines.speculation.desk import Desk
from engines.speculation.drafter import Ask, Draft, DraftPass, News, Outcome
from engines.speculation.posts import (
    Commit,
    Enter,
    Guessed,
    ToDrafter,
    ToVerifier,
    decode_to_drafter,
    decode_to_verifier,
    encode,
)
from engines.speculation.remote import PATIENCE_S, RemoteDrafter
from engines.speculation.verify import num_accepted
from engines.speculation.window import Guesses
from tests.states import make_state

PROMPT, LENGTH = 5, 80


class Guesser:
    """Guesses the truth, or with some probability another token; guesses that are known to it stay."""

    def __init__(self, truth: dict[int, list[int]], right: float, seed: int = 0) -> None:
        self._truth, self._right, self._rng = truth, right, random.Random(seed)
        self._guesses: dict[tuple[int, int, int], list[int]] = {}
        self.known: set[int] = set()
        self.passes: list[DraftPass] = []

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes = [DraftPass(len(asks))]
        return [Draft(self._guess(state, limit), [0.5] * limit) for state, limit, _ in asks]

    def _guess(self, state: SequenceState, limit: int) -> list[int]:
        uid = state.key.prompt_uid
        self.known.add(uid)
        truth = self._truth[uid]
        assert state.tokens == truth[: len(state.tokens)], "a verifier draws the truth alone"
        guesses = self._guesses.setdefault(state.sequence_id, list(truth[:PROMPT]))
        if guesses[: len(state.tokens)] != state.tokens:
            guesses[:] = state.tokens
        while len(guesses) < len(state.tokens) + limit:
            token = truth[len(guesses)] if len(guesses) < len(truth) else 0
            guesses.append(token if self._rng.random() < self._right else token + 1)
        return guesses[len(state.tokens) : len(state.tokens) + limit]

    def follow(self, news: News) -> None:
        for state in news.ended:
            self.known.discard(state.key.prompt_uid)
            self._guesses.pop(state.sequence_id, None)


@dataclass
class Channel:
    """A `Link` to a desk, whose messages may be lost, doubled, late or in another order."""

    rng: random.Random
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    is_up: bool = True
    to_desk: list[bytes] = field(default_factory=list)
    to_verifier: list[bytes] = field(default_factory=list)

    def post(self, posts: list[ToDrafter]) -> None:
        self._send(self.to_desk, encode(posts))

    def answer(self, posts: list[ToVerifier]) -> None:
        if posts:
            self._send(self.to_verifier, encode(posts))

    def _send(self, way: list[bytes], data: bytes) -> None:
        if self.rng.random() >= self.lost:
            way += [data] * (1 + (self.rng.random() < self.doubled))

    def _arrived(self, way: list[bytes]) -> list[bytes]:
        """Some stay behind, so that others overtake them."""
        came = [data for data in way if self.rng.random() >= self.late]
        if self.late:
            self.rng.shuffle(came)
        for data in came:
            way.remove(data)
        return came

    def take(self, *, waits: bool) -> list[ToVerifier]:
        return [post for data in self._arrived(self.to_verifier) for post in decode_to_verifier(data)]

    def heard(self) -> list[ToDrafter]:
        return [post for data in self._arrived(self.to_desk) for post in decode_to_drafter(data)]


@dataclass
class World:
    """Verifier and drafter, which take turns; time passes only where nothing else happens."""

    mode: DraftMode
    window: int
    right: float
    channel: Channel
    num_sequences: int = 3
    passes_each: int = 2
    """Passes of the drafter during one of the verifier."""

    def __post_init__(self) -> None:
        rng = random.Random(repr((self.mode, self.window, self.right)))
        self.truth = {uid: [rng.randrange(9) for _ in range(PROMPT + LENGTH + 20)] for uid in range(self.num_sequences)}
        self.guesser = Guesser(self.truth, self.right)
        self.desk = Desk(self.guesser, max_num_seqs=2)
        self.now, self.num_passes, self.gains = 0.0, 0, list[int]()
        self.num_silent = 0
        self.remote = RemoteDrafter([self.channel], self.mode, window=self.window, clock=lambda: self.now)

    def run(self, disturb: Callable[[World], object] = lambda _: None) -> None:
        left = {uid: make_state(uid, tokens[:PROMPT]) for uid, tokens in self.truth.items()}
        self.remote.follow(News(drawn=[Outcome(state) for state in left.values()]))
        while left:
            disturb(self)
            for _ in range(self.passes_each):
                self.channel.answer(self.desk.hear("verifier", self.channel.heard()))
                for posts in self.desk.draft().values():
                    self.channel.answer(posts)
                assert all(len(one.guesses.tokens) <= 2 * self.window for one in self.desk._entries.values())
            self._verify(left)
            assert self.num_passes < 20 * LENGTH and self.num_silent < 500, "no progress"
        self.desk.hear("verifier", self.channel.heard())

    def _verify(self, left: dict[int, SequenceState]) -> None:
        asks = [Ask(state, min(self.window, PROMPT + LENGTH - len(state.tokens))) for state in left.values()]
        drawn = []
        for (state, limit, _), draft in zip(asks, self.remote.propose(asks, len(asks), len(asks)), strict=True):
            if draft.holds:
                assert self.mode != "filled"
                continue
            assert len(draft.tokens) <= limit and draft.start in (None, len(state.tokens))
            known, truth = len(state.tokens), self.truth[state.key.prompt_uid]
            count = num_accepted(draft.tokens, truth[known:])
            state.tokens += truth[known : known + count + 1]
            drawn.append(Outcome(state, draft.tokens, count))
            self.gains.append(count + 1)
        if not drawn:
            self.num_silent += 1
            self.now += PATIENCE_S / 4
            return
        self.num_passes += 1
        self.now += 0.01
        self.remote.follow(News(drawn=drawn))
        ended = [one.state for one in drawn if len(one.state.tokens) >= PROMPT + LENGTH]
        if ended:
            self.remote.follow(News(ended=ended))
        for state in ended:
            del left[state.key.prompt_uid]


MODES: tuple[DraftMode, ...] = ("filled", "strict", "naive")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", range(1, 9))
def test_a_perfect_drafter_fills_every_window(mode: DraftMode, window: int) -> None:
    """Where it is as fast as its verifier needs: strict gains w tokens in a pass, naive w + 1."""
    world = World(mode, window, 1.0, Channel(random.Random(0)), num_sequences=2, passes_each=2 * window)
    world.run()
    assert world.desk.num_wasted == 0 and not world.guesser.known
    full = window if mode == "strict" else window + 1
    assert max(world.gains) == full and sum(gain == full for gain in world.gains) >= len(world.gains) - 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_waste_is_at_most_the_papers_bound(mode: DraftMode, window: int, right: float) -> None:
    world = World(mode, window, right, Channel(random.Random(1)), passes_each=3 * window)
    world.run()
    assert world.desk.most_over <= 0
    if mode != "naive":
        assert world.desk.most_over == 0 or window == 1, "the bound is reached"
    if mode == "strict":
        assert max(world.gains) <= window


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_channel_does_every_sequence_comes_to_its_end(mode: DraftMode, seed: int) -> None:
    rng = random.Random(seed)
    channel = Channel(rng, lost=rng.choice([0, 0.3]), doubled=rng.choice([0, 0.5]), late=rng.choice([0, 0.6]))
    world = World(mode, rng.randint(1, 8), rng.choice([0.5, 0.9, 1.0]), channel, passes_each=rng.randint(1, 9))
    world.run()
    assert world.desk.most_over <= 0 and sum(world.gains) >= LENGTH * world.num_sequences


@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_that_dies_and_comes_back(mode: DraftMode) -> None:
    """Its verifier decodes plainly meanwhile, from the first pass on."""
    world = World(mode, 4, 1.0, Channel(random.Random(0)), num_sequences=1, passes_each=8)
    alone: list[int] = []

    def disturb(world: World) -> None:
        if len(world.gains) == 5 and world.channel.is_up:
            world.channel.is_up = False
            world.channel.to_desk.clear()
            world.channel.to_verifier.clear()
            world.desk.clear()
        if not world.channel.is_up:
            alone.append(len(world.gains))
            world.channel.is_up = len(world.gains) < 5 or len(world.gains) > 12

    world.run(disturb)
    assert world.gains[5:13] == [1] * 8 and max(world.gains[14:]) > 1 and len(alone) >= 8


def test_a_silent_drafter_is_not_waited_for_long() -> None:
    world = World("strict", 4, 1.0, Channel(random.Random(0), lost=1.0), num_sequences=1)
    world.run()
    assert set(world.gains) == {1} and world.num_silent < 10


def test_no_sequence_waits_for_guesses_that_its_drafter_was_not_asked_for() -> None:
    """It comes with its KV, so that its first pass may have a draft; then nothing is drafted; then a longer window."""
    channel = Channel(random.Random(0))
    remote, state = RemoteDrafter([channel], "strict", window=2, clock=lambda: 0.0), make_state(0, [1, 2, 3])
    desk = Desk(Guesser({0: list(range(1, 60))}, 1.0), max_num_seqs=2)

    def step(limit: int) -> int:
        (draft,) = remote.propose([Ask(state, limit)], 1, 1) if limit else (Draft([], []),)
        assert not draft.holds
        drawn = range(len(state.tokens) + 1, len(state.tokens) + 2 + len(draft.tokens))
        state.tokens += drawn
        remote.follow(News(drawn=[Outcome(state, draft.tokens, len(draft.tokens))]))
        channel.answer(desk.hear("verifier", channel.heard()))
        for _ in range(12):
            for posts in desk.draft().values():
                channel.answer(posts)
        return len(drawn)

    assert [step(2), step(2)] == [1, 2], "it was not entered before the first"
    remote.propose([], 0, 0)
    remote.follow(News(drawn=[Outcome(state)]))
    assert [step(6), step(6), step(6)] == [1, 6, 6]


def test_sequences_take_turns_where_a_pass_has_room_for_few() -> None:
    """Also where a verifier draws at once: else the first ones to enter would be drafted for again and again."""
    states = [make_state(uid, range(1, 4)) for uid in range(3)]
    desk = Desk(Guesser({uid: list(range(1, 60)) for uid in range(3)}, 1.0), max_num_seqs=1)
    for state in states:
        sampled = {"key": state.key, "group_id": 0, "params": state.params, "num_prompt_tokens": 3}
        desk.hear("verifier", [Enter(number=1, tokens=[*state.tokens], window=1, ahead=False, **sampled)])
    served: list[int] = []
    for _ in range(9):
        for guessed in (post for posts in desk.draft().values() for post in posts):
            assert isinstance(guessed, Guessed)
            tokens = states[guessed.sequence_id[1]].tokens
            served.append(guessed.sequence_id[1])
            drawn = Commit(
                sequence_id=guessed.sequence_id, start=len(tokens), tokens=guessed.tokens, window=1, ahead=False
            )
            tokens += guessed.tokens
            desk.hear("verifier", [drawn])
    assert served == [0, 1, 2] * 3


def test_guesses_beyond_the_vocabulary_are_dropped() -> None:
    channel, state = Channel(random.Random(0)), make_state(0, [1, 2, 3])
    remote = RemoteDrafter([channel], "filled", window=2, clock=lambda: 0.0, vocab_size=131)
    remote.follow(News(drawn=[Outcome(state)]))
    drafts = []
    for token in (131, 2**62, 130):
        guessed = Guessed(
            sequence_id=state.sequence_id, number=1, num_known=3, tokens=[token], shares=[1.0], is_all=False
        )
        channel.answer([guessed])
        drafts += remote.propose([Ask(state, 2)], 1, 1)
    assert [one.tokens for one in drafts] == [[], [], [130]]


def test_guesses_for_an_earlier_sequence_of_the_same_key_do_not_count() -> None:
    """They may still be on their way when a later rollout has one, which is shorter."""
    channel = Channel(random.Random(0))
    remote = RemoteDrafter([channel], "filled", window=2, clock=lambda: 0.0)
    guesser = Guesser({0: list(range(1, 60))}, 1.0)
    desk = Desk(guesser, max_num_seqs=2)
    for length in (30, 3):
        state = make_state(0, range(1, length + 1))
        remote.follow(News(drawn=[Outcome(state)]))
        channel.answer(desk.hear("verifier", channel.heard()))
        for posts in desk.draft().values():
            channel.answer(posts)
        if length == 30:
            remote.follow(News(ended=[state]))
    (draft,) = remote.propose([Ask(state, 2)], 1, 1)
    assert draft.tokens == [4]


def test_the_drafter_waits_at_its_window() -> None:
    guesses = Guesses(10, window=3, ahead=True)
    assert guesses.room == 6
    guesses.add([1, 2, 3, 4, 5, 6], [0.5] * 6)
    assert guesses.room == 0
    assert guesses.commit([1, 2, 3]) == 0 and guesses.tokens == [4, 5, 6] and guesses.room == 3
    assert guesses.commit([9]) == 2 and guesses.tokens == [] and guesses.num_known == 14
    guesses.ahead = False
    assert guesses.room == 3
    guesses.add([1], [0.5])
    assert guesses.commit([1, 7]) == 0, "all guesses were right, and the verifier was ahead"
