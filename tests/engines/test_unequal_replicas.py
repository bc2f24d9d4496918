"""Replicas of unequal size: the tokens of one process, where small ones hand over what outgrows their KV."""

from __future__ import annotations

from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.config import ModelConfig
from engines.coordination.policies import OnDemand, Static
from engines.parallel.groups import nested_groups
from engines.parallel.layout import Layout, ReplicaSpec
from engines.replica.replica import Replica
from tests.checkpoints import save_text_checkpoint
from tests.engines.test_trajectories import (
    COLUMNS,
    PROMPTS,
    Elsewhere,
    Meddling,
    Ranked,
    facts,
    one_turn_at_a_time,
)
from tests.engines.test_trajectories import PARAMS as TURNS
from tests.worlds import join, run_world

BLOCK = 16
HELD = 4 * BLOCK
"""Tokens that one rank's KV cache holds; prompt and completion have up to 120."""
PARAMS = SamplingParams(max_tokens=90, n=3, stop_token_ids=(100, 101, 102))


def layout_of(epoch: int, *replicas: tuple[int, ...]) -> Layout:
    return Layout(epoch=epoch, replicas=tuple(ReplicaSpec(id=ranks[0], ranks=ranks) for ranks in replicas))


WIDE_FIRST, WIDE_LAST, ONE = ((0, 2), (1,), (3,)), ((0,), (2,), (1, 3)), ((0, 1, 2, 3),)
DRAFTS = {"drafter": "grouped_suffix", "draft_lengths": "fixed"}
WORLDS: dict[str, dict[str, Any]] = {
    "on demand": {},
    "static, swapped": {"schedule": Static, "preemption": "swap", "prefix_caching": False},
    "static, recomputed": {"schedule": Static, "preemption": "recompute", "kv_host_bytes": 0},
    "chunks": {"schedule": lambda: Elsewhere(35)},
    "priorities": {"schedule": Ranked, "max_num_seqs": 2},
    "drafts": {"schedule": Static, **DRAFTS},
    "drafts, chunks": {"schedule": lambda: Elsewhere(35), **DRAFTS},
    "turns": {},
    "turns, swapped": {"schedule": Static, "preemption": "swap"},
    "turns, chunks": {"schedule": lambda: Elsewhere(25)},
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
    lengths = {length for _, some, _, _ in ranks for length in some}
    assert HELD + 1 in lengths, "no replica has handed anything over"
    if "swapped" in name or "recomputed" in name or name == "priorities":
        assert sum(preempted for _, _, preempted, _ in ranks) > 0
    if "regroups" in name:
        assert ranks[0][3] > 0
