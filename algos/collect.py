"""Collects one step's experiences: rolls out groups, scores them, keeps the useful ones, computes advantages."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import msgspec

from algos.algorithm import Algorithm
from algos.environments.pool import EnvironmentPool
from algos.experience import Experience
from algos.rewards.pool import Item, ItemKey, RewardPool
from algos.rewards.runner import FailureKind, RewardRunner
from algos.tasks.task import Problem, Task
from engines import LLM, Completion, SamplingParams
from engines.decoding import from_msgpack
from engines.parallel.collectives import Communicator
from engines.rollout.environment import CallCounts, Environments
from engines.rollout.environment import FailureKind as CallFailure
from engines.rollout.journal import Journal
from engines.rollout.prediction import LengthPredictor
from engines.rollout.telemetry import Mark, StepRecord, TurnSpan
from engines.sequence import Finished

_MOST_SKIPPED = 100
"""Most problems per round whose prompts the engine rejects; after one more the run ends with the engine's error."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt's completions and their raw rewards."""

    problem: Problem
    prompt_token_ids: list[int]
    completions: list[Completion]
    rewards: list[float]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The data that one step trains on."""

    groups: list[Group]
    """All sampled groups in sampling order; the step trains on the first `prompts_per_step` that were kept."""
    experiences: list[Experience]
    next_index: int
    """Data position after this step."""
    metrics: dict[str, float]
    steps: list[StepRecord]
    """The steps of this rank's replicas, in all rounds."""
    marks: list[Mark]
    """On rank 0, the coordinator's decisions in all rounds."""
    turns: list[TurnSpan]
    """On rank 0, where trajectories were that a coordinator ran, in all rounds."""


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """What becomes of prompts that are too long."""

    max_tokens: int | None = None
    """None: what the engine accepts."""
    cut: bool = False
    """Keep the last `max_tokens` tokens of a longer prompt, instead of refusing it."""


def fit_prompt(llm: LLM, problem: Problem, params: SamplingParams, limit: PromptLimit) -> Problem:
    """Returns the problem, its prompt cut if need be. Raises ValueError if the prompt is too long."""
    tokens = llm.chat_template.encode(problem.prompt, "prompt")
    if limit.max_tokens is not None and len(tokens) > limit.max_tokens:
        if not limit.cut:
            raise ValueError(f"prompt: {len(tokens)} tokens are more than max_prompt_tokens={limit.max_tokens}")
        tokens = tokens[-limit.max_tokens :]
        problem = replace(problem, tokens=tokens)
    llm.check(tokens, params)
    return problem


