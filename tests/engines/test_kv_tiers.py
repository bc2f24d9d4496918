"""The tiers of stored KV: bounded, found wherever they lie, and never other content than was stored."""

from __future__ import annotations

import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import EngineConfig
from engines.control.sealing import new_token
from engines.kvcache.disk import DiskKVStore, disk_folder
from engines.kvcache.peer import PeerKVStore
from engines.kvcache.tiers import DEFAULT_HOST_BYTES, TieredKVStore, host_pool_bytes, make_kv_store
from engines.kvcache.transfer import HEADER_BYTES, HostKVStore, KVContent, tokens_digest
from engines.sequence import KVPart
from tests.engines.test_kv_transfer import CONTENT, DAMAGES, TOKEN, layers_of
from tests.worlds import ROOT

TOKEN_OF_WIRE = new_token()
SIZE = HEADER_BYTES + CONTENT.num_bytes


def content_of(num_tokens: int, name: int = 0) -> KVContent:
    return replace(CONTENT, num_tokens=num_tokens, tokens_digest=tokens_digest([name]))


def named_layers(content: KVContent) -> list[torch.Tensor]:
    """Other content has other layers."""
    generator = torch.Generator().manual_seed(int(content.tokens_digest[:8], 16))
    return [torch.randn(content.layer_shape, generator=generator) for _ in range(content.num_layers)]


def make_tiers(folder: Path, host_bytes: int, disk_bytes: int) -> TieredKVStore:
    for name in ("host", "disk"):
        (folder / name).mkdir(exist_ok=True)
    return TieredKVStore(
        HostKVStore(TOKEN, host_bytes, [folder / "host"]), DiskKVStore(TOKEN, disk_bytes, folder / "disk")
    )


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.exists() else {}


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
                content = content_of(1 + number, len(parts))
                size = HEADER_BYTES + content.num_bytes
                fits = size <= host_bytes
                while fits and sum(in_host.values()) + size > host_bytes:
                    oldest = next(iter(in_host))
                    fits = sum(on_disk.values()) + in_host[oldest] <= disk_bytes
                    if fits:
                        on_disk[oldest] = in_host.pop(oldest)
                room = fits or sum(on_disk.values()) + size <= disk_bytes
                part = store.export(content, named_layers(content))
                assert (part is not None) == room
                if part is not None:
                    (in_host if fits else on_disk)[Path(part.location).name] = size
                    parts.append((part, content))
            elif parts:
                part, content = parts[number % len(parts)]
                file = Path(part.location).name
                where = store if "elsewhere" not in operation else elsewhere
                if operation.startswith("load"):
                    if file not in {*in_host, *on_disk} or file in harmed:
                        with pytest.raises(ValueError, match="recompute the KV"):
                            where.load(part, content)
                    else:
                        assert torch.equal(
                            torch.stack(list(where.load(part, content))), torch.stack(named_layers(content))
                        )
                        if where is store and file in in_host:
                            in_host.move_to_end(file)
                elif operation == "harm":
                    path = store.path_of(part.location)
                    if path.exists():
                        data = bytearray(path.read_bytes())
                        data[HEADER_BYTES] ^= 1
                        path.write_bytes(data)
                        harmed ^= {file}  # twice is as good as never
                else:
                    if operation == "lose":
                        store.path_of(part.location).unlink(missing_ok=True)
                    else:
                        where.drop(part)
                    in_host.pop(file, None)
                    on_disk.pop(file, None)
            assert files_in(folder / "host") == dict(in_host)
            assert files_in(store.disk.folder) == on_disk
        store.close()
        assert not files_in(folder / "host") and not files_in(store.disk.folder)


def test_the_tier_that_would_take_a_part_is_named(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 2 * SIZE, 2 * SIZE)
    names = []
    for _ in range(5):
        tier = store.tier_for(CONTENT.num_bytes)
        names.append(None if tier is None else tier.name)
        store.export(CONTENT, layers_of(CONTENT))
    assert names == ["host", "host", "disk", "disk", None]


def test_what_one_thread_moves_down_another_drops(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 3 * SIZE, 20 * SIZE)
    exported: queue.SimpleQueue[KVPart | None] = queue.SimpleQueue()
    loaded = []

    def drop() -> None:
        while (part := exported.get()) is not None:
            loaded.append(torch.equal(torch.stack(list(store.load(part, CONTENT))), torch.stack(layers_of(CONTENT))))
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
    assert loaded and all(loaded)
    assert not files_in(tmp_path / "host") and not files_in(store.disk.folder)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_on_disk_is_refused(tmp_path: Path, how: str) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    part = store.export(CONTENT, layers_of(CONTENT))
    assert part is not None and store.load(part, CONTENT)
    change, message = DAMAGES[how]
    change(Path(part.location))
    with pytest.raises(ValueError, match=message):
        store.load(part, CONTENT)


