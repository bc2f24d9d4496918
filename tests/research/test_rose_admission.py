"""ROSE's Dual-SLO admission: Eq. 1 and 2 by hand, and against serving played pass by pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import Replica
from engines.replica.scheduler import Scheduler
from engines.sequence import SamplingParams, Work
from engines.serving.policies import QueuedRequest, ServingView
from research.rose.admission import (
    DualSLO,
    EqualTurns,
    QueueDebt,
    ServingTimes,
    decode_slack,
    first_token_waits,
    prefill_slacks,
)
from research.simulator.pace import ProfilePace
from research.simulator.runner import VOCAB_SIZE, KVPool, SimulatedMover, SimulatedRunner
from tests.states import make_state

LINEAR = ServingTimes(
    prefill_s=lambda num_tokens: 1e-3 * num_tokens, decode_s=lambda batch, context: 0.02, chunk_tokens=100
)


def view(
    queued: list[tuple[float, int]],
    last: list[float],
    *,
    now: float = 0.0,
    context: int = 0,
    delayed_s: float = 0.0,
    delayed_before_s: float = 0.0,
) -> ServingView:
    return ServingView(
        now=now,
        queued=tuple(QueuedRequest(arrived=arrived, num_tokens=count) for arrived, count in queued),
        last_token_times=tuple(last),
        num_context_tokens=context,
        busy_at=now if queued or last else -math.inf,
        delayed_s=delayed_s,
        delayed_before_s=delayed_before_s,
    )


def test_the_printed_equations() -> None:
    seen = view([(9.9, 100), (9.95, 30), (9.8, 10)], [9.99, 9.97], now=10.0)
    # 9.9 + 0.5 - 10 - 0.1 = 0.3; 9.95 + 0.5 - 10 - 0.03 = 0.42; 9.8 + 0.5 - 10 - 0.01 = 0.29
    assert min(prefill_slacks(seen, 0.5, LINEAR)) == pytest.approx(0.29)
    assert decode_slack(seen, 0.15, LINEAR) == pytest.approx(9.97 + 0.15 - 10 - 0.02)


def test_the_printed_form_admits_too_much_and_the_cumulative_one_does_not() -> None:
    """Three prompts arrive together, and a pass has 100 tokens. Alone, they have their first tokens after 0.1, 0.219
    and 0.337 s, as those that have one decode on (0.02 s a pass). An SLO of 0.35 s leaves 0.013 s; Eq. 1 says 0.25."""
    seen = view([(0.0, 100), (0.0, 99), (0.0, 98)], [])
    assert list(first_token_waits(seen, LINEAR)) == pytest.approx([0.1, 0.219, 0.337])
    assert min(prefill_slacks(seen, 0.35, LINEAR)) == pytest.approx(0.25)
    assert min(prefill_slacks(seen, 0.35, LINEAR, "cumulative")) == pytest.approx(0.013)
    printed = DualSLO(times=LINEAR, ttft_s=0.35, tpot_s=None)
    assert printed.admits(seen, 0.1) and not replace(printed, form="cumulative").admits(seen, 0.1)


def test_the_next_pass_also_has_prompt_tokens() -> None:
    """A decode's next token comes after 0.02 s by Eq. 2, but 99 of the 130 waiting tokens are in the same pass."""
    seen = view([(0.0, 60), (0.0, 70)], [0.0])
    assert decode_slack(seen, 0.15, LINEAR) == pytest.approx(0.13)
    assert decode_slack(seen, 0.15, LINEAR, "cumulative") == pytest.approx(0.031)
    assert decode_slack(view([], [0.0]), 0.15, LINEAR, "cumulative") == pytest.approx(0.13)


