"""Drafts in the simulator against closed forms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from engines.coordination.policies import OnDemand, Static
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.rollout.pace import row_seconds
from engines.sequence import SamplingParams, SequenceState
from engines.speculation.calibration import Calibration
from engines.speculation.drafter import Ask, Draft, DraftPass, News
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import Prices, RowSeconds
from research.seer.thresholds import Thresholds
from research.simulator.cluster import Cluster, SimulatedRollout
from research.simulator.datasheets import H100, LLAMA_8B
from research.simulator.drafts import SEER_TABLE_2, DraftAcceptance, References, SimulatedDrafter
from research.simulator.pace import ProfilePace
from tests.research.test_simulator import FlatPace, Moving, check_after_every_event, cluster, long_tail, states
from tests.states import make_state

DRAFTS = {"drafter": "grouped_suffix", "max_draft_tokens": 4, "draft_lengths": "fixed"}
EQUAL = 120
GROUPS, SIZE = 10, 4


class DraftPace(FlatPace):
    """10 ms and 1 ms per sequence, 3 ms per draft that was looked up and 0.2 ms per draft token."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return 0.01 + 0.001 * output.num_running + self.drafting(0, output.num_drafted)

    def draft(self, spec: ReplicaSpec, method: str, passes: Sequence[DraftPass]) -> float:
        return self.drafting(sum(one.num_rows for one in passes), 0)

    @staticmethod
    def drafting(num_looked_up: int, num_drafted: int) -> float:
        return 0.003 * num_looked_up + 0.0002 * num_drafted


def drafting(num_ranks: int, policy, lengths: list[int], tokens: float, **options) -> Cluster:
    acceptance = DraftAcceptance(table={0: tokens}, length=4)
    engine = DRAFTS | options.pop("engine", {})
    return cluster(num_ranks, policy, lengths, drafts=acceptance, pace=DraftPace(), engine=engine, **options)


def test_drafts_that_are_never_right_cost_their_time_and_nothing_else() -> None:
    plain = cluster(1, Static(), [EQUAL] * 8, pace=DraftPace()).roll_out(states(8))
    done = drafting(1, Static(), [EQUAL] * 8, 1.0).roll_out(states(8))
    assert [(one.num_running, one.num_tokens - one.num_drafted) for one in done.steps] == [
        (one.num_running, one.num_tokens) for one in plain.steps
    ]
    assert all(one.num_accepted == 0 for one in done.steps)
    assert [one.drafted for one in done.steps] == [(), *([(8, 8, 8, 8)] * (EQUAL - 1))]
    assert done.makespan == pytest.approx(plain.makespan + (EQUAL - 1) * DraftPace.drafting(8, 32), rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 100, 101])
@pytest.mark.parametrize("num_drafted", [1, 4])
def test_drafts_that_are_always_right(length: int, num_drafted: int) -> None:
    engine = {"max_draft_tokens": num_drafted}
    done = drafting(1, Static(), [length] * 3, 5.0, engine=engine).roll_out(states(3))
    assert len(done.steps) - 1 == math.ceil((length - 1) / (num_drafted + 1))
    assert done.lengths == {(0, uid, 0): length for uid in range(3)}


def test_table_entries_as_probabilities() -> None:
    """With one draft token 1 + p, with two 1 + p + p^2."""
    assert DraftAcceptance(table={0: 1.25}, length=1).probabilities == pytest.approx([0.25])
    between = DraftAcceptance(table={4: 1.75, 2: 1.3125}, length=2).probabilities
    assert between == pytest.approx([0.25, 0.25, 0.25, 0.375, 0.5])
    assert DraftAcceptance(table={0: 1, 1: 9}).probabilities == [0.0, 1.0]


def propose(drafter: SimulatedDrafter, state: SequenceState, limit: int = 8) -> tuple[int, list[float]]:
    """Returns how many tokens of a draft at a new position are right, and its estimates."""
    state.tokens.append(5)
    (draft,) = drafter.propose([Ask(state, limit)], 1, 1)
    assert len(draft.tokens) == limit
    return sum(token > 2**32 for token in draft.tokens), draft.probabilities


