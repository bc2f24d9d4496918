"""Control messages between processes: what arrives, what is refused, and who is noticed to be gone."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import zmq

from engines.control.ends import Joined, Lost, Notice, Received
from engines.control.sealing import BEAT, BYE, DATA, HELLO, MAX_BYTES, REFUSED, WELCOME, Message, Seal, new_token
from engines.control.transport import REASONS, Client, Server
from tests.stopping import stopped

ROOT = Path(__file__).resolve().parents[2]
TOKEN = new_token()
WAIT_S = 30.0  # for what is to come; a loaded machine may take its time
TIMES: dict[str, Any] = {"interval_s": 0.1, "patience_s": 30.0}
SOON_S = 3.0  # patience, where somebody is to lose it


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server(TOKEN, **TIMES)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with closing(Client("rank-3", server.address, TOKEN, **TIMES)) as client:
        joined(server, "rank-3")
        yield client


def refuses(use: Callable[[], object], words: str) -> str:
    """What the error says, in which these words are."""
    with pytest.raises(ConnectionError, match=words) as error:
        use()
    return str(error.value)


def next_of(end: Any) -> Any:
    """The next thing that `end` receives; it has to come."""
    item = end.receive(WAIT_S)
    assert item is not None, f"nothing came in {WAIT_S} s"
    return item


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)
    return value


def joined(server: Server, name: str) -> None:
    assert next_of(server) == Joined(peer=name)


class Raw:
    """A bare zmq DEALER that says what it is told to."""

    def __init__(self, address: str, name: str = "raw", session: bytes = b"SESSION!", token: bytes = TOKEN) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        self.socket.connect(address)
        self.name, self.session = name, session
        self.seal = Seal(token, is_server=False)
        self.answers = Seal(TOKEN, is_server=True)
        self.answers._outgoing, self.answers._incoming = self.answers._incoming, self.answers._outgoing

    def pack(self, kind: int, sequence: int, payload: bytes = b"") -> list[bytes]:
        return self.seal.pack(kind, self.session, sequence, payload)

    def send(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.socket.send_multipart(frames)

    def join(self) -> Raw:
        self.send(self.pack(HELLO, 1, self.name.encode()))
        return self

    def answer(self, skip_beats: bool = True) -> Any:
        """The next message for us: (kind, payload), or ("refused", version)."""
        while self.socket.poll(WAIT_S * 1000):
            frames = self.socket.recv_multipart()
            _, version, kind = struct.unpack_from("<4sHB", frames[0])
            if kind == REFUSED:
                return "refused", version
            message = self.answers.unpack(frames)
            assert not isinstance(message, str), message
            assert message.session == self.session
            if message.kind != BEAT or not skip_beats:
                return message.kind, message.payload
        raise AssertionError("no answer")

    def close(self) -> None:
        self.context.destroy(linger=0)


def start(script: str, *args: str) -> subprocess.Popen[str]:
    """A process that runs `script` with this module's names of the transport, and its token."""
    code = "import contextlib, json, os, sys, time\nfrom engines.control import sealing, transport\n"
    code += "from engines.control.sealing import *\nfrom engines.control.transport import *\n"
    code += f"token = bytes.fromhex({TOKEN.hex()!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + script, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0], f"{process.args} wrote nothing in {WAIT_S} s"
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> str:
    """Kills it if it still runs. What it wrote that nobody has read."""
    process.kill()
    return process.communicate(timeout=WAIT_S)[0]


# ---- Both ends


def test_messages_arrive_whole_and_in_order(server: Server, client: Client) -> None:
    assert server.peers() == ["rank-3"]
    payloads = [b"", b"\0", os.urandom(1 << 20), os.urandom(MAX_BYTES + 1), *map(str.encode, map(str, range(2000)))]
    exchange(server, client, payloads)


def test_a_long_message_comes_in_parts() -> None:
    with (
        closing(Server(TOKEN, max_bytes=1000, **TIMES)) as server,
        closing(Client("rank-3", server.address, TOKEN, max_bytes=1000, **TIMES)) as client,
    ):
        joined(server, "rank-3")
        exchange(server, client, [os.urandom(size) for size in (0, 1, 999, 1000, 1001, 1999, 2000, 2001, 54_321)])
        assert not any(server.rejected.values()) and not any(client.rejected.values())


