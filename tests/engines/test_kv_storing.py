"""Sequences whose chunk has ended leave when their KV has been stored, while others step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engines import LLM
from engines.kvcache.files import FileKVStore
from engines.kvcache.store import KVContent
from engines.replica import kv_thread
from engines.replica.mover import KVMover, _Written
from engines.replica.replica import Replica
from engines.sequence import Completion, KVPart, SequenceId, SequenceState, Work
from tests.engines.test_kv_mover import Rollout, make_replica, make_states, step_unawaited
from tests.engines.test_kv_store import TOKEN
from tests.engines.test_token_equality import PARAMS, PROMPTS

CHUNK = 5


class GatedStore(FileKVStore):
    """Entries are stored once the gate is open."""

    def __init__(self, folder: Path, capacity_bytes: int = 2**26) -> None:
        super().__init__("host", TOKEN, capacity_bytes, [folder])
        self.gate = threading.Event()

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        assert self.gate.wait(60.0)
        return super().export(content, layers)


@pytest.fixture(scope="module")
def wanted(qwen3: str) -> dict[SequenceId, Completion]:
    outputs = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24).generate(PROMPTS, PARAMS)
    return {(0, uid, one.index): one for uid, output in enumerate(outputs) for one in output.outputs}


@pytest.fixture
def long_states(wanted: dict[SequenceId, Completion]) -> list[SequenceState]:
    return [state for state in make_states() if len(wanted[state.sequence_id].token_ids) > 15][:8]


@pytest.fixture
def behind_a_gate(qwen3: str, long_states: list[SequenceState], tmp_path: Path) -> tuple[Replica, Rollout, GatedStore]:
    """A replica with eight sequences, three of which have just ended their chunk; the others go on to their end."""
    store, rollout = GatedStore(tmp_path), Rollout()
    replica = make_replica(qwen3, store, prefix_caching=False)
    for index, state in enumerate(long_states):
        replica.submit(Work(state=state, max_new_tokens=CHUNK if index < 3 else None))
    assert [step_unawaited(replica, rollout) for _ in range(CHUNK)] == [8] * CHUNK
    return replica, rollout, store


def finish(
    replica: Replica,
    rollout: Rollout,
    works: Iterable[Work],
    wanted: dict[SequenceId, Completion],
) -> None:
    """Continues the works here, to the end of all sequences."""
    for work in works:
        replica.submit(work)
    rollout.finish(replica)
    rollout.check({id_: wanted[id_] for id_ in rollout.done})
    assert len(rollout.done) == 8


def leaving(replica: Replica) -> list[SequenceId]:
    return [state.sequence_id for state in replica.states()[:3]]


def until_stored(replica: Replica) -> None:
    assert isinstance(replica.mover, KVMover)
    kv_thread.wait([job.future for job in replica.mover._writer._jobs.values()])


def open_on_wait(store: GatedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens the gate as soon as somebody waits for a write, and not before."""
    wait = kv_thread.wait

    def open_and_wait(*args: Any) -> Any:
        store.gate.set()
        return wait(*args)

    monkeypatch.setattr(kv_thread, "wait", open_and_wait)


def test_others_step_while_kv_is_stored(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
) -> None:
    replica, rollout, store = behind_a_gate
    held = sum(len(replica.scheduler.blocks.table(one)) for one in replica.scheduler.running)
    assert len(replica.scheduler.running) == 5 and replica.num_sequences == 8
    assert replica.scheduler.blocks.num_blocks - replica.scheduler.blocks.num_free_blocks == held
    for _ in range(3):
        output = replica.step()
        assert output.num_running == 5 and not output.released and not output.finished
    store.gate.set()
    until_stored(replica)
    works = replica.step().released
    assert [work.state.num_generated for work in works] == [CHUNK] * 3 and replica.num_sequences == 5
    assert all(work.kv is not None and work.kv.num_tokens == len(work.state.tokens) - 1 for work in works)
    assert replica.kv_moves.waited_s == 0 and replica.kv_moves.num_exported == 3
    finish(replica, rollout, works, wanted)
    assert replica.kv_moves.num_imported == 3 and not list(tmp_path.iterdir())


def test_the_last_ones_leave_in_the_step_that_ends_their_chunk(
    qwen3: str, long_states: list[SequenceState], tmp_path: Path
) -> None:
    store = GatedStore(tmp_path)
    store.gate.set()
    replica = make_replica(qwen3, store)
    replica.submit(Work(state=long_states[0], max_new_tokens=2))
    assert not replica.step().released
    (work,) = replica.step().released
    assert work.kv is not None and not replica.has_work and replica.kv_moves.waited_s > 0


@pytest.mark.parametrize("with_kv", [False, True])
def test_a_pause_waits_for_kv_that_it_wants(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_kv: bool,
) -> None:
    replica, rollout, store = behind_a_gate
    open_on_wait(store, monkeypatch)
    works = replica.pause(leaving(replica), with_kv=with_kv)
    assert store.gate.is_set() == with_kv == all(work.kv is not None for work in works)
    store.gate.set()
    finish(replica, rollout, works, wanted)
    replica.mover.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir()), "what nobody wants is dropped"