def test_parts_of_another_run_are_neither_read_nor_removed(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    other = DiskKVStore(TOKEN[::-1], 2**20, tmp_path / "disk")
    part = other.export(CONTENT, layers_of(CONTENT))
    assert part is not None
    with pytest.raises(ValueError, match="is no file of this run"):
        store.load(part, CONTENT)
    store.drop(part)
    assert other.load(part, CONTENT)


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    with pytest.raises(AssertionError, match="bytes of layers"):
        store.export(CONTENT, layers_of(CONTENT)[:1])
    assert not files_in(store.disk.folder) and store.num_bytes == 0


# -- disks that fail


def refused_once(store: TieredKVStore | DiskKVStore) -> list[str]:
    """Exports twice, in vain; what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [store.export(CONTENT, layers_of(CONTENT)) for _ in range(2)] == [None, None]
    return [str(one.message) for one in told]


@pytest.mark.parametrize("folder", ["missing", "a file", "/proc"])
def test_an_unusable_folder_is_told_at_once_and_once(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_text("")
    path = tmp_path / folder
    with pytest.warns(UserWarning, match=rf"cannot write 512 bytes in {path} \(.*kv_disk_folder that exists"):
        store = DiskKVStore(TOKEN, 2**20, path)
    assert refused_once(store) == [] and store.files.num_bytes == 0


def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    lost = store.export(CONTENT, layers_of(CONTENT))
    assert lost is not None
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(ValueError, match="cannot be read"):
        store.load(lost, CONTENT)
    store.drop(lost)
    (message,) = refused_once(store)
    assert f"cannot write {SIZE} bytes in {tmp_path}/disk (No such file or directory)" in message
    (tmp_path / "disk").mkdir()
    part = store.export(CONTENT, layers_of(CONTENT))
    assert part is not None and store.load(part, CONTENT)


def test_a_file_size_limit_of_the_process(tmp_path: Path) -> None:
    store = make_tiers(tmp_path, 0, 2**20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, before[1]))
    try:
        (message,) = refused_once(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in message
    assert not files_in(store.disk.folder) and store.num_bytes == 0


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has 0\.1 MiB free, kv_disk_bytes=1048576 is 1\.0 MiB"):
        store = TieredKVStore(HostKVStore(TOKEN, SIZE, [tmp_path]), DiskKVStore(TOKEN, 2**20, small_disk))
    (small_disk / "ballast").write_bytes(bytes(64 * 1024))
    first = store.export(CONTENT, layers_of(CONTENT))
    assert first is not None  # in memory
    (message,) = refused_once(store)
    assert f"bytes in {small_disk} (No space left on device, 0.0 MiB are free)" in message
    assert torch.equal(torch.stack(list(store.load(first, CONTENT))), torch.stack(layers_of(CONTENT)))
    (small_disk / "ballast").unlink()
    second = store.export(CONTENT, layers_of(CONTENT))
    assert second is not None and files_in(store.disk.folder) == {Path(first.location).name: SIZE}
    for part in (first, second):
        assert torch.equal(torch.stack(list(store.load(part, CONTENT))), torch.stack(layers_of(CONTENT)))


_EXPORT_INTO_FULL_MEMORY = """
import os, sys, warnings
from pathlib import Path
from engines.kvcache.transfer import DEV_SHM, HostKVStore
from tests.engines.test_kv_tiers import CONTENT, SIZE, TOKEN, files_in, layers_of, refused_once
tmp = Path(sys.argv[1])
store = HostKVStore(TOKEN, 2**30, [DEV_SHM, tmp])
first = store.export(CONTENT, layers_of(CONTENT))
assert Path(first.location).parent == DEV_SHM
for folder in (DEV_SHM, tmp):
    try:
        (folder / "ballast").write_bytes(bytes(2**20))
    except OSError:
        pass
(message,) = refused_once(store)
assert "KV store: cannot take" in message and "/dev/shm" in message, message
assert store.num_bytes == SIZE and set(files_in(DEV_SHM)) == {Path(first.location).name, "ballast"}
assert set(files_in(tmp)) == {"ballast"}
assert store.load(first, CONTENT)
(DEV_SHM / "ballast").unlink()
assert store.export(CONTENT, layers_of(CONTENT)) is not None and store.num_bytes == 2 * SIZE
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
    store = TieredKVStore(HostKVStore(TOKEN, 0, [tmp_path]), DiskKVStore(TOKEN, 2**14, small_disk))
    part = store.export(CONTENT, layers_of(CONTENT))
    assert part is not None
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        pytest.skip("remounting is not permitted here")
    (message,) = refused_once(store)
    assert "Read-only file system" in message
    assert store.load(part, CONTENT)
    store.drop(part)  # cannot be removed: no error
    store.close()


# -- processes and hosts

_EXPORT_AND_WAIT = """
import sys, time
from pathlib import Path
from engines.kvcache.disk import DiskKVStore
from tests.engines.test_kv_transfer import CONTENT, TOKEN, layers_of
print(DiskKVStore(TOKEN, 2**20, Path(sys.argv[1])).export(CONTENT, layers_of(CONTENT)).location, flush=True)
time.sleep(600)
"""


def test_files_of_a_killed_run_are_reclaimed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _EXPORT_AND_WAIT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    next_run: dict[str, Any] = {"host_bytes": 0, "disk_bytes": 2**20, "disk_parent": str(tmp_path)}
    try:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent == disk_folder(tmp_path) and path.stat().st_mode & 0o777 == 0o600
        make_kv_store(TOKEN[::-1], **next_run)
        assert path.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    make_kv_store(TOKEN[::-1], **next_run)
    assert not path.exists()


def test_another_host_fetches_what_lies_on_disk(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    stores = []
    for host, folder in zip("ab", folders, strict=True):
        folder.mkdir()
        local = make_tiers(folder, SIZE, 4 * SIZE)
        stores.append(PeerKVStore(local, host=host, address="127.0.0.1", token=TOKEN_OF_WIRE, patience_s=5.0))
    try:
        parts = [stores[0].export(CONTENT, layers_of(CONTENT)) for _ in range(3)]
        assert len(files_in(disk_folder(folders[0] / "disk"))) == 2
        for part in parts:
            assert part is not None
            assert torch.equal(torch.stack(list(stores[1].load(part, CONTENT))), torch.stack(layers_of(CONTENT)))
            stores[1].drop(part)
            with pytest.raises(ValueError, match="cannot be fetched"):  # asked after the drop, answered after it
                stores[1].load(part, CONTENT)
        assert not files_in(folders[0] / "host") and not files_in(disk_folder(folders[0] / "disk"))
    finally:
        for store in stores:
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
