"""The draft server: what it keeps, by brute force; what clients know after any loss; and that no step waits."""

from __future__ import annotations

import gc
import random
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from engines.control.sealing import new_token
from engines.control.transport import Client
from engines.sequence import SequenceState
from engines.speculation.client import DraftClient, DraftTimes
from engines.speculation.drafter import Ask, Draft, News
from engines.speculation.messages import (
    DraftCacheInfo,
    Expected,
    FetchCst,
    Fetched,
    RegisterGroup,
    UpdateCst,
    decode_answers,
    encode,
)
from engines.speculation.mirror import Mirror
from engines.speculation.server import COUNTED, DraftServer, DraftStore
from engines.speculation.suffix import SuffixDrafter
from tests.engines.test_decoding import nested
from tests.states import make_state

TOKEN = new_token()
WAIT_S = 60.0  # for what is to come; a loaded machine may take its time
SOON = DraftTimes(append_tokens=4, append_s=0.01, fetch_s=0.02, retry_s=0.05, patience_s=5.0)


def tokens_of(owner: DraftStore | Mirror) -> dict[str, dict[int, list[int]]]:
    """A copy of all tokens, by group and request."""
    groups: dict[str, Any] = owner._groups  # type: ignore[assignment]
    return {
        name: {key: getattr(one, "tokens", one).tolist() for key, one in group.requests.items()}
        for name, group in groups.items()
    }


def update(group: str, request: int, start: int, tokens: list[int]) -> UpdateCst:
    return UpdateCst(group_id=group, request_id=request, prev_token_count=start, new_tokens=tokens)


def fetch(store: DraftStore, now: float, **infos: tuple[int, dict[int, int]]) -> list[Any]:
    caches = [DraftCacheInfo(version=version, token_counts=counts) for version, counts in infos.values()]
    return decode_answers(store.answer(encode([FetchCst(group_ids=list(infos), draft_cache_infos=caches)]), now))


