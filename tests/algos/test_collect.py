"""Collecting a step's experience, on a real engine and a real reward process."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from algos.collect import Collector, NothingScoredError, PromptLimit, Rollout
from algos.dapo import DAPO
from algos.environments.pool import EnvironmentPool
from algos.environments.protocol import EnvironmentConfig
from algos.grpo import GRPO
from algos.rewards.runner import RewardConfig, RewardRunner
from algos.tasks.task import Problem
from engines import LLM, SamplingParams
from engines.parallel.collectives import SingleRank
from engines.rollout.journal import Journal
from tests.chat_models import QWEN25, save_chat_checkpoint
from tests.checkpoints import save_text_checkpoint
from tests.environments import Echo, Local

REWARDS = '''
import hashlib

def even(prompts, completions, *, kind):
    """Groups of kind "mixed" get unequal rewards, those of kind "flat" equal ones."""
    return [
        hashlib.sha256(c.encode()).digest()[0] % 2 if k == "mixed" else 1.0 for c, k in zip(completions, kind)
    ]

def calls(completions):
    """How many are in the call."""
    return [len(completions)] * len(completions)

def raises_always(completions):
    raise RuntimeError("never for me")

def raises_on_long(prompts, completions, **columns):
    if any(len(c) > 20 for c in completions):
        raise RuntimeError("too long for me")
    return [1.0] * len(completions)
'''
PARAMS = SamplingParams(max_tokens=30, n=8)


SERVICE = """
from pathlib import Path

class Service:
    '''Asks a service in one of its calls, if the problem is of kind "asks".'''

    def ask(self, call):
        if self.kind == "asks" and call == {call!r} and not Path({flag!r}).exists():
            raise ConnectionError("the service is down")

    def reset(self, kind):
        self.kind = kind
        self.ask("reset")

    def step(self, text):
        self.ask("step")

    def get_reward(self):
        self.ask("get_reward")
        return 1.0
