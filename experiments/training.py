"""The main job behind `train.py`'s command line: the checks before it, and the run, step by step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from algos.collect import Collector, Group, NothingScoredError, PromptLimit, Rollout, fit_prompt
from algos.deepspeed_config import resolve
from algos.deepspeed_engine import start_deepspeed, stop_deepspeed
from algos.evaluation import evaluate
from algos.own_code import source_of
from algos.pretrained import check_folder
from algos.publish import read_record, save_tensors
from algos.rewards.runner import RewardRunner
from algos.tasks.task import Problem, Task
from algos.trainer import Trainer
from algos.warmstart import new_config, tokenizer_of, warm_start
from algos.warmstart_config import MODEL_SIZES, WarmStartConfig
from engines import LLM, SamplingParams
from engines.adapter_config import checkpoint_folder
from engines.config import ModelConfig, longest_sequence
from engines.json_files import flat, read_json
from engines.models.tokenizer import load_tokenizer
from engines.native.wait_policy import watch_cores
from engines.parallel.collectives import Communicator, TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import nested_layout
from engines.parallel.sharding import check_shardable
from engines.replica.preflight import check_engine, usable_device
from engines.rollout.journal import Journal
from engines.rollout.telemetry import StepRecord, chrome_trace, draft_metrics
from engines.sequence import Finished
from experiments import launch
from experiments.config import TrainConfig
from experiments.engine_options import DRAFT_POLICIES
from experiments.pat_measuring import nested_layouts, transport_of
from experiments.pat_training import RolloutLayouts, load_profile, make_controller
from experiments.policies import Logged
from experiments.run_folder import (
    AFRESH,
    RunFolder,
    check_run_folder,
    last_published,
    lock_folder,
    make_run_folder,
    newest_run,
)
from experiments.tracking import CODE, Tracker, check_environment
from research.pat.controller import PatController

STEP_FILES = ("metrics.jsonl", "lengths.jsonl", "samples.jsonl", "rollout_steps.jsonl", "decisions.jsonl")
SAMPLES_PER_STEP = 4
KV_MOVES = (
    *("num_swapped_out", "num_swapped_in", "swapped_out_bytes", "swapped_in_bytes"),
    *("num_imported", "stored_bytes", "stored_tokens", "loaded_tokens", "fetched_tokens"),
)
MAY_CHANGE = (
    *("resume", "name", "runs", "steps", "eval_every", "save_every", "keep_checkpoints", "reward_limits"),
    *("wandb", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags"),
    *(
        "rank_timeout_s",
        "dispatch",
        "chunk_tokens",
        "follow_ups",
        "spread",
        "order",
        "layout_policy",
        "pat_profile",
        "pat",
    ),
)


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
    columns = task.train_problem(0).columns  # reads its files
    resolve(config.trainer, num_ranks=launch.num_ranks())
    if config.wandb != "off" and launch.rank() == 0:
        check_environment()
    if config.resume and config.name is None:
        config = replace(config, name=newest_run(config.runs, config.stem))
    check_run_folder(config.runs, config.name, resume=config.resume)
    if config.resume:
        _check_same_run(config)
    layout = nested_layout(range(launch.num_ranks()), config.tensor_parallel_size)
    sizes = _check_engine(config)
    profile = load_profile(config, sizes)
    _check_prompts(config, task, sizes)
    limits = config.reward_limits
    if config.deterministic:
        limits = replace(limits, beside_rollout=False)
    with contextlib.ExitStack() as stack:
        specs = [spec for spec in (task.reward, config.reward) if spec is not None]
        # The first judges evaluations, the last is trained on; there is at least one.
        judge, *own = (stack.enter_context(RewardRunner(spec, limits)) for spec in specs)
        reward = own[0] if own else judge
        reward.check(columns)
        for problem in task.held_out_problems(1) if config.eval_every else []:
            judge.check(problem.columns)
            reward.check(problem.columns)
        model = _prepare_model(config, threads)
        device = start_deepspeed(timedelta(seconds=config.rank_timeout_s))
        world = TorchGroup(timeout_s=config.rank_timeout_s)
        layouts = [layout] if profile is None else nested_layouts(world.size)
        groups = GroupCache(world, layouts, timeout_s=config.rank_timeout_s, device=device)
        controller = None if profile is None else make_controller(config, profile, sizes, transport_of(groups))
        run = stack.enter_context(
            contextlib.closing(Run(config, task, model, device, groups, reward, judge, controller))
        )
        result = run.train(start)
    stop_deepspeed()
    return result


def _check_same_run(config: TrainConfig) -> None:
    """Raises ValueError if a resumed run has other options than when it was started, except those in MAY_CHANGE."""
    assert config.name is not None
    path = config.runs / config.name / "config.json"
    # An option that did not exist when the run was started counts as its present default.
    before = flat(_as_json(replace(TrainConfig(), algorithm=config.algorithm))) | {
        f"{owner}.{one.name}": one.default
        for owner in ("algorithm", "task_options")
        for one in fields(getattr(config, owner))
        if one.default is not MISSING
    }
    before |= flat(read_json(path, dict[str, Any]))
    differ = [
        f"{name}={value} now, {before.get(name)} in {path}"
        for name, value in flat(_as_json(config)).items()
        if name.split(".")[0] not in MAY_CHANGE and value != before.get(name)
    ]
    if differ:
        raise ValueError(
            f"resume: {'; '.join(differ)}; go on with the same options (only {', '.join(MAY_CHANGE)} may change)"
        )


def _as_json(config: TrainConfig) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    del options["rollout"]["engine"]
    options["rollout"] |= config.rollout.engine.as_given()
    return options | {"ranks": launch.num_ranks()}


def _check_engine(config: TrainConfig) -> ModelConfig:
    """Returns the model's sizes. Raises ValueError for options that the rollout engine would refuse, before a model is
    warm-started."""
    model = checkpoint_folder(config.model)
    with tempfile.TemporaryDirectory() as folder:
        if config.is_embedded_model:
            model = Path(folder)
            new_config(config.model).save_pretrained(model)  # type: ignore[arg-type]
        elif not model.is_dir():
            raise FileNotFoundError(
                f"model={config.model!r}: no such folder; give one, a name of the hub as Qwen/Qwen3-0.6B, or one of "
                f"{list(MODEL_SIZES)}"
            )
        else:
            check_folder(model)
        sizes = ModelConfig.from_pretrained(model)
    check_shardable(sizes, config.tensor_parallel_size)
    device = torch.device("cuda", launch.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    options = config.rollout.engine_config(config.seed, deterministic=config.deterministic)
    check_engine(options, sizes, usable_device("train", device))
    longest = longest_sequence(options, sizes)
    if config.rollout.max_tokens >= longest and launch.rank() == 0:
        warnings.warn(
            f"--rollout.max-tokens {config.rollout.max_tokens}: the model's context has {longest} tokens, prompt "
            "included, so completions end there",
            stacklevel=2,
        )
    return sizes


def _check_prompts(config: TrainConfig, task: Task, sizes: ModelConfig) -> None:
    """Raises ValueError if the first prompts cannot be rendered with the model's chat template."""
    if config.is_embedded_model:
        tokenizer = tokenizer_of(config.model)  # type: ignore[arg-type]
    else:
        tokenizer = load_tokenizer(checkpoint_folder(config.model), sizes)
    template = config.conversation.template(tokenizer)
    for problem in [task.train_problem(0), *task.held_out_problems(1)]:
        template.encode(problem.prompt, f"problem {problem.uid}")