class Oracle:
    """The store by brute force: nothing is kept up to date, all is counted anew."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.groups: dict[str, dict[str, Any]] = {}
        self.counts = dict.fromkeys(COUNTED, 0)

    def use(self, group: str, now: float) -> dict[str, Any] | None:
        for name, one in list(self.groups.items()):
            if now - one["used"] > one["ttl"]:
                del self.groups[name]
                self.counts["expired"] += 1
        if group in self.groups:
            self.groups[group] = self.groups.pop(group) | {"used": now}
        return self.groups.get(group)

    def num_bytes(self) -> int:
        return sum(
            512 + sum(256 + 4 * len(one) for one in group["requests"].values()) for group in self.groups.values()
        )

    def evict(self) -> None:
        while self.num_bytes() > self.max_bytes:
            del self.groups[min(self.groups, key=lambda name: list(self.groups).index(name))]
            self.counts["evicted"] += 1

    def register(self, group: str, ttl: int, now: float) -> None:
        known = self.use(group, now)
        self.groups[group] = {"used": now, "requests": {} if known is None else known["requests"], "ttl": ttl}
        self.evict()

    def update(self, group: str, request: int, start: int, tokens: list[int], now: float) -> int | None:
        known = self.use(group, now)
        have = [] if known is None else known["requests"].get(request, [])
        if known is None or start > len(have):
            self.counts["gap"] += 1
            return len(have)
        if start + len(tokens) <= len(have):
            self.counts["doubled"] += 1
            return None
        known["requests"][request] = have + tokens[len(have) - start :]
        self.evict()
        return None


def test_the_store_against_brute_force() -> None:
    """Updates are repeated, reordered, lost and cut anywhere; groups expire and are evicted."""
    counts = sum((Counter(play_on_the_store(seed)) for seed in range(40)), Counter())
    assert counts.keys() == {*COUNTED} - {"malformed"}


def play_on_the_store(seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    max_bytes = rng.choice([1_000, 2_000, 10**6])
    store, oracle = DraftStore(max_bytes=max_bytes), Oracle(max_bytes)
    truth = {(group, request): [rng.randrange(99) for _ in range(60)] for group in "abcd" for request in range(3)}
    now = 0.0
    for _ in range(300):
        now += rng.choice([0.0, 0.1, 0.1, 3.0])
        group, request = rng.choice(list(truth))
        if rng.random() < 0.15:
            ttl = rng.randint(1, 20)
            assert store.answer(encode([RegisterGroup(group_id=group, ttl_seconds=ttl)]), now) == b""
            oracle.register(group, ttl, now)
        elif rng.random() < 0.8:
            have = len(oracle.groups.get(group, {"requests": {}})["requests"].get(request, []))
            start = max(0, have + rng.randint(-6, 3)) if rng.random() < 0.7 else rng.randint(0, 60)
            tokens = truth[group, request][start : start + rng.randint(0, 12)]
            answer = store.answer(encode([update(group, request, start, tokens)]), now)
            wanted = oracle.update(group, request, start, tokens, now)
            heard = decode_answers(answer) if answer else []
            assert heard == ([] if wanted is None else [
                Expected(group_id=group, request_id=request, token_count=wanted)
            ])  # fmt: skip
        else:
            counts = {one: rng.randint(0, 20) for one in rng.sample(range(3), rng.randint(0, 3))}
            *answers, last = fetch(store, now, **{group: (0, counts)})
            known = oracle.use(group, now)
            wanted_answers = set()
            for one in range(3):
                have, count = [] if known is None else known["requests"].get(one, []), counts.get(one, 0)
                if count > len(have):
                    wanted_answers.add((one, len(have), ()))
                elif count < len(have):
                    wanted_answers.add((one, count, tuple(have[count:])))
            assert {
                (one.request_id, one.prev_token_count, tuple(one.new_tokens))
                if isinstance(one, UpdateCst)
                else (one.request_id, one.token_count, ())
                for one in answers
            } == wanted_answers
            assert isinstance(last, Fetched) and (last.versions[group] > 0) == (known is not None)
        assert tokens_of(store) == {name: one["requests"] for name, one in oracle.groups.items()}
        assert store.counts == oracle.counts
        assert store.num_bytes == oracle.num_bytes() <= max_bytes
    return oracle.counts


def test_nothing_comes_twice_and_a_group_made_anew_has_another_version() -> None:
    store = DraftStore(max_bytes=10**6)
    store.answer(encode([RegisterGroup(group_id="a", ttl_seconds=9), update("a", 1, 0, [5, 6, 7])]), 0.0)
    delta, fetched = fetch(store, 0.0, a=(0, {1: 1}))
    assert delta == update("a", 1, 1, [6, 7])
    version = fetched.versions["a"]
    assert fetch(store, 1.0, a=(version, {})) == [Fetched(versions={"a": version})]
    store.answer(encode([RegisterGroup(group_id="a", ttl_seconds=9), update("a", 1, 0, [5, 6, 7])]), 50.0)
    assert fetch(store, 50.0, a=(version, {1: 3}))[0].versions["a"] > version


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xff" * 30, encode([{"type": "Shutdown"}]), encode([[]]),
        encode([{"type": "UpdateCst", "group_id": "a", "request_id": 1, "prev_token_count": 0, "new_tokens": [-1]}]),
        encode([{"type": "UpdateCst", "group_id": "a", "request_id": 1, "prev_token_count": -2, "new_tokens": [1]}]),
        encode([{"type": "UpdateCst", "group_id": "a", "request_id": 1, "prev_token_count": 0, "new_tokens": [2**31]}]),
        encode([{"type": "FetchCst", "group_ids": ["a"], "draft_cache_infos": []}]),
        encode([{"type": "RegisterGroup", "group_id": "a", "ttl_seconds": 0}]),
    ],
)  # fmt: skip
def test_what_is_no_request_is_dropped_and_counted(payload: bytes) -> None:
    store = DraftStore(max_bytes=10**6)
    store.answer(encode([RegisterGroup(group_id="a", ttl_seconds=9)]), 0.0)
    assert store.answer(payload, 0.0) == b"" and store.counts["malformed"] == 1
    assert tokens_of(store) == {"a": {}}


@pytest.mark.parametrize("seed", range(60))
def test_mirrors_converge_after_any_loss(seed: int) -> None:
    """Three clients; payloads are lost with their connections, the store is emptied, groups are evicted and expire."""
    rng = random.Random(seed)
    mirrors = [Mirror(append_tokens=4, append_s=1.0) for _ in range(3)]
    truth = {(f"g{i % 2}", i): [rng.randrange(1000) for _ in range(rng.randint(1, 40))] for i in range(9)}
    given = dict.fromkeys(truth, 0)
    store, now, restarts = DraftStore(max_bytes=10**6), 0.0, 0
    for mirror in mirrors:
        for group in ("g0", "g1"):
            mirror.register_group(group, 100)

    def talk(mirror: Mirror, loss: float, everything: bool) -> None:
        """One connection's exchange, which may be cut before or after any payload."""
        requests = [*mirror.updates(now), mirror.fetch(everything=everything)]
        for request in requests:
            if rng.random() < loss:
                return
            answers = store.answer(encode([request]), now)
            if answers and rng.random() >= loss:
                mirror.hear(decode_answers(answers), now)

    for _ in range(200):
        now += rng.choice([0.0, 0.3, 0.9])
        (group, request), tokens = rng.choice(list(truth.items()))
        start = given[group, request]
        end = min(len(tokens), start + rng.randint(1, 5))
        given[group, request] = end
        mirrors[request % 3].give(update(group, request, start, tokens[start:end]), rng.random() < 0.1, now)
        if rng.random() < 0.05:
            store, restarts = DraftStore(max_bytes=10**6), restarts + 1
        talk(rng.choice(mirrors), loss=0.2, everything=rng.random() < 0.2)
    for _ in range(4):
        now += 2.0
        for mirror in mirrors:
            talk(mirror, loss=0.0, everything=True)
    wanted: dict[str, dict[int, list[int]]] = {"g0": {}, "g1": {}}
    for (group, request), end in given.items():
        if end:
            wanted[group][request] = truth[group, request][:end]
    assert restarts and tokens_of(store) == wanted
    assert all(tokens_of(mirror) == wanted for mirror in mirrors)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it did not become so in {WAIT_S} s"
        time.sleep(0.01)


