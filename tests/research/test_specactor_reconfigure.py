"""SpecActor's reconfiguration: what it learns, and what it decides, against played drafters and verifiers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from engines.config import EngineConfig
from engines.coordination.policies import Static
from engines.sequence import SamplingParams, SequenceId, SequenceKey, SequenceState
from engines.speculation.drafter import Ask
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import DraftPolicy, Prices
from research.simulator.cluster import Cluster, ClusterConfig, Overheads
from research.simulator.stated import StatedDrafter, simulated_token
from research.specactor.plan import Mode, Placement, Plan
from research.specactor.profile import Affine, Costs, Verifier
from research.specactor.reconfigure import Acceptance, Reconfiguration, choices
from research.specactor.throughput import Pair, coupled, decoupled
from tests.research.specactor_world import Played
from tests.research.test_simulated_draft_ranks import ALONE, PAIR, PairPace
from tests.research.test_simulator import states

# 1 s for a pass of a drafter; a verifier's pass takes 4 s, and 0.02 s more per row.
COSTS = Costs(
    drafts={"small": Affine(0.0, 1.0)},
    verifiers={4: Verifier(tuple(Affine(0.02 * rows, 4.0) for rows in range(1, 18)))},
)
BATCH, PARAMS = 32, SamplingParams(max_tokens=10_000)
FIRST, SECOND = (0, 0, 0), (0, 1, 0)


def plan_of(mode: Mode) -> Plan:
    num_drafters = 1 if mode in ("filled", "strict") else 0
    return Plan(
        placement=Placement(num_drafters, 1, 2, 4),
        batch=BATCH,
        leftover_gpus=0,
        mode=mode,
        method="small",
        window=5,
        tokens_per_second=1.0,
    )


def outcomes(p: float, tried: int, draws: random.Random) -> int:
    return next((place for place in range(tried) if draws.random() >= p), tried)


def test_acceptance_is_that_of_guesses_that_were_compared() -> None:
    """The share of accepted guesses of those tried is lower, and would depend on the window."""
    draws = random.Random(0)
    for p, tried in itertools.product((0.0, 0.5, 0.9, 1.0), (1, 8)):
        acceptance = Acceptance()
        assert acceptance.estimate is None
        for _ in range(4000):
            acceptance.observe(tried, outcomes(p, tried, draws))
        assert acceptance.estimate == pytest.approx(p, abs=0.04), "a deviation of sqrt(p (1 - p) / 2000), three times"
    for _ in range(1000):
        acceptance.observe(8, 0)
    assert acceptance.estimate == pytest.approx(0.368, abs=0.01), "1 / e of what was before"


@pytest.mark.parametrize("p", [0.5, 0.8, 0.95])
def test_a_drafter_that_waits_for_the_verifier_is_as_fast_as_played(p: float) -> None:
    for window, ratio in ((1, 3.6), (2, 5.2), (3, 2.4), (4, 3.5), (6, 5.37)):
        pair = Pair(1.0, lambda _, ratio=ratio: ratio, 16)  # type: ignore[misc]
        game = Played(lambda _: 1.0, lambda _, x=ratio: x, p, window, "filled", 16, ahead=False)  # type: ignore[misc]
        found = decoupled(pair, p, window, "filled", ahead=False).tokens_per_second
        assert found == pytest.approx(game.rate(2000), rel=0.02), (window, ratio)
        assert found <= decoupled(pair, p, window, "filled").tokens_per_second + 1e-9


@pytest.mark.parametrize("mode", ["filled", "strict", "coupled"])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_choice_is_the_best_of_all_windows(mode: Mode, p: float) -> None:
    found = {(one.mode, one.window): one.tokens_per_second for one in choices(COSTS, plan_of(mode), p, BATCH)}
    off = 1 / COSTS.verifiers[4](BATCH, 1)
    assert found["off", 0] == pytest.approx(off)
    for window in range(1, 17):
        barrier = coupled(p, window, window, COSTS.verifiers[4](BATCH, window + 1))
        if mode != "filled":
            assert found["coupled", window] == pytest.approx(barrier)
        if mode != "coupled":
            pair = Pair(1.0, lambda rows: COSTS.verifiers[4](BATCH, rows), BATCH)
            rate = decoupled(pair, p, window, mode).tokens_per_second  # type: ignore[arg-type]
            assert max(found.values()) >= rate - 1e-6
            assert found.get(("decoupled", window), rate) == pytest.approx(rate)


def ask(one: SequenceId, generated: int) -> Ask:
    step, prompt, sample = one
    key = SequenceKey(run_seed=0, policy_step=step, prompt_uid=prompt, sample_index=sample)
    state = SequenceState(key=key, group_id=0, tokens=[0] * (1 + generated), num_prompt_tokens=1, params=PARAMS)
    return Ask(state, limit=16)


def chosen(policy: Reconfiguration, generated: dict[SequenceId, int]) -> dict[SequenceId, tuple[int, bool]]:
    """Returns (window, ahead) of each sequence that is drafted for."""
    asks = [ask(*item) for item in generated.items()]
    return {one.state.sequence_id: (one.limit, one.ahead) for one in policy.wants(asks, len(asks), len(asks))}


def play(policy: Reconfiguration, chances: dict[SequenceId, float], until: int) -> dict[SequenceId, tuple[int, bool]]:
    """Draws outcomes until each sequence has `until` tokens."""
    draws = random.Random(1)
    generated = dict.fromkeys(chances, 0)
    while min(generated.values()) < until:
        windows = chosen(policy, generated)
        for one, p in chances.items():
            accepted = 0
            if one in windows:
                accepted = outcomes(p, windows[one][0], draws)
                policy.observe(ask(one, 0).state, [1.0] * windows[one][0], accepted)
            generated[one] += accepted + 1
    return chosen(policy, generated)


def test_sequences_get_their_own_windows_after_an_interval() -> None:
    others: dict[SequenceId, float] = {(1, number, 0): 0.8 for number in range(BATCH - 2)}
    policy = Reconfiguration(COSTS, plan_of("filled"), interval_tokens=500)
    assert play(policy, {FIRST: 0.95, SECOND: 0.0, **others}, 480)[SECOND] == (5, True)
    policy = Reconfiguration(COSTS, plan_of("filled"), interval_tokens=500)
    after = play(policy, {FIRST: 0.95, SECOND: 0.0, **others}, 520)
    assert SECOND not in after and after[FIRST][1]
    mine = next(one for one in policy.decisions if one.sequence_id == SECOND)
    assert (mine.acceptance, mine.batch, mine.num_generated) == (0.0, BATCH, 500)
    assert mine.choice == mine.off and mine.off.tokens_per_second > 0
    assert all(one.choice.tokens_per_second >= one.off.tokens_per_second for one in policy.decisions)


def test_drafts_that_are_wrong_for_all_end_and_are_tried_again() -> None:
    policy = Reconfiguration(COSTS, plan_of("filled"), interval_tokens=800)
    assert play(policy, {FIRST: 0.0, SECOND: 0.0}, 1000) == {}
    assert chosen(policy, {FIRST: 1650, SECOND: 1650}) == {FIRST: (5, True), SECOND: (5, True)}
    for _ in range(100):
        policy.observe(ask(FIRST, 0).state, [1.0] * 5, 5)
        policy.observe(ask(SECOND, 0).state, [1.0] * 5, 0)
    again = chosen(policy, {FIRST: 1750, SECOND: 1750})
    assert FIRST in again and SECOND not in again
    assert SECOND not in chosen(policy, {FIRST: 3300, SECOND: 3300}), "after twice the interval"
    assert SECOND in chosen(policy, {FIRST: 3400, SECOND: 3400})
    assert policy.decisions[-1].mean_acceptance == pytest.approx(0.5, abs=0.01)


def test_in_a_rollout_that_waits_for_whole_windows_bad_drafts_cost_one_interval() -> None:
    """Afterwards sequences decode within 3 % of what they do without a drafter."""
    pace = PairPace()
    costs = Costs(
        drafts={"small": lambda batch: pace.drafts[0] + pace.drafts[1] * batch},
        verifiers={4: lambda batch, rows: pace.verify[0] + pace.verify[1] * batch * rows},
    )

    def seconds(length: int, policy: DraftPolicy | None, p: float = 0.05) -> float:
        engine = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "draft_mode": "strict", "max_draft_tokens": 4}
        drafts = {"drafter": "own", "draft_lengths": "adaptive"} if policy else {}
        config = ClusterConfig(
            layout=PAIR if policy else ALONE,
            engine=EngineConfig(**engine, **drafts),  # type: ignore[arg-type]
            pace=pace,
            num_kv_tokens={1: 100_000},
            max_model_len=4096,
            own_drafter=partial(StatedDrafter, simulated_token, lambda *_: p) if policy else None,
            overheads=Overheads(),
            draft_policy=policy or MarginalGain,
        )
        lengths = {(0, uid, 0): length for uid in range(8)}
        return Cluster(config, schedule_policy=Static(), lengths=lengths).roll_out(states(8)).makespan

    def reconfigured(_: Prices) -> Reconfiguration:
        return Reconfiguration(costs, replace(plan_of("strict"), window=4), interval_tokens=200)

    def planned(_: Prices) -> Reconfiguration:
        return Reconfiguration(costs, replace(plan_of("strict"), window=4), interval_tokens=4096)

    plain = seconds(390, None) - seconds(250, None)
    assert seconds(390, reconfigured) - seconds(250, reconfigured) < 1.03 * plain
    assert seconds(390, planned) - seconds(250, planned) > 1.3 * plain
    assert seconds(390, reconfigured, 0.95) < 0.7 * seconds(390, None), "good drafts are kept"


def test_as_printed_only_sequences_below_the_mean_are_decided_for_a_batch_of_one() -> None:
    dear = Costs(drafts=COSTS.drafts, verifiers={4: Verifier(tuple(Affine(rows / 4, 1.0) for rows in range(1, 18)))})
    for printed, decided in ((True, [SECOND]), (False, [FIRST, SECOND])):
        policy = Reconfiguration(dear, plan_of("strict"), interval_tokens=500, printed=printed)
        found = play(policy, {FIRST: 0.8, SECOND: 0.6}, 540)
        assert sorted({one.sequence_id for one in policy.decisions}) == decided
        last = next(one for one in reversed(policy.decisions) if one.sequence_id == SECOND)
        rates = choices(dear, plan_of("strict"), round(last.acceptance, 2), 1 if printed else 2)
        assert last.choice == max(rates, key=lambda one: one.tokens_per_second)
        assert found.get(SECOND, (0, False))[0] == last.choice.window
    with pytest.raises(ValueError, match="interval_tokens=0"):
        Reconfiguration(dear, plan_of("strict"), interval_tokens=0)
