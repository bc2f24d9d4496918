"""Stored KV: one contract for all stores, bit for bit, bounded, and never other content than was stored."""

from __future__ import annotations

import itertools
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import EngineConfig, ModelConfig
from engines.kvcache import files, peer
from engines.kvcache.files import FileKVStore
from engines.kvcache.peer import PeerKVStore
from engines.kvcache.store import HEADER_BYTES, KVContent, KVStore, load_heads, tokens_digests
from engines.kvcache.tiers import (
    DEFAULT_HOST_BYTES,
    TieredKVStore,
    host_pool_bytes,
    make_disk_store,
    make_kv_store,
)
from engines.parallel.owned_files import reclaim
from engines.parallel.sharding import Shard, kv_heads
from engines.sequence import KVHandle, KVPart
from tests.worlds import ROOT

TOKEN = "0123456789abcdef"


def digest_of(tokens: list[int]) -> str:
    return tokens_digests(tokens, [len(tokens)])[0]


CONTENT = KVContent(
    policy_version=3, tokens_digest=digest_of([5, 6, 7]), dtype="float32", num_layers=2, first_token=0, num_tokens=3,
    first_head=0, num_heads=2, head_dim=4,
)  # fmt: skip
SIZE = HEADER_BYTES + CONTENT.num_bytes
NO_PART = CONTENT.part("")


def layers_of(content: KVContent) -> list[torch.Tensor]:
    """Other tokens have other layers."""
    generator = torch.Generator().manual_seed(int(content.tokens_digest[:8], 16))
    dtype = getattr(torch, content.dtype)
    return [torch.randn(content.layer_shape, generator=generator).to(dtype) for _ in range(content.num_layers)]


def export(store: KVStore, content: KVContent = CONTENT) -> KVPart:
    part = store.export(content, layers_of(content))
    assert part is not None
    return part


def has(store: KVStore, part: KVPart, content: KVContent = CONTENT) -> bool:
    """Whether the entry is there; what is there must be what was stored."""
    try:
        loaded = torch.stack(list(store.load(part, content)))
    except ValueError as error:
        assert "recompute the KV" in str(error)
        return False
    assert torch.equal(loaded, torch.stack(layers_of(content)))
    return True


def make_store(folder: Path, capacity_bytes: int = 2**26, token: str = TOKEN) -> FileKVStore:
    return FileKVStore("host", token, capacity_bytes, [folder])


