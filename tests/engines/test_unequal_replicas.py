"""Replicas of unequal size: the tokens of one process, where small ones hand over what outgrows their KV."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.config import ModelConfig
from engines.coordination.policies import OnDemand, Static
from engines.coordination.views import Dispatch, LayoutChange, LayoutView, ScheduleView
from engines.parallel.groups import nested_groups
from engines.parallel.layout import Layout, ReplicaSpec, joint_groups
from engines.replica.replica import Replica
from tests.checkpoints import save_text_checkpoint
from tests.engines.test_trajectories import COLUMNS, PROMPTS, Meddling, Ranked, facts, one_turn_at_a_time
from tests.engines.test_trajectories import PARAMS as TURNS
from tests.holding import tokens_of
from tests.worlds import error_of, join, run_world

BLOCK = 16
HELD = 4 * BLOCK
"""Tokens that one rank's KV cache holds; prompt and completion have up to 120."""
PARAMS = SamplingParams(max_tokens=90, n=3, stop_token_ids=(100, 101, 102))


def layout_of(epoch: int, *replicas: tuple[int, ...]) -> Layout:
    return Layout(epoch=epoch, replicas=tuple(ReplicaSpec(id=ranks[0], ranks=ranks) for ranks in replicas))


class Bounded(Static):
    """In chunks."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = super().next(view)
        return None if dispatch is None else replace(dispatch, max_new_tokens=self._chunk)


WIDE_FIRST, WIDE_LAST, ONE = ((0, 2), (1,), (3,)), ((0,), (2,), (1, 3)), ((0, 1, 2, 3),)
SINGLE = ((0,), (1,), (2,), (3,))
DRAFTS = {"drafter": "grouped_suffix", "draft_lengths": "fixed"}
WORLDS: dict[str, dict[str, Any]] = {
    "on demand": {},
    "static, swapped": {"schedule": Static, "preemption": "swap", "prefix_caching": False},
    "static, recomputed": {"schedule": Static, "preemption": "recompute", "kv_host_bytes": 0},
    "chunks": {"schedule": lambda: Bounded(35)},
    "priorities": {"schedule": Ranked, "max_num_seqs": 2},
    "drafts, chunks": {"schedule": lambda: Bounded(35), **DRAFTS},
    "turns, swapped": {"schedule": Static, "preemption": "swap"},
    "turns, chunks": {"schedule": lambda: Bounded(25)},
    "turns, moves in each gap": {"schedule": lambda: Ranked(moves=True)},
    "turns, moved by a request": {"meddling": "moves"},
    "turns, drafts": DRAFTS,
    "turns, regroups": {"meddling": "regroups"},
}


def options_of(model: str) -> dict[str, Any]:
    num_bytes = HELD * ModelConfig.from_pretrained(model).kv_bytes_per_token(8)
    return {"dtype": "float64", "kv_cache_bytes": num_bytes, "block_size": BLOCK, "max_num_seqs": 4}


def in_a_world(model: str, names: list[str]) -> list[Any]:
    """On a rank: completions of each of these worlds, and the lengths at which its replicas handed sequences over."""
    groups, found = join(nested_groups(range(4), (1, 2, 4))), []
    handed_over: list[int] = []
    step = Replica.step

    def watched(replica: Replica) -> Any:
        output, blocks = step(replica), replica.scheduler.blocks
        most = blocks.num_blocks * blocks.block_size
        lengths = [len(work.state.tokens) for work in output.released if work.turn is None]
        assert max(lengths, default=0) <= most + 1
        handed_over.extend(length for length in lengths if length > most)
        return output

    Replica.step = watched  # type: ignore[method-assign]
    for name in names:
        options = options_of(model) | {"schedule": OnDemand} | WORLDS[name]
        options["schedule"] = options["schedule"]()
        layouts = [layout_of(epoch, *ranks) for epoch, ranks in enumerate((ONE, WIDE_LAST, WIDE_FIRST), start=1)]
        with Meddling(options.pop("meddling", ""), layouts) as environments:
            llm = LLM(model, world=groups, layout=layout_of(0, *WIDE_FIRST), **options)
            assert llm.rollout is not None
            environments.coordinator = llm.rollout.coordinator
            given: dict[str, Any] = {"environment": environments, "columns": COLUMNS} if "turns" in name else {}
            outputs = llm.generate(PROMPTS, TURNS if given else PARAMS, prompt_uids=range(len(PROMPTS)), **given)
            completions = [[list(fact) for fact in group] for group in facts([one.outputs for one in outputs])]
            preempted = llm.replica.scheduler.num_preemptions
            found.append([completions, list(handed_over), preempted, llm.layout.epoch])
            handed_over.clear()
            llm.close()
    groups.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("four-kv-heads")
    save_text_checkpoint(folder, num_heads=4, num_kv_heads=4)
    return str(folder)


@pytest.fixture(scope="module")
def plain(model: str) -> dict[bool, Any]:
    """The completions of one process, of trajectories and of others."""
    llm = LLM(model, dtype="float64", kv_cache_bytes=2**22)
    others = facts([one.outputs for one in llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))])
    return {True: one_turn_at_a_time(llm, TURNS)[0], False: others}


@pytest.fixture(scope="module")
def worlds(model: str) -> list[Any]:
    return run_world(in_a_world, 4, model, list(WORLDS))


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_are_those_of_one_process(worlds: list[Any], plain: dict[bool, Any], name: str) -> None:
    number = list(WORLDS).index(name)
    ranks = [rank[number] for rank in worlds]
    for completions, _, _, _ in ranks:
        for group, expected in zip(completions, plain["turns" in name], strict=True):
            for one, alone in zip(group, expected, strict=True):
                tokens, logprobs, observed, reason = one
                assert (tokens, reason) == (alone[0], alone[3])
                assert logprobs == pytest.approx(alone[1], abs=1e-9)
                assert [tuple(span) for span in observed] == alone[2]
    if "schedule" in WORLDS[name] and "moves" not in name:  # otherwise who is where depends on time
        assert HELD + 1 in {length for _, some, _, _ in ranks for length in some}, "nothing was handed over"
    if name in ("static, swapped", "static, recomputed", "priorities"):
        assert sum(preempted for _, _, preempted, _ in ranks) > 0
    if "regroups" in name:
        assert ranks[0][3] > 0


PROMPTS_HERE: list[Any] = [list(range(40, 70)), *PROMPTS[:2]]
FITTING = SamplingParams(max_tokens=34, n=2, stop_token_ids=(100, 101, 102))


def regroup_between_rollouts(model: str) -> list[Any]:
    """4 -> 2+1+1 -> 1+1+2 -> 1+1+1+1 -> 2+1+1 -> 4: tokens in each, and what is refused where, and made at start."""
    groups = join(nested_groups(range(4), (1, 2, 4)))
    made = sorted(groups._groups)
    found: list[Any] = [[list(ranks) for ranks in made]]
    llm = LLM(model, world=groups, layout=layout_of(0, *ONE), schedule=OnDemand(), **options_of(model))
    for epoch, replicas in enumerate((ONE, WIDE_FIRST, WIDE_LAST, SINGLE, WIDE_FIRST, ONE)):
        if epoch:
            llm.regroup(layout_of(epoch, *replicas))
        longest = HELD * max(map(len, replicas))
        error = error_of(lambda: llm.generate(PROMPTS_HERE, SamplingParams(max_tokens=longest - 29)))  # noqa: B023
        tokens = tokens_of(llm.generate(PROMPTS_HERE, FITTING, prompt_uids=range(3)))
        found.append([error, tokens])
    llm.close()
    groups.close()
    return found


def test_regroups_between_rollouts(model: str) -> None:
    llm = LLM(model, dtype="float64", kv_cache_bytes=2**22)
    alone = tokens_of(llm.generate(PROMPTS_HERE, FITTING, prompt_uids=range(3)))
    for made, *rollouts in run_world(regroup_between_rollouts, 4, model):
        assert made == [[0, 1, 2, 3], [0, 2], [1, 3]]
        for (error, tokens), largest in zip(rollouts, (4, 2, 2, 1, 2, 4), strict=True):
            held = HELD * largest
            assert f"can reach {held + 1} tokens, the KV cache holds {held} in the largest replica" in error
            assert tokens == alone


class Narrow:
    """A layout policy: from 2+1+1 to replicas of one rank, once, when a sequence has ended."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if not view.num_delivered or view.layout.epoch:
            return None
        return LayoutChange(layout=layout_of(1, *SINGLE))


