"""Engines that change their shape: the same weights, KV and tokens, and no byte more than a rank lacks."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines import LLM, SamplingParams
from engines.config import ModelConfig
from engines.coordination.policies import OnDemand
from engines.coordination.views import LayoutChange, LayoutView
from engines.kvcache.kept import KeptKV, arrivals
from engines.kvcache.paged import read_kv
from engines.models.loader import checkpoint_tensors
from engines.models.parameters import logical_shapes
from engines.parallel.layout import Layout, ReplicaSpec, contiguous_layout, joint_groups, nested_layout, share_lacked
from engines.parallel.parts import lacking
from engines.parallel.sharding import Shard, kv_heads, shard_slices
from engines.rollout.generation import make_states
from engines.sequence import Work
from tests.checkpoints import save_checkpoint
from tests.holding import Held, check_tokens, held_params, tokens_of
from tests.worlds import error_of, join, run_world, shared_files

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 40))] for _ in range(10)]
PARAMS = [SamplingParams(max_tokens=22 + 3 * number, n=2, ignore_eos=True) for number in range(10)]
FAMILIES = ("qwen3", "qwen2-untied-mqa", "llama-biases")
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**20, "max_num_seqs": 16, "block_size": 8}
PATHS = {
    "nested, up and down": [("nested", 1), ("nested", 2), ("nested", 4), ("nested", 2), ("nested", 1)],
    "far": [("nested", 1), ("nested", 4), ("nested", 1), ("nested", 2), ("nested", 1)],
    "other pairs": [("nested", 2), ("contiguous", 2), ("nested", 4), ("contiguous", 2), ("nested", 1)],
}


def layouts_of(path: list[Any]) -> list[Layout]:
    make = {"nested": nested_layout, "contiguous": contiguous_layout}
    return [make[kind](range(4), size, epoch=epoch) for epoch, (kind, size) in enumerate(path)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_checkpoint(directory / family, family)
    return directory


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> dict[str, Any]:
    """The tokens of one process."""
    return {family: tokens_of(LLM(checkpoints / family, **OPTIONS).generate(PROMPTS, PARAMS)) for family in FAMILIES}


@pytest.mark.parametrize("seed", range(30))
def test_what_is_lacking_against_single_elements(seed: int) -> None:
    rng = random.Random(seed)
    size, counts = 24, [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    held = [(index * size // count, (index + 1) * size // count) for count in counts for index in range(count)]
    held += [(0, 0)] * rng.randint(0, 2)
    rng.shuffle(held)
    for member, (first, last) in enumerate(held):
        start = rng.randrange(size)
        wanted = (start, rng.randint(start + 1, size))
        parts = lacking(held, wanted, member)
        got = [(holder, element) for holder, begin, end in parts for element in range(begin, end)]
        assert [element for _, element in got] == [e for e in range(*wanted) if not first <= e < last]
        assert all(held[holder][0] <= element < held[holder][1] for holder, element in got)


@pytest.mark.parametrize("seed", range(30))
def test_ranks_exchange_where_replicas_that_change_meet(seed: int) -> None:
    """Against a search from rank to rank over the replicas of one layout alone."""
    rng = random.Random(seed)

    def draw(epoch: int) -> Layout:
        ranks, replicas = rng.sample(range(8), 8), []
        while ranks:
            size = rng.randint(1, min(4, len(ranks)))
            members, ranks = tuple(sorted(ranks[:size])), ranks[size:]
            replicas.append(ReplicaSpec(id=members[0], ranks=members))
        return Layout(epoch=epoch, replicas=tuple(replicas))

    before, after = draw(0), draw(1)
    changed = [spec.ranks for spec in {*before.replicas} ^ {*after.replicas}]
    found = set()
    for rank in {rank for ranks in changed for rank in ranks}:
        reached, old = {rank}, set[int]()
        while reached != old:
            old = set(reached)
            reached |= {other for ranks in changed if reached & set(ranks) for other in ranks}
        found.add(tuple(sorted(reached)))
    assert joint_groups(before, after) == sorted(found)
    for spec in after.replicas:
        for rank in spec.ranks:
            old_spec = before.replica_of(rank)
            assert old_spec is not None
            place, was = spec.ranks.index(rank), old_spec.ranks.index(rank)
            cells = 12  # of 1 to 4 parts
            mine = set(range(place * cells // spec.tp_size, (place + 1) * cells // spec.tp_size))
            had = set(range(was * cells // old_spec.tp_size, (was + 1) * cells // old_spec.tp_size))
            assert share_lacked(old_spec, spec, rank) == pytest.approx(len(mine - had) / cells)
            assert share_lacked(None, spec, rank) == pytest.approx(len(mine) / cells)


def lacked_bytes(config: ModelConfig, old: Shard, new: Shard) -> int:
    """Element by element: those of the new shard that the old one does not have, of float64."""
    count = 0
    for name, shape in logical_shapes(config).items():
        has, wants = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        has[shard_slices(config, name, old)] = True
        wants[shard_slices(config, name, new)] = True
        count += int((wants & ~has).sum())
    return 8 * count


def shard_of(layout: Layout, rank: int) -> Shard:
    spec = layout.replica_of(rank)
    assert spec is not None
    return Shard(index=spec.ranks.index(rank), count=spec.tp_size, max_count=4)


def go_along(directory: str, family: str, paths: dict[str, list[Any]]) -> dict[str, Any]:
    """Regroups between rollouts; compares weights with the checkpoint's after each."""
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}
    for transport, how in (("gloo", "all_to_all"), ("shared memory", "all_gather"), ("shared memory", "all_to_all")):
        groups = join([one for path in paths.values() for one in layouts_of(path)], timeout_s=120, transport=transport)
        for path, steps in paths.items():
            first, *others = layouts_of(steps)
            schedule = OnDemand() if transport == "gloo" else None
            policy = Never() if schedule is not None else None
            llm = LLM(
                f"{directory}/{family}", world=groups, layout=first, exchange=how, schedule=schedule,
                layout_policy=policy, **OPTIONS,
            )  # fmt: skip
            engine, decoder, checksum = llm._engine, llm._engine.decoder, llm.checksum()
            files, made = shared_files(), dict(groups._made)
            for before, after in pairwise([first, *others]):
                old, new = shard_of(before, rank), shard_of(after, rank)
                llm.regroup(after)
                switch = llm._engine.switch
                assert switch is not None and switch.weight_bytes == lacked_bytes(llm.model_config, old, new)
                if llm.layout.replicas != before.replicas and steps is paths["nested, up and down"]:
                    assert (switch.weight_bytes == 0) == (new.count > old.count)
                for name, tensor in checkpoint_tensors(f"{directory}/{family}"):
                    view = decoder.logical_views()[name]
                    assert torch.equal(view, tensor[shard_slices(llm.model_config, name, new)].double()), name
                assert llm.checksum() == checksum and llm._engine is engine
            assert groups._made == made and shared_files() == files, "a group or a file was made"
            assert decoder.parameters.embedding.is_contiguous()
            results[f"{transport} {how} {path}"] = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(10)))
            llm.close()
        groups.close()
    return results