def test_first_tokens_by_hand() -> None:
    """Passes of 100 tokens, one of them a decode's: 60 of the first prompt and 39 of the second; then two decodes, the
    other 31 of the second and 10 of the third. The decodes have 50 tokens; then 51 and 61."""
    seen = view([(0.0, 60), (0.0, 70), (0.0, 10)], [0.0], context=50)
    by_batch = replace(LINEAR, decode_s=lambda batch, context: 0.01 * batch)
    assert list(first_token_waits(seen, by_batch)) == pytest.approx([0.109, 0.17, 0.17])
    by_context = replace(LINEAR, decode_s=lambda batch, context: 1e-4 * context)
    assert list(first_token_waits(seen, by_context)) == pytest.approx([0.104, 0.1562, 0.1562])
    # passes with 98, 98 and 54 tokens of a long prompt; two decodes of 102 tokens, then 104 and 106
    long = view([(0.0, 250)], [0.0, 0.0], context=102)
    assert list(first_token_waits(long, by_context)) == pytest.approx([0.25 + 0.0312])


# --- Serving, played pass by pass


def played(seen: ServingView, start: float, chunk: int, seconds: Callable[[int, int, int, int], float]) -> list[float]:
    """When each queued request has its first token, and then each decode its next one, if only serving runs.

    A pass of `chunk` tokens has one of each decode and then those of prompts, in the order of arrival. `seconds`: of
    a pass with these decodes, tokens of their contexts, prompt tokens, pairs of a prompt token and one before it."""
    now, batch, context = start, len(seen.last_token_times), seen.num_context_tokens
    rest = [request.num_tokens for request in seen.queued]
    first: list[float] = []
    following = math.inf
    while len(first) < len(rest) or following == math.inf:
        room, pairs, begun = chunk - batch, 0, len(first)
        while begun < len(rest) and room:
            count = min(rest[begun], room)
            done = seen.queued[begun].num_tokens - rest[begun]
            pairs += sum(range(done + 1, done + count + 1))
            rest[begun] -= count
            room -= count
            begun += not rest[begun]
        now += seconds(batch, context, chunk - batch - room, pairs)
        following = min(following, now)
        context += batch + sum(request.num_tokens + 1 for request in seen.queued[len(first) : begun])
        batch += begun - len(first)
        first += [now] * (begun - len(first))
    return first + [following] * len(seen.last_token_times)


def random_case(random: Random) -> tuple[ServingView, ServingTimes, Callable[[int, int, int, int], float]]:
    chunk = random.choice([16, 64, 128])
    per_pass, per_token, per_pair = random.uniform(0, 5e-3), random.uniform(1e-4, 1e-3), random.choice([0.0, 1e-6])
    constant, per_decode, per_context = 5e-3, random.uniform(0, 1e-3), random.choice([0.0, 1e-5])

    def decode(batch: int, context: int) -> float:
        return (constant + per_decode * batch + per_context * context) if batch else 0.0

    def prefill(count: int) -> float:
        return per_pass * math.ceil(count / chunk) + per_token * count + per_pair * count * (count + 1) / 2

    def seconds(batch: int, context: int, count: int, pairs: int) -> float:
        return decode(batch, context) + (per_pass + per_token * count + per_pair * pairs if count else 0.0)

    now = random.uniform(1, 100)
    arrivals = sorted(now - random.uniform(0, 0.1) for _ in range(random.randrange(5)))
    last = [now - random.uniform(0, 0.02) for _ in range(random.randrange(5))]
    queued = [(arrived, random.randrange(1, 200)) for arrived in arrivals]
    seen = view(queued, last, now=now, context=sum(random.randrange(1, 500) for _ in last))
    return seen, ServingTimes(prefill_s=prefill, decode_s=decode, chunk_tokens=chunk), seconds


def misses(
    seen: ServingView, times: ServingTimes, seconds: Callable[[int, int, int, int], float], step: float, policy: DualSLO
) -> bool:
    ends = played(seen, seen.now + step, times.chunk_tokens, seconds)
    assert policy.ttft_s and policy.tpot_s
    due = [request.arrived + policy.ttft_s for request in seen.queued]
    due += [last + policy.tpot_s for last in seen.last_token_times]
    return any(end > limit + 1e-9 for end, limit in zip(ends, due, strict=True))


