"""The journal of finished completions: what is found again, what is not, and that generation goes on from it."""

from __future__ import annotations

import json
import random
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest

from engines import LLM, Completion, SamplingParams
from engines.coordination.policies import OnDemand
from engines.parallel.collectives import SingleRank
from engines.rollout.journal import Journal
from engines.sequence import Finished, SequenceKey, SequenceState
from tests.worlds import join, run_world

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 20))] for _ in range(6)]
PARAMS = SamplingParams(max_tokens=24, n=4)
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**21, "max_num_seqs": 5}


def state(**changes: Any) -> SequenceState:
    key = {"run_seed": 1, "policy_step": 2, "prompt_uid": 3, "sample_index": 0}
    key |= {name: changes.pop(name) for name in list(changes) if name in key}
    fields: dict[str, Any] = {"tokens": [5, 6], "params": SamplingParams(n=2), **changes}
    return SequenceState(key=SequenceKey(**key), group_id=3, num_prompt_tokens=2, **fields)


def finished(sequence: SequenceState, **changes: Any) -> Finished:
    fields: dict[str, Any] = {"token_ids": [7, 8], "logprobs": [-1 / 3, -5e-324], "versions": [2, 2], **changes}
    completion = Completion(index=sequence.key.sample_index, finish_reason="stop", text="é\n", **fields)
    return Finished(state=sequence, completion=completion)


def reopen(folder: Path, weights: int = 2**64 - 1, policy_step: int = 0, **options: Any) -> Journal:
    journal = Journal(folder, SingleRank(), **options)
    journal.recover(policy_step)
    journal.weights = weights
    return journal


def test_what_was_written_is_found_bit_for_bit(tmp_path: Path) -> None:
    written = finished(state())
    journal = Journal(tmp_path, SingleRank())
    journal.weights = 2**64 - 1
    journal.append(written)
    # Not closed: a kill closes nothing.
    assert journal.find([state()], 1) == {}, "what this run has drawn itself is not asked for again"
    again = reopen(tmp_path)
    assert again.find([state()], 1) == {state().sequence_id: written.completion}
    assert again.num_found == 1
    again.clear()
    assert again.find([state()], 1) == {} and reopen(tmp_path).find([state()], 1) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"run_seed": 2},
        {"policy_step": 3},
        {"prompt_uid": 4},
        {"sample_index": 1},
        {"tokens": [5, 7]},
        {"params": SamplingParams(n=2, temperature=0.5)},
    ],
)
def test_another_key_or_request_is_not_found(tmp_path: Path, other: dict[str, Any]) -> None:
    journal = reopen(tmp_path)
    journal.append(finished(state()))
    journal = reopen(tmp_path)
    assert journal.find([state(**other)], 1) == {}
    assert len(journal.find([state(**other), state()], 1)) == 1


def test_other_weights_and_earlier_steps_are_not_found(tmp_path: Path) -> None:
    journal = reopen(tmp_path)
    journal.append(finished(state()))
    assert reopen(tmp_path, weights=7).find([state()], 1) == {}
    assert reopen(tmp_path, policy_step=3).find([state()], 1) == {}
    assert len(reopen(tmp_path, policy_step=2).find([state()], 1)) == 1


def test_torn_and_damaged_lines_cost_themselves_only(tmp_path: Path) -> None:
    states = [state(sample_index=index) for index in range(4)]
    journal = reopen(tmp_path)
    for one in states:
        journal.append(finished(one))
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(lines[0] + b'{"weights": 3}\n\xff\n' + lines[2] + lines[3][:-20])
    again = reopen(tmp_path)
    assert set(again.find(states, 1)) == {states[0].sequence_id, states[2].sequence_id}
    again.append(finished(states[3]))  # not onto the torn line
    assert len(reopen(tmp_path).find(states, 1)) == 3


def test_whole_shares_are_found_all_or_none(tmp_path: Path) -> None:
    states = [state(sample_index=index) for index in range(6)]
    journal = reopen(tmp_path)
    for index in (0, 2, 4, 1, 3):
        journal.append(finished(states[index]))
    whole = reopen(tmp_path, whole_shares=True)
    assert {id_[2] for id_ in whole.find(states, 2)} == {0, 2, 4}
    assert whole.find(states, 1) == {}
    assert whole.num_found == 3
    assert len(reopen(tmp_path).find(states, 2)) == 5


def test_generation_goes_on_from_half_a_journal(tmp_path: Path, qwen3: str) -> None:
    llm = LLM(qwen3, **OPTIONS)
    journal = Journal(tmp_path, SingleRank())
    journal.weights = llm.checksum()
    whole = llm.generate(PROMPTS, PARAMS, prompt_uids=range(6), journal=journal)
    assert journal.path.read_bytes().count(b"\n") == 24 and journal.num_found == 0
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join(lines[:10]))
    again = reopen(tmp_path, weights=llm.checksum())
    heard: list[tuple[int, int]] = []

    def hear(one: Finished) -> None:
        heard.append((one.state.key.prompt_uid, one.completion.index))
        assert one.state.tokens[one.state.num_prompt_tokens :] == one.completion.token_ids

    out = llm.generate(PROMPTS, PARAMS, prompt_uids=range(6), journal=again, on_finished=hear)
    assert [[c.token_ids for c in o.outputs] for o in out] == [[c.token_ids for c in o.outputs] for o in whole]
    assert again.num_found == 10 and journal.path.read_bytes().count(b"\n") == 24
    journaled = [(line["key"]["prompt_uid"], line["completion"]["index"]) for line in map(json.loads, lines[:10])]
    assert set(heard[:10]) == set(journaled) and len(set(heard)) == len(heard) == 24
    steps = len(llm.step_records)
    third = reopen(tmp_path, weights=llm.checksum())
    assert llm.generate(PROMPTS, PARAMS, prompt_uids=range(6), journal=third) == out
    assert third.num_found == 24 and llm.step_records == [] and steps > 0


