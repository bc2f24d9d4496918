"""Simulated ranks that serve and lend, against closed forms and under random loads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from engines.config import EngineConfig
from engines.coordination.policies import OnDemand
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import Path
from engines.serving.coserve import CoServingLimits
from engines.serving.policies import MemoryView
from research.rose.admission import DualSLO, EqualTurns, ServingTimes
from research.rose.baselines import IdleFor
from research.rose.memory import ServingFirst, SharingOptions, StaticSplit
from research.simulator.cluster import Cluster, ClusterConfig, OutsideReplica, SimulatedRollout
from research.simulator.serving import Served, ServingSetup
from research.workloads.arrivals import Arrival
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import TrajectoryLengths, Turn
from tests.research.test_simulator import check_after_every_event, states

SPEC = ReplicaSpec(id=0, ranks=(0,))


@dataclass(frozen=True)
class TokenPace:
    """A step takes so long, and so much for each of its tokens."""

    step_s: float
    token_s: float = 0.0

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return self.step_s + self.token_s * output.num_tokens

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.0

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 0.0

    def draft(self, *_: object) -> float:
        return 0.0


SERVING, ROLLOUT = TokenPace(0.02), TokenPace(0.03)
TIMES = ServingTimes.of(SERVING, SPEC, chunk_tokens=64)


def dual(ttft_s: float | None = 0.5, tpot_s: float | None = 0.1) -> DualSLO:
    return DualSLO(times=TIMES, ttft_s=ttft_s, tpot_s=tpot_s, form="cumulative", guard_s=0.0, guard_share=0.0)


def engine(**options: object) -> EngineConfig:
    return EngineConfig(**{"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options})  # type: ignore[arg-type]


def setup(arrivals: list[Arrival], **options: object) -> ServingSetup:
    fields: dict[str, object] = {
        "pace": SERVING,
        "engine": engine(),
        "rollout_engine": engine(),
        "num_pages": 60,
        "serving_blocks": 2,
        "rollout_blocks": 3,
        "admission": dual,
        "memory": ServingFirst,
        **options,
    }
    return ServingSetup(arrivals=arrivals, **fields)  # type: ignore[arg-type]


def request(time_s: float, num_prompt: int = 8, num_generated: int = 5) -> Arrival:
    return Arrival(time_s=time_s, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated)


def cluster(
    outside: list[OutsideReplica],
    lengths: list[int],
    *,
    num_ranks: int = 0,
    turns: dict[tuple[int, int, int], list[Turn]] | None = None,
) -> Cluster:
    config = ClusterConfig(
        layout=nested_layout(range(num_ranks), 1) if num_ranks else Layout(epoch=0, replicas=()),
        engine=engine(),
        pace=ROLLOUT,
        num_kv_tokens={1: 720},
        max_model_len=720,
        pool_tokens=0,
        outside=tuple(outside),
    )
    known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
    return Cluster(config, schedule_policy=OnDemand(), lengths=known, turns=turns)


def add_up(served: Served) -> None:
    parts = [*served.busy_s.values(), served.idle_s, served.changing_s]
    assert sum(parts) == pytest.approx(served.until_s - served.begun_s, abs=1e-9) and min(parts) >= 0
    assert served.lent.seconds == pytest.approx(served.busy_s["rollout"], abs=1e-9)


def test_one_request_and_one_sequence_take_the_exact_times_of_dual_admission() -> None:
    """A rollout's step takes 30 ms, one of serving 20, and gaps of 100 ms are allowed: so after each step of serving
    there are two of the rollout, and gaps of 80 ms. The request's first token is due 500 ms after its arrival."""
    served = setup([request(1.0)])
    done = cluster([OutsideReplica(serving=served)], [100]).roll_out(states(1, 8, 100))
    (rank,) = done.served
    (one,) = rank.requests
    # Rollout steps end at multiples of 30 ms. The first one that would end after 1.5 - 0.02 s is that from 1.47 s on.
    assert one.token_s[0] == pytest.approx(1.47 + 0.02)
    assert one.gaps_s == pytest.approx([0.02 + 2 * 0.03] * 4)
    assert done.makespan == pytest.approx(100 * 0.03 + 5 * 0.02)
    assert rank.busy_s == pytest.approx({"serving": 0.1, "rollout": 3.0})
    assert rank.lent.num_tokens == 100 and rank.idle_s == pytest.approx(0)
    add_up(rank)


