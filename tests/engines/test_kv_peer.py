"""KV across hosts: fetched bit for bit over real sockets, and whatever goes wrong is a ValueError in time."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engines.control.sealing import new_token
from engines.control.transport import Client
from engines.kvcache import peer
from engines.kvcache.peer import PeerKVStore
from engines.kvcache.transfer import HostKVStore, KVContent
from engines.sequence import KVPart
from tests.engines.test_kv_transfer import CONTENT, DAMAGES, layers_of
from tests.worlds import ROOT

TOKEN = new_token()
KV_TOKEN = "0123456789abcdef"


def make_store(folder: Path, host: str, token: bytes = TOKEN) -> PeerKVStore:
    folder.mkdir(exist_ok=True)
    local = HostKVStore(KV_TOKEN, 2**26, [folder])
    return PeerKVStore(local, host=host, address="127.0.0.1", token=token, patience_s=2.0)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[PeerKVStore, PeerKVStore]]:
    both = make_store(tmp_path / "here", "here"), make_store(tmp_path / "there", "there")
    yield both
    for store in both:
        store.close()


def export(store: PeerKVStore, content: KVContent = CONTENT) -> KVPart:
    part = store.export(content, layers_of(content))
    assert part is not None
    return part


def file_of(part: KVPart) -> Path:
    return Path(part.location.split("|")[2])


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 10.0
    while path.exists():
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [3, 50_000])  # less than one piece, and more than are asked for ahead
def test_what_another_host_keeps_comes_bit_for_bit(
    stores: tuple[PeerKVStore, PeerKVStore], dtype: str, num_tokens: int
) -> None:
    here, there = stores
    content = replace(CONTENT, dtype=dtype, num_tokens=num_tokens)
    part = export(there, content)
    first, again = here.load(part, content), here.load(part, content)
    here.drop(part)
    wait_until_gone(file_of(part))
    for loaded in (first, again):
        assert torch.equal(torch.stack(list(loaded)), torch.stack(layers_of(content)))
    with pytest.raises(ValueError, match=r"has 0 of .*recompute the KV"):
        here.load(part, content)
    part = export(there, content)  # and the next question gets its own answer
    assert torch.equal(here.load(part, content)[0], layers_of(content)[0])


def test_on_one_host_nothing_is_fetched(tmp_path: Path) -> None:
    one, other = make_store(tmp_path, "here"), make_store(tmp_path, "here")
    part = export(one)
    one._server.close()
    assert torch.equal(other.load(part, CONTENT)[0], layers_of(CONTENT)[0])
    other.drop(part)
    assert not file_of(part).exists()
    one.close()
    other.close()


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "longer"])
def test_a_damaged_file_is_refused(stores: tuple[PeerKVStore, PeerKVStore], how: str) -> None:
    here, there = stores
    part = export(there)
    DAMAGES[how][0](file_of(part))
    with pytest.raises(ValueError, match="recompute the KV"):
        here.load(part, CONTENT)


def test_other_content_is_refused(stores: tuple[PeerKVStore, PeerKVStore]) -> None:
    here, there = stores
    with pytest.raises(ValueError, match="policy_version=3, wanted 4"):
        here.load(export(there), replace(CONTENT, policy_version=4))


def test_only_files_of_the_run_are_read_or_removed(stores: tuple[PeerKVStore, PeerKVStore], tmp_path: Path) -> None:
    here, there = stores
    part = export(there)
    secret = tmp_path / "there" / "secret"
    secret.write_bytes(file_of(part).read_bytes())
    for path in (secret, tmp_path / "there" / ".." / "there" / "secret", "/etc/passwd", ""):
        foreign = replace(part, location="|".join(("there", there._server.address, str(path))))
        with pytest.raises(ValueError, match="recompute the KV"):
            here.load(foreign, CONTENT)
        here.drop(foreign)
    for location in ("", "nowhere", "there|tcp://|x", "a|b|c|d", str(file_of(part))):
        with pytest.raises(ValueError, match="recompute the KV"):
            here.load(replace(part, location=location), CONTENT)
        here.drop(replace(part, location=location))
    assert torch.equal(here.load(part, CONTENT)[0], layers_of(CONTENT)[0])
    assert secret.exists()


def test_requests_that_are_none_are_answered_with_nothing(stores: tuple[PeerKVStore, PeerKVStore]) -> None:
    here, there = stores
    part = export(there)
    client = Client("fuzz", there._server.address, TOKEN)
    path = str(file_of(part))
    reads = [(path, -5, 10), (path, 2**62, 10), (path, 0, -1)]
    bad = [b"", b"\xff" * 40, b"[]", *(msgspec.msgpack.encode(peer.Read(*read)) for read in reads)]
    for request in bad:
        client.send(request)
        assert client.receive(5.0) == b""
    client.send(msgspec.msgpack.encode(peer.Read(path, 0, 2**62)))
    assert client.receive(5.0) == file_of(part).read_bytes()
    client.close()
    assert here.load(part, CONTENT)


def test_another_run_s_store_is_refused(stores: tuple[PeerKVStore, PeerKVStore], tmp_path: Path) -> None:
    stranger = make_store(tmp_path / "stranger", "here", new_token())
    part = export(stores[1])
    with pytest.raises(ValueError, match="launch token: not the coordinator's"):
        stranger.load(part, CONTENT)
    stranger.close()


SCRIPT = """
import sys, time
from pathlib import Path
from tests.engines import test_kv_peer as t
store = t.make_store(Path(sys.argv[1]), "there", bytes.fromhex(sys.argv[2]))
print(t.export(store).location, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_connected", [False, True])
def test_a_host_that_is_gone_is_named_in_time(tmp_path: Path, sent: signal.Signals, is_connected: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), TOKEN.hex()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    here = make_store(tmp_path / "here", "here")
    try:
        assert process.stdout is not None
        part = replace(export(here), location=process.stdout.readline().strip())
        if is_connected:
            assert torch.equal(here.load(part, CONTENT)[0], layers_of(CONTENT)[0])
        process.send_signal(sent)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a busy machine stops it later
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"cannot be fetched \(tcp://127.0.0.1:.*recompute the KV"):
            here.load(part, CONTENT)
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
        token = secrets.token_bytes(32)
        here, there = make_store(tmp_path / "here", "here", token), make_store(tmp_path / "there", "there", token)
        assert here.load(export(there), CONTENT) and there.load(export(here), CONTENT)
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
    assert not list(tmp_path.glob("*/curtail-kv-*"))
