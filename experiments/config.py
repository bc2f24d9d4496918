"""The main job's configuration: nested dataclasses, every field documented in `--help`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from msgspec import Meta

from algos.dapo import DAPO
from algos.deepspeed_config import TrainerConfig
from algos.grpo import GRPO
from algos.rewards.runner import RewardConfig
from algos.tasks.arithmetic import ArithmeticTask
from algos.tasks.gsm8k import Gsm8kTask
from algos.tasks.task import Task
from algos.warmstart_config import MODEL_SIZES
from engines.config import EngineConfig
from engines.constraints import Count, Positive, check_fields
from experiments.engine_options import MIB, EngineOptions

Flat = tyro.conf.arg(name="")
_WHOLE = "training does not apply it, so the ratios would be wrong"
ALGORITHMS: dict[str, type[GRPO] | type[DAPO]] = {"grpo": GRPO, "dapo": DAPO}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled in training."""

    prompts_per_step: Count = 32
    """Prompts (groups) that one training step learns from."""
    group_size: Annotated[int, Meta(ge=2, le=2**31, description="an integer of at least 2")] = 16
    """Completions per prompt."""
    max_tokens: Count = 340
    """Most tokens per completion."""
    temperature: Positive = 1.0
    """Sampling temperature; training divides its logits by the same. Greedy groups are all alike, so not 0."""
    top_k: Annotated[int, Meta(ge=-1, le=-1, description=f"-1: {_WHOLE}")] = -1
    """Must stay off: training computes log-probs over the whole vocabulary."""
    top_p: Annotated[float, Meta(ge=1, le=1, description=f"1.0: {_WHOLE}")] = 1.0
    """Must stay off, as top_k."""
    min_p: Annotated[float, Meta(ge=0, le=0, description=f"0.0: {_WHOLE}")] = 0.0
    """Must stay off, as top_k."""
    engine: Annotated[EngineOptions, Flat] = field(default_factory=lambda: EngineOptions(kv_cache_bytes=256 * MIB))

    def __post_init__(self) -> None:
        check_fields(self, "rollout.")

    def engine_config(self, seed: int, *, deterministic: bool = False) -> EngineConfig:
        """In a deterministic run nothing may depend on what was timed, as the preemption "auto" does."""
        preemption = "recompute" if deterministic else self.engine.preemption
        return replace(self.engine, seed=seed, preemption=preemption)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Rolls out a task with the paged engine and trains on it with DeepSpeed."""

    algo: Literal["grpo", "dapo"] = "grpo"
    """Which algorithm; its own options follow below."""
    task: Literal["arithmetic", "gsm8k"] = "arithmetic"
    """Worked multi-digit additions, or GSM8K from `--data`."""
    data: Path | None = None
    """GSM8K: a JSONL file with `question` and `answer`."""
    held_out_data: Path | None = None
    """GSM8K: a second such file to evaluate on; by default a part of `--data` is held out."""
    model: str = "tiny"
    """A Hugging Face directory, or the name of an embedded model that is warm-started once under runs/models."""
    name: str | None = None
    """The run's folder under runs/; by default a new one named after task and algorithm."""
    runs: Path = Path("runs")
    """Where run folders and embedded models lie."""
    ranks: Count = 1
    """Processes to start; under torchrun, its own number holds."""
    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the model in the rollout engine, in shards; the rest is data parallel."""
    dispatch: Literal["auto", "on-demand", "static"] = "auto"
    """How sequences get to replicas: on-demand, as they have room, under a coordinator on rank 0; static, sequence i to
    replica i mod their number. auto: on-demand where there are several replicas, unless `--deterministic`."""
    resume: bool = False
    """Go on with the run called `--name`, or the newest without a name, from its last published checkpoint."""
    steps: Count = 80
    """Training steps."""
    seed: int = 0
    """Of the problems' order and of every sampled token."""
    deterministic: bool = False
    """Only deterministic kernels, static dispatch, KV of preempted sequences computed again, and rewards after the
    rollout: nothing depends on timing, and two runs give the same metrics bit for bit, but for times."""
    eval_every: Count = 10
    """Steps between evaluations on held-out problems, beside one before the first step and one after the last."""
    eval_problems: Count = 128
    """Held-out problems."""
    eval_samples: Count = 4
    """Completions of each; pass@1 is the mean over them, pass@k for k up to them."""
    save_every: Count = 20
    """Steps between resume points; one follows the last step in any case."""
    keep_checkpoints: Count = 2
    """Resume points kept; older ones are deleted."""
    reward: str | None = None
    """What to train on instead of the task's reward: "package.module:function" or "file.py:function", with TRL's
    signature. Evaluation keeps the task's."""
    # The coordinator's heartbeat is of 1 s; timers take no infinity.
    rank_timeout_s: Annotated[float, Meta(ge=2, le=1e6, description="from 2 to 1e6 (seconds)")] = 1800.0
    """Longest that a rank waits for another, seconds: the run then ends and names who was waited for."""
    wandb: Literal["auto", "off"] = "auto"
    """auto: as wandb's own settings and environment say, and offline in the run folder while nobody is logged in."""
    reward_limits: Annotated[RewardConfig, tyro.conf.arg(name="reward-limits")] = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: Annotated[TrainerConfig, Flat] = field(default_factory=TrainerConfig)
    algorithm: Annotated[GRPO | DAPO, Flat, tyro.conf.AvoidSubcommands] = field(default_factory=GRPO)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if (self.task == "gsm8k") != (self.data is not None):
            fix = "give --data PATH to a JSONL file" if self.data is None else "only --task gsm8k reads --data"
            raise ValueError(f"data={self.data}: does not go with task={self.task!r}; {fix}")
        if self.held_out_data is not None and self.data is None:
            raise ValueError(f"held_out_data={self.held_out_data}: only --task gsm8k with --data reads it")
        engine, free = self.rollout.engine, "how much memory and disk is free"
        for name, value, depends_on, chosen, fix in (
            ("dispatch", "on-demand", "timing", self.dispatch, "static"),
            ("rollout.preemption", "swap", free, engine.preemption, "recompute"),
            ("rollout.kv_cache_mib", "auto", free, engine.kv_cache_bytes, "a number"),
        ):
            if self.deterministic and chosen == value:
                raise ValueError(
                    f"{name}={value!r}: depends on {depends_on}, which --deterministic rules out; give {fix}, or "
                    "leave --deterministic out"
                )
        sequences = self.rollout.prompts_per_step * self.rollout.group_size
        if self.trainer.mini_batch_size > sequences:
            raise ValueError(
                f"mini_batch_size={self.trainer.mini_batch_size}: more than a step's {sequences} sequences "
                f"(rollout.prompts_per_step={self.rollout.prompts_per_step} x "
                f"rollout.group_size={self.rollout.group_size}); lower it or raise those"
            )

    @property
    def stem(self) -> str:
        """What the folder of a run without a name begins with."""
        return f"{self.task}-{self.algo}"

    @property
    def is_on_demand(self) -> bool:
        """Where there are several replicas; one alone has nothing to be dispatched to."""
        return not self.deterministic and self.dispatch != "static"

    @property
    def is_embedded_model(self) -> bool:
        return self.model in MODEL_SIZES and not Path(self.model).exists()


def make_task(config: TrainConfig) -> Task:
    if config.task == "gsm8k":
        assert config.data is not None
        held_out = str(config.held_out_data) if config.held_out_data else None
        return Gsm8kTask(path=str(config.data), held_out_path=held_out, seed=config.seed)
    return ArithmeticTask(seed=config.seed)


def parse(arguments: list[str]) -> TrainConfig:
    """The command line's configuration. A wrong one ends the process with code 2."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--algo", choices=list(ALGORITHMS), default="grpo")
    known, _ = early.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    trainer = TrainerConfig(learning_rate=2e-4, mini_batch_size=256, max_grad_norm=1.0, zero_stage=1, weight_decay=0.0)
    default = TrainConfig(algo=known.algo, algorithm=ALGORITHMS[known.algo](), trainer=trainer)
    return tyro.cli(TrainConfig, default=default, args=arguments)