def make_tiers(folder: Path, host_bytes: int, disk_bytes: int, token: str = TOKEN) -> TieredKVStore:
    for name in ("host", "disk"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    return TieredKVStore(
        make_store(folder / "host", host_bytes, token), make_disk_store(token, disk_bytes, folder / "disk")
    )


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.exists() else {}


# -- one contract


@dataclass(frozen=True)
class Kind:
    """Two stores of a run, each in a process of its own as far as they know."""

    make: Callable[[Path, int, str], Any]
    """(folder, capacity, token of the run)"""
    is_remote: bool = False
    """Whether the reader is on another host than the writer."""


def make_peer(host: str, folder: Path, capacity_bytes: int, token: str) -> PeerKVStore:
    local = make_tiers(folder, capacity_bytes, 0, token)
    return PeerKVStore(local, host=host, address="127.0.0.1", token=token.encode() * 2, patience_s=5.0)


KINDS = {
    "host": Kind(lambda folder, size, token: make_store(folder, size, token)),
    "disk": Kind(lambda folder, size, token: make_disk_store(token, size, folder)),
    "tiers": Kind(lambda folder, size, token: make_tiers(folder, size, 0, token)),
    "tiers, all on disk": Kind(lambda folder, size, token: make_tiers(folder, 0, size, token)),
    "peers of a host": Kind(lambda folder, size, token: make_peer("here", folder, size, token)),
    "peers of two hosts": Kind(lambda folder, size, token: make_peer(folder.name, folder, size, token), is_remote=True),
}


class Pair:
    """A store and another one that reads what it has stored."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.is_remote = kind.is_remote
        self._kind, self._folder = kind, folder
        self._made: list[Any] = []
        self.writer = self.make("a")
        self.reader = self.make("b" if kind.is_remote else "a")

    def make(self, host: str, capacity_bytes: int = 3 * SIZE, token: str = TOKEN) -> Any:
        (self._folder / host).mkdir(exist_ok=True)
        self._made.append(self._kind.make(self._folder / host, capacity_bytes, token))
        return self._made[-1]

    def files(self) -> list[Path]:
        return [path for path in (self._folder / "a").rglob("curtail-*") if not path.is_dir()]

    def drop(self, part: KVPart) -> None:
        """By the reader; waits until it is done."""
        self.reader.drop(part)
        name, deadline = part.location.rpartition("|")[2], time.monotonic() + 60
        while self.is_remote and any(path.name == name for path in self.files()):
            assert time.monotonic() < deadline, "the entry is not dropped"
            time.sleep(0.01)

    def close(self) -> None:
        for store in self._made:
            store.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(KINDS[request.param], tmp_path)
    yield pair
    pair.close()
    assert not pair.files()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_stored_comes_back_bit_for_bit(pair: Pair, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_PIECE_BYTES", 100)  # more pieces than are asked for ahead
    content = replace(CONTENT, dtype=dtype)
    part = export(pair.writer, content)
    (path,) = pair.files()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == part.num_bytes + HEADER_BYTES
    loaded = pair.reader.load(part, content)
    for _ in range(2):
        pair.drop(part)
        assert not pair.files() and not has(pair.reader, part, content)
    assert torch.equal(torch.stack(list(loaded)), torch.stack(layers_of(content)))
    assert has(pair.reader, export(pair.writer, content), content), "the next question gets its own answer"


def damage(change: Callable[[bytearray], object]) -> Callable[[Path], object]:
    def on_disk(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return on_disk


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "is no file of this run in .*it is gone"),
    "truncated": (damage(lambda data: data.pop()), "has 895 bytes, 896 wanted"),
    "empty": (damage(lambda data: data.clear()), "has 0 bytes, 896 wanted"),
    "longer": (damage(lambda data: data.append(0)), "has 897 bytes, 896 wanted"),
    "no magic": (damage(lambda data: data.__setitem__(0, 0)), "no KV of format 3"),
    "another format": (damage(lambda data: data.__setitem__(8, 9)), "no KV of format 3"),
    "torn header": (damage(lambda data: data.__setitem__(slice(20, 40), bytes(20))), "its header is damaged"),
    "a flipped bit": (damage(lambda data: data.__setitem__(700, data[700] ^ 4)), "its content is damaged"),
    "a link": (to_link, "cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(pair: Pair, how: str) -> None:
    part = export(pair.writer)
    assert has(pair.reader, part)
    change, message = DAMAGES[how]
    change(pair.files()[0])
    if pair.is_remote and how == "longer":
        assert has(pair.reader, part)  # its beginning is what was asked for
        return
    with pytest.raises(ValueError, match="recompute the KV" if pair.is_remote else message):
        pair.reader.load(part, CONTENT)
    for path in pair.files():
        path.unlink()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy_version", 4),
        ("tokens_digest", digest_of([5, 6, 8])),
        ("dtype", "int32"),
        ("first_head", 1),
        ("first_token", 4),
    ],
)
def test_other_content_of_the_same_size_is_refused(pair: Pair, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}=.*wanted {value!r}"):
        pair.reader.load(export(pair.writer), replace(CONTENT, **{field: value}))


def test_files_that_are_not_the_run_s_are_neither_read_nor_removed(pair: Pair) -> None:
    mine, theirs = export(pair.writer), export(pair.make("a", token=TOKEN[::-1]))
    (path,) = (path for path in pair.files() if TOKEN in path.name)
    for file in (path.with_name("secret"), path.with_name(f"{path.name}-2")):
        file.write_bytes(path.read_bytes())
    before, where, name = pair.files(), *mine.location.rpartition("|")[::2]
    names = ["", "secret", f"{name}-2", f"../{path.parent.name}/{name}", str(path), f"{name}\0", "/etc/passwd"]
    locations = [theirs.location, *(f"{where}|{one}" if where else one for one in names)]
    for location in [*locations, "nowhere", "there|tcp://|x", "a|b|c|d"]:
        foreign = replace(mine, location=location)
        assert not has(pair.reader, foreign)
        pair.reader.drop(foreign)
        assert has(pair.reader, mine)
    pair.drop(export(pair.writer))  # after which those before it are done, too
    assert pair.files() == before
    for file in before:
        if file.name.endswith("-2"):
            file.unlink()


def test_capacity_bounds_the_files_that_exist(pair: Pair) -> None:
    parts = [export(pair.writer) for _ in range(3)]
    assert pair.writer.tier_for(CONTENT.num_bytes) is None
    assert pair.writer.export(CONTENT, layers_of(CONTENT)) is None
    pair.drop(parts[1])
    tier = pair.writer.tier_for(CONTENT.num_bytes)
    assert tier is not None and has(tier.store, export(tier.store))
    assert pair.writer.export(CONTENT, layers_of(CONTENT)) is None
    assert [path.stat().st_size for path in pair.files()] == [SIZE] * 3
    assert has(pair.reader, parts[0]) and not has(pair.reader, parts[1]) and has(pair.reader, parts[2])


def test_a_failed_export_leaves_no_file(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="bytes of layers"):
        pair.writer.export(CONTENT, layers_of(CONTENT)[:1])
    assert not pair.files()
    assert [pair.writer.export(CONTENT, layers_of(CONTENT)) is None for _ in range(4)] == [False] * 3 + [True]


@pytest.mark.parametrize("disk_files", [0, 20])
def test_one_thread_drops_what_another_exports(tmp_path: Path, disk_files: int) -> None:
    """And moves down to the disk, where there is one."""
    store = make_tiers(tmp_path, 3 * SIZE, disk_files * SIZE)
    exported: queue.SimpleQueue[KVPart | None] = queue.SimpleQueue()
    found = []

    def drop() -> None:
        while (part := exported.get()) is not None:
            found.append(has(store, part))
            store.drop(part)

    dropper = threading.Thread(target=drop)
    dropper.start()
    try:
        for _ in range(1000):
            part = store.export(CONTENT, layers_of(CONTENT))
            if part is not None:
                exported.put(part)
    finally:
        exported.put(None)
        dropper.join()
    assert found and all(found)
    assert store.num_bytes == 0 and not files_in(tmp_path / "host") and not files_in(store.disk.folders[0])


def test_what_importers_have_taken_is_forgotten_in_time(tmp_path: Path) -> None:
    store, reader = make_store(tmp_path), make_store(tmp_path)
    for _ in range(1000):
        reader.drop(export(store))
    assert len(store.files._sizes) <= 100


@pytest.mark.parametrize(("options", "message"), [
    ({"token": "short"}, r"FileKVStore.token='short'"),
    ({"token": "0123456789abcde/"}, r"FileKVStore.token"),
    ({"capacity_bytes": -1}, r"FileKVStore.capacity_bytes=-1"),
])  # fmt: skip
def test_bad_options_of_a_store_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_store(tmp_path, **{"capacity_bytes": 0, **options})


# -- KV heads


@pytest.mark.parametrize(("num_heads", "num_from", "num_to"), itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)))
def test_shards_of_any_count_are_read_by_shards_of_any_count(
    tmp_path: Path, qwen3: str, num_heads: int, num_from: int, num_to: int
) -> None:
    config = replace(ModelConfig.from_pretrained(qwen3), num_heads=8, num_kv_heads=num_heads)
    store = make_store(tmp_path)
    whole = layers_of(replace(CONTENT, num_heads=num_heads))
    made = [kv_heads(config, Shard(index=index, count=num_from, max_count=4)) for index in range(num_from)]
    cuts = {(heads.start, heads.stop) for heads in made}
    assert len(cuts) == min(num_from, num_heads)
    parts = []
    for start, stop in cuts:
        content = replace(CONTENT, first_head=start, num_heads=stop - start)
        parts.append(store.export(content, [layer[:, :, start:stop] for layer in whole]))
    for index in range(num_to):
        heads = kv_heads(config, Shard(index=index, count=num_to, max_count=4))
        wanted = replace(CONTENT, first_head=heads.start, num_heads=heads.stop - heads.start)
        for got, layer in zip(load_heads(store, parts, wanted), whole, strict=True):
            assert torch.equal(got, layer[:, :, heads])


@pytest.mark.parametrize("seed", range(200))
def test_ranges_against_every_token_and_head(seed: int) -> None:
    """Parts in any order, some lost: the first tokens are stored whose ranges are all there, from the first on."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5) for _ in range(rng.randint(0, 6))]
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    whole: list[KVPart] = []
    for first, length in zip(firsts, lengths, strict=True):
        cuts = [0, *sorted(rng.sample(range(1, 4), rng.randint(0, 3))), 4]
        whole += [
            replace(NO_PART, first_token=first, num_tokens=length, first_head=head, num_heads=end - head)
            for head, end in itertools.pairwise(cuts)
        ]
    lost = set(rng.sample(firsts, min(len(firsts), rng.choice([0, 0, 1, 2]))))
    parts = [part for part in whole if part.first_token not in lost]
    rng.shuffle(parts)
    handle = KVHandle(policy_version=0, dtype="float32", parts=tuple(parts))
    held = {part.first_token + offset for part in parts for offset in range(part.num_tokens)}
    expected = next(token for token in itertools.count() if token not in held)
    assert handle.num_tokens == expected
    assert [(group[0].first_token, group[0].num_tokens) for group in handle.ranges] == [
        (first, length) for first, length in zip(firsts, lengths, strict=True) if first + length <= expected
    ]
    assert all(sum(part.num_heads for part in group) == 4 for group in handle.ranges)
    num_kept = rng.randint(0, sum(lengths))
    kept = handle.first(num_kept)
    assert set(() if kept is None else kept.parts) == {p for p in parts if p.first_token + p.num_tokens <= num_kept}


def test_digests_of_all_ends_are_those_of_each_one() -> None:
    tokens = list(range(50))
    assert tokens_digests(tokens, [3, 3, 17, 50]) == [digest_of(tokens[:end]) for end in (3, 3, 17, 50)]
    assert len(set(tokens_digests(tokens, range(1, 51)))) == 50


def test_a_head_that_no_part_holds_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match="KV head 2 is in none of 1 parts"):
        load_heads(store, [export(store)], replace(CONTENT, first_head=1))


