"""Drafts shared by replicas in a torchrun world: the same tokens, and drafts that only the other one could supply."""

from __future__ import annotations

from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
from engines.fleet.fleet import Fleet
from engines.parallel.collectives import SingleRank
from engines.replica.engine import LocalEngine
from engines.sequence import Work
from engines.speculation.drafter import Draft, DraftPass
from engines.speculation.shared import SharedDrafter
from engines.speculation.suffix import SuffixDrafter
from tests.engines.speculation import test_draft_server
from tests.engines.speculation.test_draft_server import wait_until
from tests.engines.test_rollout_world import Flip
from tests.holding import Held, check_tokens, held_params, tokens_of
from tests.states import make_state
from tests.worlds import error_of, join, run_world

PROMPTS = [[7 * uid % 129 + 2, 5, 9, 30 + uid] for uid in range(4)]
NUM_TOKENS = 60
PARAMS = [SamplingParams(max_tokens=NUM_TOKENS, n=4, temperature=one, ignore_eos=True) for one in (0.0, 0.3, 0.7, 1.0)]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**21, "max_num_seqs": 6}
SHARED: dict[str, Any] = {"drafter": "grouped_suffix", "draft_server": True, "draft_lengths": "fixed"}
HELD = (0,)
HELD_PARAMS = [held_params(one) if uid in HELD else one for uid, one in enumerate(PARAMS)]
CASES = ["DP2", "TP2", "DP2 closed", "TP2 closed", "DP2 on demand", "DP2 on demand closed", "DP2 on demand regroups"]


def generate(model: str) -> dict[str, Any]:
    """The tokens of each case, and the drafted ones that this rank has accepted."""
    groups = join(timeout_s=120)
    results: dict[str, Any] = {}
    for case in CASES:
        given: dict[str, Any] = {"tensor_parallel_size": 2 if "TP2" in case else 1}
        if "on demand" in case:
            given |= {"schedule": OnDemand()}
        held, params = Held(HELD, num_tokens=NUM_TOKENS), PARAMS
        if "regroups" in case:
            given |= {"layout_policy": Flip(), "hidden_stop": held}
            params = HELD_PARAMS
        llm = LLM(model, world=groups, **given, **OPTIONS, **SHARED)
        held.until_epoch(llm, 1)
        sharing = llm._drafts
        assert sharing is not None
        ended = []

        def hear(_: Any, sharing: Any = sharing, ended: list[Any] = ended, closes: bool = "closed" in case) -> None:
            ended.append(1)
            if closes and len(ended) == 2 and sharing.server is not None:
                sharing.server.close()

        out = llm.generate(PROMPTS, params, on_finished=hear)
        if sharing.server is not None and "closed" not in case:
            wait_until(lambda sharing=sharing: len(sharing.server._store._groups) == len(PROMPTS))
        groups.world.barrier()
        results[case] = {
            "tokens": tokens_of(out),
            "epoch": llm.layout.epoch,
            "accepted": sum(record.num_accepted for record in llm.step_records),
        }
        llm.close()
    return results


def test_the_same_tokens(qwen3: str) -> None:
    plain = tokens_of(LLM(qwen3, **OPTIONS).generate(PROMPTS, HELD_PARAMS))
    first, second = run_world(generate, 2, qwen3)
    for case in CASES:
        assert first[case]["tokens"] == second[case]["tokens"], case
        if "regroups" in case:
            check_tokens(first[case]["tokens"], plain, HELD)
        else:
            assert first[case]["tokens"] == [[one[:NUM_TOKENS] for one in some] for some in plain], case
        assert first[case]["accepted"] + second[case]["accepted"] > 0
    assert first["DP2 on demand regroups"]["epoch"] == 1


def copy_from_the_other_replica(model: str, with_server: bool) -> int:
    """Rank 0 generates a greedy sample; rank 1 then generates its twin. Returns how many drafted tokens it accepted."""
    groups = join(timeout_s=120)
    llm = LLM(model, world=groups, **OPTIONS, **SHARED | {"draft_server": with_server})
    rank, accepted = groups.world.rank, 0
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    state = make_state(0, PROMPTS[0], params, index=rank)
    llm.replica.submit(Work(state=state))
    if rank == 0:
        while llm.replica.has_work:
            llm.replica.step()
    groups.world.barrier()
    if rank == 1:
        for _ in range(2):  # the second step asks for drafts
            llm.replica.step()
        drafter = llm.replica.drafter
        assert isinstance(drafter, SuffixDrafter) and len(state.tokens) < 20
        wait_until(lambda: not with_server or len(known_of(drafter)) == 60)
        while llm.replica.has_work:
            accepted += llm.replica.step().num_accepted
    groups.world.barrier()
    llm.close()
    return accepted


def known_of(drafter: SuffixDrafter) -> list[int]:
    client = drafter._client
    assert client is not None
    return test_draft_server.tokens_of(client._link.mirror).get("0:0", {}).get(1, [])


def test_the_second_replica_accepts_what_the_first_has_generated(qwen3: str) -> None:
    alone, shared = (run_world(copy_from_the_other_replica, 2, qwen3, with_server)[1] for with_server in (False, True))
    assert shared > 40 and shared > alone


class Broken:
    """A drafter that fails."""

    def propose(self, *_: Any) -> list[Draft]:
        raise ValueError("no drafts today")

    passes = (DraftPass(3, 40),)

    def follow(self, *_: Any) -> None: ...


def fail_on_the_first(_: str) -> str:
    groups = join(timeout_s=60)
    shards = groups.get((0, 1))
    drafter = SharedDrafter(Broken() if shards.rank == 0 else None, shards)
    return error_of(lambda: drafter.propose([], 0, 0))


def test_a_drafter_that_fails_leaves_no_shard_waiting() -> None:
    assert run_world(fail_on_the_first, 2, "") == [
        "ValueError: no drafts today",
        "RuntimeError: the drafter on the replica's first rank has failed",
    ]


def test_drafts_come_through_a_broadcast_unchanged() -> None:
    drafts = [Draft([1, 2], [0.1 + 0.2, 1e-300]), Draft([], [])]

    class Sends(SingleRank):
        def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
            sent.append(data)
            return sent[0]

    class Fixed(Broken):
        def propose(self, *_: Any) -> list[Draft]:
            return drafts

    sent: list[Any] = []
    first, other = SharedDrafter(Fixed(), Sends()), SharedDrafter(None, Sends())
    assert first.propose([], 0, 0) == other.propose([], 0, 0) == drafts
    assert first.passes == other.passes == Fixed.passes


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_refusals(qwen3: str, drafter: str) -> None:
    with pytest.raises(ValueError, match=rf"EngineConfig\.draft_server=True: .*'grouped_suffix', not '{drafter}'"):
        LLM(qwen3, drafter=drafter, draft_server=True)  # type: ignore[arg-type]


def test_a_fleet_refuses(qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.draft_server=True: is for a torchrun world"):
        Fleet(qwen3, num_replicas=1, **OPTIONS, **SHARED)


def test_one_process_has_nobody_to_share_with(qwen3: str) -> None:
    llm = LLM(qwen3, **OPTIONS, **SHARED)
    assert llm._drafts is None and isinstance(llm.replica.drafter, SuffixDrafter)
    assert isinstance(llm._engine, LocalEngine)
    llm.close()
