"""Preemption by swap: the same tokens in float64, whatever is stored, refused, lost or moved; and nothing is left."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines import LLM, SamplingParams
from engines.kvcache.cost import CopyCost, PrefillCost, SwapCost
from engines.kvcache.files import FileKVStore
from engines.kvcache.store import HEADER_BYTES, Tier
from engines.models.decoder import Decoder
from engines.models.loader import checkpoint_tensors
from engines.parallel.owned_files import DEV_SHM
from engines.sequence import Completion, SequenceId, Work
from experiments.config import RolloutConfig
from tests.engines.test_kv_mover import Rollout, begun, least_tokens, make_replica
from tests.engines.test_token_equality import LONG, PARAMS, PROMPTS, TIGHT_KV, make_states, tokens_of
from tests.worlds import run_python, run_world

OPTIONS: dict[str, Any] = {
    "dtype": "float64", "kv_cache_bytes": TIGHT_KV, "max_model_len": 100, "preemption": "swap",
}  # fmt: skip
TOKEN_BYTES = 2 * 2 * 2 * 16 * 8
PART = HEADER_BYTES + 50 * TOKEN_BYTES
TIERS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"kv_host_bytes": 0, "kv_disk_bytes": 2**24},
    "both": {"kv_host_bytes": 2 * PART, "kv_disk_bytes": 2**24},
    "too small": {"kv_host_bytes": PART},
    "both too small": {"kv_host_bytes": PART, "kv_disk_bytes": PART},
}


def make_llm(model: str, folder: Path, **options: Any) -> LLM:
    if options.get("kv_disk_bytes"):
        options["kv_disk_folder"] = str(folder)
    return LLM(model, **{**OPTIONS, **options})


def prefer_swap_beyond(llm: LLM, num_tokens: int) -> None:
    """Costs as if measured: that many tokens cost the same either way, more are cheaper to swap."""
    prefill = PrefillCost(latency=0.0, seconds_per_token=1.0, seconds_per_pair=0.0)
    copy_ = CopyCost(bytes_per_token=1, out_bandwidth=1e9, in_bandwidth=1e9, latency=float(num_tokens))
    costs = dict.fromkeys(("host", "disk"), SwapCost(prefill=prefill, copy=copy_))
    llm.replica.mover.swap_policy.costs.update(costs)


def stored_files(llm: LLM, folder: Path) -> list[Path]:
    token = llm.replica.mover.store.token  # type: ignore[union-attr]
    return [path for where in (DEV_SHM, *folder.glob("curtail-kv-*")) for path in where.glob(f"*-{token}-*")]


def check_clean(llm: LLM, folder: Path) -> None:
    assert not stored_files(llm, folder)
    blocks = llm.replica.scheduler.blocks
    blocks.check_integrity()
    assert blocks.num_free_blocks == blocks.num_blocks


@pytest.fixture(scope="module")
def plain(qwen3: str) -> dict[SequenceId, Completion]:
    outputs = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24).generate(PROMPTS, PARAMS)
    return {(0, uid, c.index): c for uid, output in enumerate(outputs) for c in output.outputs}


def step_until_swapped(llm: LLM, rollout: Rollout, num_out: int = 1) -> None:
    """Until so many sequences wait with their KV stored."""
    while sum(sequence.is_swapped_out for sequence in llm.replica.scheduler.waiting) < num_out:
        assert llm.replica.has_work, "too few were swapped out to test anything"
        rollout.step(llm.replica, 1)


# -- the same tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["swap", "auto", "mixed"])
@pytest.mark.parametrize("tiers", TIERS)
def test_tokens_are_those_of_a_plain_run(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, tiers: str, preemption: str, prefix_caching: bool
) -> None:
    options = {**TIERS[tiers], "prefix_caching": prefix_caching}
    llm = make_llm(qwen3, tmp_path, preemption="swap" if preemption == "swap" else "auto", **options)
    if preemption == "mixed":
        prefer_swap_beyond(llm, 30)
    rollout = begun(llm.replica, 0)
    rollout.finish(llm.replica)
    rollout.check(plain)
    moves, num_preemptions = llm.replica.kv_moves, llm.replica.scheduler.num_preemptions
    assert num_preemptions > 5, "the KV cache was not small enough to test anything"
    assert moves.num_swapped_in == moves.num_swapped_out and moves.swapped_in_bytes == moves.swapped_out_bytes
    assert moves.num_imported == moves.num_recomputed == moves.num_exported == 0
    if preemption == "swap":
        if "too small" in tiers:
            assert 0 < moves.num_swapped_out < num_preemptions
        else:
            assert moves.num_swapped_out == num_preemptions
    elif preemption == "mixed":
        assert 0 < moves.num_swapped_out < num_preemptions
    check_clean(llm, tmp_path)


def test_nothing_is_computed_twice(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path, prefix_caching=False)
    rollout = begun(llm.replica, 0)
    rollout.finish(llm.replica)
    assert llm.replica.kv_moves.num_swapped_out > 5 and rollout.num_tokens == least_tokens(plain)
    recomputing = make_llm(qwen3, tmp_path, prefix_caching=False, preemption="recompute")
    rollout = begun(recomputing.replica, 0)
    rollout.finish(recomputing.replica)
    rollout.check(plain)
    assert recomputing.replica.scheduler.num_preemptions > 5 and rollout.num_tokens > least_tokens(plain)
    assert recomputing.replica.mover.store is None and recomputing.replica.kv_moves.num_swapped_out == 0


def test_members_of_a_group_share_their_prompt_again_when_they_come_back(qwen3: str, tmp_path: Path) -> None:
    """Of 6 members with 6 blocks in common and 3 of their own two fit without sharing."""
    params = SamplingParams(max_tokens=40, n=6, ignore_eos=True)
    (expected,) = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24).generate(LONG[:1], params)
    options = {"kv_cache_bytes": 18 * 16 * TOKEN_BYTES, "max_model_len": 140}
    llm = make_llm(qwen3, tmp_path, **options)
    (output,) = llm.generate(LONG[:1], params)
    assert tokens_of([output.outputs]) == tokens_of([expected.outputs])
    moves, scheduler = llm.replica.kv_moves, llm.replica.scheduler
    assert moves.num_swapped_in == moves.num_swapped_out == scheduler.num_preemptions > 0
    assert scheduler.num_shared_tokens >= 96 * (5 + moves.num_swapped_in)
    check_clean(llm, tmp_path)
    # In what is common to all there is nothing to gain: the model sees it.
    frugal = make_llm(qwen3, tmp_path, preemption="auto", **options)
    prefer_swap_beyond(frugal, 60)  # more than a member has of its own
    assert tokens_of([frugal.generate(LONG[:1], params)[0].outputs]) == tokens_of([expected.outputs])
    assert frugal.replica.kv_moves.num_swapped_out < frugal.replica.scheduler.num_preemptions


def test_costs_are_measured_when_first_wanted(qwen3: str, tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path, preemption="auto", kv_host_bytes=PART, kv_disk_bytes=2**24)
    policy, store = llm.replica.mover.swap_policy, llm.replica.mover.store
    assert not policy.costs
    for name in ("host", "disk"):
        cost = policy._measure(Tier(name, getattr(store, name)))
        assert cost.copy.bytes_per_token == TOKEN_BYTES and 0 < cost.copy.latency < 60, name
        assert cost.copy.out_bandwidth > 0 and cost.copy.in_bandwidth > 0
        assert cost.prefill.seconds_per_token >= 0 and cost.prefill.seconds_per_pair >= 0
    check_clean(llm, tmp_path)


# -- what goes wrong


def test_files_lost_and_damaged_on_the_way(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path, **TIERS["both"])
    rollout = begun(llm.replica, 0)
    ways = itertools.cycle([
        Path.unlink,
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.write_bytes(path.read_bytes()[:-9] + bytes(9)),
        lambda path: None,
    ])  # fmt: skip
    seen: set[str] = set()
    while llm.replica.has_work:
        for path in stored_files(llm, tmp_path):
            if path.name not in seen:
                seen.add(path.name)
                next(ways)(path)
        rollout.step(llm.replica, 1)
    rollout.check(plain)
    moves = llm.replica.kv_moves
    assert 0 < moves.num_swapped_in < moves.num_swapped_out
    check_clean(llm, tmp_path)


def test_a_disk_that_goes_away_in_the_middle(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path, **TIERS["disk"])
    rollout = begun(llm.replica, 0)
    step_until_swapped(llm, rollout, 2)
    shutil.rmtree(tmp_path)
    with pytest.warns(UserWarning, match="KV that finds no room is recomputed") as told:
        rollout.finish(llm.replica)
    assert len(told) == 1
    rollout.check(plain)
    moves = llm.replica.kv_moves
    assert moves.num_swapped_in < moves.num_swapped_out < llm.replica.scheduler.num_preemptions


def test_a_pass_that_fails_leaves_no_wrong_kv(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each 23rd pass is interrupted after it has spoilt the blocks that it was to write to."""
    llm = make_llm(qwen3, tmp_path)
    forward, count = Decoder.forward, itertools.count(1)

    def interrupted(self: Decoder, batch: Any, kv: Any) -> torch.Tensor:
        if next(count) % 23:
            return forward(self, batch, kv)
        for tensor in (*kv.keys, *kv.values):
            tensor.view(-1, *tensor.shape[2:])[batch.slot_mapping] = 1e3
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "forward", interrupted)
    rollout = begun(llm.replica, 0)
    num_interrupted = 0
    while llm.replica.has_work:
        try:
            rollout.step(llm.replica, 1)
        except KeyboardInterrupt:
            num_interrupted += 1
    rollout.check(plain)
    assert num_interrupted > 5 and llm.replica.kv_moves.num_swapped_in > 2
    check_clean(llm, tmp_path)