def narrow(model: str) -> list[Any]:
    """In a world that was made for 2+1+1 only, so that sequences may be as long as two ranks hold."""
    groups, found = join([layout_of(0, *WIDE_FIRST)]), list[Any]()
    for max_tokens in (HELD, HELD // 2):
        llm = LLM(
            model, world=groups, layout=layout_of(0, *WIDE_FIRST), schedule=Static(), layout_policy=Narrow(),
            **options_of(model),
        )  # fmt: skip
        params = [*[SamplingParams(max_tokens=4)] * 3, SamplingParams(max_tokens=max_tokens, ignore_eos=True)]
        # The first and the last are on one replica: so the first has certainly ended before the last.
        found.append([error_of(lambda: llm.generate([[5] * 20] * 4, params)), llm.layout.epoch])  # noqa: B023
        llm.close()
    groups.close()
    return found


def test_no_regroup_leaves_a_sequence_that_nobody_can_hold(model: str) -> None:
    for (refused, epoch), (error, next_epoch) in run_world(narrow, 4, model)[:1]:
        assert refused.startswith("ValueError: layout_policy Narrow") and epoch == 0
        assert (
            f"its largest replica holds KV of {HELD} tokens, and an unfinished sequence may reach {HELD + 20}"
            in refused
        )
        assert not error and next_epoch == 1


@pytest.mark.parametrize(("num_ranks", "count"), [(8, 7), (64, 56)])
def test_groups_of_all_allocations(num_ranks: int, count: int) -> None:
    """Random layouts of them are regrouped in groups that are made: the larger blocks."""
    rng, groups = random.Random(num_ranks), list(nested_groups(range(num_ranks), (1, 2, 4, 8)))
    assert sum(len(ranks) > 1 for ranks in groups) == count and len(set(groups)) == len(groups)
    assert {len(ranks) for ranks in groups} == {1, 2, 4, 8}

    def draw(epoch: int) -> Layout:
        free, chosen = set(range(num_ranks)), []
        for ranks in sorted(groups, key=lambda ranks: (-len(ranks), rng.random())):
            if free.issuperset(ranks) and (len(ranks) == 1 or rng.random() < 0.5):
                free -= set(ranks)
                chosen.append(ranks)
        return layout_of(epoch, *chosen)

    sizes = set()
    for _ in range(200):
        before, after = draw(0), draw(1)
        before.check_places(num_ranks)
        assert set(joint_groups(before, after)) <= set(groups)
        sizes.add(tuple(sorted(spec.tp_size for spec in before.replicas)))
    assert len(sizes) > 5


@pytest.mark.parametrize(("num_ranks", "sizes", "pair"), [(8, (3,), (3, 8)), (12, (4, 6), (4, 6)), (8, (0, 1), (0, 1))])
def test_sizes_that_do_not_nest(num_ranks: int, sizes: tuple[int, ...], pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="{} does not divide {}".format(*pair)):
        list(nested_groups(range(num_ranks), sizes))
