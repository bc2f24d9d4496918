"""A sequence moves between two steps, with its KV or by recompute, and draws the same tokens either way."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines import LLM
from engines.kvcache.files import FileKVStore
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv
from engines.kvcache.store import HEADER_BYTES, KVContent, KVStore
from engines.parallel.layout import ReplicaSpec
from engines.replica import kv_thread
from engines.replica.mover import KVMover
from engines.replica.replica import Replica
from engines.rollout import pace
from engines.rollout.pace import ShortestStep
from engines.rollout.steps import Stepper
from engines.sequence import Completion, KVPart, SequenceId, Work
from tests.engines.test_kv_store import TOKEN, files_in, make_store, make_tiers
from tests.engines.test_token_equality import PARAMS, PROMPTS, TIGHT_KV, make_states
from tests.worlds import run_world


def make_replica(model: str, store: KVStore | None, **options: Any) -> Replica:
    """That recomputes what it preempts, and moves the KV of what comes and goes."""
    defaults = {"dtype": "float64", "kv_cache_bytes": 2**24, "preemption": "recompute"}
    replica = LLM(model, **{**defaults, **options}).replica
    if store is not None:
        replica.mover.use(store)
    return replica


def await_reads(replica: Replica) -> None:
    """Until all KV that is read ahead is there: what the next step admits then does not depend on time."""
    assert isinstance(replica.mover, KVMover)
    wait([job.future for job in replica.mover._reader._jobs.values()])


class Rollout:
    """All test sequences, run by whoever holds them; remembers what finished, and the forward passes' tokens."""

    def __init__(self) -> None:
        self.done: dict[SequenceId, Completion] = {}
        self.num_tokens = 0

    def step(self, replica: Replica, num_steps: int) -> None:
        for _ in range(num_steps):
            await_reads(replica)
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
        works = source.pause(with_kv=True)
        assert not source.has_work and len(works) == num_held
        stored = [work for work in works if work.kv is not None]
        assert 10 < len(stored) < num_held
        num_partial += sum(work.kv.num_tokens < len(work.state.tokens) - 1 for work in stored if work.kv)
        assert len(list(tmp_path.iterdir())) == sum(len(work.kv.parts) for work in stored if work.kv)
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
    works = replica.pause(with_kv=True)
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
    store = make_store(tmp_path, capacity_bytes=5 * (HEADER_BYTES + 40 * TOKEN_BYTES))
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
        for work in source.pause(rng.sample(here, rng.randint(0, len(here) // 2)), with_kv=rng.random() < 0.7):
            rng.choice([*replicas, replicas[2]]).submit(work)  # the small one is to be crowded
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= store.files.capacity_bytes
    rollout.check(plain)
    assert sum(replica.kv_moves.num_imported for replica in replicas) > 10
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


def parts_with(**changes: Any) -> Callable[[list[Work], Path], list[Work]]:
    def on_all(works: list[Work], folder: Path) -> list[Work]:
        handles = [work.kv for work in works if work.kv is not None]
        parts = [tuple(replace(part, **changes) for part in handle.parts) for handle in handles]
        return [replace(w, kv=replace(h, parts=p)) for w, h, p in zip(works, handles, parts, strict=True)]

    return on_all


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
    "no tokens": parts_with(num_tokens=0),
    "more tokens than there are": parts_with(num_tokens=2**40),
    "not from the first token on": parts_with(first_token=1),
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
    works = replica.pause(with_kv=True)
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
    works = replica.pause(with_kv=True)
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
    works = first.pause(with_kv=True)
    assert [work.kv for work in works] == [None] * len(works) and first.kv_moves.num_refused == len(works) > 20
    for work in works:
        first.submit(work)
    rollout.step(first, 3)
    first.mover.use(roomy)
    works = first.pause(with_kv=True)
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


TOKEN_BYTES = 2 * 2 * 2 * 16 * 8


def lose_some(rng: random.Random, folder: Path) -> None:
    """A few entries: gone, cut or with a changed byte."""
    files = sorted(path for path in folder.rglob("curtail-*") if path.is_file())
    for path in rng.sample(files, len(files) // 12):
        how = rng.choice(["gone", "cut", "changed"])
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"\1")


def run_chunk(replica: Replica, works: list[Work], size: int, rollout: Rollout) -> list[Work]:
    """Generates `size` tokens of each; returns the sequences that have not ended."""
    for work in works:
        replica.submit(replace(work, max_new_tokens=size))
    await_reads(replica)
    released = []
    while replica.has_work:
        output = replica.step()
        rollout.num_tokens += output.num_tokens
        rollout.done |= {finished.state.sequence_id: finished.completion for finished in output.finished}
        released += output.released
    return released


@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("tier", ["host", "disk", "both"])
def test_each_token_s_kv_is_written_once(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, tier: str, size: int
) -> None:
    store = make_tiers(tmp_path, {"host": 2**26, "disk": 0, "both": 2**17}[tier], 0 if tier == "host" else 2**26)
    replicas = [make_replica(qwen3, store, prefix_caching=False) for _ in range(2)]
    works, rollout, used = [Work(state=state) for state in make_states()], Rollout(), set[str]()
    for stay in itertools.count():
        works = run_chunk(replicas[stay % 2], works, size, rollout)
        parts = [part for work in works if work.kv is not None for part in work.kv.parts]
        files = {**files_in(tmp_path / "host"), **files_in(store.disk.folders[0])}
        assert len(files) == len(parts) == (stay + 1) * len(works)
        for work in works:
            assert work.kv is not None and work.kv.num_tokens == len(work.state.tokens) - 1
        used |= {name for name in ("host", "disk") if getattr(store, name).num_bytes}
        assert sum(files.values()) == sum(HEADER_BYTES + part.num_bytes for part in parts)
        if not works:
            break
    rollout.check(plain)
    assert rollout.num_tokens == least_tokens(plain)
    num_stays = {id_: -(-len(one.token_ids) // size) for id_, one in plain.items()}
    num_stored = sum(len(PROMPTS[uid]) + (n - 1) * size - 1 for (_, uid, _), n in num_stays.items() if n > 1)
    num_loaded = sum(
        len(PROMPTS[uid]) + stay * size - 1 for (_, uid, _), n in num_stays.items() for stay in range(1, n)
    )
    moves = [replica.kv_moves for replica in replicas]
    assert sum(one.stored_tokens for one in moves) == num_stored
    assert sum(one.stored_bytes for one in moves) == num_stored * TOKEN_BYTES
    assert sum(one.loaded_tokens for one in moves) == num_loaded
    assert store.num_bytes == 0 and used == ({"host", "disk"} if tier == "both" else {tier})


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_range_is_computed_again_and_stored_again(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, seed: int, prefix_caching: bool
) -> None:
    rng = random.Random(seed)
    store = make_tiers(tmp_path, 2**17, 2**26)
    tight = {"kv_cache_bytes": TIGHT_KV, "max_model_len": 100, "preemption": "swap"}
    replicas = [make_replica(qwen3, store, prefix_caching=prefix_caching, **tight) for _ in range(2)]
    works, rollout = [Work(state=state) for state in make_states()], Rollout()
    for stay in itertools.count():
        works = run_chunk(replicas[stay % 2], works, rng.randint(4, 16), rollout)
        assert all(work.kv is not None and work.kv.num_tokens == len(work.state.tokens) - 1 for work in works)
        if not works:
            break
        lose_some(rng, tmp_path)
    rollout.check(plain)
    assert prefix_caching or rollout.num_tokens > least_tokens(plain)
    assert not any(replica.scheduler.num_preemptions for replica in replicas), "chunks have room to their ends"
    assert not files_in(tmp_path / "host") and not files_in(store.disk.folders[0])


# -- reading ahead


class GatedStore(FileKVStore):
    """Loads wait for the gate."""

    gate = threading.Event()

    def load(self, part: KVPart, content: KVContent) -> Items[torch.Tensor]:
        assert self.gate.wait(60.0)
        return super().load(part, content)


def begun_behind_a_gate(model: str, folder: Path) -> tuple[Replica, Rollout, list[Work]]:
    """A replica that runs three of the sequences, and four works with KV, submitted to it."""
    store = GatedStore("host", TOKEN, 2**26, [folder])
    store.gate = threading.Event()
    replica = make_replica(model, store, prefix_caching=False)
    rollout = begun(replica, 9)
    ids = [state.sequence_id for state in replica.states()]
    works = replica.pause(ids[3:7], with_kv=True)
    replica.pause(ids[7:])
    for work in works:
        replica.submit(work)
    assert all(work.kv is not None for work in works)
    rollout.done.clear()
    return replica, rollout, works


def step_unawaited(replica: Replica, rollout: Rollout) -> int:
    output = replica.step()
    rollout.done |= {finished.state.sequence_id: finished.completion for finished in output.finished}
    return output.num_running


def test_others_step_while_kv_is_read(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    replica, rollout, works = begun_behind_a_gate(qwen3, tmp_path)
    assert [step_unawaited(replica, rollout) for _ in range(5)] == [3] * 5 and replica.num_waiting == 4
    (moved,) = replica.pause([works[1].state.sequence_id])
    assert moved.kv == works[1].kv
    replica.abort(works[2].state.sequence_id)
    replica.mover.store.gate.set()  # type: ignore[attr-defined]
    await_reads(replica)
    assert step_unawaited(replica, rollout) == 5 and replica.num_waiting == 0
    replica.submit(moved)
    moves = replica.kv_moves
    assert moves.num_imported == 2 and moves.fetched_tokens == moves.loaded_tokens > 0 == moves.waited_s
    rollout.finish(replica)
    assert moves.num_imported == 3 and moves.num_recomputed == 0
    rollout.check({id_: plain[id_] for id_ in rollout.done})
    assert len(rollout.done) == 6 and not list(tmp_path.iterdir())


def test_a_read_that_hangs_is_named_and_its_kv_computed_again(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_thread, "PATIENCE_S", 0.01)
    replica, rollout, _ = begun_behind_a_gate(qwen3, tmp_path)
    with pytest.warns(
        UserWarning, match=r"KV of sequence \(0, .*reading took longer .* on rank 0.*3 behind it"
    ) as warned:
        while replica.has_work:
            step_unawaited(replica, rollout)
    assert len(warned) == 1 and replica.kv_moves.num_recomputed == 4
    replica.mover.store.gate.set()  # type: ignore[attr-defined]
    rollout.check({id_: plain[id_] for id_ in rollout.done})
    assert len(rollout.done) == 7 and not list(tmp_path.iterdir())


def test_an_error_of_the_thread_is_raised_or_reported(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, rollout, _ = begun_behind_a_gate(qwen3, tmp_path)

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(FileKVStore, "load", broken)
    with pytest.warns(UserWarning, match="reading stored KV in the background failed.*broken"):
        replica.mover.store.gate.set()  # type: ignore[attr-defined]
        await_reads(replica)
        with pytest.raises(RuntimeError, match="broken"):
            replica.step()
    monkeypatch.undo()
    rollout.finish(replica)
    rollout.check({id_: plain[id_] for id_ in rollout.done})
    assert len(rollout.done) == 7 and not list(tmp_path.iterdir())


class SlowTransfers(ShortestStep):
    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: pace.Path) -> float:
        return 0.01 * num_tokens


def test_a_paced_read_takes_the_time_of_what_the_cache_lacks(qwen3: str, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    first, llm = make_replica(qwen3, store), LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, prefix_caching=False)
    llm.replica.mover.use(store)  # type: ignore[attr-defined]
    stepper = Stepper(llm._engine, 0, SlowTransfers(step_s=0.0))
    begun(first, 5)
    (work,) = first.pause([first.states()[0].sequence_id], with_kv=True)
    assert work.kv is not None
    start = time.monotonic()
    llm.replica.submit(work)
    stepper.step()
    assert time.monotonic() - start >= 0.01 * work.kv.num_tokens
    moves = llm.replica.kv_moves
    assert moves.fetched_tokens == work.kv.num_tokens and moves.moved_tokens == 0 < moves.waited_s


def test_closing_ends_the_thread(qwen3: str, tmp_path: Path) -> None:
    replica, _, _ = begun_behind_a_gate(qwen3, tmp_path)
    replica.mover.store.gate.set()  # type: ignore[attr-defined]
    assert isinstance(replica.mover, KVMover)
    (thread,) = replica.mover._reader._thread._threads
    replica.mover.close()
    assert not thread.is_alive()


def test_too_much_is_not_read_ahead(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_thread, "MOST_BYTES", 1)
    replica, rollout, _ = begun_behind_a_gate(qwen3, tmp_path)
    replica.mover.store.gate.set()  # type: ignore[attr-defined]
    rollout.finish(replica)
    assert 0 < replica.kv_moves.fetched_tokens < replica.kv_moves.loaded_tokens and not list(tmp_path.iterdir())


def test_the_last_token_is_always_computed(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    """A state that was taken back to fewer tokens than its KV has."""
    store = make_store(tmp_path)
    replica = make_replica(qwen3, store, prefix_caching=False)
    rollout = begun(replica, 6)
    works = [work for work in replica.pause(with_kv=True) if work.state.num_generated == 6]
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
    works = replica.pause([ids[3], ids[1], ids[1], ids[2]], with_kv=True)
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
    (work,) = replica.pause([first.sequence_id], with_kv=True)
    replica.submit(work)  # waits behind the second, which takes the only slot
    replica.step()
    (again,) = replica.pause([first.sequence_id], with_kv=True)
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
    options = {
        "world": groups, "layout": layout, "kv_cache_bytes": 2**22, "max_num_seqs": 30, "prefix_caching": False,
    }  # fmt: skip
    replicas = [make_replica(model, store, **options, block_size=block_size) for block_size in (16, 5)]
    rollout = begun(replicas[0], 5)

    def move(source: int, target: int, to: KVStore, harm: Callable[[Work], object] = lambda work: None) -> None:
        replicas[source].mover.use(to)
        works = replicas[source].pause(with_kv=True)
        replicas[source].mover.use(store)
        results.append(sum(work.kv is not None for work in works))
        groups.world.barrier()  # a refused part of one rank has been dropped
        num_files.append((len(list(Path(folder).iterdir())), sum(len(work.kv.parts) for work in works if work.kv)))
        groups.world.barrier()
        for work in works:
            harm(work)
            replicas[target].submit(work)
        groups.world.barrier()
        rollout.step(replicas[target], 3)

    def lose_some(work: Work) -> None:
        """One rank's part of every second sequence, so that the other rank could still read its own."""
        if rank == 1 and work.kv is not None and work.state.key.sample_index == 0:
            (Path(folder) / work.kv.parts[1].location).unlink()

    results: list[int] = []
    num_files: list[tuple[int, int]] = []
    move(0, 1, store)
    move(1, 0, make_store(Path(folder), 2**62 if rank == 0 else 0))  # no room on one rank
    move(0, 1, store, lose_some)
    works = replicas[1].pause(with_kv=True)
    told = groups.world.all_gather_bytes(msgspec.msgpack.encode(works))
    alone = make_replica(model, store)  # both heads, from two parts
    if rank == 0:
        for work in works:
            alone.submit(work)
        rollout.finish(alone)
    moves = [msgspec.to_builtins(replace(replica.kv_moves, waited_s=0.0)) for replica in (*replicas, alone)]
    groups.close()
    dist.destroy_process_group()
    return {
        "done": msgspec.msgpack.encode(list(rollout.done.items())).hex(),
        "same": told[0] == told[1],
        "stored": results,
        "num_files": num_files,
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
    assert min(first["stored"]) > 10
    assert first["num_files"] == second["num_files"] and all(files == parts for files, parts in first["num_files"])
    assert first["moves"][0]["num_refused"] == 0 < first["moves"][1]["num_refused"]
    assert first["moves"][1]["num_imported"] > 15 and first["moves"][1]["num_recomputed"] > 5
    assert first["moves"][2]["num_imported"] > 5
    assert not list(tmp_path.iterdir())


def take_turns(model: str, folder: str, loses: bool) -> list[Any]:
    """Chunks on a replica of two shards and on one of one, in turns."""
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache
    from engines.parallel.layout import nested_layout

    dist.init_process_group("gloo")
    layout = nested_layout(range(2), 2)
    groups = GroupCache(TorchGroup(timeout_s=60), [layout], timeout_s=60)
    rank, rng, store = groups.world.rank, random.Random(5), make_store(Path(folder))
    options = {"kv_cache_bytes": 2**22, "max_num_seqs": 30, "prefix_caching": False}
    both = make_replica(model, store, world=groups, layout=layout, **options)
    alone = make_replica(model, store, **options)
    works, rollout = [Work(state=state) for state in make_states()], Rollout()
    num_files = []
    for stay in itertools.count():
        if stay % 2 == 0 or rank == 0:
            works = run_chunk((both, alone)[stay % 2], works, 7, rollout)
        works = msgspec.msgpack.decode(
            groups.world.broadcast_bytes(msgspec.msgpack.encode(works) if rank == 0 else None), type=list[Work]
        )
        num_files.append((len(list(Path(folder).iterdir())), sum(len(work.kv.parts) for work in works if work.kv)))
        groups.world.barrier()
        if not works:
            break
        if loses and rank == 0:
            lose_some(rng, Path(folder))
        groups.world.barrier()
    stored = [replica.kv_moves.stored_tokens for replica in (both, alone)]
    groups.close()
    dist.destroy_process_group()
    return [msgspec.msgpack.encode(list(rollout.done.items())).hex(), rollout.num_tokens, num_files, stored]


@pytest.mark.parametrize("loses", [False, True])
def test_chunks_on_replicas_of_one_shard_and_of_two(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, loses: bool
) -> None:
    (done, num_tokens, num_files, stored), _ = run_world(take_turns, 2, qwen3, str(tmp_path), loses)
    rollout = Rollout()
    rollout.done = dict(msgspec.msgpack.decode(bytes.fromhex(done), type=list[tuple[SequenceId, Completion]]))
    rollout.check(plain)
    assert min(stored) > 0 and num_files[-1] == (0, 0) and not list(tmp_path.iterdir())
    if loses:
        assert num_tokens > least_tokens(plain)
    else:
        assert num_tokens == least_tokens(plain)
        num_stays = {id_: -(-len(one.token_ids) // 7) for id_, one in plain.items()}
        num_stored = sum(len(PROMPTS[uid]) + (n - 1) * 7 - 1 for (_, uid, _), n in num_stays.items() if n > 1)
        assert sum(stored) == num_stored
        for stay, (files, parts) in enumerate(num_files):
            held = sum(n > stay + 1 for n in num_stays.values())
            assert files == parts == held * sum(2 - index % 2 for index in range(stay + 1))