# -- tiers


OPERATION = st.tuples(
    st.sampled_from(["export", "export", "export", "load", "load elsewhere", "drop", "drop elsewhere", "lose", "harm"]),
    st.integers(0, 30),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATION, max_size=40), host=st.integers(0, 6), disk=st.integers(0, 8))
def test_against_a_plain_record_of_what_lies_where(operations: list[tuple[str, int]], host: int, disk: int) -> None:
    """The record: each tier's files, the least recently used first, and what every part was made of."""
    host_bytes, disk_bytes = host * SIZE, disk * SIZE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, elsewhere = make_tiers(folder, host_bytes, disk_bytes), make_tiers(folder, 0, 0)
        in_host: OrderedDict[str, int] = OrderedDict()
        on_disk: dict[str, int] = {}
        parts: list[tuple[KVPart, KVContent]] = []
        harmed: set[str] = set()
        for operation, number in operations:
            if operation == "export":
                content = replace(CONTENT, num_tokens=1 + number, tokens_digest=digest_of([len(parts)]))
                size = HEADER_BYTES + content.num_bytes
                fits = size <= host_bytes
                while fits and sum(in_host.values()) + size > host_bytes:
                    oldest = next(iter(in_host))
                    fits = sum(on_disk.values()) + in_host[oldest] <= disk_bytes
                    if fits:
                        on_disk[oldest] = in_host.pop(oldest)
                room = fits or sum(on_disk.values()) + size <= disk_bytes
                part = store.export(content, layers_of(content))
                assert (part is not None) == room
                if part is not None:
                    (in_host if fits else on_disk)[part.location] = size
                    parts.append((part, content))
            elif parts:
                part, content = parts[number % len(parts)]
                file = part.location
                where = store if "elsewhere" not in operation else elsewhere
                if operation.startswith("load"):
                    if file not in {*in_host, *on_disk} or file in harmed:
                        assert not has(where, part, content)
                    else:
                        assert has(where, part, content)
                        if where is store and file in in_host:
                            in_host.move_to_end(file)
                elif operation == "harm":
                    path = store.find(part.location)
                    if path is not None:
                        data = bytearray(path.read_bytes())
                        data[HEADER_BYTES] ^= 1
                        path.write_bytes(data)
                        harmed ^= {file}  # twice is as good as never
                else:
                    path = store.find(part.location)
                    if operation == "lose" and path is not None:
                        path.unlink()
                    else:
                        where.drop(part)
                    in_host.pop(file, None)
                    on_disk.pop(file, None)
            assert files_in(folder / "host") == dict(in_host)
            assert files_in(store.disk.folders[0]) == on_disk
        store.close()
        assert not files_in(folder / "host") and not files_in(store.disk.folders[0])