def test_what_the_cumulative_form_admits_is_in_time() -> None:
    """Whenever it lets a rollout's step run, serving alone after that step meets all deadlines; the printed form lets
    steps run after which it does not."""
    random = Random(0)
    admitted = printed_late = 0
    for _ in range(4000):
        seen, times, seconds = random_case(random)
        policy = DualSLO(
            times=times, ttft_s=random.uniform(0.1, 0.6), tpot_s=random.uniform(0.03, 0.3), form="cumulative", guard_s=0
        )
        policy = replace(policy, guard_share=0.0)
        step = random.uniform(0, 0.1)
        late = misses(seen, times, seconds, step, policy)
        if policy.admits(seen, step):
            admitted += 1
            assert not late
        printed_late += late and replace(policy, form="printed").admits(seen, step)
    assert admitted > 1000 and printed_late > 100


def test_the_cumulative_form_is_exact_where_times_add_up() -> None:
    """Without a price per pass, pair or context token, nothing is overestimated."""
    random = Random(1)
    for _ in range(500):
        chunk, now = random.choice([16, 64]), random.uniform(0, 9)
        per_token, per_decode = random.uniform(1e-4, 1e-3), random.uniform(0, 1e-2)
        times = ServingTimes(
            prefill_s=lambda count, price=per_token: price * count,  # type: ignore[misc]
            decode_s=lambda batch, context, price=per_decode: price * batch,  # type: ignore[misc]
            chunk_tokens=chunk,
        )
        queued = [(now, random.randrange(1, 36)) for _ in range(random.randrange(1, 6))]
        seen = view(queued, [now] * random.randrange(1, 4), now=now)
        ends = played(seen, now, chunk, lambda batch, _, count, __: per_decode * batch + per_token * count)  # noqa: B023
        assert [now + wait for wait in first_token_waits(seen, times)] == pytest.approx(ends[: len(queued)])
        assert now + 9 - decode_slack(seen, 9, times, "cumulative") == pytest.approx(ends[-1])


@pytest.mark.parametrize("seed", range(30))
def test_a_replica_is_not_later_than_that(seed: int) -> None:
    """A replica's own scheduler, with the steps of a profile, whose passes mix decodes and prompts. The margin is for
    the draws of prompts that end in one pass."""
    random, pace, spec = Random(seed), ProfilePace.of("h100-8b-tp1"), ReplicaSpec(id=0, ranks=(0,))
    config = EngineConfig(block_size=16, max_num_seqs=16, max_num_batched_tokens=512)
    scheduler = Scheduler(config, BlockManager(4000, config.block_size))
    pool = KVPool(capacity_tokens=0)
    mover = SimulatedMover(pool, "recompute", None, 0, now=lambda: 0.0, transfer_s=lambda count, path: 0.0)
    replica = Replica(
        runner=SimulatedRunner(),
        scheduler=scheduler,
        mover=mover,
        max_model_len=8192,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        detokenize=None,
    )
    states = [
        make_state(uid, [uid + 1] * random.randrange(1, 1500), SamplingParams(max_tokens=500))
        for uid in range(random.randrange(2, 12))
    ]
    decoding = states[: random.randrange(1, len(states))]
    for state in decoding:
        replica.submit(Work(state=state))
    while not all(state.num_generated for state in decoding):
        replica.step()
    queued = states[len(decoding) :]
    for state in queued:
        replica.submit(Work(state=state))
    context = sum(len(state.tokens) for state in decoding)
    seen = view([(0.0, len(state.tokens)) for state in queued], [0.0] * len(decoding), context=context)
    times = replace(ServingTimes.of(pace, spec, chunk_tokens=config.max_num_batched_tokens), margin=0.02)
    limits = dict(zip((state.sequence_id for state in queued), first_token_waits(seen, times), strict=True))
    next_token = 9 - decode_slack(seen, 9, times, "cumulative")
    now = pace.step(spec, replica.step())
    assert now <= next_token
    first = {one.sequence_id: now for one in queued if one.num_generated}
    while len(first) < len(queued):
        now += pace.step(spec, replica.step())
        first = {one.sequence_id: now for one in queued if one.num_generated} | first
    assert all(limits[one] * 0.9 < at <= limits[one] for one, at in first.items())