"""


@dataclass(frozen=True)
class Kinds:
    """Problems whose kinds repeat a pattern."""

    pattern: tuple[str, ...]
    reward: str = ""

    def train_problem(self, index: int) -> Problem:
        kind = self.pattern[index % len(self.pattern)]
        prompt = "x" * 600 if kind == "too long" else f"{index}="
        return Problem(uid=index, prompt=prompt, columns={"kind": kind})

    def held_out_problems(self, count: int) -> list[Problem]:
        return []


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("text")
    save_text_checkpoint(directory)
    return LLM(directory, kv_cache_bytes=2**22)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def even(rewards: Path) -> Iterator[RewardRunner]:
    with RewardRunner(f"{rewards}:even") as runner:
        yield runner


def collector(llm: LLM, reward: RewardRunner, pattern: tuple[str, ...], algorithm: Any) -> Collector:
    return Collector(
        llm=llm,
        task=Kinds(pattern),
        algorithm=algorithm,
        reward=reward,
        group=SingleRank(),
        params=PARAMS,
        prompts_per_step=4,
    )


@pytest.mark.parametrize(
    "option",
    [{"top_k": 3}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1}}, {"min_tokens": 1}],
)
def test_what_changes_the_distribution_is_refused(llm: LLM, even: RewardRunner, option: dict[str, Any]) -> None:
    one = collector(llm, even, ("mixed",), GRPO())
    with pytest.raises(ValueError, match=f"SamplingParams.{next(iter(option))}="):
        replace(one, params=replace(PARAMS, **option))


def test_grpo_trains_on_every_group(llm: LLM, even: RewardRunner) -> None:
    rollout = collector(llm, even, ("mixed", "flat"), GRPO()).collect(0)
    assert rollout.next_index == 4
    assert [group.problem.uid for group in rollout.groups] == [0, 1, 2, 3]
    assert len(rollout.experiences) == 4 * 8
    for i, experience in enumerate(rollout.experiences):
        group = rollout.groups[i // 8]
        completion = group.completions[i % 8]
        assert experience.tokens == group.prompt_token_ids + completion.token_ids
        assert experience.rollout_logprobs == completion.logprobs
        spread = statistics.stdev(group.rewards)
        expected = (group.rewards[i % 8] - statistics.fmean(group.rewards)) / (spread + 1e-6)
        assert experience.advantage == pytest.approx(expected, abs=1e-6)
    assert rollout.metrics["rollout/zero_variance_groups"] >= 0.5
    every = [reward for group in rollout.groups for reward in group.rewards]
    assert rollout.metrics["critic/rewards/mean"] == pytest.approx(statistics.fmean(every))


def test_a_reward_that_always_fails_ends_the_run(llm: LLM, rewards: Path) -> None:
    with (
        RewardRunner(f"{rewards}:raises_always") as runner,
        pytest.raises(ValueError, match=r"reward: all 32 completions of a rollout failed \(32 raised, 0 timed out"),
    ):
        collector(llm, runner, ("mixed",), GRPO()).collect(0)


def test_dapo_samples_on_until_enough_groups_differ(llm: LLM, even: RewardRunner) -> None:
    pattern = ("mixed", "flat", "flat", "mixed")
    rollout = collector(llm, even, pattern, DAPO(max_sampling_rounds=5, overlong_buffer_fraction=0)).collect(0)
    assert rollout.next_index == 8 and rollout.metrics["train/num_gen_batches"] == 2
    assert rollout.metrics["train/num_groups"] == 4
    prompts = {tuple(e.tokens[: e.num_prompt_tokens]) for e in rollout.experiences}
    kept = [g for g in rollout.groups if g.problem.columns["kind"] == "mixed"]
    assert prompts == {tuple(group.prompt_token_ids) for group in kept}


def test_dapo_stops_at_its_bound_and_says_so(llm: LLM, even: RewardRunner) -> None:
    flat = collector(llm, even, ("flat",), DAPO(max_sampling_rounds=2))
    with pytest.warns(UserWarning, match="only 0 of 4 groups had unequal rewards after 2 sampling rounds"):
        rollout = flat.collect(0)
    assert rollout.experiences == [] and rollout.next_index == 8
    assert rollout.metrics["critic/advantages/mean"] == 0


@dataclass(frozen=True)
class Chats:
    """Problems that are conversations; every fourth has a role that the template refuses."""

    reward: str = ""

    def train_problem(self, index: int) -> Problem:
        role = "user" if index % 4 else "nobody"
        return Problem(uid=index, prompt=[{"role": role, "content": f"{index}="}], columns={"kind": "mixed"})

    def held_out_problems(self, count: int) -> list[Problem]:
        return []


def test_conversations_are_rendered_and_come_to_the_reward_as_they_are(rewards: Path, tmp_path: Path) -> None:
    refuse = "{%- if messages[0].role == 'nobody' %}{{- raise_exception('who?') }}{%- endif %}"
    tokenizer = save_chat_checkpoint(tmp_path, "qwen2.5", refuse + QWEN25)
    (tmp_path / "sees.py").write_text(
        "def sees(prompts, completions):\n    return [float(prompt[0]['content'][:-1]) for prompt in prompts]\n"
    )
    with RewardRunner(f"{tmp_path}/sees.py:sees") as reward:
        one = replace(collector(LLM(tmp_path, kv_cache_bytes=2**22), reward, ("mixed",), GRPO()), task=Chats())
        with pytest.warns(UserWarning, match=r"problem \d is passed over: prompt: .* cannot render it .*who\?"):
            rollout = one.collect(0)
    assert rollout.next_index == 6 and rollout.metrics["train/num_prompts_skipped"] == 2
    for uid, group in zip((1, 2, 3, 5), rollout.groups, strict=True):
        assert group.rewards == [uid] * 8
        messages = [{"role": "user", "content": f"{uid}="}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert group.prompt_token_ids == rendered


def test_prompts_that_cannot_fit_are_passed_over(llm: LLM, even: RewardRunner) -> None:
    with pytest.warns(UserWarning, match="problem 1 is passed over: prompt: 600 tokens leave no room"):
        rollout = collector(llm, even, ("mixed", "too long", "flat"), GRPO()).collect(0)
    assert [group.problem.uid for group in rollout.groups] == [0, 2, 3, 5]
    assert rollout.next_index == 6 and rollout.metrics["train/num_prompts_skipped"] == 2
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="leave no room"):
        collector(llm, even, ("too long",), GRPO()).collect(0)


def test_prompts_beyond_a_limit_are_dropped_or_cut(llm: LLM, even: RewardRunner) -> None:
    def collect(limit: PromptLimit) -> Rollout:
        one = collector(llm, even, ("mixed", "too long", "flat"), GRPO())
        return dataclasses.replace(one, limit=limit).collect(0)

    with pytest.warns(UserWarning, match="problem 1 is passed over: prompt: 600 tokens are more than max_prompt_tok"):
        dropped = collect(PromptLimit(max_tokens=100))
    assert [group.problem.uid for group in dropped.groups] == [0, 2, 3, 5]
    with pytest.warns(UserWarning, match="1 of 4 prompts are cut to their last 100 tokens"):
        cut = collect(PromptLimit(max_tokens=100, cut=True))
    assert [group.problem.uid for group in cut.groups] == [0, 1, 2, 3]
    assert (cut.metrics["train/num_prompts_skipped"], cut.metrics["train/num_prompts_cut"]) == (0, 1)
    whole = Kinds(("mixed", "too long", "flat")).train_problem(1).prompt
    assert cut.groups[1].prompt_token_ids == llm.encode([whole])[0][-100:] and cut.groups[1].problem.prompt == whole


def test_a_reward_that_fails_costs_its_own_completions_only(llm: LLM, rewards: Path) -> None:
    config = RewardConfig(failed_reward=-1.0)
    with RewardRunner(f"{rewards}:raises_on_long", config) as runner:
        rollout = collector(llm, runner, ("flat",), GRPO()).collect(0)
    long = 0
    for group in rollout.groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            long += len(completion.text) > 20
            assert reward == (-1.0 if len(completion.text) > 20 else 1.0)
    assert rollout.metrics["reward/num_raised"] == long > 0


def test_rewards_beside_the_rollout_are_those_after_it(llm: LLM, rewards: Path) -> None:
    rollouts = []
    for beside in (True, False):
        config = RewardConfig(beside_rollout=beside, failed_reward=-1.0)
        with RewardRunner(f"{rewards}:raises_on_long", config) as runner:
            runner.check()
            # The rollout is held up, so that the pool surely gets its turn before the end.
            rollouts.append(collector(llm, runner, ("mixed", "flat"), GRPO()).collect(0, lambda _: time.sleep(0.03)))
    assert rollouts[0].groups == rollouts[1].groups and rollouts[0].experiences == rollouts[1].experiences
    metrics = [{k: v for k, v in r.metrics.items() if not k.startswith("timing_s/")} for r in rollouts]
    assert metrics[0] == metrics[1] and metrics[0]["reward/num_raised"] > 0
    assert rollouts[0].metrics["timing_s/reward_overlapped"] > 0 == rollouts[1].metrics["timing_s/reward_overlapped"]


def test_after_the_rollout_a_call_can_have_a_whole_group(llm: LLM, rewards: Path) -> None:
    config = RewardConfig(beside_rollout=False, chunk_size=PARAMS.n)
    with RewardRunner(f"{rewards}:calls", config) as runner:
        rollout = collector(llm, runner, ("flat",), GRPO()).collect(0)
    assert [group.rewards for group in rollout.groups] == [[8.0] * 8] * 4


def test_overlong_completions_are_shaped_and_masked(llm: LLM, even: RewardRunner) -> None:
    algorithm = DAPO(dynamic_sampling=False, overlong_filtering=True, overlong_buffer_fraction=0.5)
    rollout = collector(llm, even, ("flat",), algorithm).collect(0)
    completions = [completion for group in rollout.groups for completion in group.completions]
    cut = [completion.finish_reason == "length" for completion in completions]
    assert any(cut) and not all(cut)
    for experience, is_cut in zip(rollout.experiences, cut, strict=True):
        assert experience.loss_mask == [not is_cut] * experience.num_completion_tokens
    for group in rollout.groups:
        penalties = [min(0.0, (15 - len(c.token_ids)) / 15) for c in group.completions]
        start = rollout.groups.index(group) * 8
        advantages = [e.advantage for e in rollout.experiences[start : start + 8]]
        for i in range(8):
            for j in range(8):
                assert (penalties[i] < penalties[j]) == (advantages[i] < advantages[j] - 1e-9)


@pytest.mark.parametrize("algorithm", [GRPO(), DAPO(max_sampling_rounds=1)])
def test_trajectories_train_on_what_was_generated(llm: LLM, algorithm: Any) -> None:
    """Masks are by span and by algorithm, shaping counts observed tokens as `max_tokens` does, metrics do not."""
    params = SamplingParams(max_tokens=60, n=8, stop_token_ids=tuple(range(100, 124)), max_turns=4)
    with Local() as environments:
        rollout = Collector(
            llm=llm,
            task=Kinds(("mixed",)),
            algorithm=algorithm,
            reward=None,
            group=SingleRank(),
            params=params,
            prompts_per_step=3,
            environment=environments,
        ).collect(0)
        heard = environments.texts()
    completions = [one for group in rollout.groups for one in group.completions]
    assert len(heard) == len(completions) == 24 and sum(len(one.observed) > 1 for one in completions) > 8
    for group in rollout.groups:
        rewards = [float(sum(map(len, heard[llm.policy_version, group.problem.uid, index]))) for index in range(8)]
        assert group.rewards == rewards
    kept = [group for group in rollout.groups if algorithm.keep_group(group.rewards)]
    lengths = [[len(one.token_ids) for one in group.completions] for group in kept]
    shaped = [
        algorithm.shape_rewards(group.rewards, counts, [False] * 8, 60)
        for group, counts in zip(kept, lengths, strict=True)
    ]
    advantages = [value for values in algorithm.advantages(shaped) for value in values]
    assert [one.advantage for one in rollout.experiences] == advantages
    pairs = zip([one for group in kept for one in group.completions], rollout.experiences, strict=True)
    overlong = 0
    for completion, experience in pairs:
        spans = {place for start, end in completion.observed for place in range(start, end)}
        counts = algorithm.loss_mask(len(completion.token_ids), completion.finish_reason == "length")
        overlong += not counts
        places = range(len(completion.token_ids))
        assert experience.loss_mask == [counts and place not in spans for place in places]
        assert all(experience.rollout_logprobs[place] == 0.0 for place in spans)
    generated = [one.num_generated for one in completions]
    assert rollout.metrics["response_length/mean"] == pytest.approx(statistics.fmean(generated))
    assert rollout.metrics["num_turns/max"] == max(len(one.turns) for one in completions) > 2
    assert rollout.metrics["environment/num_calls"] == environments.num_calls
    assert rollout.metrics["timing_s/tool_calls"] == 0.0, "this environment's calls have no time"


def test_a_trajectory_without_a_reward_is_scored_by_the_function(llm: LLM, even: RewardRunner) -> None:
    with Local(lambda: Echo(has_reward=False)) as environments:
        one = replace(collector(llm, even, ("mixed",), GRPO()), environment=environments)
        rollout = one.collect(0)
    texts = [(group, completion.text) for group in rollout.groups for completion in group.completions]
    expected = [hashlib.sha256(text.encode()).digest()[0] % 2 for _, text in texts]
    assert [reward for group in rollout.groups for reward in group.rewards] == expected


def test_an_environment_that_fails_costs_its_trajectory_alone(llm: LLM) -> None:
    class Broken(Echo):
        def reset(self, **columns: Any) -> str | None:
            raise RuntimeError("not today")

    made = itertools.count()
    with Local(lambda: Broken() if next(made) % 8 == 3 else Echo()) as environments:
        params = SamplingParams(max_tokens=40, n=8)
        rollout = Collector(
            llm=llm,
            task=Kinds(("mixed",)),
            algorithm=GRPO(),
            reward=None,
            group=SingleRank(),
            params=params,
            prompts_per_step=2,
            environment=environments,
        ).collect(0)
    empty = [one for group in rollout.groups for one in group.completions if not one.token_ids]
    assert len(empty) == 2 and rollout.metrics["environment/num_raised"] == 2
    assert [len(one.tokens) == one.num_prompt_tokens for one in rollout.experiences].count(True) == 2


def serving(llm: LLM, pool: EnvironmentPool, *pattern: str) -> Collector:
    return Collector(
        llm=llm,
        task=Kinds(pattern),
        algorithm=GRPO(),
        reward=None,
        group=SingleRank(),
        params=SamplingParams(max_tokens=8, n=2, stop_token_ids=tuple(range(60, 131))),
        prompts_per_step=4,
        environment=pool,
    )


@pytest.mark.parametrize("call", ["reset", "get_reward"])
def test_an_environment_that_always_fails_ends_the_run(llm: LLM, tmp_path: Path, call: str) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(call=call, flag=str(tmp_path / "up")))
    with EnvironmentPool(f"{tmp_path}/service.py:Service", EnvironmentConfig(workers=1)) as pool:
        with pytest.raises(NothingScoredError, match=r"environment: all 8 trajectories .* failed \(8 raised, 0 timed"):
            serving(llm, pool, "asks").collect(0)
        rollout = serving(llm, pool, "asks", "does not").collect(0)
        assert rollout.metrics["environment/num_raised"] == 4, "of each rollout its own"


@pytest.mark.parametrize("call", ["reset", "step", "get_reward"])
def test_trajectories_that_failed_are_sampled_again_after_a_kill(llm: LLM, tmp_path: Path, call: str) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(call=call, flag=str(tmp_path / "up")))
    with EnvironmentPool(f"{tmp_path}/service.py:Service", EnvironmentConfig(workers=1)) as pool:

        def collect() -> tuple[int, float, set[float]]:
            journal = Journal(tmp_path / "journal", SingleRank())
            journal.recover(0)
            rollout = replace(serving(llm, pool, "asks", "does not"), journal=journal).collect(0)
            rewards = {reward for group in rollout.groups for reward in group.rewards}
            return journal.num_found, rollout.metrics["environment/num_raised"], rewards

        found, raised, rewards = collect()
        assert found == 0 < raised <= 4 and rewards == {0.0, 1.0}
        (tmp_path / "up").touch()
        assert collect() == (8 - raised, 0, {1.0})
