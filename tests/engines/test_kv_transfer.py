"""A sequence moves between two steps, with its KV or by recompute, and draws the same tokens either way."""

from __future__ import annotations

import itertools
import os
import queue
import random
import secrets
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines.kvcache.transfer import (
    HEADER_BYTES,
    HostKVStore,
    KVContent,
    fill_kv,
    load_heads,
    read_kv,
    reclaim,
    tokens_digest,
)

from engines import LLM
from engines.config import ModelConfig
from engines.kvcache.paged import PagedKVCache
from engines.parallel.collectives import Communicator
from engines.parallel.sharding import Shard, kv_heads
from engines.replica.replica import Replica
from engines.sequence import Completion, KVPart, SequenceId, Work
from tests.engines.test_token_equality import PARAMS, PROMPTS, TIGHT_KV, make_states
from tests.worlds import ROOT, run_world

TOKEN = "0123456789abcdef"
CONTENT = KVContent(
    policy_version=3, tokens_digest=tokens_digest([5, 6, 7]), dtype="float32", num_layers=2, num_tokens=3,
    first_head=0, num_heads=2, head_dim=4,
)  # fmt: skip


def make_store(folder: Path, capacity_bytes: int = 2**26) -> HostKVStore:
    return HostKVStore(TOKEN, capacity_bytes, [folder])


def make_replica(model: str, store: HostKVStore | None, **options: Any) -> Replica:
    return with_store(LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**24, **options}), store)


def with_store(llm: LLM, store: HostKVStore | None, group: Communicator | None = None) -> Replica:
    return Replica(
        runner=llm.replica._runner,
        scheduler=llm.replica.scheduler,
        blocks=llm.replica.scheduler.blocks,
        max_model_len=llm.max_model_len,
        vocab_size=llm.model_config.vocab_size,
        eos_token_ids=llm.model_config.eos_token_ids,
        detokenize=None,
        kv_store=store,
        tensor_parallel=group,
    )


class Rollout:
    """All test sequences, run by whoever holds them; remembers what finished, and the forward passes' tokens."""

    def __init__(self) -> None:
        self.done: dict[SequenceId, Completion] = {}
        self.num_tokens = 0

    def step(self, replica: Replica, num_steps: int) -> None:
        for _ in range(num_steps):
            output = replica.step()
            self.num_tokens += output.num_tokens
            for finished in output.finished:
                assert finished.state.sequence_id not in self.done
                self.done[finished.state.sequence_id] = finished.completion

    def finish(self, *replicas: Replica) -> None:
        while any(replica.has_work for replica in replicas):
            for replica in replicas:
                self.step(replica, 1)

    def check(self, plain: dict[SequenceId, Completion]) -> None:
        assert self.done.keys() == plain.keys()
        for sequence_id, completion in self.done.items():
            assert completion.token_ids == plain[sequence_id].token_ids
            assert completion.finish_reason == plain[sequence_id].finish_reason
            assert completion.logprobs == pytest.approx(plain[sequence_id].logprobs, rel=1e-9, abs=1e-9)


@pytest.fixture(scope="module")
def plain(qwen3: str) -> dict[SequenceId, Completion]:
    outputs = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24).generate(PROMPTS, PARAMS)
    return {(0, uid, c.index): c for uid, output in enumerate(outputs) for c in output.outputs}


def least_tokens(plain: dict[SequenceId, Completion]) -> int:
    """Of the forward passes of a rollout that computes nothing twice: a sequence's last token is never computed."""
    return sum(len(PROMPTS[uid]) + len(c.token_ids) - 1 for (_, uid, _), c in plain.items())


def begun(replica: Replica, num_steps: int) -> Rollout:
    """A rollout of all sequences, some steps in, on one replica."""
    rollout = Rollout()
    for state in make_states():
        replica.submit(Work(state=state))
    rollout.step(replica, num_steps)
    return rollout