def known_to(client: DraftClient) -> dict[str, dict[int, list[int]]]:
    """A copy of what the client's thread knows; it goes on meanwhile."""
    try:
        return tokens_of(client._link.mirror)
    except RuntimeError:  # a dictionary has changed while it was read
        return {}


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_converge_after_kills_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    truth = {(f"g{i % 4}", i): [rng.randrange(1000) for _ in range(60)] for i in range(15)}
    with ExitStack() as stack:
        server = DraftServer(TOKEN)
        address = server.address
        clients = [stack.enter_context(closing(DraftClient(address, TOKEN, SOON))) for _ in range(3)]
        for client in clients:
            for group in range(4):
                client.register_group(f"g{group}")
        for end in range(5, 61, 5):
            for (group, request), tokens in truth.items():
                clients[request % 3].give(
                    group, request, [7, 7, *tokens[:end]], 2, has_ended=end == 60 and request >= 12
                )
            for client in clients:
                client.flush()
            if end % 15 == 0:
                server.close()
                if rng.random() < 0.5:
                    time.sleep(0.1)
                server = DraftServer(TOKEN, port=int(address.rpartition(":")[2]))
            wait_until(lambda: rng.random() < 0.3)
        stack.enter_context(closing(server))
        wanted = {f"g{i}": {key[1]: tokens for key, tokens in truth.items() if key[0] == f"g{i}"} for i in range(4)}
        wait_until(lambda: all(known_to(client) == wanted for client in clients))
        wait_until(lambda: tokens_of(server._store) == wanted)
        grown = {(one.group_id, one.request_id): one.tokens.tolist() for one in clients[0].take()}
        assert grown == {key: tokens for key, tokens in truth.items() if key[1] % 3}