@pytest.mark.parametrize("num_references", SEER_TABLE_2)
def test_the_mean_accepted_length_is_that_of_the_table(num_references: int) -> None:
    """Drafts of 8 tokens at 4,000 positions; four standard errors."""
    drafter = SimulatedDrafter(DraftAcceptance(seed=3), References(lambda state: state.key.sample_index > 0))
    for index in range(1, 1 + num_references):
        drafter.follow(News(ended=[make_state(7, [1, 2, 3], index=index)]))
    state = make_state(7, [1, 2, 3])
    counts = [propose(drafter, state)[0] for _ in range(4_000)]
    error = statistics.stdev(counts) / len(counts) ** 0.5
    assert abs(statistics.fmean(counts) - (SEER_TABLE_2[num_references] - 1)) < 4 * error < 0.15


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 3, 4])
def test_a_running_sibling_is_a_reference_for_the_tokens_that_it_holds(num_ahead: int) -> None:
    """A draft of three tokens beside a sibling that is `num_ahead` longer, at 4,000 positions; four standard errors."""
    references = References(lambda _: False)
    drafter = SimulatedDrafter(DraftAcceptance(table={0: 1.25, 1: 1.75}, length=1), references)
    state, sibling, counts = make_state(7, [1, 2, 3]), make_state(7, [1, 2, 3], index=1), []
    sibling.tokens += [5] * num_ahead
    for _ in range(4_000):
        sibling.tokens.append(5)
        references.update(sibling)
        counts.append(propose(drafter, state, 3)[0])
    chances = [0.75 if place < num_ahead else 0.25 for place in range(3)]
    error = statistics.stdev(counts) / len(counts) ** 0.5
    assert abs(statistics.fmean(counts) - sum(math.prod(chances[:end]) for end in (1, 2, 3))) < 4 * error < 0.1


def test_estimates_are_too_sure_until_a_policy_calibrates_them() -> None:
    """Mean 0.5: tokens with a share of 1 are right in 0.5 + 0.35 x 0.375 of cases, with 1/2 in 0.5 - 0.65 x 0.375."""
    drafter = SimulatedDrafter(DraftAcceptance(table={0: 1.5}, length=1), References(lambda _: False))
    calibration, state, estimates = Calibration(), make_state(7, [1, 2, 3]), []
    for _ in range(6_000):
        num_right, probabilities = propose(drafter, state, 1)
        calibration.observe(probabilities, num_right)
        estimates += probabilities
    assert set(estimates) == {1.0, 0.5} and estimates.count(1.0) == pytest.approx(6_000 * 0.65, rel=0.05)
    paths = calibration.paths([Draft([1], [1.0]), Draft([1], [0.5]), Draft([1, 1], [0.5, 0.5])])
    assert paths == pytest.approx(np.array([[0.632, 0], [0.257, 0], [0.257, 0.162]]), abs=0.06)


def group_states() -> list[SequenceState]:
    params = SamplingParams(max_tokens=1000)
    prompts = [[uid * 100 + place for place in range(16)] for uid in range(GROUPS)]
    return [make_state(uid, prompt, params, index=index) for index in range(SIZE) for uid, prompt in enumerate(prompts)]


def roll_out_groups(policy, *, seed: int = 0, num_kv_tokens: int = 9_000, check: bool = False, **options):
    drawn = iter(long_tail(GROUPS * SIZE, seed=1))
    lengths = {state.sequence_id: next(drawn) for state in group_states()}
    options = {"pace": ProfilePace(device=H100, shape=LLAMA_8B), **options}
    engine = DRAFTS | {"draft_server": options.pop("server", False), "draft_lengths": options.pop("lengths", "fixed")}
    drafts = DraftAcceptance(table={0: 1.5, 3: 3.5}, length=4, seed=seed)
    made = cluster(3, policy, [], engine=engine, drafts=drafts, num_kv_tokens={1: num_kv_tokens}, **options)
    made.lengths = lengths
    if check:
        check_after_every_event(made)
    done = made.roll_out(group_states())
    assert done.lengths == lengths and made.pool.num_tokens == 0
    return done


