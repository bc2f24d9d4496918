"""The main job behind `train.py`'s command line: a run, step by step."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch

from algos.collect import Collector, NothingScoredError, PromptLimit, Rollout, fit_prompt
from algos.deepspeed_config import resolve
from algos.deepspeed_engine import start_deepspeed, stop_deepspeed
from algos.evaluation import evaluate
from algos.own_code import source_of
from algos.publish import save_tensors
from algos.rewards.runner import RewardRunner
from algos.tasks.task import Problem, Task
from algos.trainer import Trainer
from engines import LLM, SamplingParams
from engines.coordination.policies import SchedulePolicy
from engines.json_files import read_json, read_jsonl
from engines.parallel.collectives import Communicator, TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout, nested_layout
from engines.progress import Bar
from engines.rollout.journal import Journal
from engines.sequence import Finished
from experiments import launch
from experiments.config import TrainConfig
from experiments.engine_options import DRAFT_POLICIES
from experiments.heddle_allocating import Allocations, groups_of
from experiments.heddle_training import HeddleRollouts
from experiments.length_predictions import LengthPredictions, predictor_trunk
from experiments.pat_measuring import nested_layouts, transport_of
from experiments.pat_training import RolloutLayouts, deployed, load_profile, make_controller
from experiments.policies import Logged
from experiments.relay_training import RelayedWeights
from experiments.rollout_record import STEP_FILES, RolloutRecord, trajectory_figures
from experiments.run_folder import (
    AFRESH,
    RunFolder,
    check_run_folder,
    last_published,
    lock_folder,
    make_run_folder,
    newest_run,
)
from experiments.specactor_training import DraftRoles, first_layout
from experiments.tracking import CODE, Tracker, check_environment
from experiments.training_checks import as_json, check_prompts, check_rollouts, check_same_run, prepare_model
from experiments.training_environment import RunEnvironment, share_environment, start_environment
from research.pat.controller import PatController
from research.pat.deployment import Deployment


def train(config: TrainConfig, start: float) -> dict[str, Any]:
    """Runs the whole job on this rank; returns the result for JSON. `start`: `time.perf_counter` of the command."""
    threads = launch.share_cores()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        torch.use_deterministic_algorithms(True)
        # Otherwise torch fills every buffer that DeepSpeed allocates with NaN, gigabytes in each step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    config = replace(config, trainer=config.trainer.on("cuda" if torch.cuda.is_available() else "cpu"))
    # Checks that need no process group come first: they cost nothing, and every rank sees an error.
    task: Task = config.task_options
    first = task.train_problem(0)  # reads its files
    resolve(config.trainer, num_ranks=launch.num_ranks())
    if config.wandb != "off" and launch.rank() == 0:
        check_environment()
    if config.resume and config.name is None:
        config = replace(config, name=newest_run(config.runs, config.stem))
    check_run_folder(config.runs, config.name, resume=config.resume)
    if config.resume:
        check_same_run(config)
    layout = nested_layout(range(launch.num_ranks()), config.tensor_parallel_size)
    if config.speculation != "none":
        layout = first_layout(launch.num_ranks(), config.tensor_parallel_size)
    sizes = check_rollouts(config)
    profile = load_profile(config, sizes)
    check_prompts(config, task, sizes)
    limits = config.reward_limits
    if config.deterministic:
        limits = replace(limits, beside_rollout=False)
    with contextlib.ExitStack() as stack:
        specs = [spec for spec in (task.reward, config.reward) if spec is not None]
        # The first judges evaluations, the last is trained on; there may be none where trajectories bring their own.
        rewards = [stack.enter_context(RewardRunner(spec, limits)) for spec in specs]
        columns = [one.columns for one in (first, *(task.held_out_problems(1) if config.eval_every else []))]
        pool = start_environment(config, columns, stack)
        for names in columns:
            for one in rewards:
                one.check(names)
        model = prepare_model(config, threads)
        device = start_deepspeed(timedelta(seconds=config.rank_timeout_s))
        world = TorchGroup(timeout_s=config.rank_timeout_s)
        layouts: list[Layout | tuple[int, ...]] = [layout]
        if profile is not None:
            layouts = [*nested_layouts(world.size)]
        if allocates := config.layout_policy == "heddle":
            layouts += groups_of(world.size, [one.replicas[0].tp_size for one in nested_layouts(world.size, sizes)])
        groups = GroupCache(world, layouts, timeout_s=config.rank_timeout_s, device=device)
        controller = deployment = None
        if profile is not None and allocates:
            deployment = deployed(config, profile, sizes, transport_of(groups))
        elif profile is not None:
            controller = make_controller(config, profile, sizes, transport_of(groups))
        environment = share_environment(config, pool, world)
        if environment is not None and environment.has_reward:
            rewards.clear()
        run = stack.enter_context(
            contextlib.closing(Run(config, task, model, device, groups, rewards, environment, controller, deployment))
        )
        result = run.train(start)
    stop_deepspeed()
    return result


def _open_folder(config: TrainConfig, group: Communicator) -> RunFolder:
    """Rank 0 makes the folder and locks it as long as the returned object exists."""
    locks = []

    def make() -> str:
        path = make_run_folder(config.runs, config.name, config.stem, resume=config.resume)
        locks.append(lock_folder(path))
        return str(path)

    return RunFolder(Path(launch.on_rank_0(group, make)), group, *locks)


def _make_llm(
    config: TrainConfig,
    model: Path,
    device: torch.device,
    groups: GroupCache,
    schedule: SchedulePolicy | None,
    controller: PatController | None,
) -> LLM:
    """Returns the engine, which has no weights yet."""
    rollout = config.rollout
    placement: dict[str, Any] = {"tensor_parallel_size": config.tensor_parallel_size}
    if config.speculation != "none":
        placement = {"layout": first_layout(groups.world.size, config.tensor_parallel_size)}
    llm = LLM(
        model,
        device=device,
        world=groups,
        **placement,
        schedule=schedule,
        layout_policy=controller,
        draft_policy=DRAFT_POLICIES[rollout.draft_policy],
        load=False,
        **asdict(rollout.engine_config(config.seed, deterministic=config.deterministic)),
    )
    llm.chat_template = config.conversation.template(llm.tokenizer)
    return llm


PREDICTOR = "length_predictor"
"""The run's folder of the last fit."""
DRAFT_HISTORY = "draft_history.msgpack"
"""The file of a resume point with the completions that drafts copy from."""