# --- The policy


def test_dual_admits_what_both_do() -> None:
    """Fig. 9's other policies each ignore one SLO."""
    random = Random(2)
    seen_both = set()
    for _ in range(300):
        seen, times, _ = random_case(random)
        dual = DualSLO(times=times, ttft_s=random.uniform(0.05, 0.4), tpot_s=random.uniform(0.01, 0.2))
        one_each = replace(dual, tpot_s=None), replace(dual, ttft_s=None)
        step = random.uniform(0, 0.1)
        answers = tuple(policy.admits(seen, step) for policy in one_each)
        assert dual.admits(seen, step) == all(answers)
        assert replace(dual, ttft_s=None, tpot_s=None).admits(seen, step)
        seen_both.add(answers)
    assert len(seen_both) == 4


def test_an_idle_server_admits_everything() -> None:
    policy = DualSLO(times=LINEAR, ttft_s=1e-3, tpot_s=1e-3)
    assert policy.admits(view([], []), 1e6)


def test_the_guard() -> None:
    """The larger of 1 ms and 5 % of the step."""
    policy = DualSLO(times=LINEAR, ttft_s=None, tpot_s=0.12)  # 0.1 s of slack
    assert policy.admits(view([], [0.0]), 0.095) and not policy.admits(view([], [0.0]), 0.0953)
    late = view([], [0.0], now=0.0905)  # 9.5 ms of slack
    assert policy.admits(late, 0.0084) and not policy.admits(late, 0.0086)
    careful = replace(policy, times=replace(LINEAR, margin=0.5))
    assert careful.admits(view([], [0.0]), 0.085) and not careful.admits(view([], [0.0]), 0.0859)  # 0.09 s of slack


def test_the_times_of_a_pace() -> None:
    pace = ProfilePace.of("h100-8b-tp1")
    spec = ReplicaSpec(id=0, ranks=(0,))
    times = ServingTimes.of(pace, spec, chunk_tokens=512)
    profile = pace.profiles[1]
    assert times.prefill(300) == pytest.approx(profile.prefill_seconds(1, 300))
    last = profile.prefill_seconds(1, 76, 1024)
    passes = [profile.step_seconds(1, 512, end, pairs=512 * (end - 255.5), logit_rows=0) for end in (512, 1024)]
    assert times.prefill(1100) == pytest.approx(sum(passes) + last)
    assert times.decode(8, 8000) == pytest.approx(profile.step_seconds(8, 8, 8000))
    mixed = profile.step_seconds(9, 520, 8512, pairs=8000 + 512 * 256.5, logit_rows=9)
    assert times.beside(8, 8000) == pytest.approx(mixed - profile.prefill_seconds(1, 512))
    assert times.prefill(0) == times.decode(0, 0) == times.beside(0, 0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, -1e-9])