def test_each_gap_is_as_long_as_the_slack_allows() -> None:
    for tpot_s, num_between in ((0.04, 0), (0.0501, 1), (0.11001, 3)):
        served = setup([request(0.0, num_generated=6)], admission=lambda tpot_s=tpot_s: dual(0.04, tpot_s))
        done = cluster([OutsideReplica(serving=served)], [60]).roll_out(states(1, 8, 60))
        (one,) = done.served[0].requests
        assert one.gaps_s == pytest.approx([0.02 + num_between * 0.03] * 5)


def test_without_admission_both_models_take_turns_or_wait_for_an_idle_gpu() -> None:
    taking_turns = setup([request(0.0, num_generated=20)], admission=EqualTurns)
    done = cluster([OutsideReplica(serving=taking_turns)], [60]).roll_out(states(1, 8, 60))
    assert done.served[0].requests[0].gaps_s == pytest.approx([0.05] * 19)
    swapping = setup([request(0.0), request(1.0)], admission=lambda: IdleFor(0.2), change_s=0.3)
    done = cluster([OutsideReplica(serving=swapping)], [60]).roll_out(states(1, 8, 60))
    (rank,) = done.served
    first, second = rank.requests
    assert first.token_s == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10])
    assert rank.changing_s == pytest.approx(3 * 0.3)
    assert 0.3 < second.ttft_s - 0.02 <= 0.33 and second.gaps_s == pytest.approx([0.02] * 4)
    assert rank.idle_s == pytest.approx(2 * 0.2, abs=0.04), "it looks at the end of a step, and every 5 ms"
    add_up(rank)


def test_a_rank_that_lends_nothing_serves_as_alone() -> None:
    arrivals = [request(0.05 * place, 30, 10) for place in range(20)]
    alone = setup(arrivals)
    done = cluster([OutsideReplica(serving=alone, join_s=1e6)], [100], num_ranks=1).roll_out(states(1, 8, 100))
    (rank,) = done.served
    assert rank.busy_s["rollout"] == 0 == rank.lent.num_tokens and len(rank.requests) == 20
    assert max(gap for one in rank.requests for gap in one.gaps_s) == pytest.approx(0.02)
    assert done.makespan == pytest.approx(3.0)


def test_the_prefix_cache_of_serving_hides_no_memory_from_the_rollout() -> None:
    """Its idle pages fill the pool while all tools run; then the trajectories go on together all the same."""
    arrivals = [request(time_s, 40, 2) for time_s in (*range(-9, 0), *(1 + 0.1 * place for place in range(20)))]
    turns = {
        (0, uid, 0): [Turn(num_generated=20, tool_s=4.0, num_observed=2), Turn(num_generated=20)] for uid in range(8)
    }
    simulated = cluster([OutsideReplica(serving=setup(arrivals, lease_s=0.5))], [40] * 8, turns=turns)
    done = simulated.roll_out([replace(state, in_turns=True) for state in states(8, 8, 300)])
    assert done.makespan < 4.0 + 4 * 20 * 0.03, "far less than one after the other"
    assert done.served[0].begun_s == 0.0 and done.served[0].requests[0].arrived_s == -9