def test_the_tier_that_would_take_a_part_is_named(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 2 * SIZE, 2 * SIZE)
    names = []
    for _ in range(5):
        tier = store.tier_for(CONTENT.num_bytes)
        names.append(None if tier is None else tier.name)
        store.export(CONTENT, layers_of(CONTENT))
    assert names == ["host", "host", "disk", "disk", None]


# -- folders that fail


def refused_once(store: TieredKVStore | FileKVStore) -> list[str]:
    """Exports twice, in vain; what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [store.export(CONTENT, layers_of(CONTENT)) for _ in range(2)] == [None, None]
    return [str(one.message) for one in told]


def test_a_folder_of_memory_that_cannot_be_used_is_reported_once_and_another_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileKVStore("host", TOKEN, 2**20, [tmp_path / "missing", tmp_path])
    with pytest.warns(UserWarning, match=rf"KV host tier: cannot write {SIZE} bytes in .*missing \(No such file"):
        part = export(store)
    assert store.find(part.location) == tmp_path / part.location
    store.drop(part)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert refused_once(store) == []
    (message,) = refused_once(make_store(tmp_path))
    assert "(No space left on device, " in message and "a smaller kv_host_bytes than" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["missing", "a file", "/proc"])
def test_an_unusable_disk_folder_is_reported_at_once_and_once(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_text("")
    path = tmp_path / folder
    with pytest.warns(UserWarning, match=rf"cannot write 512 bytes in {path}/.*kv_disk_folder that exists"):
        store = make_disk_store(TOKEN, 2**20, path)
    assert refused_once(store) == [] and store.num_bytes == 0


def test_a_disk_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    lost = export(store)
    shutil.rmtree(tmp_path / "disk")
    assert not has(store, lost)
    store.drop(lost)
    (message,) = refused_once(store)
    assert f"cannot write {SIZE} bytes in {tmp_path}/disk/" in message and "(No such file or directory)" in message
    (tmp_path / "disk").mkdir()
    assert has(store, export(store))


def test_a_file_size_limit_of_the_process(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, before[1]))
    try:
        (message,) = refused_once(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in message
    assert not files_in(store.disk.folders[0]) and store.num_bytes == 0


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has 0\.1 MiB free, not the 1\.0 MiB .*kv_disk_bytes than 1048576"):
        store = TieredKVStore(make_store(tmp_path, SIZE), make_disk_store(TOKEN, 2**20, small_disk))
    (small_disk / "ballast").write_bytes(bytes(64 * 1024))
    first = export(store)  # in memory
    (message,) = refused_once(store)
    assert f"bytes in {small_disk}/" in message and "(No space left on device, 0.0 MiB are free)" in message
    assert has(store, first)
    (small_disk / "ballast").unlink()
    second = export(store)
    assert files_in(store.disk.folders[0]) == {first.location: SIZE}
    assert has(store, first) and has(store, second)


_EXPORT_INTO_FULL_MEMORY = """
import sys
from pathlib import Path
from engines.parallel.owned_files import DEV_SHM
from tests.engines.test_kv_store import SIZE, TOKEN, FileKVStore, export, files_in, has, refused_once
tmp = Path(sys.argv[1])
store = FileKVStore("host", TOKEN, 2**30, [DEV_SHM, tmp])
first = export(store)
for folder in (DEV_SHM, tmp):
    try:
        (folder / "ballast").write_bytes(bytes(2**20))
    except OSError:
        pass