def test_estimates_that_cannot_be(bad: float) -> None:
    broken = ServingTimes(prefill_s=lambda count: bad, decode_s=lambda batch, context: bad, chunk_tokens=1)
    policy = DualSLO(times=broken, ttft_s=1.0, tpot_s=1.0)
    with pytest.raises(ValueError, match=r"prefill_s\(3\)=.*: an estimate must be at least 0"):
        policy.admits(view([(0.0, 3)], []), 0.0)
    with pytest.raises(ValueError, match=r"decode_s\(1, 7\)=.*: an estimate must be at least 0"):
        policy.admits(view([], [0.0], context=7), 0.0)
    with pytest.raises(ValueError, match=r"seconds=.*: an estimate must be at least 0"):
        DualSLO(times=LINEAR, ttft_s=1.0, tpot_s=1.0).admits(view([], []), bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttft_s": 0.0}, r"DualSLO\.ttft_s=0\.0: must be above 0"),
        ({"guard_s": -1.0}, r"DualSLO\.guard_s=-1\.0: must be at least 0"),
        ({"form": "other"}, r"DualSLO\.form='other': must be one of"),
    ],
)
def test_what_it_refuses(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DualSLO(**{"times": LINEAR, "ttft_s": 1.0, "tpot_s": 1.0, **options})  # type: ignore[arg-type]


def test_a_long_queue_is_priced_at_once_and_not_too_low() -> None:
    """Thousands of prompts, of which at most 32 decode together: as many prices as for a short queue, and no first
    token later than that."""
    calls = 0

    def beside(batch: int, context: int) -> float:
        nonlocal calls
        calls += 1
        return 1e-4 * batch + 1e-6 * context

    times = replace(LINEAR, beside_s=beside, max_num_seqs=32)
    random = Random(3)
    counts = [random.randrange(1, 200) for _ in range(2000)]
    waits = list(first_token_waits(view([(0.0, count) for count in counts], [0.0]), times))
    assert calls < 40
    assert waits == sorted(waits)
    now, batch, context, done, ahead = 0.0, 1, 0, 0, 0
    for count, wait in zip(counts, waits, strict=True):
        while ahead < count:
            room = 100 - batch
            now += 1e-3 * room + 1e-4 * batch + 1e-6 * context
            context += batch
            ahead += room
        ahead -= count
        assert now <= wait + 1e-9
        batch, context, done = min(batch + 1, 32), context + count + 1, done + 1


@pytest.mark.parametrize("step_s", [0.3, 0.39])
def test_a_queue_is_delayed_by_no_more_than_its_debt(step_s: float) -> None:
    """One prompt a pass, first come first served, near saturation: each first token comes at most `most_s` later than
    without the rollout, where slack alone fills the SLO and then fails it. Steps that take longer than the estimate of
    0.3 s count as they are: only the last one adds its excess."""
    random = Random(5)
    times = replace(LINEAR, chunk_tokens=10**6)
    arrivals, now = [], 0.0
    for _ in range(400):
        now += random.expovariate(1.0)
        arrivals.append((now, random.randrange(100, 1700)))  # 0.9 s on average

    def ttfts(policy: QueueDebt | DualSLO | None) -> list[float]:
        found, queue, now, left = [], list[tuple[float, int]](), 0.0, list(arrivals)
        delayed_s = before_s = 0.0
        while left or queue:
            if not queue:
                now = max(now, left[0][0]) if policy is None else now
            while left and left[0][0] <= now:
                queue.append(left.pop(0))
            before_s = before_s if queue else delayed_s
            seen = view(queue, [], now=now, delayed_s=delayed_s, delayed_before_s=before_s)
            if policy is not None and policy.admits(seen, 0.3):
                began, now = now, now + step_s
                if queue or left[0][0] < now:
                    delayed_s += now - (began if queue else left[0][0])
            elif queue:
                arrived, count = queue.pop(0)
                now += 1e-3 * count
                found.append(now - arrived)
            else:
                now = left[0][0]
        return found

    alone = ttfts(None)
    worst = max(alone)
    dual = DualSLO(times=times, ttft_s=1.6 * worst, tpot_s=None, form="cumulative")
    bounded = ttfts(QueueDebt(dual, 0.6 * worst))
    most_s = 0.6 * worst + step_s - 0.3 + 1e-9
    assert all(late <= early + most_s for early, late in zip(alone, bounded, strict=True))
    assert max(ttfts(dual)) > 1.6 * worst and worst < max(bounded) <= 1.6 * worst + step_s - 0.3


def test_equal_turns_alternate_while_serving_has_work() -> None:
    idle, decoding = view([], []), view([], [0.0], context=8)
    turns = EqualTurns()
    assert [turns.admits(view, 0.1) for view in (idle, idle, decoding, decoding, decoding, idle)] == [
        *(True, True, False, True, False, True)
    ]

    class Never:
        def admits(self, view: ServingView, seconds: float) -> bool:
            return False

    refused = EqualTurns(Never())
    assert not any(refused.admits(view, 0.1) for view in (idle, decoding, decoding))