def exchange(server: Server, client: Client, payloads: list[bytes]) -> None:
    for payload in payloads:
        client.send(payload)
        server.send("rank-3", payload[::-1])
    assert [next_of(server) for _ in payloads] == [Received(peer="rank-3", payload=payload) for payload in payloads]
    assert [client.receive(WAIT_S) for _ in payloads] == [payload[::-1] for payload in payloads]
    assert server.receive(0) is None and client.receive(0) is None


def test_a_client_that_leaves(server: Server, client: Client) -> None:
    client.send(b"last words")
    client.close()
    client.close()
    assert next_of(server) == Received(peer="rank-3", payload=b"last words")
    assert next_of(server) == Lost(peer="rank-3", reason="it left")
    assert server.peers() == []
    refuses(lambda: server.send("rank-3", b""), r"peer: 'rank-3' has left \(it left\); here: nobody")
    for use in (lambda: client.send(b""), lambda: client.receive(0)):
        refuses(use, "'rank-3' has closed its connection")


@pytest.mark.parametrize("reason", ["the coordinator has closed", "the policy had no plan"])
def test_a_server_that_closes_says_why(server: Server, client: Client, reason: str) -> None:
    refuses(lambda: server.send("rank-9", b""), "peer: 'rank-9' never joined; here: rank-3;")
    server.send("rank-3", b"last words")
    server.close(*([reason] if "policy" in reason else []))
    server.close()
    assert client.receive(WAIT_S) == b"last words"
    for use in (lambda: client.receive(WAIT_S), lambda: client.receive(WAIT_S), lambda: client.send(b"")):
        refuses(use, f"dropped 'rank-3': {reason}")
    for use in (lambda: server.send("rank-3", b""), lambda: server.receive(0)):
        refuses(use, "closed")


# ---- The wire, by hand


def test_the_wire_format(server: Server) -> None:
    """The header, packed again from its description."""

    def frames(kind: int, sequence: int, payload: bytes) -> list[bytes]:
        head = struct.pack("<4sHB8sQ", b"CRTL", 6, kind, b"12345678", sequence)
        return [head + blake2b(head + payload, key=TOKEN, digest_size=16, person=b"to-server").digest(), payload]

    with closing(Raw(server.address, session=b"12345678")) as raw:
        raw.send(frames(HELLO, 1, b"by-hand"), frames(DATA, 2, b"payload"))
        joined(server, "by-hand")
        assert next_of(server) == Received(peer="by-hand", payload=b"payload")
        assert raw.answer(skip_beats=False) == (WELCOME, b"")
        assert raw.pack(DATA, 7, b"xyz") == frames(DATA, 7, b"xyz")