(message,) = refused_once(store)
assert "KV host tier: cannot write" in message and "in /dev/shm" in message, message
assert store.num_bytes == SIZE and set(files_in(DEV_SHM)) == {first.location, "ballast"}
assert set(files_in(tmp)) == {"ballast"}
assert has(store, first)
(DEV_SHM / "ballast").unlink()
assert has(store, export(store)) and store.num_bytes == 2 * SIZE
store.close()
assert not files_in(DEV_SHM)
"""


def test_full_memory(small_disk: Path) -> None:
    """In a /dev/shm of its own, the temporary folder being full, too."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        pytest.skip("mounts of one's own are not permitted here")
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec"
    command = ["unshare", "--mount", "sh", "-c", f'{mount} "$0" "$@"', sys.executable, "-c", _EXPORT_INTO_FULL_MEMORY]
    subprocess.run([*command, str(small_disk)], cwd=ROOT, check=True)


def test_a_disk_that_turns_read_only(small_disk: Path, tmp_path: Path) -> None:
    store = TieredKVStore(make_store(tmp_path, 0), make_disk_store(TOKEN, 2**14, small_disk))
    part = export(store)
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        pytest.skip("remounting is not permitted here")
    (message,) = refused_once(store)
    assert "Read-only file system" in message
    assert has(store, part)
    store.drop(part)  # cannot be removed: no error
    store.close()