def test_a_group_out_of_use_is_forgotten_and_comes_back_whole() -> None:
    with closing(DraftServer(TOKEN)) as server, closing(DraftClient(server.address, TOKEN, SOON)) as client:
        store = server._store
        store.expire = lambda now: None  # type: ignore[method-assign]  # until it has been seen
        client.register_group("a", 1)
        client.give("a", 1, [9, 1, 2, 3], 1)
        client.flush()
        wait_until(lambda: tokens_of(store) == {"a": {1: [1, 2, 3]}})
        del store.expire

        def is_forgotten() -> bool:
            client.flush()
            return not known_to(client) and not tokens_of(server._store)

        wait_until(is_forgotten)
        assert server.counts["expired"] == 1
        client.give("a", 1, [9, 1, 2, 3, 4], 1)
        client.flush()
        wait_until(lambda: tokens_of(server._store) == {"a": {1: [1, 2, 3, 4]}})


def test_forged_and_malformed_messages_are_dropped_and_counted() -> None:
    with closing(DraftServer(TOKEN)) as server:
        with pytest.raises(ValueError, match="launch token"):
            Client("forger", server.address, new_token())
        with closing(Client("friend", server.address, TOKEN)) as client:
            first = [RegisterGroup(group_id="a", ttl_seconds=9), update("a", 1, 0, [1, 2])]
            for payload in (b"\xff", *nested(), encode(first), encode(first), encode([update("b", 1, 0, [1])])):
                client.send(payload)
            assert decode_answers(client.receive(WAIT_S) or b"") == [
                Expected(group_id="b", request_id=1, token_count=0)
            ]
        counts = server.counts
        assert counts["token"] >= 1 and counts["doubled"] == counts["gap"] == 1
        assert counts["malformed"] == 1 + len(nested())
        assert tokens_of(server._store) == {"a": {1: [1, 2]}}


def test_one_warning_when_there_is_no_server() -> None:
    with DraftServerOnce() as address, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        times = DraftTimes(patience_s=1.1, retry_s=0.01)
        with closing(DraftClient(address, TOKEN, times)) as client:
            wait_until(lambda: len(caught) > 0)
            link = client._link
            assert not link._has_ended and client.take() == []
            time.sleep(0.1)
    assert len(caught) == 1 and "draft server" in str(caught[0].message)


class DraftServerOnce:
    """An address at which somebody listens and never answers, as a process that was stopped."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def drafter_of(client: DraftClient | None) -> SuffixDrafter:
    return SuffixDrafter(grouped=True, max_draft_tokens=8, max_bytes=2**24, client=client)


def propose(drafter: SuffixDrafter, *states: SequenceState) -> list[Draft]:
    return drafter.propose([Ask(state, 8) for state in states], len(states), len(states))


WAITS = {"sleep", "lock.acquire", "SimpleQueue.get", "lock.__enter__", "RLock.acquire"}
SOCKETS = ("engines/control/", "zmq", "/socket.py", "/selectors.py", "/threading.py", "/queue.py")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A collection, which begins at some allocation, closes sockets that other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_step_waits_for_a_server_that_does_not_answer() -> None:
    """Of all calls that the step's thread makes, none is of a socket, and none can wait."""
    calls: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.add(frame.f_code.co_filename)
        elif event == "c_call":
            calls.add(f"{argument.__module__ or ''}:{argument.__qualname__}")

    times = DraftTimes(patience_s=1.1)
    with DraftServerOnce() as address, closing(DraftClient(address, TOKEN, times)) as client:
        alone, shared = drafter_of(None), drafter_of(client)
        states = [make_state(0, [1, 2, 3, 4, 5], index=index) for index in range(3)]
        for token in [9, 1, 2, 3, 9, 1, 2, 3, 9]:
            for state in states:
                state.tokens.append(token)
            expected = propose(alone, *states)
            sys.setprofile(note)
            drafts = propose(shared, *states)
            sys.setprofile(None)
            assert drafts == expected
        sys.setprofile(note)
        shared.follow(News(ended=[states[0]]))
        sys.setprofile(None)
        assert any(drafts[0].tokens) and threading.active_count() > 1
    assert any("client.py" in call for call in calls) and any("SimpleQueue.put" in call for call in calls)
    for call in calls:
        module, _, name = call.rpartition(":")
        assert name not in WAITS and module not in ("_socket", "select"), call
        assert not any(part in call for part in SOCKETS), call