def test_an_export_that_is_interrupted_loses_no_sequence(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(qwen3, tmp_path)
    export, count = FileKVStore.export, itertools.count(1)

    def interrupted(self: FileKVStore, content: Any, layers: Any) -> Any:
        if next(count) % 3 == 0:
            raise KeyboardInterrupt
        return export(self, content, layers)

    monkeypatch.setattr(FileKVStore, "export", interrupted)
    rollout = begun(llm.replica, 0)
    while llm.replica.has_work:
        try:
            rollout.step(llm.replica, 1)
        except KeyboardInterrupt:
            assert not llm.replica.scheduler.running
    rollout.check(plain)
    check_clean(llm, tmp_path)


# -- leaving while swapped out


def test_paused_while_swapped_out_and_resumed_elsewhere(
    qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path
) -> None:
    llm = make_llm(qwen3, tmp_path)
    reaching, storeless = make_replica(qwen3, llm.replica.mover.store), make_replica(qwen3, None)
    rollout = begun(llm.replica, 0)
    step_until_swapped(llm, rollout, 3)
    swapped = [sequence.state.sequence_id for sequence in llm.replica.scheduler.waiting if sequence.is_swapped_out]
    works = llm.replica.pause(swapped)
    assert all(work.kv is not None for work in works)
    assert len(stored_files(llm, tmp_path)) == len(works) == llm.replica.kv_moves.num_exported
    for work, replica in zip(works, (reaching, storeless, llm.replica), strict=False):
        replica.submit(work)
    for work in works[3:]:
        reaching.submit(work)
    rollout.finish(llm.replica, reaching, storeless)
    rollout.check(plain)
    assert reaching.kv_moves.num_imported == len(works) - 2 and storeless.kv_moves.num_recomputed == 1
    assert len(stored_files(llm, tmp_path)) == 1  # which the one without a store could not give back
    llm.close()
    assert not stored_files(llm, tmp_path)


def test_aborted_while_swapped_out(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path)
    rollout = begun(llm.replica, 0)
    step_until_swapped(llm, rollout, 3)
    swapped = [sequence.state.sequence_id for sequence in llm.replica.scheduler.waiting if sequence.is_swapped_out]
    for sequence_id in swapped:
        llm.replica.abort(sequence_id)
    assert not stored_files(llm, tmp_path)
    rollout.finish(llm.replica)
    rollout.check({id_: one for id_, one in plain.items() if id_ not in swapped})
    check_clean(llm, tmp_path)


def test_an_interrupted_call_leaves_nothing(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    llm = make_llm(qwen3, tmp_path)
    files: list[int] = []

    def interrupt(_: object) -> None:
        files.append(len(stored_files(llm, tmp_path)))
        if files[-1] > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)), on_finished=interrupt)
    assert files[-1] > 1
    check_clean(llm, tmp_path)
    outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
    for uid, output in enumerate(outputs):
        assert [c.token_ids for c in output.outputs] == [plain[0, uid, c.index].token_ids for c in output.outputs]