def _prepare_model(config: TrainConfig, threads: int) -> Path:
    """The policy's checkpoint, warm-started when it is an embedded one."""
    model = checkpoint_folder(config.model)
    if config.is_embedded_model:
        model = config.runs / "models" / config.model
        recipe = WarmStartConfig(size=config.model)  # type: ignore[arg-type]
        record = read_record(model)
        if record is not None and record.get("warm_start") != asdict(recipe):
            raise ValueError(
                f"model={config.model!r}: {model} was made with another recipe; use it by --model {model}, or remove it"
            )
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # the host's other ranks wait for the first
        watch_cores()
        warm_start(model, recipe)
        torch.set_num_threads(threads)
    return model


def _open_folder(config: TrainConfig, group: Communicator) -> RunFolder:
    """Rank 0 makes the folder and locks it as long as the returned object exists."""
    locks = []

    def make() -> str:
        path = make_run_folder(config.runs, config.name, config.stem, resume=config.resume)
        locks.append(lock_folder(path))
        return str(path)

    return RunFolder(Path(launch.on_rank_0(group, make)), group, *locks)


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
        reward: RewardRunner,
        judge: RewardRunner,
        controller: PatController | None = None,
    ) -> None:
        """`reward` is the reward to train on; `judge`, the task's own reward, scores evaluations."""
        self.config = config
        self.group = group = groups.world
        self.judge, self.reward = judge, reward
        if config.resume:
            self.folder = _open_folder(config, group)
            self.folder.check()
        rollout = config.rollout
        self.params = SamplingParams(
            temperature=rollout.temperature, max_tokens=rollout.max_tokens, n=rollout.group_size
        )
        schedule = config.schedule(group.size // config.tensor_parallel_size)
        self.dispatches = None
        if schedule is not None and config.dispatch not in ("auto", "on-demand", "static"):
            self.dispatches = Logged(schedule)
        self.llm = LLM(
            model,
            device=device,
            world=groups,
            tensor_parallel_size=config.tensor_parallel_size,
            schedule=self.dispatches or schedule,
            layout_policy=controller,
            draft_policy=DRAFT_POLICIES[rollout.draft_policy],
            load=False,
            **asdict(rollout.engine_config(config.seed, deterministic=config.deterministic)),
        )
        self.llm.chat_template = config.conversation.template(self.llm.tokenizer)
        launch.tell_engine(self.llm)
        self.trainer = Trainer(config.trainer, config.algorithm, model, temperature=rollout.temperature)
        self.limit = PromptLimit(max_tokens=rollout.max_prompt_tokens, cut=rollout.long_prompts == "cut")
        self.held_out = self._held_out_problems(task) if config.eval_every else []
        self.state = RunState(step=0, data_index=0, evaluations=[])
        if not config.resume:
            self.folder = _open_folder(config, group)  # late, so that an error above leaves no empty folder
        launch.end_on_signals(self._last_words)
        if group.rank == 0:
            print(f"run: {self.folder.path}", file=sys.stderr, flush=True)
            trained, everything = self.trainer.num_parameters
            print(f"parameters: {trained:,} of {everything:,} are trained", file=sys.stderr, flush=True)
        self.journal = Journal(self.folder.path / "journal", group, whole_shares=config.deterministic)
        self.collector = Collector(
            llm=self.llm,
            task=task,
            algorithm=config.algorithm,
            reward=reward,
            group=group,
            params=self.params,
            prompts_per_step=rollout.prompts_per_step,
            limit=self.limit,
            journal=self.journal,
        )
        self.layouts = RolloutLayouts(controller, self.collector)

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
        self.llm.close()
        self.journal.close()

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
        self.folder.replace("config.json", json.dumps(_as_json(self.config), indent=2) + "\n")
        for option in ("reward", "task", "algo", "dispatch", "layout_policy"):
            if file := source_of(str(getattr(self.config, option))):
                self.folder.copy(file, f"{CODE}/{option}-{file.name}")
        self.layouts.begin(self.state.data_index, keep_weights=False)
        self._sync_weights()
        self.tracker = Tracker(self.folder, self.config)
        if not self.config.resume and self.config.eval_every:
            self.tracker.log(self.state.step, self._evaluate())
        began, first, on_terminal = time.perf_counter(), self.state.step, sys.stderr.isatty()
        with tqdm(
            total=self.config.steps,
            initial=first,
            desc=f"step {first}/{self.config.steps}",
            bar_format="{desc} {bar}",
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
            f"{'-' if speed is None else round(speed * self.group.size)} tokens/s ETA {tqdm.format_interval(eta_s)}"
        )

    def _train_step(self) -> dict[str, float]:
        began = time.perf_counter()
        regroup_s = self.layouts.begin(self.state.data_index, keep_weights=True)  # after evaluations
        num_found = self.journal.num_found
        moves = self._moves()
        if self.dispatches is not None:
            self.dispatches.log.clear()  # those of an evaluation
        rollout_began = time.monotonic()
        rollout = self._roll_out()
        updated = time.perf_counter()
        moves = {name: count - moves[name] for name, count in self._moves().items()}
        heard, steps = self._hear_replicas(rollout, moves)
        metrics = rollout.metrics | heard
        metrics["rollout/num_journaled"] = float(self.journal.num_found - num_found)
        self.llm.sleep()
        if rollout.experiences:
            metrics |= self.trainer.update(rollout.experiences)
        self.llm.wake_up()
        metrics["timing_s/update_actor"] = time.perf_counter() - updated
        self.state.step += 1
        self.state.data_index = rollout.next_index
        samples = [_sample(one) for one in rollout.groups[:SAMPLES_PER_STEP]]
        self._write_rollout(rollout, samples, steps, rollout_began)
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
            num_tokens = sum(len(c.token_ids) for g in rollout.groups for c in g.completions)
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
        with tqdm(total=expected, desc=name, unit="seq", leave=False, position=1, disable=hidden) as progress:

            def show(finished: Finished) -> None:
                progress.update()

            yield show

    def _moves(self) -> dict[str, int]:
        """This rank's counts of KV moves and preemptions since the run's start."""
        replica = self.llm.replica
        counts = {f"rollout/{name}": getattr(replica.kv_moves, name) for name in KV_MOVES}
        return counts | {"rollout/num_preemptions": replica.scheduler.num_preemptions}

    def _hear_replicas(self, rollout: Rollout, moves: dict[str, int]) -> tuple[dict[str, float], list[StepRecord]]:
        """Returns metrics, `moves` summed over the replicas' first ranks among them, and the steps of all replicas."""
        leads = any(replica.ranks[0] == self.group.rank for replica in self.llm.layout.replicas)
        # In all nested layouts the first rank of replica i is rank i.
        led = [step for step in rollout.steps if step.replica_id == self.group.rank]
        mine = (moves if leads else dict.fromkeys(moves, 0), led)
        everyone = launch.gather(self.group, mine, tuple[dict[str, int], list[StepRecord]])
        steps = [step for _, part in everyone for step in part]
        metrics = {name: float(sum(counts[name] for counts, _ in everyone)) for name in moves}
        if self.llm.config.drafter != "none":
            metrics |= {f"rollout/{name}": value for name, value in draft_metrics(steps).items()}
        return metrics | self.layouts.metrics(), steps

    def _sync_weights(self) -> None:
        """Copies the trainer's weights to the engine. Ranks' checksums must be equal; the journal gets the checksum."""
        checksum = self.llm.update_weights(self.trainer.named_weights(), version=self.state.step)
        everyone = self.group.all_gather_bytes(checksum.to_bytes(8, "little"))
        others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if others:
            raise RuntimeError(f"weights differ after the update: ranks {others} have other checksums than rank 0")
        self.journal.weights = checksum

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
            )
        self.state.evaluations.append(metrics["val-core/pass@1"])
        if self.state.step == 0:
            self.folder.append("metrics.jsonl", {"training/global_step": 0, **metrics})
        return metrics

    # -- files

    def _write_rollout(
        self, rollout: Rollout, samples: list[dict[str, Any]], steps: list[StepRecord], began: float
    ) -> None:
        """Times in the files are seconds (in the timeline: microseconds) since `began`, a time of `time.monotonic`."""
        if not self.folder.is_writer:
            return
        step = {"training/global_step": self.state.step}
        everyone = [one for group in rollout.groups for one in group.completions]
        lengths = {
            "lengths": [len(one.token_ids) for one in everyone],
            "finish_reasons": [one.finish_reason for one in everyone],
        }
        self.folder.append("lengths.jsonl", {**step, **lengths, "digest": _digest(rollout)})
        self.folder.append("samples.jsonl", *({**step, **sample} for sample in samples))
        rows = ({**step, **asdict(one), "start": one.start - began} for one in steps)
        self.folder.append("rollout_steps.jsonl", *rows)
        self.folder.replace("timeline.json", json.dumps(chrome_trace(steps, rollout.marks, origin=began)))
        if self.llm.rollout is not None and (coordinator := self.llm.rollout.coordinator) is not None:
            clock = coordinator.monotonic_time
            log = [*self.layouts.log, *(self.dispatches.log if self.dispatches else ())]
            rows = ({**step, **asdict(one), "now": clock(one.now) - began} for one in log)
            self.folder.append("decisions.jsonl", *rows)

    def _save(self) -> None:
        """Publishes a resume point together with a Hugging Face checkpoint."""

        def write_own(path: Path) -> None:
            save_tensors(torch.get_rng_state(), path / f"rng-{self.group.rank}.pt")
            if self.folder.is_writer:
                (path / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.state)) + b"\n")

        def write_model(path: Path) -> None:
            self.trainer.save_pretrained(path / "huggingface")

        writes = [self.trainer.save_checkpoint, write_model, write_own]
        self.folder.publish(self.state.step, writes, self.config.keep_checkpoints)
        self.journal.clear()

    def _resume(self) -> None:
        path = last_published(self.folder.path)
        self.trainer.load_checkpoint(path)
        torch.set_rng_state(torch.load(path / f"rng-{self.group.rank}.pt", weights_only=True))
        self.state = read_json(path / "run.json", RunState)
        if self.state.step > self.config.steps:
            raise ValueError(f"steps={self.config.steps}: the run is at step {self.state.step} already; raise --steps")
        self.folder.truncate(self.state.step, STEP_FILES)
        self.journal.recover(self.state.step)
        self.layouts.recall(self.folder.path / "lengths.jsonl")
        self.group.barrier()

    def _summary(self, start: float) -> dict[str, Any]:
        figures: list[str] = []
        if self.folder.is_writer:
            from experiments.comparison.machine import this_tier
            from experiments.figures import draw_run  # matplotlib takes half a second, and only one rank draws

            with self.folder.writing("figures"):
                figures = [str(path) for path in draw_run(self.folder.path, this_tier())]
        checkpoint = self.folder.latest()
        return {
            "experiment": "train",
            "algo": self.config.algo,
            "task": self.config.task,
            "eval_before": self.state.evaluations[0] if self.state.evaluations else None,
            "eval_after": self.state.evaluations[-1] if self.state.evaluations else None,
            "steps": self.state.step,
            "minutes": round((time.perf_counter() - start) / 60, 2),
            "run_dir": str(self.folder.path),
            "model": str(checkpoint / "huggingface") if checkpoint else None,
            "figures": figures,
        }


def _is_due(every: int, step: int, is_last: bool) -> bool:
    return every > 0 and (is_last or step % every == 0)


def _digest(rollout: Rollout) -> str:
    """Digest of all tokens sampled in the step: equal digests mean equal rollouts."""
    tokens = [completion.token_ids for group in rollout.groups for completion in group.completions]
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def _sample(group: Group) -> dict[str, Any]:
    completion = group.completions[0]
    return {
        **group.problem.columns,
        "prompt": group.problem.prompt,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "reward": group.rewards[0],
    }