def append_where_there_is_no_room(journal: Journal, states: list[SequenceState]) -> list[str]:
    """What is warned of."""
    before = journal.path.read_bytes()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one in states:
            journal.append(finished(one, token_ids=[7] * 2000, logprobs=[-1 / 3] * 2000, versions=[2] * 2000))
    assert journal.path.read_bytes() == before, "a line is torn"
    return [str(one.message) for one in told]


@pytest.mark.parametrize("how", ["limit", "disk"])
def test_a_line_that_finds_no_room_is_left_out_and_told_once(
    tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """Of each line a part would fit. What is written before and after is found."""
    states = [state(sample_index=index) for index in range(4)]
    folder = request.getfixturevalue("small_disk") if how == "disk" else tmp_path
    journal = reopen(folder)
    journal.append(finished(states[0]))
    if how == "disk":
        (folder / "ballast").write_bytes(bytes(52 * 1024))
        (message,) = append_where_there_is_no_room(journal, states[1:3])
        (folder / "ballast").unlink()
        why = "No space left on device"
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 1000, before[1]))
        try:
            (message,) = append_where_there_is_no_room(journal, states[1:3])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        why = "File too large"
    assert f"journal: cannot write to {journal.path} ({why}); the rollout goes on" in message
    journal.append(finished(states[3]))
    assert set(reopen(folder).find(states, 1)) == {states[0].sequence_id, states[3].sequence_id}


def test_a_rollout_outlives_its_journal(tmp_path: Path, qwen3: str) -> None:
    llm = LLM(qwen3, **OPTIONS)
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    journal = Journal(tmp_path, SingleRank())
    with pytest.warns(UserWarning, match="No space left on device") as told:
        outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(6), journal=journal)
    assert len(told) == 1
    again = llm.generate(PROMPTS, PARAMS, prompt_uids=range(6))
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in again]


def journaled_world(directory: str, folder: str, kinds: list[str]) -> dict[str, Any]:
    groups = join(timeout_s=120)
    results: dict[str, Any] = {}
    for kind in kinds:
        schedule = OnDemand() if kind == "on-demand" else None
        llm = LLM(directory, world=groups, tensor_parallel_size=2 if kind == "TP2" else 1, schedule=schedule, **OPTIONS)
        rows = []
        for keep in (None, 0.5, 1.0):
            journal = Journal(Path(folder) / kind, groups.world)
            journal.weights = llm.checksum()
            groups.world.barrier()
            if keep is not None and groups.world.rank == 0:  # rank 1's file is left whole
                lines = journal.path.read_bytes().splitlines(keepends=True)
                journal.path.write_bytes(b"".join(lines[: int(keep * len(lines))]))
            groups.world.barrier()
            journal.recover(0)
            heard: list[int] = []
            out = llm.generate(
                PROMPTS, PARAMS, prompt_uids=range(6), journal=journal, on_finished=lambda one, h=heard: h.append(0)
            )
            groups.world.barrier()
            rows.append(
                {
                    "tokens": [[c.token_ids for c in o.outputs] for o in out],
                    "found": journal.num_found,
                    "heard": len(heard),
                    "lines": journal.path.read_bytes().count(b"\n"),
                }
            )
        results[kind] = rows
        llm.close()
    return results


def test_in_a_world_of_ranks(tmp_path: Path, qwen3: str) -> None:
    kinds = ["on-demand", "static", "TP2"]
    alone = LLM(qwen3, **OPTIONS).generate(PROMPTS, PARAMS, prompt_uids=range(6))
    ranks = run_world(journaled_world, 2, qwen3, str(tmp_path), kinds)
    heard_by = {"on-demand": [24, 0], "static": [12, 12], "TP2": [24, 0]}
    for kind in kinds:
        for rank in range(2):
            rows = ranks[rank][kind]
            assert [row["tokens"] for row in rows] == [[[c.token_ids for c in o.outputs] for o in alone]] * 3
            assert [row["found"] for row in rows] == [0, 18 if kind == "static" else 12, 24]
            assert [row["heard"] for row in rows] == [heard_by[kind][rank]] * 3
            assert [row["lines"] for row in rows] == [heard_by[kind][rank]] * 3


def test_a_trajectory_of_another_environment_is_not_found(tmp_path: Path) -> None:
    written = finished(state(), observed=[(0, 1)], reward=0.5)
    journal = Journal(tmp_path, SingleRank(), environment="one")
    journal.weights = 2**64 - 1
    journal.append(written)
    assert reopen(tmp_path, environment="one").find([state()], 1) == {state().sequence_id: written.completion}
    assert reopen(tmp_path, environment="another").find([state()], 1) == {} == reopen(tmp_path).find([state()], 1)


def test_a_trajectory_that_is_left_out_is_not_found(tmp_path: Path) -> None:
    states = [state(sample_index=index) for index in range(2)]
    journal = reopen(tmp_path)
    journal.left_out = {states[0].sequence_id}
    for one in states:
        journal.append(finished(one))
    assert set(reopen(tmp_path).find(states, 1)) == {states[1].sequence_id}