_FORK = """
import os, sys
from pathlib import Path
from tests.engines.test_swap import PART, begun, make_llm, step_until_swapped, stored_files
folder = Path(sys.argv[2])
llm = make_llm(sys.argv[1], folder, kv_host_bytes=PART, kv_disk_bytes=2**24)
rollout = begun(llm.replica, 0)
step_until_swapped(llm, rollout, 3)
before = stored_files(llm, folder)
assert len(before) >= 3 and len({path.parent for path in before}) == 2
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert stored_files(llm, folder) == before, "the child has removed files"
print(*before, sep="\\n")
"""


def test_a_forked_child_that_exits_leaves_its_parent_s_kv(qwen3: str, tmp_path: Path) -> None:
    done = run_python(["-c", _FORK, qwen3, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-2000:]
    paths = done.stdout.splitlines()
    assert len(paths) >= 3 and not [path for path in paths if os.path.exists(path)], "the parent's exit removes them"


@pytest.mark.parametrize("version", [0, 1])
def test_new_weights_take_no_kv_that_was_swapped_out(qwen3: str, tmp_path: Path, version: int) -> None:
    """Under the old version's number, too: the tests and some users count none."""
    llm = make_llm(qwen3, tmp_path)
    rollout = begun(llm.replica, 0)
    step_until_swapped(llm, rollout, 3)
    with pytest.raises(RuntimeError, match="sequences are running"):
        llm.update_weights([], version=1)
    works = llm.replica.pause()
    assert sum(work.kv is not None for work in works) >= 3
    changed = {name: tensor.double() * 1.1 for name, tensor in checkpoint_tensors(qwen3)}
    llm.update_weights(changed.items(), version=version)
    assert not stored_files(llm, tmp_path)
    fresh = LLM(qwen3, dtype="float64", kv_cache_bytes=2**24, load=False)
    fresh.update_weights(changed.items(), version=version)
    done: list[dict[SequenceId, list[int]]] = []
    for replica, which in ((llm.replica, works), (fresh.replica, [dataclasses.replace(w, kv=None) for w in works])):
        rollout = Rollout()
        for work in copy.deepcopy(which):
            replica.submit(work)
        rollout.finish(replica)
        done.append({id_: one.token_ids for id_, one in rollout.done.items()})
    assert done[0] == done[1]
    check_clean(llm, tmp_path)


def test_a_deterministic_run_depends_on_nothing_measured() -> None:
    assert RolloutConfig().engine_config(0).preemption == "auto"
    assert RolloutConfig().engine_config(0, deterministic=True).preemption == "recompute"


# -- shards


def swap_in_shards(model: str, folder: str) -> list[Any]:
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache
    from engines.parallel.layout import nested_layout

    dist.init_process_group("gloo")
    groups = GroupCache(TorchGroup(timeout_s=60), [nested_layout(range(2), 2)], timeout_s=60)
    rank = groups.world.rank
    results: list[Any] = []
    options = {**OPTIONS, "kv_cache_bytes": TIGHT_KV // 2, "tensor_parallel_size": 2, "world": groups}
    for case in ("swap", "auto", "disk", "no room on one rank", "lost on one rank"):
        chosen = dict(options)
        if case == "auto":
            chosen["preemption"] = "auto"
        if case == "disk":
            chosen |= {"kv_host_bytes": PART, "kv_disk_bytes": 2**24, "kv_disk_folder": folder}
        llm = LLM(model, **chosen)
        store = llm.replica.mover.store
        if case == "no room on one rank" and rank == 1:
            store.files.capacity_bytes = PART // 2  # type: ignore[union-attr]
        rollout = begun(llm.replica, 0)
        while llm.replica.has_work:
            if case == "lost on one rank":
                for sequence in llm.replica.scheduler.waiting:
                    if rank == 1 and sequence.kv is not None and sequence.state.key.sample_index == 0:
                        (DEV_SHM / sequence.kv.parts[1].location).unlink(missing_ok=True)
            rollout.step(llm.replica, 1)
        groups.world.barrier()
        results.append({
            "case": case,
            "done": msgspec.msgpack.encode(list(rollout.done.items())).hex(),
            "moves": msgspec.to_builtins(llm.replica.kv_moves),
            "preemptions": llm.replica.scheduler.num_preemptions,
            "left": len(stored_files(llm, Path(folder))),
        })  # fmt: skip
    groups.close()
    dist.destroy_process_group()
    return results


def test_shards_swap_alike(qwen3: str, plain: dict[SequenceId, Completion], tmp_path: Path) -> None:
    for first, second in zip(*run_world(swap_in_shards, 2, qwen3, str(tmp_path)), strict=True):
        case, moves = first["case"], first["moves"]
        assert {**first} == {**second}, "the ranks differ"
        rollout = Rollout()
        done = msgspec.msgpack.decode(bytes.fromhex(first["done"]), type=list[tuple[SequenceId, Completion]])
        rollout.done = dict(done)
        rollout.check(plain)
        assert first["preemptions"] > 5 and first["left"] == 0
        if case in ("swap", "disk"):
            assert moves["num_swapped_in"] == moves["num_swapped_out"] == first["preemptions"]
        elif case == "no room on one rank":
            assert moves["num_swapped_out"] < first["preemptions"]
        elif case == "lost on one rank":
            assert 0 < moves["num_swapped_in"] < moves["num_swapped_out"]


def test_a_swapped_out_sequence_is_not_loaded_into_shared_blocks(qwen3: str, tmp_path: Path) -> None:
    """Others read them: bits that were rounded otherwise must not appear in the middle of their lives."""
    llm = make_llm(qwen3, tmp_path, kv_cache_bytes=16 * 16 * TOKEN_BYTES, max_model_len=140)
    for index, state in enumerate(make_states()[:6]):
        state.tokens, state.num_prompt_tokens, state.group_id = list(LONG[0]), 100, 0
        state.params = SamplingParams(max_tokens=40 - 3 * index, ignore_eos=True)
        llm.replica.submit(Work(state=state))
    kv, blocks = llm._engine.kv, llm.replica.scheduler.blocks
    num_checked = 0
    while llm.replica.has_work:
        running = list(llm.replica.scheduler.running)
        common = list(blocks.table(running[0])[:6]) if running else []  # of the prompt that all share
        before = [tensor[common].clone() for tensor in (*kv.keys, *kv.values)]
        num_in = llm.replica.kv_moves.num_swapped_in
        llm.replica.step()
        if common and llm.replica.kv_moves.num_swapped_in > num_in:
            num_checked += 1
            for old, new in zip(before, (*kv.keys, *kv.values), strict=True):
                assert torch.equal(old, new[common])
    assert num_checked > 0