def flip(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


def bad_messages(raw: Raw) -> dict[str, list[list[bytes]]]:
    """By reason, messages that must not be taken. The next good one of `raw` is number 3."""
    header, payload = raw.pack(DATA, 3, b"payload")
    stranger = Seal(new_token(), is_server=False)
    return {
        "header": [
            *([b""], [header], [header, payload, b""], [b"", header, payload], [header, payload] * 500),
            *([b"", b""], [b"CRT", payload], [b"GET / HTTP/1.1", b"Host: localhost"], [payload, header]),
            *([header[:-1], payload], [header + b"\0", payload], [header[:7], payload]),
        ],
        "version": [[header[:4] + b"\1\0" + header[6:], payload], [header[:4] + b"\0\0\1", b""]],
        "token": [
            *(stranger.pack(kind, raw.session, 3, b"x") for kind in (HELLO, DATA, BYE)),
            *([header, payload[:-1]], [header, b""], [header, payload + b"\0"], [header, flip(payload, 0)]),
            *([flip(header, index), payload] for index in range(6, len(header))),
            Seal(TOKEN, is_server=True).pack(DATA, raw.session, 3, b"the server's own words"),
        ],
        "duplicate": [
            raw.pack(HELLO, 1, b"raw"),
            *(raw.pack(DATA, 2, payload) for payload in (b"first", b"other")),
            raw.pack(BYE, 0),
        ],
        "stale": [raw.seal.pack(kind, b"stranger", 2, b"boo") for kind in (DATA, BEAT, BYE)],
    }


@pytest.mark.parametrize("reason", REASONS)
def test_a_bad_message_is_dropped_and_counted(reason: str) -> None:
    with closing(Server(TOKEN, **TIMES)) as server, closing(Raw(server.address)) as raw:
        raw.join().send(raw.pack(DATA, 2, b"first"))
        bad = bad_messages(raw)[reason]
        raw.send(*bad, raw.pack(DATA, 3, b"second"))
        joined(server, "raw")
        assert [next_of(server).payload for _ in range(2)] == [b"first", b"second"]
        assert server.rejected == dict.fromkeys(REASONS, 0) | {reason: len(bad)}
        assert server.receive(0) is None


@pytest.mark.parametrize("num_bytes", [1001, 100_000])
def test_what_is_too_large_is_cut_off_and_others_go_on(num_bytes: int) -> None:
    with (
        closing(Server(TOKEN, max_bytes=1000, **TIMES)) as server,
        closing(Raw(server.address)) as raw,
        closing(Client("rank-0", server.address, TOKEN, max_bytes=1000, **TIMES)) as client,
    ):
        joined(server, "rank-0")
        raw.join()
        joined(server, "raw")
        raw.send(raw.pack(DATA, 2, b"x" * num_bytes))
        assert next_of(server) == Lost(peer="raw", reason="its connection was closed without a goodbye")
        client.send(b"x" * 1000)
        assert len(next_of(server).payload) == 1000


def test_bytes_that_are_not_even_zmq(server: Server) -> None:
    host, port = server.address.removeprefix("tcp://").split(":")
    noise = random.Random(0)
    for size in (0, 1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            try:
                raw.sendall(noise.randbytes(size))
            except ConnectionError:
                assert size > 64, "cut off in the greeting"
    with closing(Client("rank-0", server.address, TOKEN, **TIMES)):
        joined(server, "rank-0")


def test_a_replayed_session_changes_nothing(server: Server) -> None:
    with closing(Raw(server.address)) as raw, closing(Raw(server.address)) as thief:
        words = [(HELLO, b"raw"), (DATA, b"a"), (DATA, b"b"), (BYE, b"it left")]
        said = [raw.pack(kind, index + 1, payload) for index, (kind, payload) in enumerate(words)]
        raw.send(*said[:3])
        joined(server, "raw")
        assert [next_of(server).payload for _ in range(2)] == [b"a", b"b"]
        thief.send(*said[:3])
        until(lambda: server.rejected["duplicate"] == 3)
        server.send("raw", b"secret")  # still goes to the one that joined
        assert [raw.answer(), raw.answer()] == [(WELCOME, b""), (DATA, b"secret")]
        assert not thief.socket.poll(0)
        raw.send(said[3])
        assert next_of(server) == Lost(peer="raw", reason="it left")
        thief.send(*said)
        until(lambda: server.rejected["stale"] == 4)
        assert server.receive(0) is None
        assert server.rejected == dict.fromkeys(REASONS, 0) | {"duplicate": 3, "stale": 4}


def test_a_missing_message_ends_the_session(server: Server) -> None:
    """Nothing is silently skipped: the peer is dropped, told so, and its later messages are stale."""
    with closing(Raw(server.address)) as raw:
        raw.join().send(raw.pack(DATA, 2, b"a"), raw.pack(DATA, 5, b"d"), raw.pack(DATA, 3, b"b"))
        joined(server, "raw")
        assert next_of(server).payload == b"a"
        assert next_of(server) == Lost(peer="raw", reason="messages 3 to 4 are missing")
        assert [raw.answer(), raw.answer()] == [(WELCOME, b""), (BYE, b"messages 3 to 4 are missing")]
        until(lambda: server.rejected["stale"] == 1)


def test_a_silent_peer_is_lost_and_its_late_messages_are_stale() -> None:
    with closing(Server(TOKEN, interval_s=0.05, patience_s=0.3)) as server, closing(Raw(server.address)) as raw:
        raw.join()
        joined(server, "raw")
        lost = next_of(server)
        assert isinstance(lost, Lost) and lost.peer == "raw" and lost.reason.startswith("silent for ")
        raw.send(*(raw.pack(DATA, sequence, b"late") for sequence in range(2, 12)))
        until(lambda: server.rejected["stale"] == 10)
        assert [raw.answer(), raw.answer()] == [(WELCOME, b""), (BYE, lost.reason.encode())]
        assert raw.answer() == (BYE, b"it was given up as lost before")
        raw.session = b"renewed!"
        raw.join()
        joined(server, "raw")
        assert raw.answer() == (WELCOME, b"")  # the ten late ones got one answer between them


def test_a_server_that_was_away_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread gets no time for longer than its patience: that silence was its own."""
    with closing(Server(TOKEN, interval_s=0.1, patience_s=SOON_S)) as server, closing(Raw(server.address)) as raw:
        raw.join()
        joined(server, "raw")
        is_back = threading.Event()

        def unpack(frames: list[bytes]) -> str:
            time.sleep(SOON_S + 0.5)
            is_back.set()
            return "header"

        monkeypatch.setattr(server._seal, "unpack", unpack)
        raw.send([b"", b""])
        assert is_back.wait(WAIT_S)
        monkeypatch.undo()
        assert raw.answer() == (WELCOME, b"")
        while raw.socket.poll(0):  # beats from before
            assert raw.answer(skip_beats=False) == (BEAT, b"")
        assert raw.answer(skip_beats=False) == (BEAT, b"")
        raw.send(raw.pack(DATA, 2, b"still here"))
        assert next_of(server) == Received(peer="raw", payload=b"still here")


# ---- Refusals


def test_another_launch_is_refused_in_words(server: Server) -> None:
    """Two runs on one host: a process that finds the wrong coordinator hears so, and disturbs nobody."""
    with closing(Server(new_token(), **TIMES)) as other:
        assert other.address != server.address
        with closing(Client("rank-0", server.address, TOKEN, **TIMES)) as good:
            joined(server, "rank-0")
            with pytest.raises(ValueError, match=r"launch token: not the coordinator's; start both from the same"):
                Client("rank-0", other.address, TOKEN, **TIMES)
            assert other.rejected["token"] >= 1 and other.receive(0) is None
            good.send(b"undisturbed")
            assert next_of(server) == Received(peer="rank-0", payload=b"undisturbed")


def test_another_version_is_refused_in_words(server: Server) -> None:
    script = """
sealing.VERSION = transport.VERSION = 1
try:
    Client("rank-0", sys.argv[1], token)
except ValueError as error:
    print(error)
"""
    process = start(script, server.address)
    assert process.communicate(timeout=WAIT_S)[0] == (
        "protocol version: the coordinator's is 6, 'rank-0' has 1; start both from the same installation\n"
    )
    assert server.rejected["version"] >= 1 and server.receive(0) is None


@pytest.mark.parametrize("reason", ["token", "version"])
def test_a_refusal_is_said_once(server: Server, reason: str) -> None:
    with closing(Raw(server.address)) as raw:
        raw.send(*[bad_messages(raw)[reason][0]] * 1000)
        until(lambda: server.rejected[reason] == 1000)
        raw.join()
        assert [raw.answer(), raw.answer()] == [("refused", 6), (WELCOME, b"")]


def test_a_client_believes_no_stranger() -> None:
    """What a false coordinator can do to a client: refuse it before it has joined, and nothing after."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    seal, noise, clients = Seal(TOKEN, is_server=True), random.Random(0), []

    def run() -> None:
        clients.append(Client("rank-0", f"tcp://127.0.0.1:{port}", TOKEN, **TIMES))

    try:
        thread = threading.Thread(target=run)
        thread.start()
        route, header, payload = router.recv_multipart()
        session = header[7:15]
        good = [seal.pack(kind, session, index + 1, b"hi" * index) for index, kind in enumerate((WELCOME, DATA))]
        router.send_multipart([route, header, payload])  # its own words, which are of the other direction
        router.send_multipart([route, *good[0]])
        forged = [header, noise.randbytes(20)], [good[1][0], b"ho"], [struct.pack("<4sHB", b"CRTL", 6, REFUSED), b""]
        forged += (seal.pack(BYE, b"another!", 0, b"go"), good[0], [noise.randbytes(39), b""], [b""])
        for frames in (*forged, good[1]):
            router.send_multipart([route, *frames])
        thread.join(WAIT_S)
        (client,) = clients
        assert client.receive(WAIT_S) == b"hi"
        expected = {"token": 3, "header": 3, "stale": 1, "duplicate": 1, "version": 0}
        assert client.rejected == expected
        router.send_multipart([route, *seal.pack(DATA, session, 9, b"")])
        refuses(lambda: client.receive(WAIT_S), f"tcp://127.0.0.1:{port}: messages 3 to 8 are missing")
    finally:
        for client in clients:
            client.close()
        context.destroy(linger=0)


# ---- Processes that come and go

RANK = """
with contextlib.closing(Client(sys.argv[2], sys.argv[1], token, interval_s=0.1, patience_s=30)) as client:
    while True:
        payload = client.receive(60)
        if payload == b"exit":
            os._exit(0)
        if payload == b"return":
            sys.exit()
        if payload == b"compute":
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:  # longer than the patience, without a call of the client's
                pass
        client.send(payload)
"""


@pytest.fixture
def ranks(server: Server) -> Iterator[dict[str, subprocess.Popen[str]]]:
    processes = {name: start(RANK, server.address, name) for name in ("rank-0", "rank-1")}
    try:
        assert {next_of(server) for _ in processes} == {Joined(peer=name) for name in processes}
        yield processes
    finally:
        for process in processes.values():
            end(process)


@pytest.mark.parametrize("how", ["kill -9", "exit", "return"])
def test_a_process_that_is_gone_is_named(server: Server, ranks: dict[str, subprocess.Popen[str]], how: str) -> None:
    server.send("rank-1", b"before")
    assert next_of(server) == Received(peer="rank-1", payload=b"before")
    if how == "kill -9":
        ranks["rank-1"].kill()
    else:
        server.send("rank-1", how.encode())
    reason = "it left" if how == "return" else "its connection was closed without a goodbye"
    assert next_of(server) == Lost(peer="rank-1", reason=reason)
    server.send("rank-0", b"on we go")
    assert next_of(server) == Received(peer="rank-0", payload=b"on we go")
    ranks["again"] = start(RANK, server.address, "rank-1")
    joined(server, "rank-1")
    server.send("rank-1", b"new")
    assert next_of(server) == Received(peer="rank-1", payload=b"new")


def test_a_busy_process_keeps_beating() -> None:
    with closing(Server(TOKEN, interval_s=0.1, patience_s=SOON_S)) as server:
        process = start(RANK, server.address, "rank-0")
        try:
            joined(server, "rank-0")
            server.send("rank-0", b"compute")
            assert next_of(server) == Received(peer="rank-0", payload=b"compute")  # and no Lost before
        finally:
            end(process)


def test_a_stopped_process_is_lost_and_joins_anew() -> None:
    script = """
client = Client("rank-0", sys.argv[1], token, interval_s=0.1, patience_s=30)
try:
    while True:
        client.send(b"tick")
        client.receive(0.02)
except ConnectionError as error:
    print(error, flush=True)
    client.close()
client = Client("rank-0", sys.argv[1], token)
client.send(b"again")
client.receive(60)
"""
    with closing(Server(TOKEN, interval_s=0.1, patience_s=SOON_S)) as server:
        process = start(script, server.address)
        try:
            joined(server, "rank-0")
            assert next_of(server) == Received(peer="rank-0", payload=b"tick")
            seen: list[Notice] = []
            with stopped(process.pid):
                while not isinstance(notice := next_of(server), Lost):
                    seen.append(notice)
            assert set(seen) <= {Received(peer="rank-0", payload=b"tick")}
            assert notice.reason.startswith("silent for ")
            told = read_line(process)
            assert told == f"{server.address} dropped 'rank-0': {notice.reason}; join anew as a new Client\n"
            joined(server, "rank-0")
            assert next_of(server) == Received(peer="rank-0", payload=b"again")  # none of the old one's late messages
        finally:
            end(process)


def test_a_second_client_of_a_name_replaces_the_first(server: Server) -> None:
    """Until the caller has read of the change, the second gets nothing: that was meant for the first."""
    with closing(Client("rank-0", server.address, TOKEN, **TIMES)) as first:
        joined(server, "rank-0")
        with closing(Client("rank-0", server.address, TOKEN, **TIMES)) as second:
            why = "another client has joined under its name"
            server.send("rank-0", b"for the first")
            assert [next_of(server) for _ in range(2)] == [Lost(peer="rank-0", reason=why), Joined(peer="rank-0")]
            server.send("rank-0", b"for the second")
            assert second.receive(WAIT_S) == b"for the second"
        refuses(lambda: first.receive(WAIT_S), why)


SERVER = """
with contextlib.closing(Server(token, interval_s=0.1, patience_s=float(sys.argv[1]))) as server:
    print(server.address, flush=True)
    threads = lambda: len(os.listdir("/proc/self/task"))
    while True:
        match server.receive(60):
            case Received(peer=peer, payload=b"facts"):
                pages = int(open("/proc/self/statm").read().split()[1])
                facts = {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "fds": len(os.listdir("/proc/self/fd"))}
                facts |= {"threads": threads(), "rejected": sum(server.rejected.values()), "reasons": server.rejected}
                server.send(peer, json.dumps(facts).encode())
            case Received(peer=peer, payload=payload):
                server.send(peer, payload)
"""


@pytest.fixture
def remote() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that echoes, in a process of its own: its address and its process."""
    process = start(SERVER, str(SOON_S))
    try:
        yield read_line(process).strip(), process
    finally:
        end(process)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_gone_is_named(remote: tuple[str, subprocess.Popen[str]], how: signal.Signals) -> None:
    """A dead one by its connection, long before the patience is at its end; a stopped one by its silence."""
    address, process = remote
    words = "its connection was closed" if how == signal.SIGKILL else r"silent for (\d+\.\d) s"
    with closing(Client("rank-0", address, TOKEN, interval_s=0.1, patience_s=600.0)) as client:
        client.send(b"there?")
        assert client.receive(WAIT_S) == b"there?"
        if how == signal.SIGSTOP:
            with stopped(process.pid):
                client._patience_s = 2.0  # it may have been slow before
                error = refuses(lambda: client.receive(WAIT_S), f"{address}: {words}")
        else:
            process.send_signal(how)
            error = refuses(lambda: client.receive(WAIT_S), f"{address}: {words}")
        refuses(lambda: client.send(b""), words)
        assert how == signal.SIGKILL or float(re.findall(words, error)[0]) >= 2.0


def test_nobody_there() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        words = rf"{address}: silent for (\d+\.\d) s; is the coordinator running"
        error = refuses(lambda: Client("rank-0", address, TOKEN, interval_s=0.1, patience_s=0.3), words)
        assert float(re.findall(words, error)[0]) >= 0.3


# ---- A hundred thousand bad messages


def fuzzed(noise: random.Random, good: list[bytes]) -> list[bytes]:
    """Random bytes, a valid message with something changed, or another number of frames."""
    kind = noise.randrange(4)
    if kind == 0:
        return [noise.randbytes(noise.choice([0, 1, 7, 38, 39, 40, 300])), noise.randbytes(noise.randrange(3000))]
    frames = [bytearray(frame) for frame in good]
    if kind == 1:
        for index in noise.sample(range(len(good[0]) + 20), noise.randint(1, 3)):  # mostly in the header
            frame, place = (frames[0], index) if index < len(good[0]) else (frames[1], index - len(good[0]))
            frame[place] ^= 1 << noise.randrange(8)
    elif kind == 2:
        frame = frames[noise.randrange(2)]
        del frame[noise.randrange(len(frame)) :]
    else:
        frames = [bytearray(noise.randbytes(noise.randrange(200))) for _ in range(noise.choice([1, 3, 4, 9]))]
    return [bytes(frame) for frame in frames]


def test_fuzz(remote: tuple[str, subprocess.Popen[str]]) -> None:
    address, process = remote
    noise, num_sent = random.Random(0), 0
    with closing(Client("rank-0", address, TOKEN, **TIMES)) as client:

        def ask(payload: bytes) -> bytes:
            client.send(payload)
            return next_of(client)

        def flood(num_messages: int) -> dict[str, Any]:
            """By a passer-by: what the server holds when it has seen all."""
            nonlocal num_sent
            num_sent += num_messages
            with closing(Raw(address)) as raw:
                good = raw.pack(DATA, 2, noise.randbytes(500))
                for index in range(num_messages):
                    raw.send(fuzzed(noise, good))
                    if index % 50 == 0:  # while the others queue up behind each other
                        word = noise.randbytes(40)
                        assert ask(word) == word
                return until(lambda: now if (now := json.loads(ask(b"facts")))["rejected"] == num_sent else None)

        for num_messages in (10_000, *[10] * 20):
            before = flood(num_messages)
        for num_messages in (90_000, *[10] * 100):
            flood(num_messages)
        after = until(lambda: now if (now := json.loads(ask(b"facts")))["fds"] <= before["fds"] else None)
        assert num_sent > 100_000
        assert {reason for reason, count in after["reasons"].items() if count} >= {"version", "header", "token"}
        assert after["threads"] == before["threads"]
        # Keeping the messages would take 100 MB, and a mere 100 bytes for each 9 MB.
        assert after["rss"] - before["rss"] < 6 << 20
        assert process.poll() is None


def test_unpack_never_raises() -> None:
    noise = random.Random(1)
    seal = Seal(TOKEN, is_server=True)
    good = Seal(TOKEN, is_server=False).pack(DATA, b"SESSION!", 2, noise.randbytes(100))
    assert seal.unpack(good) == Message(DATA, b"SESSION!", 2, good[1])
    for _ in range(20_000):
        assert seal.unpack(fuzzed(noise, good)) in REASONS


# ---- Opening and closing


def num_open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(count: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """zmq closes what a socket had in a thread of its own: the counts once they have not changed for half a second."""
    seen = [count()]
    while len(seen) < 6 or len(set(seen[-6:])) > 1:
        time.sleep(0.1)
        seen.append(count())
        assert len(seen) < 300, "what is open never settles"
    return seen[-1]


def test_opening_and_closing_leaks_nothing() -> None:
    def cycle() -> None:
        with closing(Server(TOKEN, **TIMES)) as server:
            port = int(server.address.rsplit(":")[-1])
            with ExitStack() as stack:
                for rank in range(3):
                    client = stack.enter_context(closing(Client(f"rank-{rank}", server.address, TOKEN, **TIMES)))
                    client.send(b"hello")
                assert {next_of(server).peer for _ in range(6)} == {"rank-0", "rank-1", "rank-2"}
                if port % 2:
                    server.close()  # the other order
            with pytest.raises((ValueError, ConnectionError)):
                Client("rank-0", server.address, new_token(), interval_s=0.01, patience_s=0.05)
            with pytest.raises(ValueError):
                Client("rank-0", "nowhere", TOKEN)
            with pytest.raises(ValueError):
                Server(TOKEN, host="256.0.0.1")

    for _ in range(3):
        cycle()
    before = settled(num_open)
    for _ in range(40):
        cycle()
    after = settled(num_open)
    assert after[0] <= before[0] and after[1] <= before[1]
    assert not [thread for thread in threading.enumerate() if thread.name == "control-transport"]


def test_forgetting_to_close_does_not_hang(server: Server) -> None:
    process = start('client = Client("rank-0", sys.argv[1], token)\nother = Server(token)', server.address)
    assert process.wait(WAIT_S) == 0
    end(process)
    joined(server, "rank-0")
    assert next_of(server) == Lost(peer="rank-0", reason="its connection was closed without a goodbye")


def test_a_port_in_use(server: Server) -> None:
    port = int(server.address.rsplit(":")[-1])
    with pytest.raises(OSError, match=rf"port: 127\.0\.0\.1:{port} is in use; choose another, or 0 for any free one"):
        Server(TOKEN, port=port)
    server.close()
    with closing(Server(TOKEN, port=port)) as next_server:
        assert next_server.address == f"tcp://127.0.0.1:{port}"


def test_loopback_unless_told_otherwise(server: Server) -> None:
    assert server.address.startswith("tcp://127.0.0.1:")
    with closing(Server(TOKEN, host="0.0.0.0")) as everywhere:
        assert everywhere.address.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Server(b"short"), r"launch token: 5 bytes, must be 32; use new_token\(\)"),
        (lambda: Server(TOKEN, interval_s=2, patience_s=1), "interval_s: 2 must be above 0 and below patience_s, 1"),
        (lambda: Server(TOKEN, host="no such"), "host, port: cannot listen on no such:0"),
        (lambda: Client("rank 0", "tcp://127.0.0.1:1", TOKEN), "name: 'rank 0' is no peer name; use 1 to 64 letters"),
        (lambda: Client("rank-0", "127.0.0.1:1", TOKEN), "address: '127.0.0.1:1': .*; give the server's `address`"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