def test_when_all_others_have_left_a_step_waits_for_the_rest(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rollout, store = behind_a_gate
    others = replica.pause([state.sequence_id for state in replica.states()[3:]])
    open_on_wait(store, monkeypatch)
    output = replica.step()
    assert output.num_running == 0 and len(output.released) == 3 and not replica.has_work
    assert store.gate.is_set() and replica.kv_moves.waited_s > 0
    finish(replica, rollout, [*others, *output.released], wanted)


def test_an_abort_drops_what_is_being_stored(
    behind_a_gate: tuple[Replica, Rollout, GatedStore], tmp_path: Path
) -> None:
    replica, rollout, store = behind_a_gate
    for sequence_id in leaving(replica):
        assert len(replica.abort(sequence_id).completion.token_ids) == CHUNK
    store.gate.set()
    rollout.finish(replica)
    replica.mover.close()  # type: ignore[attr-defined]
    assert len(rollout.done) == 5 and not list(tmp_path.iterdir())


def test_after_a_failed_step_they_leave_without_new_kv(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rollout, store = behind_a_gate

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(replica._runner, "run", broken)
        with pytest.raises(RuntimeError, match="broken"):
            replica.step()
    output = replica.step()
    assert output.num_running == 5 and [work.kv for work in output.released] == [None] * 3
    store.gate.set()
    finish(replica, rollout, output.released, wanted)
    replica.mover.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_an_error_or_an_interrupt_while_they_leave_loses_none(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rollout, store = behind_a_gate
    store.gate.set()
    until_stored(replica)

    def interrupted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            inner(*args, **options)
            raise KeyboardInterrupt

        return call

    for name in ("_stored", "_release", "_leave"):
        with monkeypatch.context() as patch:
            patch.setattr(replica, name, interrupted(getattr(replica, name)))
            with pytest.raises(KeyboardInterrupt):
                replica.step()
        assert replica.num_sequences == 8
    works = replica.step().released
    assert len(works) == 3
    finish(replica, rollout, works, wanted)
    assert not list(tmp_path.iterdir())


def test_one_leaves_while_another_is_stored(
    behind_a_gate: tuple[Replica, Rollout, GatedStore], wanted: dict[SequenceId, Completion]
) -> None:
    """The first one's write has ended, that of the others waits."""
    replica, rollout, store = behind_a_gate
    assert isinstance(replica.mover, KVMover)
    jobs = replica.mover._writer._jobs
    first = next(iter(jobs))
    jobs[first].future = Future()
    jobs[first].future.set_result(_Written())
    output = replica.step()
    assert [work.state.sequence_id for work in output.released] == [first.state.sequence_id]
    assert output.num_running == 5 and replica.kv_moves.waited_s == 0 and not store.gate.is_set()
    (paused,) = replica.pause(leaving(replica)[:1])
    store.gate.set()
    rollout.finish(replica)
    assert paused.kv is None and len(rollout.done) == 5


def test_an_error_of_the_writer_is_no_error_of_the_sequence(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rollout, store = behind_a_gate

    def broken(*_: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(FileKVStore, "export", broken)
    with pytest.warns(UserWarning, match=r"KV of sequence \(0, .*: cannot be stored: OSError\('broken'\)"):
        store.gate.set()
        works = replica.pause(leaving(replica), with_kv=True)
    assert not any(work.kv for work in works) and replica.kv_moves.num_refused == 3
    finish(replica, rollout, works, wanted)


def test_a_write_that_hangs_is_named_and_given_up(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, rollout, store = behind_a_gate
    monkeypatch.setattr(kv_thread, "PATIENCE_S", 0.01)
    wanted_warning = r"KV of sequence \(0, .*writing took longer than 0\.01 s on rank 0.*, as is that of 2 behind it"
    with pytest.warns(UserWarning, match=wanted_warning) as warned:
        works = replica.pause(leaving(replica), with_kv=True)
    assert len(warned) == 1 and not any(work.kv for work in works) and replica.kv_moves.num_refused == 3
    store.gate.set()
    finish(replica, rollout, works, wanted)
    replica.mover.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir()), "what was stored too late is dropped"


def test_without_room_they_leave_with_what_was_stored_before(
    qwen3: str,
    long_states: list[SequenceState],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
) -> None:
    store, rollout = GatedStore(tmp_path, 0), Rollout()
    store.gate.set()
    replica = make_replica(qwen3, store)
    works = [Work(state=state, max_new_tokens=CHUNK) for state in long_states]
    for work in works:
        replica.submit(work)
    released: list[Work] = []
    while replica.has_work:
        released += replica.step().released
    assert len(released) == 8 and not any(work.kv for work in released) and replica.kv_moves.num_refused == 8
    finish(replica, rollout, released, wanted)


def test_too_much_at_once_is_stored_in_the_step(
    qwen3: str,
    long_states: list[SequenceState],
    wanted: dict[SequenceId, Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_thread, "MOST_BYTES", 1)
    store, rollout = GatedStore(tmp_path), Rollout()
    store.gate.set()
    replica = make_replica(qwen3, store)
    for state in long_states:
        replica.submit(Work(state=state, max_new_tokens=CHUNK))
    for _ in range(CHUNK - 1):
        assert not replica.step().released
    released = replica.step().released
    assert len(released) >= 7
    while replica.has_work:
        released += replica.step().released
    assert len(released) == 8 and all(work.kv is not None for work in released)
    finish(replica, rollout, released, wanted)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_regrouped_does_not_wait_for_its_old_thread(
    behind_a_gate: tuple[Replica, Rollout, GatedStore],
) -> None:
    """The thread ends behind its job, whose entry nobody has then."""
    replica, _, store = behind_a_gate
    assert isinstance(replica.mover, KVMover)
    (thread,) = replica.mover._writer._thread._threads
    replica.mover.close(waits=False)
    assert thread.is_alive() and not store.num_bytes
    store.gate.set()
    thread.join(60.0)
    assert not thread.is_alive() and not store.num_bytes