class RunState(msgspec.Struct, kw_only=True):
    """The part of a resume point that is not the trainer's."""

    step: int
    data_index: int
    evaluations: list[float]


class Run:
    """One training run on this rank: policy, engine and files, and the loop over steps."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        model: Path,
        device: torch.device,
        groups: GroupCache,
        rewards: list[RewardRunner],
        environment: RunEnvironment | None = None,
        controller: PatController | None = None,
        deployment: Deployment | None = None,
    ) -> None:
        """The first of `rewards` scores evaluations, the last one is the reward to train on; there are none where
        trajectories bring their own."""
        self.config = config
        self.group = group = groups.world
        self.judge = rewards[0] if rewards else None
        self.reward = rewards[-1] if rewards else None
        if config.resume:
            self.folder = _open_folder(config, group)
            self.folder.check()
        rollout = config.rollout
        self.params = SamplingParams(
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            max_turns=rollout.max_turns,
            n=rollout.group_size,
        )
        self.predictions = self.heddle = None
        if config.predicts_lengths:
            trunk = predictor_trunk(config.heddle, model)
            self.predictions = LengthPredictions(config.heddle)
            if config.dispatch == "heddle":
                num_sequences = rollout.prompts_per_step * rollout.group_size
                self.heddle = HeddleRollouts(config.heddle, num_sequences, self.predictions)
        schedule = config.schedule(group.size) if self.heddle is None else self.heddle.policy
        dispatches = None
        if schedule is not None and config.dispatch not in ("auto", "on-demand", "static"):
            dispatches = Logged(schedule)
        self.llm = _make_llm(config, model, device, groups, dispatches or schedule, controller)
        if environment is not None:
            self.llm.chat_template = replace(self.llm.chat_template, tools=environment.tools or None)
        launch.tell_engine(self.llm)
        self.trainer = Trainer(config.trainer, config.algorithm, model, temperature=rollout.temperature)
        self.relayed: RelayedWeights | None = None
        if config.weights == "relay":
            self.relayed = RelayedWeights(self.llm, self.trainer, groups, timeout_s=config.rank_timeout_s)
        self.limit = PromptLimit(max_tokens=rollout.max_prompt_tokens, cut=rollout.long_prompts == "cut")
        self.held_out = self._held_out_problems(task) if config.eval_every else []
        self.state = RunState(step=0, data_index=0, evaluations=[])
        """For the result, where there are trajectories."""
        if not config.resume:
            self.folder = _open_folder(config, group)  # late, so that an error above leaves no empty folder
        launch.end_on_signals(self._last_words)
        if self.predictions is not None and group.rank == 0:
            self.predictions.start(trunk, self.folder.path / PREDICTOR)
        if group.rank == 0:
            print(f"run: {self.folder.path}", file=sys.stderr, flush=True)
            trained, everything = self.trainer.num_parameters
            print(f"parameters: {trained:,} of {everything:,} are trained", file=sys.stderr, flush=True)
        self.journal: Journal | None = None
        """Without a resume point nobody could go on with what it holds."""
        if config.save_every > 0 or config.resume:
            self.journal = Journal(
                self.folder.path / "journal",
                group,
                whole_shares=config.deterministic,
                environment=environment.digest if environment else "",
            )
        self.collector = Collector(
            llm=self.llm,
            task=task,
            algorithm=config.algorithm,
            reward=self.reward,
            group=group,
            params=self.params,
            prompts_per_step=rollout.prompts_per_step,
            limit=self.limit,
            journal=self.journal,
            environment=environment.environments if environment else None,
            in_rounds=config.deterministic,
            predictor=None if self.predictions is None else self.predictions.predictor,
        )
        speculates = config.speculation != "none"
        self.layouts: RolloutLayouts | DraftRoles | Allocations = RolloutLayouts(controller, self.collector)
        if speculates:
            self.layouts = DraftRoles(config, self.collector)
        if deployment is not None:
            self.layouts = Allocations(deployment, self.collector)
        self.record = RolloutRecord(self.folder, self.collector, self.layouts, dispatches)

    def _last_words(self) -> str:
        """The message for an interrupt now: whether and how the run can be resumed."""
        point = self.folder.latest()
        if point is None:
            how = AFRESH if self.config.name else "the same command starts anew"
            return f"interrupted: nothing is published yet in {self.folder.path}, so it cannot be resumed; {how}"
        starter = [sys.executable] if self.config.ranks == self.group.size else ["torchrun", "..."]
        resume = [] if self.config.resume else ["--resume"]
        name = [] if self.config.name else ["--name", self.folder.path.name]
        return f"interrupted: go on from {point.name} with: {shlex.join([*starter, *sys.argv, *resume, *name])}"

    def close(self) -> None:
        """Closes connections and files, without delay."""
        if self.relayed is not None:
            self.relayed.close()
        self.llm.close()
        if self.journal is not None:
            self.journal.close()
        if self.predictions is not None:
            self.predictions.close()

    def _held_out_problems(self, task: Task) -> list[Problem]:
        """The held-out problems that the engine accepts. Raises ValueError if there is none."""
        problems = task.held_out_problems(self.config.eval_problems)
        fitting, reason = [], "the task has none; give it some, or --eval-every 0"
        for problem in problems:
            try:
                fitting.append(fit_prompt(self.llm, problem, self.params, self.limit))
            except ValueError as error:
                reason = str(error)
        if not fitting:
            raise ValueError(f"held-out problems: none of {len(problems)} can run: {reason}")
        if len(fitting) < len(problems) and self.group.rank == 0:
            warnings.warn(
                f"{len(problems) - len(fitting)} of {len(problems)} held-out problems are left out: {reason}",
                stacklevel=2,
            )
        return fitting

    # -- the loop

    def train(self, start: float) -> dict[str, Any]:
        if self.config.resume:
            self._resume()
        self.folder.replace("config.json", json.dumps(as_json(self.config), indent=2) + "\n")
        for option in ("reward", "environment", "task", "algo", "dispatch", "layout_policy"):
            if file := source_of(str(getattr(self.config, option))):
                self.folder.copy(file, f"{CODE}/{option}-{file.name}")
        self.layouts.begin(self.state.data_index, keep_weights=False)
        if self.relayed is not None:
            self.relayed.push(self.state.step)
        self._sync_weights()
        self.tracker = Tracker(self.folder, self.config)
        if not self.config.resume and self.config.eval_every:
            self.tracker.log(self.state.step, self._evaluate())
        began, first, on_terminal = time.perf_counter(), self.state.step, sys.stderr.isatty()
        with Bar(
            total=self.config.steps,
            initial=first,
            desc=f"step {first}/{self.config.steps}",
            bar_format="{desc} {bar}",
            mininterval=0,  # a step's line is shown, however soon it follows the last one
            disable=not (self.folder.is_writer and on_terminal),
        ) as progress:
            while self.state.step < self.config.steps:
                metrics = self._train_step()
                a_step_s = (time.perf_counter() - began) / (self.state.step - first)
                told = self._progress(metrics, eta_s=a_step_s * (self.config.steps - self.state.step))
                progress.set_description_str(told, refresh=False)
                progress.update()
                if self.folder.is_writer and not on_terminal:
                    print(told, file=sys.stderr, flush=True)
        summary = self._summary(start)
        self.tracker.close(summary["figures"])
        return summary

    def _progress(self, metrics: dict[str, float], eta_s: float) -> str:
        pass_1 = f"{self.state.evaluations[-1]:.3f}" if self.state.evaluations else "-"
        speed = metrics.get("perf/throughput")  # none where a part of the step is from the journal
        return (
            f"step {self.state.step}/{self.config.steps} reward {metrics['critic/rewards/mean']:.3f} pass@1 {pass_1} "
            f"{'-' if speed is None else round(speed * self.group.size)} tokens/s ETA {Bar.format_interval(eta_s)}"
        )

    def _train_step(self) -> dict[str, float]:
        began = time.perf_counter()
        regroup_s = self.layouts.begin(self.state.data_index, keep_weights=True)  # after evaluations
        num_found = self._num_found
        if self.heddle is not None:
            self.heddle.begin(self.llm)
        if self.predictions is not None:
            self.predictions.begin()
        self.record.begin()
        rollout = self._roll_out()
        updated = time.perf_counter()
        metrics = rollout.metrics | self.record.metrics(rollout)
        if self.heddle is not None and self.group.rank == 0:
            metrics |= self.heddle.metrics()
        if self.predictions is not None:
            metrics |= self.predictions.end(rollout.groups, self.llm.policy_version, rollout.turns)
        metrics["rollout/num_journaled"] = float(self._num_found - num_found)
        self.llm.sleep()
        if self.relayed is not None:
            self.relayed.finish()
            metrics |= self.relayed.metrics()
        if rollout.experiences:
            metrics |= self.trainer.update(rollout.experiences)
        if self.relayed is not None:
            self.relayed.push(self.state.step + 1)
        self.llm.wake_up()
        metrics["timing_s/update_actor"] = time.perf_counter() - updated
        self.state.step += 1
        self.state.data_index = rollout.next_index
        samples = self.record.write(self.state.step, rollout)
        if isinstance(self.layouts, Allocations):
            self.layouts.learn([len(one.token_ids) for group in rollout.groups for one in group.completions])
        regroup_s += self.layouts.begin(self.state.data_index, keep_weights=False)
        synced = time.perf_counter()
        self._sync_weights()
        metrics["timing_s/update_weights"] = time.perf_counter() - synced
        metrics["timing_s/regroup"] = regroup_s
        last = self.state.step == self.config.steps
        if _is_due(self.config.eval_every, self.state.step, last):
            metrics |= self._evaluate()
        elapsed = time.perf_counter() - began
        metrics["timing_s/step"] = elapsed
        if not metrics["rollout/num_journaled"]:  # else a killed run has spent a part of the time
            num_tokens = sum(c.num_generated for g in rollout.groups for c in g.completions)
            metrics["perf/throughput"] = num_tokens / elapsed / self.group.size
            metrics["perf/rollout_tokens_per_second"] = num_tokens / rollout.metrics["timing_s/gen"]
        # The metrics of a step are part of its resume point, so they are written before it is published.
        self.folder.append("metrics.jsonl", {"training/global_step": self.state.step, **metrics})
        self.tracker.log(self.state.step, metrics, samples)
        if _is_due(self.config.save_every, self.state.step, last):
            self._save()
        return metrics

    def _roll_out(self) -> Rollout:
        rollout = self.config.rollout
        total = rollout.prompts_per_step * rollout.group_size
        with self._bar("rollout", total) as show:
            try:
                return self.collector.collect(self.state.data_index, show)
            except NothingScoredError as error:
                go_on = f"go on with --name {self.folder.path.name} --resume"
                fix = go_on if self.folder.latest() else "start again"
                if self.config.name and not self.folder.latest():
                    fix += f": {AFRESH}"
                raise ValueError(f"{error}; then {fix}") from None

    @contextlib.contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Callable[[Finished], None]]:
        """A bar of `total` completions, of which rank 0 receives all under a coordinator, else its replica's share."""
        expected = total if self.llm.rollout is not None else len(range(0, total, len(self.llm.layout.replicas)))
        hidden = None if self.folder.is_writer else True  # None: only without a terminal
        with Bar(total=expected, desc=name, unit="seq", leave=False, position=1, disable=hidden) as progress:

            def show(finished: Finished) -> None:
                progress.update()

            yield show

    def _sync_weights(self) -> None:
        """Copies the trainer's weights to the engine. Ranks' checksums must be equal; the journal gets the checksum."""
        if self.relayed is not None:
            checksum = self.relayed.pull(self.state.step)
        else:
            checksum = self.llm.update_weights(self.trainer.named_weights(), version=self.state.step)
        everyone = self.group.all_gather_bytes(checksum.to_bytes(8, "little"))
        others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if others:
            raise RuntimeError(f"weights differ after the update: ranks {others} have other checksums than rank 0")
        if self.journal is not None:
            self.journal.weights = checksum

    @property
    def _num_found(self) -> int:
        """Completions that were taken from the journal."""
        return 0 if self.journal is None else self.journal.num_found

    def _evaluate(self) -> dict[str, float]:
        num_samples = self.config.eval_samples
        with self._bar("evaluate", len(self.held_out) * num_samples) as show:
            metrics = evaluate(
                self.llm,
                self.held_out,
                replace(self.params, n=num_samples),
                self.judge,
                self.group,
                threshold=self.config.eval_threshold,
                own_reward=None if self.reward is self.judge else self.reward,
                on_finished=show,
                environment=self.collector.environment,
                in_rounds=self.collector.in_rounds,
                predictor=self.collector.predictor,
            )
        self.state.evaluations.append(metrics["val-core/pass@1"])
        if self.state.step == 0:
            self.folder.append("metrics.jsonl", {"training/global_step": 0, **metrics})
        return metrics

    # -- files

    def _save(self) -> None:
        """Publishes a resume point together with a Hugging Face checkpoint."""

        def write_own(path: Path) -> None:
            save_tensors(torch.get_rng_state(), path / f"rng-{self.group.rank}.pt")
            if self.folder.is_writer:
                (path / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.state)) + b"\n")
                if self.llm.draft_history is not None:
                    (path / DRAFT_HISTORY).write_bytes(self.llm.draft_history.to_bytes())

        def write_model(path: Path) -> None:
            self.trainer.save_pretrained(path / "huggingface")

        writes = [self.trainer.save_checkpoint, write_model, write_own]
        self.folder.publish(self.state.step, writes, self.config.keep_checkpoints)
        if self.journal is not None:
            self.journal.clear()

    def _resume(self) -> None:
        path = last_published(self.folder.path)
        self.trainer.load_checkpoint(path)
        torch.set_rng_state(torch.load(path / f"rng-{self.group.rank}.pt", weights_only=True))
        self.state = read_json(path / "run.json", RunState)
        if self.state.step > self.config.steps:
            raise ValueError(f"steps={self.config.steps}: the run is at step {self.state.step} already; raise --steps")
        if self.llm.draft_history is not None:
            self.llm.draft_history.restore((path / DRAFT_HISTORY).read_bytes())
        self.folder.truncate(self.state.step, STEP_FILES)
        assert self.journal is not None
        self.journal.recover(self.state.step)
        self.layouts.recall(self.folder.path / "lengths.jsonl")
        self.group.barrier()

    def _summary(self, start: float) -> dict[str, Any]:
        figures: list[str] = []
        trajectories: dict[str, float | None] = {}
        if self.folder.is_writer and self.config.figures:
            from experiments.comparison.machine import this_tier
            from experiments.figures import draw_run  # matplotlib takes half a second, and only one rank draws

            with self.folder.writing("figures"):
                figures = [str(path) for path in draw_run(self.folder.path, this_tier())]
        if self.folder.is_writer and self.config.environment is not None:
            trajectories = trajectory_figures(read_jsonl(self.folder.path / "metrics.jsonl"))
        checkpoint = self.folder.latest()
        return {
            "experiment": "train",
            "algo": self.config.algo,
            "task": self.config.task,
            "eval_before": self.state.evaluations[0] if self.state.evaluations else None,
            "eval_after": self.state.evaluations[-1] if self.state.evaluations else None,
            "steps": self.state.step,
            **trajectories,
            "minutes": round((time.perf_counter() - start) / 60, 2),
            "run_dir": str(self.folder.path),
            "model": str(checkpoint / "huggingface") if checkpoint else None,
            "figures": figures,
        }


def _is_due(every: int, step: int, is_last: bool) -> bool:
    return every > 0 and (is_last or step % every == 0)
