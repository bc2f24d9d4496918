"""KV across hosts: what sockets add to the contract of `test_kv_store.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engines.control.transport import Client
from engines.kvcache import peer
from engines.kvcache.peer import PeerKVStore
from tests.engines.test_decoding import nested
from tests.engines.test_kv_store import CONTENT, export, has, make_tiers
from tests.proc import state_of
from tests.worlds import ROOT

TOKEN = bytes(range(32))


def make_store(folder: Path, host: str) -> PeerKVStore:
    return PeerKVStore(make_tiers(folder, 2**20, 0), host=host, address="127.0.0.1", token=TOKEN, patience_s=2.0)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[PeerKVStore, PeerKVStore]]:
    both = make_store(tmp_path / "here", "here"), make_store(tmp_path / "there", "there")
    yield both
    for store in both:
        store.close()


def test_on_one_host_nothing_is_fetched(tmp_path: Path) -> None:
    one, other = make_store(tmp_path, "here"), make_store(tmp_path, "here")
    part = export(one)
    one._server.close()
    assert has(other, part)
    other.drop(part)
    assert not has(other, part) and other.num_fetched == 0
    one.close()
    other.close()


def test_requests_that_are_none_are_answered_with_nothing(
    stores: tuple[PeerKVStore, PeerKVStore], tmp_path: Path
) -> None:
    here, there = stores
    part = export(there)
    client = Client("fuzz", there._server.address, TOKEN)
    name = part.location.split("|")[2]
    reads = [(name, -5, 10), (name, 2**62, 10), (name, 2**63, 10), (name, 0, -1)]
    bad = [b"", b"\xff" * 40, b"[]", *nested(), *(msgspec.msgpack.encode(peer.Read(*read)) for read in reads)]
    for request in bad:
        client.send(request)
        assert client.receive(5.0) == b""
    client.send(msgspec.msgpack.encode(peer.Read(name, 0, 2**62)))
    assert client.receive(5.0) == (tmp_path / "there" / "host" / name).read_bytes()
    client.close()
    assert here.load(part, CONTENT)


def test_a_drop_waits_for_no_fetch(stores: tuple[PeerKVStore, PeerKVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = stores
    monkeypatch.setattr(here, "_patience_s", 60.0)
    fetched, dropped = export(there), export(there)
    asked, may_answer, read = threading.Event(), threading.Event(), there._read

    def read_late(request: peer.Read) -> bytes:
        asked.set()
        may_answer.wait(60.0)
        return read(request)

    monkeypatch.setattr(there, "_read", read_late)
    fetch = threading.Thread(target=here.load, args=(fetched, CONTENT))
    fetch.start()
    assert asked.wait(60.0)
    here.drop(dropped)
    assert fetch.is_alive(), "it has waited for the fetch"
    may_answer.set()
    fetch.join()
    deadline = time.monotonic() + 60
    while has(there, dropped):
        assert time.monotonic() < deadline, "the entry is not dropped"
        time.sleep(0.01)
    assert has(there, fetched) and here.num_fetched == 1


SCRIPT = """
import sys, time
from pathlib import Path
from tests.engines import test_kv_peer as t
store = t.make_store(Path(sys.argv[1]), "there")
print(t.export(store).location, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_connected", [False, True])
def test_a_host_that_is_gone_is_named_in_time(tmp_path: Path, sent: signal.Signals, is_connected: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "there")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    here = make_store(tmp_path / "here", "here")
    try:
        assert process.stdout is not None
        part = replace(export(here), location=process.stdout.readline().strip())
        if is_connected:
            assert has(here, part)
        for _ in range(20):  # somebody may send it SIGCONT, as a debugger does: then it answers
            while state_of(process.pid) not in "TZ":  # stopped, or ended: on a busy machine that takes a while
                process.send_signal(sent)
                time.sleep(0.001)
            start = time.monotonic()
            try:
                here.load(part, CONTENT)
            except ValueError as error:
                assert re.search(r"cannot be fetched \(tcp://127.0.0.1:.*recompute the KV", str(error))
                break
        else:
            raise AssertionError("a host that is gone has answered")
        here.drop(part)
        assert time.monotonic() - start < 30.0
    finally:
        process.kill()
        process.wait()
        here.close()


def test_closing_leaves_no_thread_connection_or_file(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def use() -> None:
        here, there = make_store(tmp_path / "here", "here"), make_store(tmp_path / "there", "there")
        assert has(here, export(there)) and has(there, export(here))
        here.close()
        there.close()
        here.close()

    use()
    before = held()
    for _ in range(5):
        use()
    deadline = time.monotonic() + 10.0  # zmq gives sockets back a moment later
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() <= before
    assert not list(tmp_path.glob("*/host/*"))