@pytest.fixture
def pair() -> Iterator[tuple[SuffixDrafter, SuffixDrafter, DraftClient]]:
    """Drafters of two replicas, and the second one's client."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(DraftServer(TOKEN)))
        one, other = (stack.enter_context(closing(DraftClient(server.address, TOKEN, SOON))) for _ in range(2))
        yield drafter_of(one), drafter_of(other), other


PROMPT = list(range(100, 140))
TEXT = list(range(30))  # nothing in it repeats


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_second_replica_copies_from_the_first(
    pair: tuple[SuffixDrafter, SuffixDrafter, DraftClient], has_ended: bool
) -> None:
    here, there, client = pair
    first, second = make_state(0, PROMPT, index=0), make_state(0, PROMPT, index=1)
    first.tokens += TEXT[:10]
    propose(here, first)
    first.tokens += TEXT[10:]
    if has_ended:
        here.follow(News(ended=[first]))
    else:
        propose(here, first)
    second.tokens += TEXT[:3]
    assert propose(drafter_of(None), second)[0].tokens == []
    propose(there, second)
    wait_until(lambda: known_to(client).get("0:0", {}).get(1) == TEXT)
    second.tokens.append(TEXT[3])
    wait_until(lambda: propose(there, second)[0].tokens == TEXT[4:12])
    # The first one comes to the second replica: it is followed by its state, and not twice in the tree.
    first.tokens.append(77)
    propose(there, second, first)
    group = there._groups[0, 0]
    assert group.tree.length(1) == 24 + len(TEXT) + 1 and group.running == {1, 2}
    # It is the same tree that the second replica has when it generates all of it itself.
    alone = drafter_of(None)
    propose(alone, second, first)
    assert propose(alone, second, first) == propose(there, second, first)
    assert alone._groups[0, 0].tree.num_tokens == group.tree.num_tokens
    group.tree.check_integrity()


def test_tokens_arrive_again_after_a_group_was_dropped_here(
    pair: tuple[SuffixDrafter, SuffixDrafter, DraftClient],
) -> None:
    here, there, client = pair
    first, second = make_state(0, PROMPT, index=0), make_state(0, PROMPT, index=1)
    first.tokens += TEXT
    here.follow(News(ended=[first]))
    second.tokens += TEXT[:3]
    wait_until(lambda: propose(there, second)[0].tokens == TEXT[3:11])
    there._groups.clear()  # as when other groups need the bytes
    wait_until(lambda: propose(there, second)[0].tokens == TEXT[3:11])
    assert known_to(client)["0:0"][1] == TEXT


def test_a_running_sequence_follows_its_state_alone(pair: tuple[SuffixDrafter, SuffixDrafter, DraftClient]) -> None:
    """The server may know more of it: when a step was taken back, or when a replica that ran it was lost."""
    here, there, client = pair
    longer, state = make_state(0, PROMPT, index=0), make_state(0, PROMPT, index=0)
    longer.tokens += TEXT
    here.follow(News(ended=[longer]))
    state.tokens += TEXT[:3]
    propose(there, state)
    wait_until(lambda: known_to(client).get("0:0", {}).get(1) == TEXT)
    while not client._grown.empty():
        assert propose(there, state)[0].tokens == []
        assert there._groups[0, 0].tree.length(1) == 24 + 3
    state.tokens += [*TEXT[3:], 77]
    propose(there, state)
    assert there._groups[0, 0].tree.length(1) == 24 + len(TEXT) + 1
    there.follow(News(ended=[state]))
    wait_until(lambda: known_to(client)["0:0"][1] == [*TEXT, 77])
