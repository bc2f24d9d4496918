"""Drafts in paced runs: what looking them up costs, and by which times their lengths are decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.replica import StepOutput
from engines.replica.row_times import RowTimes
from engines.rollout.pace import Path, row_seconds
from engines.sequence import Work
from engines.speculation.drafter import Ask, Draft, DraftPass
from engines.speculation.policy import Prices
from tests.states import make_state
from tests.worlds import join, run_world

PROMPTS = [[7, 8, 9, 10] * 4, [21, 22, 23] * 6]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
ROWS = [1, 5, 40]


class ByRows:
    """A `Pace`: 5 ms, 1 ms per token, and 8 ms per draft that was looked up."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return 0.005 + 0.001 * output.num_tokens

    def draft(self, spec: ReplicaSpec, method: str, passes: Sequence[DraftPass]) -> float:
        assert method == "ngram"
        return 0.008 * sum(one.num_rows for one in passes)

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.0

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 0.0


class EverySecond:
    """A `SpeculationPolicy`: wants drafts for every second pass, and takes two tokens of each."""

    def __init__(self, prices: Prices) -> None:
        self.seconds, self.draft = prices
        self._num_passes = 0

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        self._num_passes += 1
        return asks if self._num_passes % 2 == 0 else []

    def shorten(self, states: Any, drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        return [draft.cut(2) for draft in drafts]

    def observe(self, *_: object) -> None:
        pass


def make_llm(model: str, made: list[EverySecond], **options: Any) -> LLM:
    def make(prices: Prices) -> EverySecond:
        made.append(EverySecond(prices))
        return made[-1]

    return LLM(model, drafter="ngram", draft_policy=make, **options)


def roll_out(model: str, with_drafter: bool) -> dict[str, Any]:
    layout = nested_layout(range(1), 1)
    if with_drafter:
        layout = replace(layout, replicas=(*layout.replicas, ReplicaSpec(id=1, ranks=(1,), role="draft")))
    groups = join([layout])
    made: list[EverySecond] = []
    llm = make_llm(model, made, world=groups, layout=layout, schedule=OnDemand(), pace=ByRows())
    done = llm.generate(PROMPTS, PARAMS)
    result = {
        "tokens": [one.outputs[0].token_ids for one in done],
        "steps": [[one.seconds, one.num_tokens, (*one.drafted, 0)[0]] for one in llm.step_records],
        "rows": [one.seconds(rows) for one in made for rows in ROWS],
        "drafting": [one.draft(3, 4) for one in made],
    }
    llm.close()
    groups.close()
    return result


def test_a_paced_step_takes_what_the_pace_says_and_its_policy_decides_by_the_pace(qwen3: str) -> None:
    paced = run_world(roll_out, 1, qwen3, False)[0]
    drafted = [one for one in paced["steps"] if one[2]]
    assert drafted and len(drafted) < len(paced["steps"])
    for seconds, num_tokens, num_sequences in paced["steps"]:
        assert seconds >= 0.005 + 0.001 * num_tokens + 0.008 * num_sequences
    expected = row_seconds(ByRows(), ReplicaSpec(id=0, ranks=(0,)))
    assert paced["rows"] == [expected(rows) for rows in ROWS] == [0.005 + 0.001 * rows for rows in ROWS]
    assert paced["drafting"] == [0.008 * 3]
    assert paced["tokens"] == [one.outputs[0].token_ids for one in LLM(qwen3).generate(PROMPTS, PARAMS)]


def test_drafts_of_other_ranks_are_free_for_the_policy_of_their_verifier(qwen3: str) -> None:
    verifier = run_world(roll_out, 2, qwen3, True)[0]
    assert verifier["drafting"] == [0] and verifier["rows"] == [0.005 + 0.001 * rows for rows in ROWS]


def test_a_live_policy_decides_by_measured_times_and_only_drafts_that_were_looked_up_count(qwen3: str) -> None:
    made: list[EverySecond] = []
    llm = make_llm(qwen3, made)
    assert isinstance(made[0].seconds, RowTimes)
    for uid, prompt in enumerate(PROMPTS):
        llm.replica.submit(Work(state=make_state(uid, prompt, PARAMS)))
    looked_up, num_drafted = [], 0
    while llm.replica.has_work:
        output = llm.replica.step()
        looked_up.append(sum(one.num_rows for one in output.draft_passes))
        num_drafted += output.num_drafted
    assert num_drafted and looked_up[:5] == [0, 0, 2, 0, 2], "a prefill, then every second pass"