class Random:
    """Admits a share of the steps."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def admits(self, view: object, seconds: float) -> bool:
        return self._rng.random() < 0.5


def random_world(seed: int) -> tuple[Cluster, list[int], bool]:
    """Random loads and policies on two serving ranks, of which one may die, beside a dedicated one."""
    rng = random.Random(seed)
    in_turns = rng.random() < 0.5
    lengths = LogNormalLengths(median=30, sigma=0.8, cap=120)
    trajectories = TrajectoryLengths(
        num_turns=LogNormalLengths(median=3, sigma=0.5, cap=6),
        generated=LogNormalLengths(median=12, sigma=0.5, cap=40),
        observed=LogNormalLengths(median=6, sigma=0.5, cap=20),
        tool_median_s=0.3,
        tool_sigma=1.0,
    ).draw(30, 1, seed)
    turns = {(0, uid, 0): one for uid, (one,) in enumerate(trajectories)} if in_turns else None
    counts = [sum(turn.num_generated for turn in one) for (one,) in trajectories]
    drawn = counts if in_turns else lengths.draw(30, seed)
    admissions = [dual, lambda: dual(None), lambda: dual(0.3, None), EqualTurns, lambda: Random(seed)]
    split = rng.random() < 0.3
    outside = [
        OutsideReplica(
            join_s=rng.choice([0.0, 0.4]),
            death_s=rng.uniform(0.5, 2.0) if number and rng.random() < 0.7 else None,
            serving=setup(
                [
                    request(time_s, rng.randint(1, 60), rng.randint(1, 30))
                    for time_s in sorted(rng.uniform(0, 10) for _ in range(rng.randint(0, 60)))
                ],
                admission=rng.choice(admissions),
                memory=StaticSplit if split else lambda: ServingFirst(SharingOptions(window_s=2.0)),
                serving_share=0.5 if split else 1.0,
                rollout_engine=engine(prefill_chunk_size=16, prefix_caching=rng.random() < 0.7),
                lease_s=rng.choice([0.05, 1.0, None]),
                limits=CoServingLimits(stall_s=rng.choice([0.3, 2.0])),
                change_s=rng.choice([0.0, 0.1]),
            ),
        )
        for number in range(2)
    ]
    simulated = cluster(outside, drawn, num_ranks=1, turns=turns)
    return simulated, drawn, in_turns


def roll_out(simulated: Cluster, in_turns: bool) -> SimulatedRollout:
    begun = [replace(state, in_turns=in_turns) for state in states(30, 8, 300)]
    return simulated.roll_out(begun)


class CutToNothing(ServingFirst):
    """Takes all pages back at 0.5 s."""

    def cut(self, view: MemoryView) -> int | None:
        return 0 if view.now >= 0.5 else None


def test_a_rank_without_pages_gets_no_sequences() -> None:
    """Although trajectories like to go on where they ran, and it has the fewest."""
    turns = {(0, uid, 0): [Turn(num_generated=12, tool_s=0.1, num_observed=2)] * 3 for uid in range(14)}
    served = setup([], memory=CutToNothing)
    simulated = cluster([OutsideReplica(serving=served)], [36] * 14, num_ranks=1, turns=turns)
    stop_after(simulated, 5000)
    done = simulated.roll_out([replace(state, in_turns=True) for state in states(14, 8, 300)])
    (rank,) = done.served
    assert rank.lent.num_taken_back > 0 == rank.lent.num_stalled
    assert max(step.start for step in done.steps if step.replica_id == 1) < 0.5 < done.makespan


def stop_after(simulated: Cluster, most: int) -> None:
    """Lets a rollout fail in which something goes on for ever."""
    run_next, count = simulated.queue.run_next, iter(range(most))

    def run() -> bool:
        assert next(count, None) is not None, "it does not end"
        return run_next()

    simulated.queue.run_next = run  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(16))
def test_random_worlds_lose_no_token_and_answer_every_request(seed: int) -> None:
    """Whatever is cut, taken back, stalled or killed: each sequence ends once at its length, the ranks that live have
    answered all requests, and their seconds add up. The same seed gives the same."""
    simulated, lengths, in_turns = random_world(seed)
    check_after_every_event(simulated)
    stop_after(simulated, 20_000)
    done = roll_out(simulated, in_turns)
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    for rank, outside in zip(done.served, simulated.config.outside, strict=True):
        if outside.death_s is None:
            assert outside.serving is not None
            came = [one for one in outside.serving.arrivals if one.time_s <= done.makespan]
            assert len(rank.requests) == len(came)
            for one, arrival in zip(rank.requests, came, strict=True):
                assert len(one.token_s) == one.num_tokens == arrival.num_generated_tokens
                assert one.arrived_s == arrival.time_s < one.token_s[0] and min(one.gaps_s, default=1) > 0
            add_up(rank)
    again = roll_out(random_world(seed)[0], in_turns)
    assert again == done


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(ValueError, match=r"a request has 481 tokens, and the serving model's pages hold 480"):
        setup([request(0.0, 480, 1)])