# -- caches and layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_reading_and_filling_against_a_dense_copy(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)

    def random_cache(block_size: int) -> tuple[PagedKVCache, list[int], torch.Tensor]:
        """A cache of noise, a random block table, and per layer the KV of its tokens, gathered one by one."""
        cache = PagedKVCache(
            num_layers=3, num_blocks=40, block_size=block_size, num_kv_heads=2, head_dim=4, dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        blocks = rng.sample(range(40), -(-num_tokens // block_size) + rng.randint(0, 2))
        return cache, blocks, dense(cache, blocks)

    def dense(cache: PagedKVCache, blocks: list[int]) -> torch.Tensor:
        size = cache.keys[0].shape[1]
        return torch.stack([
            torch.stack([torch.stack([c[blocks[t // size], t % size] for t in range(num_tokens)]) for c in pair])
            for pair in zip(cache.keys, cache.values, strict=True)
        ])  # fmt: skip

    num_tokens = rng.randint(1, 30)
    source, blocks, wanted = random_cache(rng.randint(1, 9))
    layers = list(read_kv(source, blocks, num_tokens))
    assert torch.equal(torch.stack(layers), wanted)
    other, other_blocks, _ = random_cache(rng.randint(1, 9))
    before = [tensor.clone() for tensor in (*other.keys, *other.values)]
    fill_kv(other, other_blocks, num_tokens, layers)
    assert torch.equal(dense(other, other_blocks), wanted)
    changed = sum(
        int((a != b).any(-1).any(-1).sum()) for a, b in zip((*other.keys, *other.values), before, strict=True)
    )
    assert changed == 6 * num_tokens, "other tokens' KV was written to"


# -- the store


def layers_of(content: KVContent) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, content.dtype)
    return [torch.randn(content.layer_shape, generator=generator).to(dtype) for _ in range(content.num_layers)]


def export(store: HostKVStore, content: KVContent = CONTENT) -> KVPart:
    part = store.export(content, layers_of(content))
    assert part is not None
    return part


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_stored_comes_back_bit_for_bit(dtype: str) -> None:
    content = replace(CONTENT, dtype=dtype)
    token = secrets.token_hex(16)
    store, reader = (HostKVStore(token, 2**20) for _ in range(2))
    part = export(store, content)
    path = Path(part.location)
    assert path.parent == Path("/dev/shm") and path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == part.num_bytes + HEADER_BYTES == store.num_bytes
    loaded = reader.load(part, content)
    reader.drop(part)
    assert not path.exists()
    reader.drop(part)
    assert torch.equal(torch.stack(list(loaded)), torch.stack(layers_of(content)))


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
    "gone": (Path.unlink, "cannot be read"),
    "truncated": (damage(lambda data: data.pop()), "has 895 bytes, 896 wanted"),
    "empty": (damage(lambda data: data.clear()), "has 0 bytes, 896 wanted"),
    "longer": (damage(lambda data: data.append(0)), "has 897 bytes, 896 wanted"),
    "no magic": (damage(lambda data: data.__setitem__(0, 0)), "no KV of format 2"),
    "another format": (damage(lambda data: data.__setitem__(8, 9)), "no KV of format 2"),
    "torn header": (damage(lambda data: data.__setitem__(slice(20, 40), bytes(20))), "its header is damaged"),
    "a flipped bit": (damage(lambda data: data.__setitem__(700, data[700] ^ 4)), "its content is damaged"),
    "a link": (to_link, "cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path: Path, how: str) -> None:
    store = make_store(tmp_path)
    part = export(store)
    assert store.load(part, CONTENT)
    change, message = DAMAGES[how]
    change(Path(part.location))
    with pytest.raises(ValueError, match=message):
        store.load(part, CONTENT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("policy_version", 4), ("tokens_digest", tokens_digest([5, 6, 8])), ("dtype", "int32"), ("first_head", 1)],
)
def test_other_content_of_the_same_size_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match=f"{field}=.*wanted {value!r}"):
        store.load(export(store), replace(CONTENT, **{field: value}))


def test_files_that_are_not_the_run_s_are_neither_read_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, other_run = make_store(tmp_path), HostKVStore(TOKEN[::-1], 2**20, [tmp_path])
    elsewhere = make_store(tmp_path / "other")
    (tmp_path / "notes.txt").write_text("keep me")
    foreign = [export(other_run), export(elsewhere), replace(CONTENT_PART, location=str(tmp_path / "notes.txt"))]
    foreign.append(replace(CONTENT_PART, location=f"{tmp_path}/../{tmp_path.name}/{Path(export(mine).location).name}"))
    for part in foreign:
        with pytest.raises(ValueError, match="is no file of this run in"):
            mine.load(part, CONTENT)
        mine.drop(part)
        assert Path(part.location).exists()


CONTENT_PART = KVPart(first_head=0, num_heads=2, location="", num_bytes=CONTENT.num_bytes)


def test_capacity_bounds_the_files_that_exist(tmp_path: Path) -> None:
    size = CONTENT.num_bytes + HEADER_BYTES
    store, reader = make_store(tmp_path, 3 * size), make_store(tmp_path)
    parts = [export(store) for _ in range(3)]
    assert store.export(CONTENT, layers_of(CONTENT)) is None
    reader.drop(parts[1])  # as an importer in another process does
    export(store)
    assert store.export(CONTENT, layers_of(CONTENT)) is None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * size == store.num_bytes
    store.close()
    assert not list(tmp_path.iterdir())


def test_what_importers_have_taken_is_forgotten_in_time(tmp_path: Path) -> None:
    store, reader = make_store(tmp_path), make_store(tmp_path)
    for _ in range(1000):
        reader.drop(export(store))
    assert len(store.files._sizes) <= 100


def test_one_thread_drops_what_another_exports(tmp_path: Path) -> None:
    store = make_store(tmp_path, 20 * (CONTENT.num_bytes + HEADER_BYTES))
    exported: queue.SimpleQueue[KVPart | None] = queue.SimpleQueue()

    def drop() -> None:
        while (part := exported.get()) is not None:
            store.drop(part)

    dropper = threading.Thread(target=drop)
    dropper.start()
    num_kept = 0
    try:
        for _ in range(2000):
            part = store.export(CONTENT, layers_of(CONTENT))
            num_kept += part is not None
            if part is not None:
                exported.put(part)
    finally:
        exported.put(None)
        dropper.join()
    assert num_kept and store.num_bytes == 0 and not list(tmp_path.iterdir())


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        store.export(CONTENT, layers_of(CONTENT)[:1])
    assert not list(tmp_path.iterdir()) and store.num_bytes == 0


def test_a_missing_or_full_folder_is_told_once_and_another_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostKVStore(TOKEN, 2**20, [tmp_path / "missing", tmp_path])
    with pytest.warns(UserWarning, match=r"cannot take 0\.0 MiB in .*missing \(No such file"):
        part = export(store)
    assert Path(part.location).parent == tmp_path
    store.drop(part)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.export(CONTENT, layers_of(CONTENT)) is None
    with pytest.warns(UserWarning, match=r"No space left on device, [\d.]+ MiB are free"):
        assert make_store(tmp_path).export(CONTENT, layers_of(CONTENT)) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("options", "message"), [
    ({"token": "short"}, r"HostKVStore.token='short'"),
    ({"token": "0123456789abcde/"}, r"HostKVStore.token"),
    ({"capacity_bytes": -1}, r"HostKVStore.capacity_bytes=-1"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostKVStore(**{"token": TOKEN, "capacity_bytes": 0, **options})


_EXPORT_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.engines.test_kv_transfer import export, make_store
print(export(make_store(Path(sys.argv[1]))).location, flush=True)
time.sleep(600)
"""


def test_files_of_the_dead_are_reclaimed_and_those_of_the_living_not(tmp_path: Path) -> None:
    mine = Path(export(make_store(tmp_path)).location)
    # A pid that lives, but of another process that has had it before.
    reused = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-1"))
    elsewhere = mine.with_name(mine.name.replace(f"-{os.stat('/proc/self/ns/pid').st_ino}-", "-1-"))
    for path in (reused, elsewhere):
        path.write_bytes(b"")
    process = subprocess.Popen(
        [sys.executable, "-c", _EXPORT_AND_WAIT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        assert theirs.parent == tmp_path and theirs.exists()
        assert reclaim([tmp_path]) == [reused]
        assert theirs.exists() and mine.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    assert theirs.exists()
    assert reclaim([tmp_path], keep_token=TOKEN) == []  # what a replica that left has handed over
    assert reclaim([tmp_path]) == [theirs]
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere])


# -- head shards


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


def test_a_head_that_no_part_holds_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match="KV head 2 is in none of 1 parts"):
        load_heads(store, [export(store)], replace(CONTENT, first_head=1))


# -- replicas


def test_paused_with_kv_and_resumed_nothing_is_computed_twice(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    alone = {"prefix_caching": False}  # what is computed once because it is shared would hide what is computed twice
    first = make_replica(qwen3, store, max_num_seqs=30, max_num_batched_tokens=64, prefill_chunk_size=16, **alone)
    second = make_replica(qwen3, store, block_size=5, max_num_seqs=20, **alone)
    rollout = begun(first, 4)  # some decode, some are in the middle of their prompt, some wait
    num_held, num_partial = len(make_states()) - len(rollout.done), 0
    for source, target in ((first, first), (first, second), (second, first)):
        works = source.pause(store=store)
        assert not source.has_work and len(works) == num_held
        stored = [work for work in works if work.kv is not None]
        assert 10 < len(stored) < num_held
        num_partial += sum(work.kv.num_tokens < len(work.state.tokens) - 1 for work in stored if work.kv)
        assert len(list(tmp_path.iterdir())) == len(stored)
        for work in works:
            target.submit(work)
        rollout.step(target, 1)
        num_held = len(make_states()) - len(rollout.done)
    rollout.finish(first)
    rollout.check(plain)
    assert rollout.num_tokens == least_tokens(plain)
    assert num_partial > 0
    moves = [first.kv_moves, second.kv_moves]
    assert sum(m.num_imported for m in moves) == sum(m.num_exported for m in moves) > 30
    assert sum(m.num_recomputed + m.num_refused for m in moves) == 0
    assert not list(tmp_path.iterdir())


def resume(model: str, folder: str, works: str) -> list[Any]:
    replica = make_replica(model, make_store(Path(folder)), max_num_seqs=7, prefix_caching=False)
    for work in msgspec.msgpack.decode(bytes.fromhex(works), type=list[Work]):
        replica.submit(work)
    rollout = Rollout()
    rollout.finish(replica)
    return [msgspec.msgpack.encode(list(rollout.done.items())).hex(), rollout.num_tokens, replica.kv_moves.num_imported]


def test_resumed_with_kv_in_another_process(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, prefix_caching=False)
    rollout = begun(replica, 13)
    works = replica.pause(store=store)
    assert all(work.kv is not None for work in works) and len(works) > 20
    sent = msgspec.msgpack.encode(works).hex()
    ((done, num_tokens, num_imported),) = run_world(resume, 1, qwen3, str(tmp_path), sent, as_torchrun=False)
    rollout.done |= dict(msgspec.msgpack.decode(bytes.fromhex(done), type=list[tuple[SequenceId, Completion]]))
    rollout.check(plain)
    assert rollout.num_tokens + num_tokens == least_tokens(plain) and num_imported == len(works)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_moved_every_few_steps_with_kv_or_without(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    one = 2 * 2 * 2 * 16 * 8  # bytes of a token's KV
    store = make_store(tmp_path, capacity_bytes=5 * (HEADER_BYTES + 40 * one))
    replicas = [
        make_replica(qwen3, store, max_num_seqs=4),
        make_replica(qwen3, store, max_num_seqs=9, block_size=3, prefill_chunk_size=7),
        make_replica(qwen3, store, kv_cache_bytes=TIGHT_KV, max_model_len=100, block_size=2),
    ]
    rollout = Rollout()
    for state in make_states():
        rng.choice(replicas).submit(Work(state=state))
    while any(replica.has_work for replica in replicas):
        for replica in replicas:
            rollout.step(replica, rng.randint(0, 4))
        source = rng.choice(replicas)
        here = list(source._sequences)
        for work in source.pause(rng.sample(here, rng.randint(0, len(here) // 2)), rng.choice([store, store, None])):
            rng.choice([*replicas, replicas[2]]).submit(work)  # the small one is to be crowded
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= store.capacity_bytes
    rollout.check(plain)
    assert sum(replica.kv_moves.num_imported for replica in replicas) > 20
    assert sum(replica.kv_moves.num_refused for replica in replicas) > 0
    assert sum(replica.kv_moves.num_recomputed for replica in replicas) == 0
    assert replicas[2].scheduler.num_preemptions > 0
    assert rollout.num_tokens > least_tokens(plain), "nothing was recomputed"
    assert not list(tmp_path.iterdir())
    for replica in replicas:
        replica.scheduler.blocks.check_integrity()
        assert replica.scheduler.blocks.num_free_blocks == replica.scheduler.blocks.num_blocks


def handles_swapped(works: list[Work], folder: Path) -> list[Work]:
    return [replace(work, kv=other.kv) for work, other in zip(works, works[1:] + works[:1], strict=True)]


def handles_with(**changes: Any) -> Callable[[list[Work], Path], list[Work]]:
    return lambda works, folder: [replace(work, kv=work.kv and replace(work.kv, **changes)) for work in works]


def files_changed(change: Callable[[Path], object]) -> Callable[[list[Work], Path], list[Work]]:
    def on_all(works: list[Work], folder: Path) -> list[Work]:
        for path in list(folder.iterdir()):
            change(path)
        return works

    return on_all


UNUSABLE: dict[str, Callable[[list[Work], Path], list[Work]]] = {
    "another policy version": handles_with(policy_version=1),
    "another dtype": handles_with(dtype="float32"),
    "no parts": handles_with(parts=()),
    "no tokens": handles_with(num_tokens=0),
    "more tokens than there are": handles_with(num_tokens=2**40),
    "another sequence's": handles_swapped,
    "deleted files": files_changed(Path.unlink),
    "truncated files": files_changed(lambda path: os.truncate(path, path.stat().st_size // 2)),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_kv_is_recomputed_and_counted(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, case: str
) -> None:
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, prefix_caching=False)  # which would find what it has just computed
    rollout = begun(replica, 9)
    works = replica.pause(store=store)
    for work in UNUSABLE[case](works, tmp_path):
        replica.submit(work)
    rollout.finish(replica)
    rollout.check(plain)
    assert replica.kv_moves.num_recomputed == replica.kv_moves.num_exported == len(works) > 20
    assert replica.kv_moves.num_imported == 0
    if case != "no parts":
        assert not list(tmp_path.iterdir())


def test_weights_of_another_version_do_not_take_old_kv(qwen3: str, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store)
    begun(replica, 5)
    works = replica.pause(store=store)
    replica.policy_version = 1
    rollout = Rollout()
    for work in works:
        replica.submit(work)
    rollout.finish(replica)
    assert replica.kv_moves.num_recomputed == len(works) and not list(tmp_path.iterdir())
    assert all(completion.versions[:5] == [0] * 5 for completion in rollout.done.values())


def test_a_full_store_or_none_recomputes(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    full, roomy = make_store(tmp_path, 0), make_store(tmp_path)
    first, storeless = make_replica(qwen3, full), make_replica(qwen3, None)
    rollout = begun(first, 6)
    works = first.pause(store=full)
    assert [work.kv for work in works] == [None] * len(works) and first.kv_moves.num_refused == len(works) > 20
    for work in works:
        first.submit(work)
    rollout.step(first, 3)
    works = first.pause(store=roomy)
    for work in works:
        storeless.submit(work)
    rollout.finish(storeless)
    rollout.check(plain)
    assert storeless.kv_moves.num_recomputed == sum(work.kv is not None for work in works) > 20


def test_released_at_its_budget_with_kv(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    store = make_store(tmp_path)
    replicas = [make_replica(qwen3, store, prefix_caching=False) for _ in range(2)]
    works = [Work(state=state) for state in make_states()]
    rollout = Rollout()
    for stay in itertools.count():
        replica, other = replicas[stay % 2], replicas[1 - stay % 2]
        for work in works:
            replica.submit(replace(work, max_new_tokens=7))
        works = []
        while replica.has_work:
            output = replica.step()
            rollout.num_tokens += output.num_tokens
            rollout.done |= {finished.state.sequence_id: finished.completion for finished in output.finished}
            works += output.released
        assert all(work.kv is not None and work.max_new_tokens is None for work in works)
        if not works:
            break
    assert stay == 5
    rollout.check(plain)
    assert rollout.num_tokens == least_tokens(plain)
    assert replica.kv_moves.num_imported + other.kv_moves.num_imported > 50
    assert not list(tmp_path.iterdir())


def test_the_last_token_is_always_computed(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    """A state that was taken back to fewer tokens than its KV has."""
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, prefix_caching=False)
    rollout = begun(replica, 6)
    works = [work for work in replica.pause(store=store) if work.state.num_generated == 6]
    for index, work in enumerate(works):
        state, num_cut = work.state, 1 + index % 2
        del state.tokens[-num_cut:], state.logprobs[-num_cut:], state.versions[-num_cut:]
        assert work.kv is not None and work.kv.num_tokens - len(state.tokens) == num_cut - 1
        replica.submit(work)
    rollout.num_tokens = 0
    rollout.step(replica, 1)
    moves = replica.kv_moves
    # One token too few still tells that the KV is its own, two do not.
    assert (moves.num_imported, moves.num_recomputed) == ((len(works) + 1) // 2, len(works) // 2)
    assert rollout.num_tokens == sum(len(w.state.tokens) - 1 if i % 2 else 1 for i, w in enumerate(works))
    rollout.finish(replica)
    rollout.check(plain)


def test_pausing_some_leaves_the_others(qwen3: str, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, max_num_seqs=3)
    states = make_states()[:6]
    for state in states:
        state.params = replace(PARAMS, ignore_eos=True)
    for state, budget in zip(states, (None, 10, 40, 5, None, 5), strict=True):
        replica.submit(Work(state=state, max_new_tokens=budget))
    for _ in range(4):
        replica.step()
    ids = [state.sequence_id for state in states]
    with pytest.raises(KeyError, match=r"sequence \(0, 99, 0\): is not on this replica"):
        replica.pause([ids[0], (0, 99, 0)])
    works = replica.pause([ids[3], ids[1], ids[1], ids[2]], store)
    assert [work.state for work in works] == [states[3], states[1], states[2]]
    assert [work.max_new_tokens for work in works] == [5, 6, None]
    assert [work.kv is not None for work in works] == [False, True, True]
    assert [work.state.sequence_id for work in replica.pause()] == [ids[0], ids[4], ids[5]]
    assert not replica.has_work


def test_kv_that_was_not_taken_on_goes_on_or_is_dropped(qwen3: str, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, max_num_seqs=1)
    first, second = make_states()[:2]
    for state in (first, second):
        state.params = replace(PARAMS, ignore_eos=True)
        replica.submit(Work(state=state))
    replica.step()
    (work,) = replica.pause([first.sequence_id], store)
    replica.submit(work)  # waits behind the second, which takes the only slot
    replica.step()
    (again,) = replica.pause([first.sequence_id], store)
    assert again.kv == work.kv is not None and len(list(tmp_path.iterdir())) == 1
    replica.submit(again)
    assert replica.abort(first.sequence_id).completion.finish_reason == "abort"
    assert not list(tmp_path.iterdir())


# -- tensor parallel


def move_between_layouts(model: str, folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache
    from engines.parallel.layout import nested_layout

    dist.init_process_group("gloo")
    layout = nested_layout(range(2), 2)
    groups = GroupCache(TorchGroup(timeout_s=60), [layout], timeout_s=60)
    rank = groups.world.rank
    store = make_store(Path(folder))
    replicas = [
        with_store(LLM(model, world=groups, layout=layout, **options), store, groups.get(layout.replicas[0].ranks))
        for options in (
            {"dtype": "float64", "kv_cache_bytes": 2**22, "max_num_seqs": 30},
            {"dtype": "float64", "kv_cache_bytes": 2**22, "max_num_seqs": 30, "block_size": 5},
        )
    ]
    rollout = begun(replicas[0], 5)

    def move(source: int, target: int, to: HostKVStore, harm: Callable[[Work], object] = lambda work: None) -> None:
        works = replicas[source].pause(store=to)
        results.append(sum(work.kv is not None for work in works))
        for work in works:
            harm(work)
            replicas[target].submit(work)
        groups.world.barrier()
        rollout.step(replicas[target], 3)

    def lose_some(work: Work) -> None:
        """One rank's part of every second sequence, so that the other rank could still read its own."""
        if rank == 1 and work.kv is not None and work.state.key.sample_index == 0:
            Path(work.kv.parts[1].location).unlink()

    results: list[int] = []
    move(0, 1, store)
    move(1, 0, make_store(Path(folder), 2**62 if rank == 0 else 0))  # no room on one rank
    left_behind = len(list(Path(folder).iterdir()))
    groups.world.barrier()
    move(0, 1, store, lose_some)
    works = replicas[1].pause(store=store)
    told = groups.world.all_gather_bytes(msgspec.msgpack.encode(works))
    alone = make_replica(model, store)  # both heads, from two parts
    if rank == 0:
        for work in works:
            alone.submit(work)
        rollout.finish(alone)
    moves = [msgspec.to_builtins(replica.kv_moves) for replica in (*replicas, alone)]
    groups.close()
    dist.destroy_process_group()
    return {
        "done": msgspec.msgpack.encode(list(rollout.done.items())).hex(),
        "same": told[0] == told[1],
        "stored": results,
        "left_behind": left_behind,
        "moves": moves,
    }


def test_shards_move_alike_and_to_another_number_of_shards(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path
) -> None:
    first, second = run_world(move_between_layouts, 2, qwen3, str(tmp_path))
    rollout = Rollout()
    rollout.done = dict(msgspec.msgpack.decode(bytes.fromhex(first["done"]), type=list[tuple[SequenceId, Completion]]))
    rollout.check(plain)
    assert first["same"] and second["same"]
    assert first["stored"] == second["stored"] and first["moves"][:2] == second["moves"][:2]
    with_kv, without, half = first["stored"]
    assert with_kv > 20 and without == 0 and half > 10
    assert first["left_behind"] == second["left_behind"] == 0
    assert first["moves"][0]["num_refused"] == 0 < first["moves"][1]["num_refused"]
    assert first["moves"][1]["num_imported"] > with_kv and first["moves"][1]["num_recomputed"] > 5
    assert first["moves"][2]["num_imported"] > 5 and first["moves"][2]["num_recomputed"] == 0
    assert not list(tmp_path.iterdir())


def test_a_store_without_the_shards_group_is_refused(qwen3: str, tmp_path: Path) -> None:
    class TwoRanks:
        rank, size, name = 0, 2, "two"

    with pytest.raises(ValueError, match=r"Replica.tensor_parallel: a group of 2 for 1 shards"):
        with_store(LLM(qwen3), make_store(tmp_path), TwoRanks())  # type: ignore[arg-type]
