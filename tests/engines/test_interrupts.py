"""An interrupt at any moment: nothing of the interrupted call is left, and what is counted is what there is."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import LLM, RequestOutput, SamplingParams
from engines.kvcache.tiers import TieredKVStore, make_disk_store
from engines.sequence import KVPart, Work
from tests.engines.test_drafts import ScriptedDrafter, options_of, truth_of
from tests.engines.test_kv_store import CONTENT, SIZE, TOKEN, export, files_in, layers_of, make_store
from tests.engines.test_swap import PART, TOKEN_BYTES, make_llm, stored_files
from tests.interrupts import interrupts
from tests.states import make_state

LOOP = [
    *(f"engines/replica/{name}.py" for name in ("replica", "scheduler", "mover", "slot_table", "runner", "staging")),
    *("engines/kvcache/block_manager.py", "engines/replica/stop_strings.py", "engines/speculation/ngram.py"),
]
STORES = [f"engines/kvcache/{name}.py" for name in ("tiers", "files", "store")]
PROMPTS = [[5, 6, 7] * 6, [8] * 20, [3, 4] * 10]
PARAMS = SamplingParams(max_tokens=14, n=2, ignore_eos=True)


def work(uid: int) -> Work:
    return Work(state=make_state(uid, [5, 6, uid] * 3, SamplingParams(max_tokens=8, ignore_eos=True)))


def finish(llm: LLM) -> dict[int, list[int]]:
    tokens = {}
    while llm.replica.has_work:
        tokens |= {one.state.key.prompt_uid: one.completion.token_ids for one in llm.replica.step().finished}
    return tokens


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Log-probs are rounded by the shapes of the passes, which the prefix cache decides."""
    return [[one.token_ids for one in output.outputs] for output in outputs]


def check_replica(llm: LLM) -> None:
    """What is known is known everywhere, and the blocks add up."""
    scheduler = llm.replica.scheduler
    ids = {sequence.state.sequence_id for sequence in (*scheduler.running, *scheduler.waiting)}
    assert ids == {state.sequence_id for state in llm.replica.states()}
    assert len(scheduler.running) + len(scheduler.waiting) == len(ids)
    scheduler.blocks.check_integrity()


@pytest.mark.parametrize("drafter", ["none", "ngram", "truth"])
@pytest.mark.parametrize("what", ["submit", "pause", "step"])
def test_of_a_replica_s_call_at_every_line(qwen3: str, what: str, drafter: str) -> None:
    """`submit` leaves the sequence out, `pause` all of them in, and `step` as they were; the others go on."""
    options: dict[str, Any] = {} if drafter == "none" else options_of("ngram")
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**19, max_model_len=90, **options)
    for uid in range(3):
        llm.replica.submit(work(uid))
    expected = finish(llm)
    if drafter == "truth":
        llm.replica.drafter = ScriptedDrafter("truth", truth_of(llm, [work(uid).state for uid in range(3)]))
    call: Callable[[], Any] = {
        "submit": lambda: llm.replica.submit(work(2)), "pause": llm.replica.pause, "step": llm.replica.step,
    }[what]  # fmt: skip
    # A step has over a thousand lines, which fail alike wherever the loop is, but for the replica's own.
    own = interrupts("engines/replica/replica.py")
    for interrupter in itertools.chain(own, interrupts(*LOOP, step=17 if what == "step" else 1)):
        for uid in range(2 if what == "submit" else 3):
            llm.replica.submit(work(uid))
        llm.replica.step()
        before = sorted(state.to_bytes() for state in llm.replica.states())
        interrupter.run(call)
        check_replica(llm)
        if interrupter.has_fired:
            assert sorted(state.to_bytes() for state in llm.replica.states()) == before
            if what == "submit":
                llm.replica.submit(work(2))
            assert finish(llm) == expected
        llm.replica.clear()
    if drafter == "truth":
        assert llm.replica.drafter.num_accepted > 100  # type: ignore[union-attr]


@pytest.mark.parametrize(("files", "step"), [(["engines/llm.py"], 5), (LOOP, 211), (STORES, 11)])
def test_of_a_call_at_every_few_lines(qwen3: str, tmp_path: Path, files: list[str], step: int) -> None:
    def make() -> LLM:
        return make_llm(
            qwen3, tmp_path, kv_host_bytes=PART, kv_disk_bytes=2**24, kv_cache_bytes=96 * TOKEN_BYTES, block_size=4
        )

    llm = make()
    expected = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(3)))
    assert llm.replica.kv_moves.num_swapped_in >= 2
    for interrupter in interrupts(*files, step=step):
        interrupter.run(lambda: llm.generate(PROMPTS, PARAMS, prompt_uids=range(3)))
        assert not llm.replica.has_work and not llm.replica.states() and not stored_files(llm, tmp_path)
        check_replica(llm)
        assert tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(3))) == expected
    assert tokens_of(make().generate(PROMPTS, PARAMS, prompt_uids=range(3))) == expected


CALLS: dict[str, Callable[[TieredKVStore, KVPart], object]] = {
    "export into memory": lambda store, part: (store.drop(part), export(store)),
    "export into memory, by moving one down": lambda store, _: export(store),
    "load": lambda store, part: store.load(part, CONTENT),
    "drop": lambda store, part: store.drop(part),
    "drop from the disk": lambda store, part: (export(store), store.drop(part)),
    "close": lambda store, _: store.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_of_a_store_at_every_line(name: str) -> None:
    for interrupter in interrupts(*STORES):
        with tempfile.TemporaryDirectory() as folder:
            host = Path(folder) / "host"
            host.mkdir()
            store = TieredKVStore(make_store(host, SIZE), make_disk_store(TOKEN, 3 * SIZE, Path(folder)))
            part = export(store)
            interrupter.run(lambda store=store, part=part: CALLS[name](store, part))  # type: ignore[misc]
            in_memory, on_disk = files_in(host), files_in(store.disk.folders[0])
            assert store.host.num_bytes == sum(in_memory.values()) <= SIZE
            assert store.disk.num_bytes == sum(on_disk.values()) <= 3 * SIZE
            assert {*in_memory.values(), *on_disk.values()} <= {SIZE}, "a file is not whole"
            more = [store.export(CONTENT, layers_of(CONTENT)) for _ in range(4)]
            assert any(more) and len(files_in(host)) + len(files_in(store.disk.folders[0])) == 4, "room is lost"
            store.close()
            assert not files_in(host) and not files_in(store.disk.folders[0])