def tokens_per_step(done: SimulatedRollout) -> float:
    return 1 + sum(one.num_accepted for one in done.steps) / sum(one.drafted[0] for one in done.steps if one.drafted)


@pytest.mark.parametrize("policy", [Static, OnDemand, Moving])
@pytest.mark.parametrize("num_kv_tokens", [9_000, 1_100])
def test_every_sequence_ends_at_its_length_with_drafts(policy, num_kv_tokens: int) -> None:
    done = roll_out_groups(policy(), num_kv_tokens=num_kv_tokens, check=True, server=True)
    assert (done.num_preempted > 0) == (num_kv_tokens == 1_100 and policy is not Moving)
    assert sum(one.num_drafted for one in done.steps) > sum(one.num_accepted for one in done.steps) > 1000


def test_the_same_seed_gives_the_same_log_and_another_one_another() -> None:
    first, again, other = (roll_out_groups(OnDemand(), seed=seed, num_kv_tokens=1_100) for seed in (0, 0, 1))
    assert first == again
    assert first.steps != other.steps and first.lengths == other.lengths


def test_a_draft_server_brings_references_from_other_replicas() -> None:
    alone, shared = (tokens_per_step(roll_out_groups(OnDemand(), server=server)) for server in (False, True))
    assert 1.5 < alone < shared < 3.5


def test_policies_are_the_live_ones_and_decide_by_the_pace() -> None:
    """Where rows cost nothing, they draft as much as they can; where a row costs as much as a pass, nothing."""
    given: list[RowSeconds] = []

    class Gain(MarginalGain):
        def __init__(self, prices: Prices) -> None:
            given.append(prices.verify)
            super().__init__(prices)

    class DearRows(FlatPace):
        def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
            return 0.01 * output.num_tokens

    class FreeRows(FlatPace):
        def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
            return 0.01

    fixed = roll_out_groups(OnDemand(), pace=FreeRows())
    for policy in ({}, {"draft_policy": Gain}, {"draft_policy": Thresholds}):
        free = roll_out_groups(OnDemand(), pace=FreeRows(), lengths="adaptive", **policy)
        dear = roll_out_groups(OnDemand(), pace=DearRows(), lengths="adaptive", **policy)
        assert not any(one.num_drafted for one in dear.steps)
        assert tokens_per_step(free) > (1.5 if policy else 0.9 * tokens_per_step(fixed))
    expected = row_seconds(DearRows(), ReplicaSpec(id=0, ranks=(0,)))
    assert len(given) == 6 and [given[3](rows) for rows in (1, 7)] == [expected(1), expected(7)] == [0.01, 0.07]


@pytest.mark.parametrize(
    ("engine", "drafts"),
    [
        ({}, DraftAcceptance()),
        ({"drafter": "ngram"}, None),
        ({"drafter": "ngram"}, DraftAcceptance()),
        (DRAFTS, None),
        (DRAFTS | {"draft_paths": 2}, DraftAcceptance()),
    ],
)
def test_drafts_that_are_not_simulated(engine: dict[str, object], drafts: DraftAcceptance | None) -> None:
    with pytest.raises(
        ValueError, match=r"ClusterConfig\.drafts=.*: with drafter=.* give drafts with 'grouped_suffix'"
    ):
        cluster(1, Static(), [5], engine=engine, drafts=drafts)


@pytest.mark.parametrize("table", [{}, {-1: 2.0}, {0: 0.5}, {0: 9.5}, {0: math.nan}])
def test_impossible_tables(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"DraftAcceptance\.table=.*: give numbers of references, from 0"):
        DraftAcceptance(table=table)