class NothingScoredError(ValueError):
    """All reward calls of a rollout, or all its environments, failed: there is nothing to train on, and further
    rollouts would fail, too."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Rolls out a task's problems. All ranks of `group` make the same calls and get the same groups and experiences."""

    llm: LLM
    task: Task
    algorithm: Algorithm
    reward: RewardRunner | None
    """None: each trajectory brings its own."""
    group: Communicator
    params: SamplingParams
    """`params.n` is the group size."""
    prompts_per_step: int
    limit: PromptLimit = PromptLimit()
    journal: Journal | None = None
    environment: Environments | None = None
    """Of trajectories; `OnRankZero` on other ranks. A reward of its own counts, and others are scored by `reward`."""
    in_rounds: bool = False
    """See `LLM.generate`."""
    predictor: LengthPredictor | None = None
    """Of trajectories' lengths; rank 0's."""

    def __post_init__(self) -> None:
        reshaping = ["top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        for name in [*reshaping, "logit_bias", "bad_words", "min_tokens"]:
            if (value := getattr(self.params, name)) != getattr(SamplingParams(), name):
                raise ValueError(
                    f"params: SamplingParams.{name}={value!r}: training computes log-probs of the model's own "
                    "distribution at a temperature; leave it out"
                )

    def collect(self, index: int, on_finished: Callable[[Finished], None] | None = None) -> Rollout:
        """Samples whole rounds of problems from data position `index` on until `prompts_per_step` groups are kept.

        After `max_sampling_rounds` it warns and returns the groups kept so far. Raises NothingScoredError.
        """
        sampled: list[Group] = []
        kept: list[Group] = []
        sums: Counter[str] = Counter()
        steps: list[StepRecord] = []
        marks: list[Mark] = []
        turns: list[TurnSpan] = []
        rounds = skipped = cut = 0
        while len(kept) < self.prompts_per_step and rounds < self.algorithm.max_sampling_rounds:
            problems, next_index = self._draw(index)
            skipped += next_index - index - len(problems)
            cut += sum(problem.tokens is not None for problem in problems)
            index = next_index
            groups, figures = self.sample(problems, on_finished)
            _check_scores(figures, sum(len(group.rewards) for group in groups))
            sums.update(figures)
            steps += self.llm.step_records
            marks += self.llm.rollout.marks if self.llm.rollout is not None else []
            turns += self.llm.rollout.turn_spans if self.llm.rollout is not None else []
            sampled += groups
            kept += [group for group in groups if self.algorithm.keep_group(group.rewards)]
            rounds += 1
        if len(kept) < self.prompts_per_step and self.group.rank == 0:
            warnings.warn(
                f"only {len(kept)} of {self.prompts_per_step} groups had unequal rewards after {rounds} sampling "
                "rounds; the step trains on those. Easier or harder problems, or more max_sampling_rounds, help",
                stacklevel=2,
            )
        kept = kept[: self.prompts_per_step]
        advantages = self.algorithm.advantages([self._shaped(group) for group in kept])
        experiences = [
            experience
            for group, values in zip(kept, advantages, strict=True)
            for experience in self._experiences(group, values)
        ]
        metrics = rollout_metrics(sampled, experiences) | sums
        metrics |= {"train/num_gen_batches": float(rounds), "train/num_groups": float(len(kept))}
        if self.environment is not None:
            num_trajectories = sum(len(group.completions) for group in sampled)
            metrics["timing_s/agent_loop/tool_calls/mean"] = sums["timing_s/tool_calls"] / num_trajectories
        metrics |= {"train/num_prompts_skipped": float(skipped), "train/num_prompts_cut": float(cut)}
        if cut and self.group.rank == 0:
            warnings.warn(
                f"{cut} of {len(sampled)} prompts are cut to their last {self.limit.max_tokens} tokens", stacklevel=2
            )
        return Rollout(
            groups=sampled,
            experiences=experiences,
            next_index=index,
            metrics=metrics,
            steps=steps,
            marks=marks,
            turns=turns,
        )

    def sample(
        self, problems: Sequence[Problem], on_finished: Callable[[Finished], None] | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        """See `sample_groups`."""
        return sample_groups(
            self.llm,
            problems,
            self.params,
            self.reward,
            self.group,
            on_finished,
            self.journal,
            environment=self.environment,
            in_rounds=self.in_rounds,
            predictor=self.predictor,
        )

    def _draw(self, index: int) -> tuple[list[Problem], int]:
        """Returns the next problems whose prompts the engine accepts, and the index after them."""
        problems: list[Problem] = []
        skipped = 0
        while len(problems) < self.prompts_per_step:
            problem = self.task.train_problem(index)
            index += 1
            try:
                problem = fit_prompt(self.llm, problem, self.params, self.limit)
            except ValueError as error:
                skipped += 1
                if self.group.rank == 0:
                    warnings.warn(f"problem {problem.uid} is passed over: {error}", stacklevel=2)
                if skipped > _MOST_SKIPPED:
                    raise
                continue
            problems.append(problem)
        return problems, index

    def _shaped(self, group: Group) -> list[float]:
        lengths = [len(completion.token_ids) for completion in group.completions]
        truncated = [completion.finish_reason == "length" for completion in group.completions]
        return self.algorithm.shape_rewards(group.rewards, lengths, truncated, self.params.most_tokens)

    def _experiences(self, group: Group, advantages: Sequence[float]) -> list[Experience]:
        return [
            Experience(
                tokens=group.prompt_token_ids + completion.token_ids,
                num_prompt_tokens=len(group.prompt_token_ids),
                rollout_logprobs=completion.logprobs,
                loss_mask=completion.loss_mask if counts else [False] * len(completion.token_ids),
                advantage=advantage,
            )
            for completion, advantage in zip(group.completions, advantages, strict=True)
            for counts in [self.algorithm.loss_mask(len(completion.token_ids), completion.finish_reason == "length")]
        ]


def sample_groups(
    llm: LLM,
    problems: Sequence[Problem],
    params: SamplingParams,
    reward: RewardRunner | None,
    group: Communicator,
    on_finished: Callable[[Finished], None] | None = None,
    journal: Journal | None = None,
    *,
    environment: Environments | None = None,
    in_rounds: bool = False,
    predictor: LengthPredictor | None = None,
) -> tuple[list[Group], dict[str, float]]:
    """Completes and scores problems. Returns the groups, and metrics: seconds, numbers of failed scores, and of
    trajectories whose environment failed. Those of an `EnvironmentPool` that failed are left out of the journal.

    `gen` is the time of the rollout, `reward` the wait for rewards after it, and `reward_overlapped` the time of this
    rank's reward calls during it. A rank scores each completion that it receives during the rollout. After the rollout
    (with `beside_rollout` off: only then) rank r scores the other completions of groups i with i mod size = r.
    """
    if isinstance(environment, EnvironmentPool):
        environment.failed.clear()
        if journal is not None:
            journal.left_out = environment.failed
    start = time.perf_counter()
    by_uid = {problem.uid: problem for problem in problems}
    with RewardPool(reward) if reward is not None else contextlib.nullcontext() as pool:

        def hear(finished: Finished) -> None:
            is_scored = finished.completion.reward is not None
            if pool is not None and reward is not None and reward.config.beside_rollout and not is_scored:
                pool.add(_item(by_uid[finished.state.key.prompt_uid], finished.completion))
            if on_finished is not None:
                on_finished(finished)

        outputs = llm.generate(
            [problem.tokens or problem.prompt for problem in problems],
            params,
            prompt_uids=list(by_uid),
            on_finished=hear,
            journal=journal,
            environment=environment,
            columns=None if environment is None else [problem.columns for problem in problems],
            in_rounds=in_rounds,
            predictor=predictor,
        )
        generated = time.perf_counter()
        rewards, failed = _finish_scores(pool, problems, [output.outputs for output in outputs], group)
    groups = [
        Group(
            problem=problem,
            prompt_token_ids=output.prompt_token_ids,
            completions=output.outputs,
            rewards=[rewards[problem.uid, completion.index] for completion in output.outputs],
        )
        for problem, output in zip(problems, outputs, strict=True)
    ]
    return groups, {
        "timing_s/gen": generated - start,
        "timing_s/reward": time.perf_counter() - generated,
        "timing_s/reward_overlapped": 0.0 if pool is None else pool.seconds_beside,
        **({} if environment is None else _call_figures(environment, llm.environment_calls, group)),
        **{f"reward/num_{kind}": float(failed[kind]) for kind in get_args(FailureKind)},
    }


def _call_figures(environment: Environments, calls: CallCounts, group: Communicator) -> dict[str, float]:
    """Calls and seconds of this rank; failed trajectories of all ranks, on every rank."""
    here = Counter(calls.failures)
    if isinstance(environment, EnvironmentPool):  # it knows of failed rewards, too
        here |= Counter(environment.failed.values())
    failed: Counter[CallFailure] = Counter()
    for part in group.all_gather_bytes(msgspec.msgpack.encode(dict(here))):
        failed.update(from_msgpack(part, dict[CallFailure, int]))
    failures = {f"environment/num_{kind}": float(failed[kind]) for kind in get_args(CallFailure)}
    return {"environment/num_calls": float(calls.num_calls), "timing_s/tool_calls": calls.seconds, **failures}


def score_groups(groups: Sequence[Group], reward: RewardRunner, group: Communicator) -> list[float]:
    """Returns the rewards of all completions by another reward, in their order, on every rank."""
    with RewardPool(reward) as pool:
        problems = [one.problem for one in groups]
        rewards, _ = _finish_scores(pool, problems, [one.completions for one in groups], group)
    return [rewards[one.problem.uid, completion.index] for one in groups for completion in one.completions]


def _item(problem: Problem, completion: Completion) -> Item:
    key = (problem.uid, completion.index)
    return Item(key=key, prompt=problem.prompt, completion=completion.text, columns=problem.columns)


def _finish_scores(
    pool: RewardPool | None,
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    group: Communicator,
) -> tuple[dict[ItemKey, float], Counter[FailureKind]]:
    """Scores the completions that no rank's pool has scored, and that bring no reward. Returns all rewards and
    failures, on every rank."""
    brought = {
        (problem.uid, one.index): one.reward
        for problem, group_ in zip(problems, completions, strict=True)
        for one in group_
        if one.reward is not None
    }
    if pool is None:
        return brought, Counter()
    taken_by_rank = group.all_gather_bytes(msgspec.msgpack.encode(pool.stop()))
    taken = {key for part in taken_by_rank for key in from_msgpack(part, list[ItemKey])}
    mine, failed_here = pool.finish(
        _item(problems[i], completion)
        for i in range(group.rank, len(problems), group.size)
        for completion in completions[i]
        if (problems[i].uid, completion.index) not in taken | brought.keys()
    )
    rewards: dict[ItemKey, float] = brought
    failed: Counter[FailureKind] = Counter()
    for part in group.all_gather_bytes(msgspec.msgpack.encode((list(mine.items()), dict(failed_here)))):
        scores, counts = from_msgpack(part, tuple[list[tuple[ItemKey, float]], dict[FailureKind, int]])
        rewards |= dict(scores)
        failed.update(counts)
    return rewards, failed


def _check_scores(figures: dict[str, float], num_completions: int) -> None:
    failed = {kind: int(figures[f"reward/num_{kind}"]) for kind in get_args(FailureKind)}
    if sum(failed.values()) == num_completions:
        raise NothingScoredError(
            f"reward: all {num_completions} completions of a rollout failed ({failed['raised']} raised, "
            f"{failed['timed_out']} timed out, {failed['invalid']} were no finite number); see the warnings above "
            "and mend the function"
        )
    broken = {kind: int(figures.get(f"environment/num_{kind}", 0)) for kind in get_args(CallFailure)}
    if sum(broken.values()) >= num_completions:
        raise NothingScoredError(
            f"environment: all {num_completions} trajectories of a rollout failed ({broken['raised']} raised, "
            f"{broken['timed_out']} timed out, {broken['invalid']} were invalid, {broken['lost']} lost); see the "
            "warnings above and mend it, or what it calls"
        )


def rollout_metrics(groups: Sequence[Group], experiences: Sequence[Experience]) -> dict[str, float]:
    """Metrics under verl's names: rewards and lengths of all sampled groups, advantages of the experiences."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.num_generated for completion in completions]
    cut = [completion.finish_reason == "length" for group in groups for completion in group.completions]
    prompts = [len(group.prompt_token_ids) for group in groups]
    solved = [sum(group.rewards) / len(group.rewards) for group in groups]
    many: list[tuple[str, Sequence[float]]] = [
        ("critic/rewards", rewards),
        ("response_length", lengths),
        ("prompt_length", prompts),
        ("critic/advantages", [experience.advantage for experience in experiences] or [0.0]),
    ]
    if any(completion.observed for completion in completions):
        many.append(("num_turns", [len(completion.turns) for completion in completions]))
    metrics: dict[str, float] = {}
    for name, values in many:
        metrics |= {
            f"{name}/mean": statistics.fmean(values),
            f"{name}/max": float(max(values)),
            f"{name}/min": float(min(values)),
        }
    return metrics | {
        "response_length/clip_ratio": statistics.fmean(cut),
        "rollout/zero_variance_groups": statistics.fmean(len(set(group.rewards)) == 1 for group in groups),
        "rollout/group_reward_std": statistics.pstdev(solved),
    }