# -- what the dead leave

_EXPORT_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.engines.test_kv_store import export, make_tiers
store = make_tiers(Path(sys.argv[1]), *map(int, sys.argv[2:]))
print(store.find(export(store).location), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_files_of_the_dead_are_reclaimed_and_those_of_the_living_not(tmp_path: Path, tier: str) -> None:
    sizes = ["4096", "0"] if tier == "host" else ["0", "4096"]
    store = make_tiers(tmp_path, *map(int, sizes))
    mine = store.find(export(store).location)
    assert mine is not None
    # A pid that lives, but of another process that has had it before.
    reused = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-1"))
    elsewhere = mine.with_name(mine.name.replace(f"-{os.stat('/proc/self/ns/pid').st_ino}-", "-1-"))
    for path in (reused, elsewhere):
        path.write_bytes(b"")
    process = subprocess.Popen(
        [sys.executable, "-c", _EXPORT_AND_WAIT, str(tmp_path), *sizes], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        assert theirs.parent == mine.parent and theirs.exists()
        assert reclaim([mine.parent]) == [reused]
        assert theirs.exists() and mine.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    assert reclaim([mine.parent], keep_label=TOKEN) == []  # what a replica that left has handed over
    assert theirs.exists()
    if tier == "host":
        assert reclaim([mine.parent]) == [theirs]
    else:
        make_kv_store(TOKEN[::-1], host_bytes=0, disk_bytes=1, disk_parent=str(tmp_path / "disk"))
    assert sorted(mine.parent.iterdir()) == sorted([mine, elsewhere])
    elsewhere.unlink()
    store.close()


# -- sizes


def test_the_host_pool_is_what_is_safely_there() -> None:
    assert host_pool_bytes(None, free_bytes=2**40, num_ranks=4) == DEFAULT_HOST_BYTES
    assert host_pool_bytes(None, free_bytes=2**30, num_ranks=4) == 2**26
    assert host_pool_bytes(0, free_bytes=0, num_ranks=4) == 0
    assert host_pool_bytes(100, free_bytes=400, num_ranks=4) == 100
    with pytest.raises(ValueError, match=r"EngineConfig.kv_host_bytes=100: for 4 ranks .* 399 bytes are free; give"):
        host_pool_bytes(100, free_bytes=399, num_ranks=4)


@pytest.mark.parametrize(("options", "message"), [
    ({"preemption": "never"}, r"EngineConfig.preemption='never': must be one of"),
    ({"kv_host_bytes": -1}, r"EngineConfig.kv_host_bytes=-1: must be an integer of at least 0"),
    ({"kv_host_bytes": True}, r"EngineConfig.kv_host_bytes=True: must be"),
    ({"kv_disk_bytes": None}, r"EngineConfig.kv_disk_bytes=None: must be"),
    ({"kv_disk_bytes": 1}, r"EngineConfig.kv_disk_bytes=1, kv_disk_folder=None: a disk tier has both"),
    ({"kv_disk_folder": "/tmp"}, r"EngineConfig.kv_disk_bytes=0, kv_disk_folder='/tmp': a disk tier has both"),
    ({"kv_disk_folder": 3}, r"EngineConfig.kv_disk_folder=3: must be text"),
    ({"preemption": "swap", "kv_host_bytes": 0}, r"EngineConfig.preemption='swap': there is nowhere to swap to"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_a_folder_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(kv_disk_bytes=1, kv_disk_folder=Path("kv"))  # type: ignore[arg-type]
    assert config.kv_disk_folder == os.path.join(os.getcwd(), "kv")


@pytest.mark.parametrize("tier", ["host", "tiers"])
def test_threads_that_export_at_once_lose_nothing(tmp_path: Path, tier: str) -> None:
    """A host pool of three entries, and a disk for the rest; the bound holds."""
    big = replace(CONTENT, num_layers=64)
    size = HEADER_BYTES + big.num_bytes
    store: Any = make_tiers(tmp_path, 3 * size, 2**30) if tier == "tiers" else make_store(tmp_path, 20 * size)

    def make_some() -> list[KVPart | None]:
        return [store.export(big, layers_of(big)) for _ in range(100)]

    with ThreadPoolExecutor(3) as threads, warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [part for made in [threads.submit(make_some) for _ in range(3)] for part in made.result()]
    kept = [part for part in parts if part is not None]
    assert len(kept) == (300 if tier == "tiers" else 20)
    assert all(has(store, part, big) for part in kept)
    assert sum(files_in(tmp_path / "host" if tier == "tiers" else tmp_path).values()) <= 20 * size
    store.close()


def test_free_memory_is_looked_up_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when what was free then has been taken."""
    clock, free, looks = [0.0], [100], [0]

    def look() -> int:
        looks[0] += 1
        return free[0]

    monkeypatch.setattr(files, "free_memory_bytes", look)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    memory = files._FreeMemory()
    assert memory.take(60) and looks[0] == 1
    free[0] = 40
    assert memory.take(40) and looks[0] == 1
    assert not memory.take(41) and looks[0] == 2, "it looks again before it refuses"
    assert memory.take(30) and looks[0] == 2
    clock[0], free[0] = 0.2, 5
    assert not memory.take(6) and looks[0] == 3
    assert memory.take(5) and looks[0] == 3