class Never:
    """A layout policy that leaves the layout as it is."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_checkpoint_in_every_shape(
    checkpoints: Path, alone: dict[str, Any], family: str
) -> None:
    results = run_world(go_along, 4, str(checkpoints), family, PATHS)
    assert len(results[0]) == 9
    for rank in results:
        for name, tokens in rank.items():
            assert tokens == alone[family], name


def move_kv(directory: str, family: str, how: str, path: list[Any], seed: int) -> dict[str, Any]:
    """Steps replicas, regroups them with KV that stays, compares the KV of all heads, and goes on to the end."""
    rank, rng = int(os.environ["RANK"]), random.Random(seed)
    before, after = layouts_of(path)
    groups = join([before, after], timeout_s=120)
    llm = LLM(f"{directory}/{family}", world=groups, layout=before, exchange=how, **OPTIONS)
    ids = list(range(len(PROMPTS)))
    states = make_states(PROMPTS, PARAMS, ids, run_seed=0, policy_step=0)
    old, new = before.replica_of(rank), after.replica_of(rank)
    assert old is not None and new is not None
    for state in states[old.id :: len(before.replicas)]:
        llm.replica.submit(Work(state=state))
    for _ in range(rng.randint(6, 12)):
        llm.replica.step()
    staying = {state.sequence_id for state in states if rng.random() < 0.8}
    works = llm.replica.pause(keeping=staying)
    everyone = groups.world.all_gather_bytes(msgspec.msgpack.encode(works if rank == old.ranks[0] else []))
    decode = msgspec.msgpack.Decoder(list[Work]).decode
    all_works = [one for data in everyone for one in decode(data)]
    home = {work.state.sequence_id: number for number, data in enumerate(everyone) for work in decode(data)}
    group = {rank: ranks for ranks in joint_groups(before, after) for rank in ranks}
    places = {
        id_: rng.choice([spec.id for spec in after.replicas if spec.ranks[0] in group[leader]])
        for id_, leader in home.items()
    }
    config, blocks = llm.model_config, llm.replica.scheduler.blocks
    mine = {}
    for id_, keys in llm.replica.kept.items():
        table = blocks.find(keys)
        assert len(table) == len(keys)
        layers = torch.stack(list(read_kv(llm._engine.kv, table, len(table) * 8)))
        heads = kv_heads(config, shard_of(before, rank))
        mine[id_] = (keys, [heads.start, heads.stop], layers.numpy().tobytes(), list(layers.shape))
    told = groups.world.all_gather_bytes(msgspec.msgpack.encode(list(mine.items())))
    kept: dict[Any, list[Any]] = {}
    for data in told:
        for id_, one in msgspec.msgpack.decode(data, type=list[tuple[tuple[int, int, int], Any]]):
            kept.setdefault(id_, []).append(one)
    llm._placement.regroup(before, after, {id_: places[id_] for id_ in staying})
    wanted = kv_heads(config, shard_of(after, rank))
    blocks, num_compared = llm.replica.scheduler.blocks, 0
    blocks.check_integrity()
    for id_, parts in kept.items():
        if places[id_] == new.id:
            keys = parts[0][0]
            table = blocks.find(keys)
            assert len(table) == len(keys), "not all blocks have arrived"
            layers = torch.stack(list(read_kv(llm._engine.kv, table, len(table) * 8)))
            for head in range(wanted.start, wanted.stop):
                for _, (start, stop), raw, shape in parts:
                    if start <= head < stop:
                        was = torch.frombuffer(bytearray(raw), dtype=torch.float64).view(shape)
                        assert torch.equal(layers[..., head - wanted.start, :], was[..., head - start, :])
                        num_compared += 1
    coming = [work for work in all_works if places[work.state.sequence_id] == new.id]
    lengths = {work.state.sequence_id: work.state.params.max_tokens - work.state.num_generated for work in coming}
    # Those that had not run have their prompts before them, too.
    prompts = [len(work.state.tokens) - 1 for work in coming if work.state.sequence_id not in kept]
    expected = sum(lengths.values()) + sum(prompts)
    for work in coming:
        llm.replica.submit(work)
    done, num_tokens = [], 0
    while llm.replica.has_work:
        output = llm.replica.step()
        num_tokens += output.num_tokens
        done += [(one.state.sequence_id, one.completion.token_ids) for one in output.finished]
    shared = llm.replica.scheduler.num_shared_tokens
    blocks.check_integrity()
    llm.close()
    return {
        "tokens": [[list(id_), tokens] for id_, tokens in done], "compared": num_compared, "computed": num_tokens,
        "expected": expected, "kept": len(kept), "shared": shared,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("qwen3", [("nested", 1), ("nested", 2)]),
        ("qwen3", [("nested", 1), ("nested", 4)]),
        ("qwen2-untied-mqa", [("nested", 2), ("contiguous", 2)]),
        ("qwen2-untied-mqa", [("nested", 4), ("nested", 1)]),
        ("llama-biases", [("contiguous", 2), ("nested", 4)]),
        ("llama-biases", [("nested", 4), ("nested", 2)]),
    ],
)
def test_kv_that_stays_goes_where_its_sequence_goes(
    checkpoints: Path, alone: dict[str, Any], family: str, path: list[Any], how: str
) -> None:
    results = run_world(move_kv, 4, str(checkpoints), family, how, path, len(family) + path[1][1])
    done = {tuple(id_): tokens for rank in results for id_, tokens in rank["tokens"]}
    assert len(done) == 20
    for (_, uid, index), tokens in done.items():
        assert tokens == alone[family][uid][index]
    for rank in results:
        assert rank["kept"] > 8
        assert rank["computed"] <= rank["expected"], "KV that stayed was computed again"
    assert sum(rank["compared"] for rank in results) > 8


@pytest.mark.parametrize("seed", range(20))
def test_arrivals_against_a_plain_record(seed: int) -> None:
    """Each content once, from a block that has it, in the order of the sequences, as long as there is room."""
    rng = random.Random(seed)
    names = [bytes([number]) * 16 for number in range(40)]
    held = {replica: dict(zip(rng.sample(names, 30), rng.sample(range(100), 30), strict=True)) for replica in (3, 5)}
    kept, places = {}, {}
    for number in range(rng.randint(1, 8)):
        replica = rng.choice([3, 5])
        keys = rng.sample(list(held[replica]), rng.randint(1, 10))
        blocks = [held[replica][key] for key in keys]
        kept[0, number, 0] = KeptKV(replica_id=replica, keys=b"".join(keys), blocks=blocks)
        places[0, number, 0] = rng.choice([0, 1, 9])
    places[0, 99, 0] = 0  # a sequence without KV
    room = {0: rng.randint(1, 25), 1: 100}
    found = arrivals(kept, places, room)
    for target in room:
        assert len(found[target]) <= room[target]
        expected = [key for id_, one in kept.items() if places[id_] == target for key, _ in one.contents()]
        assert list(found[target]) == list(dict.fromkeys(expected))[: len(found[target])]
        if len(dict.fromkeys(expected)) <= room[target]:
            assert set(found[target]) == set(expected)
        for key, (replica, block) in found[target].items():
            assert held[replica][key] == block


HELD = (0,)
"""Dispatched first, and only two of its sequences: the others have slots, too."""
HELD_PARAMS = [held_params(one) if uid in HELD else one for uid, one in enumerate(PARAMS)]


class Placing:
    """A layout policy that goes through layouts as sequences are delivered, and places all that have run.

    It begins when the held sequences have tokens, and so KV that has to move."""

    def __init__(self, path: list[Any], every: int) -> None:
        self._path, self._every = path, every

    def decide(self, view: LayoutView) -> LayoutChange | None:
        epoch = view.layout.epoch + 1
        if epoch >= len(self._path) or view.num_delivered < self._every * epoch:
            return None
        if not all(one.num_generated for (_, uid, _), one in view.unfinished.items() if uid in HELD):
            return None
        layout = layouts_of(self._path)[epoch]
        ran = [id_ for id_, one in view.unfinished.items() if one.last_replica_id is not None]
        replicas = [spec.id for spec in layout.replicas]
        return LayoutChange(layout=layout, places={id_: replicas[k % len(replicas)] for k, id_ in enumerate(ran)})


ROLLOUTS = (([*range(10)], HELD_PARAMS), ([*range(10, 20)], PARAMS))
SWITCHES = {
    "none": [("nested", 1)],
    "one, up": [("nested", 1), ("nested", 4)],
    "one, down": [("nested", 4), ("nested", 1)],
    "three": [("nested", 1), ("nested", 2), ("nested", 1), ("nested", 2)],
    "three, other pairs": [("nested", 2), ("nested", 4), ("contiguous", 2), ("nested", 1)],
}


def roll_out(directory: str, family: str, switches: dict[str, list[Any]]) -> dict[str, Any]:
    """Two rollouts for each path; the second one begins in the layout that the first one left."""
    groups = join([one for path in switches.values() for one in layouts_of(path)], timeout_s=120)
    results = {}
    for name, path in switches.items():
        held = Held(HELD, num_tokens=80)
        drafts = {"drafter": "ngram", "draft_lengths": "fixed"} if name == "three" else {}
        llm = LLM(
            f"{directory}/{family}", world=groups, layout=layouts_of(path)[0], schedule=OnDemand(),
            layout_policy=Placing(path, every=4), hidden_stop=held,
            **OPTIONS | {"max_num_seqs": 4} | drafts,
        )  # fmt: skip
        held.until_epoch(llm, len(path) - 1)
        tokens = [tokens_of(llm.generate(PROMPTS, params, prompt_uids=uids)) for uids, params in ROLLOUTS]
        assert llm.rollout is not None
        results[name] = {
            "tokens": tokens,
            "epoch": llm.layout.epoch,
            "switches": len(llm.rollout.switches),
            "kv_bytes": sum(one.parts.kv_bytes for one in llm.rollout.switches),
            "imported": llm.replica.kv_moves.num_imported,
        }
        llm.close()
    return results


def moves_kv(path: list[Any], family: str) -> bool:
    return len(path) > 1 and "mqa" not in family  # where all ranks have the one head


@pytest.mark.parametrize("family", FAMILIES)
def test_switches_within_a_rollout_change_no_token(checkpoints: Path, family: str) -> None:
    alone = LLM(checkpoints / family, **OPTIONS)
    plain = [tokens_of(alone.generate(PROMPTS, params, prompt_uids=uids)) for uids, params in ROLLOUTS]
    results = run_world(roll_out, 4, str(checkpoints), family, SWITCHES)
    for name, path in SWITCHES.items():
        for rank in results:
            first, second = rank[name]["tokens"]
            check_tokens(first, plain[0], HELD)
            check_tokens(second, plain[1])
            assert rank[name]["epoch"] == rank[name]["switches"] == len(path) - 1, name
            # Between ranks that do not exchange, KV goes through files: with two pairs of ranks, half of it.
            assert rank[name]["imported"] == 0 or "three" in name
        if moves_kv(path, family):
            assert sum(rank[name]["kv_bytes"] for rank in results) > 0, name


def regroup_badly(directory: str) -> dict[str, Any]:
    two, one = nested_layout(range(2), 2, epoch=1), nested_layout(range(2), 1)
    groups = join([one, two], timeout_s=60)
    llm = LLM(f"{directory}/qwen3", world=groups, layout=one, **OPTIONS)
    errors = [
        error_of(lambda bad=bad: llm.regroup(bad))
        for bad in (
            None,
            nested_layout(range(2), 2, epoch=2),
            nested_layout(range(4), 2, epoch=1),
            Layout(epoch=1, replicas=(ReplicaSpec(id=0, ranks=(1, 0)),)),
        )
    ]
    before = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(10)))
    llm.replica.scheduler.num_preemptions = 5 + groups.world.rank
    llm.sleep()
    llm.regroup(two, keep_weights=False)
    llm.replica.scheduler.num_preemptions += 10
    lacked = llm._engine.switch.weight_bytes  # type: ignore[union-attr]
    asleep = sum(tensor.untyped_storage().size() for tensor in llm._engine.kv.keys)
    errors.append(error_of(lambda: llm.generate(PROMPTS, PARAMS)))
    llm.wake_up()
    errors.append(error_of(lambda: llm.generate(PROMPTS, PARAMS)))
    llm.update_weights(checkpoint_tensors(f"{directory}/qwen3"), version=0)
    after = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(10)))
    llm.sleep(weights=True)
    llm.regroup(nested_layout(range(2), 1, epoch=2))
    llm.replica.scheduler.num_preemptions += 100
    llm.wake_up()
    llm.update_weights(checkpoint_tensors(f"{directory}/qwen3"), version=0)
    again = tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=range(10)))
    counted = llm.led_counts["num_preemptions"]
    llm.close()
    same = before == after == again
    return {"errors": errors, "same": same, "lacked": lacked, "asleep": asleep, "counted": counted}


def test_layouts_between_rollouts(checkpoints: Path) -> None:
    results = run_world(regroup_badly, 2, str(checkpoints))
    assert [result["counted"] for result in results] == [5 + 10 + 100, 6 + 100], (
        "of two ranks together, the first counts"
    )
    for result in results:
        none, epoch, other, order, asleep, empty = result["errors"]
        assert "ValueError: layout=None: give a Layout with the next epoch, 1" in none
        assert "give a Layout with the next epoch, 1" in epoch
        assert "ValueError: layout: places ranks [0, 1, 2, 3]; give each of the 2 ranks" in other
        assert "ValueError: layout: replica 0 has ranks (1, 0), and no such group" in order
        assert "memory is released; call wake_up() first" in asleep
        assert "there are no weights; call update_weights() first" in empty
        assert result["same"] and result["lacked"] == 0
        assert result["asleep"] == 0, "memory that was given back was taken"


def regroup_a_larger_model(directory: str) -> dict[str, float]:
    """Peak memory of the process above what it has before or after, in layers of the model."""
    one = nested_layout(range(2), 1)
    groups = join([one, nested_layout(range(2), 2)], timeout_s=120)
    llm = LLM(directory, world=groups, layout=one, dtype="float64", kv_cache_bytes=2**23)
    layer_kib = sum(tensor.nbytes for tensor in llm._engine.decoder.parameters.layers[0].tensors()) / 1024

    def kib(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0])

    results = {"layers": float(len(llm._engine.decoder.parameters.layers))}
    for epoch, size in enumerate((2, 1, 2), start=1):
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        llm.regroup(nested_layout(range(2), size, epoch=epoch))
        results[f"{epoch}: TP{size}"] = (kib("VmHWM") - max(before, kib("VmRSS"))) / layer_kib
    llm.close()
    return results


def test_memory_for_one_layer_at_a_time(tmp_path: Path) -> None:
    """Beside the weights a rank has what it sends, what it gets, and the new shapes: at most a layer of each."""
    save_checkpoint(
        tmp_path, "qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    for result in run_world(regroup_a_larger_model, 2, str(tmp_path)):
        assert result.pop("layers") == 10
        assert all(peak < 4 for peak in result.values()), result
