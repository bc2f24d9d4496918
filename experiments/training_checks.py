"""What is checked before a run of `train.py` begins, and the model that it begins with."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from algos.pretrained import check_folder
from algos.publish import as_recorded, read_record
from algos.tasks.arithmetic import ArithmeticTask
from algos.tasks.task import Demonstrated, Task
from algos.warmstart import demonstrate, new_config, template_of, tokenizer_of, warm_start
from algos.warmstart_config import MODEL_SIZES, WarmStartConfig
from engines.adapter_config import checkpoint_folder
from engines.config import ModelConfig, longest_sequence
from engines.json_files import flat, read_json
from engines.models.tokenizer import load_tokenizer
from engines.native.wait_policy import watch_cores
from engines.parallel.sharding import check_shardable
from engines.replica.preflight import check_engine, usable_device
from experiments import launch
from experiments.config import TrainConfig

MAY_CHANGE = (
    *("resume", "name", "runs", "steps", "eval_every", "save_every", "keep_checkpoints", "figures"),
    *("reward_limits", "environment_limits"),
    *("wandb", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags"),
    *("rank_timeout_s", "dispatch", "chunk_tokens", "follow_ups", "spread", "order"),
    *("layout_policy", "pat_profile", "pat", "speculation", "predict_lengths", "heddle", "weights"),
)

_STEP_TOKENS, _LEAST_BATCH = 2048, 4
"""Of a step of a warm start: tokens that it has at most, on average, and problems that it has at least."""


def check_same_run(config: TrainConfig) -> None:
    """Raises ValueError if a resumed run has other options than when it was started, except those in MAY_CHANGE."""
    assert config.name is not None
    path = config.runs / config.name / "config.json"
    # An option that did not exist when the run was started counts as its present default.
    before = flat(as_json(replace(TrainConfig(), algorithm=config.algorithm))) | {
        f"{owner}.{one.name}": one.default
        for owner in ("algorithm", "task_options")
        for one in fields(getattr(config, owner))
        if one.default is not MISSING
    }
    before |= flat(read_json(path, dict[str, Any]))
    differ = [
        f"{name}={value} now, {before.get(name)} in {path}"
        for name, value in flat(as_json(config)).items()
        if name.split(".")[0] not in MAY_CHANGE and value != before.get(name)
    ]
    if differ:
        raise ValueError(
            f"resume: {'; '.join(differ)}; go on with the same options (only {', '.join(MAY_CHANGE)} may change)"
        )


def as_json(config: TrainConfig) -> dict[str, Any]:
    options = as_recorded(config)
    del options["rollout"]["engine"]
    options["rollout"] |= config.rollout.engine.as_given()
    return options | {"ranks": launch.num_ranks()}


def check_rollouts(config: TrainConfig) -> ModelConfig:
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


def check_prompts(config: TrainConfig, task: Task, sizes: ModelConfig) -> None:
    """Raises ValueError if the first prompts cannot be rendered with the model's chat template."""
    if config.is_embedded_model:
        tokenizer = tokenizer_of(config.model)  # type: ignore[arg-type]
    else:
        tokenizer = load_tokenizer(checkpoint_folder(config.model), sizes)
    template = config.conversation.template(tokenizer)
    for problem in [task.train_problem(0), *task.held_out_problems(1)]:
        template.encode(problem.prompt, f"problem {problem.uid}")


def prepare_model(config: TrainConfig, threads: int) -> Path:
    """The policy's checkpoint, warm-started when it is an embedded one."""
    model = checkpoint_folder(config.model)
    if config.is_embedded_model:
        name, recipe = recipe_of(config)
        model = config.runs / "models" / name
        record = read_record(model)
        if record is not None and record.get("warm_start") != as_recorded(recipe):
            raise ValueError(
                f"model={config.model!r}: {model} was made with another recipe; use it by --model {model}, or remove it"
            )
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # the host's other ranks wait for the first
        watch_cores()
        warm_start(model, recipe)
        torch.set_num_threads(threads)
    return model


def recipe_of(config: TrainConfig) -> tuple[str, WarmStartConfig]:
    """Returns the folder's name of an embedded model, and what makes it: demonstrations of the run's task, fewer in a
    step where they are long, or, where it has none, of additions of any length, as for arithmetic itself."""
    task: Task = config.task_options
    plain = WarmStartConfig(size=config.model)  # type: ignore[arg-type]
    if not isinstance(task, Demonstrated) and launch.rank() == 0:
        print(
            f"model {config.model}: --task {config.task} has no demonstrations, so the model has learned additions; "
            "give --model, or the task a method `demonstration` (docs/training.md)",
            file=sys.stderr,
        )
    if isinstance(task, ArithmeticTask) or not isinstance(task, Demonstrated):
        return config.model, plain
    seed = {one.name: plain.task.seed for one in fields(config.task_options) if one.name == "seed"}
    recipe = replace(plain, task=replace(config.task_options, **seed))
    template = template_of(plain.size)
    learned = [demonstrate(template, recipe.task, index) for index in range(plain.batch_size)]
    num_tokens = sum(len(one.tokens) for one in learned)
    fitting = plain.batch_size * _STEP_TOKENS // num_tokens
    recipe = replace(recipe, batch_size=min(plain.batch_size, max(_LEAST_BATCH, fitting)))
    digest = hashlib.blake2b(repr((as_recorded(recipe), learned)).encode(), digest_size=4).hexdigest()
    return f"{config.model}-{config.task.rpartition(':')[2]}-{digest}", recipe
