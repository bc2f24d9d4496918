"""The main job's configuration: nested dataclasses, every field documented in `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro
from msgspec import Meta

from algos.algorithm import Algorithm
from algos.cispo import CISPO
from algos.dapo import DAPO
from algos.deepspeed_config import TrainerConfig
from algos.environments.protocol import EnvironmentConfig
from algos.grpo import GRPO
from algos.gspo import GSPO
from algos.reinforce_pp import ReinforcePlusPlus
from algos.rewards.runner import RewardConfig
from algos.rloo import RLOO
from algos.tasks.arithmetic import ArithmeticTask
from algos.tasks.gsm8k import Gsm8kTask
from algos.tasks.jsonl import JsonlTask
from algos.tasks.lookup import LookupTask
from algos.tasks.task import Task
from algos.warmstart_config import MODEL_SIZES
from engines.config import EngineConfig
from engines.constraints import Count, Finite, Positive, WholeNumber, check_fields
from engines.coordination.policies import OnDemand, SchedulePolicy, Static
from engines.relay.message import dtype_of
from engines.speculation.marginal_gain import check_draft_policy
from experiments import launch
from experiments.chat_options import ChatOptions
from experiments.engine_options import DRAFT_POLICIES, MIB, DraftPolicyName, EngineOptions
from experiments.grouped_help import print_help
from experiments.heddle_options import OF_PREDICTOR, HeddleConfig
from experiments.policies import IN_CHUNKS, ChunkFields, layout_controller, own_class, schedule_policy
from research.pat.controller import PatOptions
from research.seer.context_aware import ContextOptions

Flat = tyro.conf.arg(name="")
FolderName = Annotated[
    str, Meta(pattern=r"^(?!\.{1,2}$)[^/\0]{1,200}$", description="one folder name: up to 200 characters, no '/'")
]
WandbName = Annotated[str, Meta(min_length=1, max_length=128, description="text of 1 to 128 characters")]
WandbTag = Annotated[str, Meta(min_length=1, max_length=64, description="text of 1 to 64 characters")]
WandbProject = Annotated[
    str, Meta(pattern=r"^[^/\\#?%:]{1,128}$", description="a name of 1 to 128 characters, none of them one of /\\#?%:")
]
_WHOLE = "training does not apply it, so the ratios would be wrong"
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO(),
    "dr-grpo": GRPO(normalise_std=False, loss_aggregation="constant-length"),
    "dapo": DAPO(),
    "gspo": GSPO(),
    "cispo": CISPO(),
    "rloo": RLOO(),
    "reinforce++": ReinforcePlusPlus(),
}
TASKS: dict[str, type[Task]] = {
    "arithmetic": ArithmeticTask,
    "gsm8k": Gsm8kTask,
    "jsonl": JsonlTask,
    "lookup": LookupTask,
}
OF_ALGORITHM = (
    *("num_epochs", "max_sampling_rounds", "needs_reference"),
    *("keep_group", "shape_rewards", "advantages", "loss_mask", "loss"),
)
OF_TASK = ("reward", "train_problem", "held_out_problems")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled in training."""

    prompts_per_step: Count = 32
    """Prompts (groups) that one training step learns from."""
    group_size: Annotated[int, Meta(ge=2, le=2**31, description="an integer of at least 2")] = 16
    """Completions per prompt."""
    max_tokens: Count = 340
    """Most tokens per completion, observed ones included."""
    max_turns: Count | None = None
    """Most turns of a trajectory; None: as many as its environment takes."""
    max_prompt_tokens: Count | None = None
    """Most tokens per prompt; None: as many as the model's context has room for."""
    long_prompts: Literal["drop", "cut"] = "drop"
    """What becomes of a prompt with more: it is passed over, or its first tokens are cut off."""
    temperature: Positive = 1.0
    """Sampling temperature; training divides its logits by it, too. Not 0: greedy completions of a group are equal."""
    top_k: Annotated[int, Meta(ge=-1, le=-1, description=f"-1: {_WHOLE}")] = -1
    """Must stay off: training computes log-probs over the whole vocabulary."""
    top_p: Annotated[float, Meta(ge=1, le=1, description=f"1.0: {_WHOLE}")] = 1.0
    """Must stay off, as top_k."""
    min_p: Annotated[float, Meta(ge=0, le=0, description=f"0.0: {_WHOLE}")] = 0.0
    """Must stay off, as top_k."""
    draft_policy: DraftPolicyName = "marginal-gain"
    """What decides adaptive lengths of drafts: marginal-gain drafts as long as tokens per second are expected to rise,
    thresholds give all drafts one length by the batch size and the acceptance so far."""
    engine: Annotated[EngineOptions, Flat] = field(default_factory=lambda: EngineOptions(kv_cache_bytes=256 * MIB))

    def __post_init__(self) -> None:
        check_fields(self, "rollout.")
        if self.long_prompts == "cut" and self.max_prompt_tokens is None:
            raise ValueError("rollout.long_prompts='cut': cuts to a length; give --rollout.max-prompt-tokens")
        check_draft_policy(self.engine, DRAFT_POLICIES[self.draft_policy])

    def engine_config(self, seed: int, *, deterministic: bool = False) -> EngineConfig:
        """The engine's options. A deterministic run recomputes preempted KV: preemption "auto" depends on timing."""
        preemption = "recompute" if deterministic else self.engine.preemption
        return replace(self.engine, seed=seed, preemption=preemption)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ChunkFields):
    """Rolls out a task with the paged engine and trains on it with DeepSpeed."""

    algo: str = "grpo"
    """grpo, dr-grpo, dapo, gspo, cispo, rloo, reinforce++, or a class of your own as FILE.py:Class (docs/training.md).
    The options of the algorithm that is named here are below."""
    task: str = "arithmetic"
    """arithmetic: worked multi-digit additions. gsm8k: word problems from --data. jsonl: your own data. lookup: queries
    to a SQLite table, in trajectories. Or a class of your own as FILE.py:Class (docs/training.md). The options of the
    task that is named here are below."""
    model: str = "tiny"
    """A Hugging Face folder, a name of the hub (Qwen/Qwen3-0.6B: from its local cache, or downloaded), or the name of
    an embedded model that is warm-started once under runs/models: on demonstrations of the task, or else on
    additions."""
    name: FolderName | None = None
    """The run's folder under runs/; by default a new one named after task and algorithm."""
    runs: Path = Path("runs")
    """Folder of all run folders and embedded models."""
    ranks: Count = 1
    """Processes to start; under torchrun, its number of processes applies instead."""
    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the model in the rollout engine, in shards; the rest is data parallel. With
    `--layout-policy` the policy chooses it."""
    dispatch: str = "auto"
    """How sequences get to replicas. on-demand: a coordinator on rank 0 sends them when replicas have room. static:
    sequence i to replica i modulo their number. group-static: whole groups to random replicas. divided: in chunks that
    go on anywhere. seer: these with the longest groups first; a chunk has by default an eighth of
    `--rollout.max-tokens`, or a block. heddle: trajectories by their predicted lengths (docs/heddle.md). auto:
    on-demand for several replicas unless `--deterministic`. Or a class of your own as FILE.py:Class
    (docs/rollouts.md)."""
    layout_policy: str = "none"
    """pat: the rollout begins in the tensor-parallel size that is expected to be the best for its batch, and changes to
    larger ones while the batch shrinks (PAT). heddle: before each rollout, replicas of the sizes that promise
    the earliest end by the lengths of the last one (docs/heddle.md). Or a class of your own as FILE.py:Class
    (docs/pat.md). All need `--pat-profile`, several ranks, and a dispatch by a coordinator: on-demand, heddle, or your
    own."""
    pat_profile: Path | None = None
    """What `experiments/pat_profile.py` has measured with the same model, engine options and ranks."""
    pat: PatOptions = field(default_factory=PatOptions)
    predict_lengths: bool = False
    """Predict the lengths of trajectories with any dispatch: a policy of your own sees them, and metrics say how right
    they are. `--dispatch heddle` always does."""
    heddle: HeddleConfig = field(default_factory=HeddleConfig)
    speculation: Literal["none", "specactor"] = "none"
    """specactor: some replicas only draft, and run ahead of those that verify, in rollouts for which that promises more
    tokens per second (SpecActor). Needs several replicas, a draft model and dispatch on demand (docs/specactor.md)."""
    weights: Literal["direct", "relay"] = "direct"
    """How new weights get to the rollout engine. direct: each rank copies whole parameters, which ZeRO-3 gathers.
    relay: each rank pushes its own part to a relay on rank 0's host, and pulls what has changed in its shard
    (docs/relay.md)."""
    resume: bool = False
    """Continue the run called `--name`, or the newest run without a name, from its last published checkpoint."""
    steps: Count = 80
    """Training steps."""
    seed: int = 0
    """Seed of the problems' order and of every sampled token."""
    deterministic: bool = False
    """Use deterministic kernels and static dispatch, recompute the KV of preempted sequences, and score after the
    rollout. Nothing then depends on timing: two runs give the same metrics bit for bit, except times."""
    eval_every: WholeNumber = 10
    """Steps between evaluations on held-out problems, besides one before the first step and one after the last; 0:
    none at all."""
    eval_problems: Count = 128
    """Held-out problems per evaluation."""
    eval_samples: Count = 4
    """Completions per held-out problem, from which pass@1 and pass@k (k = 2, 4, ... up to this) are estimated."""
    eval_threshold: Finite = 1.0
    """A completion counts as right, in pass@k, when its reward reaches this."""
    save_every: WholeNumber = 20
    """Steps between resume points, besides one after the last step; 0: none at all, and the model is not kept."""
    keep_checkpoints: Count = 2
    """Resume points kept; older ones are deleted."""
    figures: bool = True
    """Draw the run when it ends, which takes a second."""
    reward: str | None = None
    """Reward function to train on instead of the task's: "package.module:function" or "file.py:function", with TRL's
    signature. Evaluation has the means of both; pass@k is by the task's, if it has one."""
    environment: str | None = None
    """What completions talk to between their turns, as trajectories: a class, FILE.py:Class, or tools, FILE.py:f,g
    (docs/trajectories.md); by default the task's, if it has one. A reward of its own takes the place of the task's."""
    # The coordinator's heartbeat is 1 s; timers do not accept infinity.
    rank_timeout_s: Annotated[float, Meta(ge=2, le=1e6, description="from 2 to 1e6 (seconds)")] = 1800.0
    """Most seconds that a rank waits for another one; after that the run ends and names the missing ranks."""
    wandb: Literal["auto", "off"] = "auto"
    """auto: use wandb's own settings and environment; offline in the run folder if nobody is logged in."""
    wandb_project: WandbProject | None = None
    """wandb's project; otherwise WANDB_PROJECT, or curtail."""
    wandb_entity: WandbName | None = None
    """wandb's user or team."""
    wandb_group: WandbName | None = None
    """Name that all runs of an experiment share; wandb groups them by it."""
    wandb_tags: tuple[WandbTag, ...] = ()
    """Tags of the run in wandb."""
    reward_limits: Annotated[RewardConfig, tyro.conf.arg(name="reward-limits")] = field(default_factory=RewardConfig)
    environment_limits: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    conversation: Annotated[ChatOptions, Flat] = field(default_factory=ChatOptions)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: Annotated[TrainerConfig, Flat] = field(
        default_factory=lambda: TrainerConfig(learning_rate=2e-4, max_grad_norm=1.0, zero_stage=1, weight_decay=0.0)
    )
    # These two are of the class that `algo` and `task` name, whose type `parse` puts here.
    algorithm: Annotated[Any, Flat] = field(default_factory=GRPO)
    task_options: Annotated[Any, Flat] = field(default_factory=ArithmeticTask)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if getattr(self.task_options, "seed", self.seed) != self.seed:
            object.__setattr__(self, "task_options", replace(self.task_options, seed=self.seed))
        if self.environment is None:
            object.__setattr__(self, "environment", getattr(self.task_options, "environment", None))
        if self.reward is None and self.task_options.reward is None and self.environment is None:
            raise ValueError(
                f"task={self.task!r}: has no reward of its own; give --reward FILE.py:function, or (with --task jsonl) "
                "--answer-column, the column of the right answers"
            )
        engine, free = self.rollout.engine, "how much memory and disk is free"
        for name, value, depends_on, chosen, fix in (
            ("dispatch", self.dispatch, "timing", self.dispatch not in ("auto", "static") and self.dispatch, "static"),
            ("rollout.draft_server", True, "timing", engine.draft_server, "no draft server"),
            ("rollout.preemption", "swap", free, engine.preemption, "recompute"),
            ("rollout.kv_cache_mib", "auto", free, engine.kv_cache_bytes, "a number"),
            ("rollout.draft_lengths", "adaptive", "timing", engine.drafter != "none" and engine.draft_lengths, "fixed"),
        ):
            if self.deterministic and chosen == value:
                raise ValueError(
                    f"{name}={value!r}: depends on {depends_on}, which --deterministic rules out; give {fix}, or "
                    "leave --deterministic out"
                )
        self._check_layout_policy()
        self._check_speculation()
        self._check_environment()
        self._check_heddle()
        if self.weights == "relay":
            if self.trainer.lora_rank:
                raise ValueError(
                    f"weights='relay': with lora_rank={self.trainer.lora_rank} no rank has the merged weights; give "
                    "direct"
                )
            dtype_of("rollout.dtype", self.rollout.engine.dtype)
        for name in ("wandb_project", "wandb_entity", "wandb_group", "wandb_tags"):
            if self.wandb == "off" and (value := getattr(self, name)):
                raise ValueError(f"{name}={value!r}: has no effect with wandb='off'; leave one of them out")
        if self.dispatch in IN_CHUNKS:
            self.chunk_options()
        for one in fields(ChunkFields):
            value, of = getattr(self, one.name), ("seer",) if one.name == "order" else IN_CHUNKS
            if value != one.default and self.dispatch not in of:
                raise ValueError(
                    f"{one.name}={value!r}: has no effect with --dispatch {self.dispatch}; give {', '.join(of)}, or "
                    "leave it out"
                )
        if self.dispatch not in ("auto", "heddle"):
            self._schedule(self.dispatch)
        sequences = self.rollout.prompts_per_step * self.rollout.group_size
        if self.trainer.mini_batch_size is not None and self.trainer.mini_batch_size > sequences:
            raise ValueError(
                f"mini_batch_size={self.trainer.mini_batch_size}: more than a step's {sequences} sequences "
                f"(rollout.prompts_per_step={self.rollout.prompts_per_step} x "
                f"rollout.group_size={self.rollout.group_size}); lower it or raise those"
            )

    def _check_environment(self) -> None:
        max_turns, limits = self.rollout.max_turns, self.environment_limits
        if self.environment is None and (max_turns is not None or limits != EnvironmentConfig()):
            name = "environment_limits" if max_turns is None else f"rollout.max_turns={max_turns}"
            raise ValueError(f"{name}: is for trajectories; give --environment FILE.py:Class, or leave it out")
        if self.environment is not None and self.rollout.long_prompts == "cut":
            raise ValueError(
                "rollout.long_prompts='cut': what an environment observes is rendered behind a whole prompt; give drop"
            )

    def _check_heddle(self) -> None:
        is_dispatch = self.dispatch == "heddle"
        used = OF_PREDICTOR if self.predict_lengths else ()
        without = replace(HeddleConfig(), **{name: getattr(self.heddle, name) for name in used})
        if not is_dispatch and self.heddle != without:
            raise ValueError(f"heddle: has no effect with --dispatch {self.dispatch}; give heddle, or leave it out")
        asked = "dispatch='heddle'" if is_dispatch else "predict_lengths=True"
        if self.predicts_lengths and self.environment is None:
            raise ValueError(
                f"{asked}: is for trajectories; give --environment FILE.py:Class, a task that has one, or leave it out"
            )
        if self.predicts_lengths and self.deterministic:
            raise ValueError(f"{asked}: depends on timing, which --deterministic rules out; leave it out")

    def _check_layout_policy(self) -> None:
        policy = self.layout_policy
        if policy not in ("none", "pat", "heddle"):
            layout_controller("layout_policy", policy, ["none", "pat", "heddle"])
        if (policy != "none") != (self.pat_profile is not None):
            raise ValueError(
                f"layout_policy={policy!r}, pat_profile={self.pat_profile}: a layout policy gets a profile; "
                "give both, or neither"
            )
        engine, tp_size = self.rollout.engine, self.tensor_parallel_size
        for name, value, chosen, fix in (
            ("deterministic", True, self.deterministic, "leave it out"),
            ("dispatch", "static", self.dispatch, "it binds sequences to replicas of one layout; give 'on-demand'"),
            ("dispatch", "group-static", self.dispatch, "it does, too; give 'on-demand'"),
            ("tensor_parallel_size", tp_size, None if tp_size == 1 else tp_size, "leave it out: the policy chooses it"),
            ("rollout.kv_cache_mib", "auto", engine.kv_cache_bytes, "give a number, as the profile was made with"),
        ):
            if policy != "none" and chosen == value:
                raise ValueError(f"{name}={value!r}: does not go with layout_policy={policy!r}; {fix}")
        if self.pat_profile is not None and not self.pat_profile.is_file():
            raise ValueError(f"pat_profile={str(self.pat_profile)!r}: is no file; experiments/pat_profile.py makes one")
        if policy != "pat" and self.pat != PatOptions():
            raise ValueError(f"pat: has no effect with --layout-policy {policy}; give pat, or leave it out")

    def _check_speculation(self) -> None:
        if self.speculation == "none":
            return
        for name, value, chosen, fix in (
            ("deterministic", True, self.deterministic, "drafts depend on timing; leave it out"),
            ("layout_policy", self.layout_policy, self.layout_policy != "none" and self.layout_policy, "give 'none'"),
            ("dispatch", "static", self.dispatch, "draft ranks need a coordinator; give 'on-demand'"),
            ("rollout.draft_mode", "naive", self.rollout.engine.draft_mode, "it is not planned for; give 'filled'"),
        ):
            if chosen == value:
                raise ValueError(f"{name}={value!r}: does not go with speculation='specactor'; {fix}")
        if self.rollout.engine.drafter != "model":
            raise ValueError(
                f"rollout.drafter={self.rollout.engine.drafter!r}: speculation='specactor' drafts with a small model; "
                "give --rollout.drafter model --rollout.draft-model FOLDER"
            )

    @property
    def stem(self) -> str:
        """How the folder names of runs without a name begin."""
        return "-".join(name.rpartition(":")[2] for name in (self.task, self.algo))

    @property
    def predicts_lengths(self) -> bool:
        return self.predict_lengths or self.dispatch == "heddle"

    def schedule(self, num_ranks: int) -> SchedulePolicy | None:
        """Returns the policy of a coordinator; None without one, as for one replica that gets all sequences at once.
        Trajectories on several ranks always have one."""
        if self.dispatch not in ("auto", "static", "on-demand"):
            return self._schedule(self.dispatch)()
        is_static = self.deterministic or self.dispatch == "static"
        is_on_demand = num_ranks > self.tensor_parallel_size and not is_static
        if is_on_demand or self.layout_policy != "none" or self.speculation != "none":
            return OnDemand()
        if self.predict_lengths or (self.environment is not None and num_ranks > 1):
            return Static() if is_static else OnDemand()
        return None

    def _schedule(self, name: str) -> Callable[[], SchedulePolicy]:
        chunks = self.chunk_options() if name in IN_CHUNKS else ContextOptions(seed=self.seed)
        return schedule_policy("dispatch", name, chunks, others=("auto", "heddle"))

    def chunk_options(self) -> ContextOptions:
        """Returns Seer's options. Raises ValueError for a chunk below a block, or above a sequence's most tokens."""
        block_size, most = self.rollout.engine.block_size, self.rollout.max_tokens
        if most < block_size:
            raise ValueError(
                f"rollout.max_tokens={most}: --dispatch {self.dispatch} divides into chunks of at least a block of KV, "
                f"which has {block_size} tokens; raise it, lower rollout.block_size, or dispatch otherwise"
            )
        options = self.chunks(max(block_size, most // 8), seed=self.seed)
        options.check(block_size=block_size, max_tokens=most)
        return options

    @property
    def is_embedded_model(self) -> bool:
        return self.model in MODEL_SIZES and not Path(self.model).exists()


def parse(arguments: list[str]) -> TrainConfig:
    """Parses the command line. Wrong options end the process with code 2."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--algo", default="grpo")
    early.add_argument("--task", default="arithmetic")
    named, _ = early.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    try:
        kind = _config_type(named.algo, named.task, arguments)
    except ValueError as error:
        print(f"error: {launch.as_typed(str(error))}", file=sys.stderr)
        sys.exit(2)
    options: tuple[str, ...] = getattr(get_type_hints(kind)["task_options"], "options", ())
    if {"-h", "--help"} & {*arguments}:
        note = f" With --task {named.task}, unless given: {' '.join(options)}." if options else ""
        print_help(kind, partial(_group_of, kind), GROUPS, description=f"{TrainConfig.__doc__}{note}")
        sys.exit()
    markers = (tyro.conf.HelptextFromCommentsOff,)  # it reads the source of each class for comments
    return tyro.cli(kind, args=[*options, *arguments], description=TrainConfig.__doc__, config=markers)


GROUPS = ("run", "data", "model", "rollout", "optimiser", "algorithm", "wandb")
_OF_DATA = (
    "task",
    "reward",
    "reward_limits",
    "environment",
    "environment_limits",
    *(one.name for one in fields(ChatOptions)),
)
_OF_ROLLOUT = (
    "rollout",
    "weights",
    "pat",
    "predict_lengths",
    "heddle",
    "dispatch",
    "layout_policy",
    "pat_profile",
    "tensor_parallel_size",
)


def _group_of(kind: type[TrainConfig], option: str) -> str:
    """Returns the group of an option in `--help`."""
    hints, name = get_type_hints(kind), option.partition(".")[0]
    if name == "model" or name.startswith("lora_"):
        return "model"
    if name in _OF_DATA or name in _names(hints["task_options"]) - {"seed"}:
        return "data"
    if name in _OF_ROLLOUT or name in _names(ChunkFields):
        return "rollout"
    if name == "algo" or name in _names(hints["algorithm"]):
        return "algorithm"
    if name in _names(TrainerConfig):
        return "optimiser"
    return "wandb" if name.startswith("wandb") else "run"


def _config_type(algo: str, task: str, arguments: list[str]) -> type[TrainConfig]:
    """Returns `TrainConfig` with the options of this algorithm and task. Raises ValueError if one of them cannot be
    used, or `arguments` have an option of another one."""
    algorithm: Any = ALGORITHMS.get(algo) or _own("algo", algo, ALGORITHMS, OF_ALGORITHM, "algos/algorithm.py")
    of_algorithm: Any = type(algorithm) if algo in ALGORITHMS else algorithm
    of_task: Any = TASKS.get(task) or _own("task", task, TASKS, OF_TASK, "algos/tasks/task.py")
    taken = _names(TrainConfig) | _names(TrainerConfig)
    for option, name, names in (("algo", algo, _names(of_algorithm)), ("task", task, _names(of_task) - {"seed"})):
        if clash := sorted(names & taken):
            raise ValueError(f"{option}={name!r}: its field {clash[0]!r} is an option of train.py already; rename it")
        taken |= names
    owners = [(f"--algo {name}", _names(type(one))) for name, one in ALGORITHMS.items()]
    owners += [(f"--task {name}", _names(one)) for name, one in TASKS.items()]
    typed = {argument.partition("=")[0].replace("--no-", "--", 1) for argument in arguments}
    for name in sorted({name for _, names in owners for name in names} - taken - {"seed"}):
        if (option := f"--{name.replace('_', '-')}") in typed:
            whose = " and ".join(owner for owner, names in owners if name in names)
            raise ValueError(f"{option}: is an option of {whose}; name it, or leave {option} out")
    if "seed" in _names(of_task):  # the run's, not an option of its own
        seed = ("seed", tyro.conf.Suppress[int], field(default=0))
        of_task = make_dataclass(of_task.__name__, [seed], bases=(of_task,), frozen=True, kw_only=True)
    default = algorithm if algo in ALGORITHMS else MISSING
    both = [
        ("algorithm", Annotated[of_algorithm, Flat], field(default=default)),
        ("task_options", Annotated[of_task, Flat], field(default=MISSING)),
    ]
    return make_dataclass("TrainConfig", both, bases=(TrainConfig,), frozen=True, kw_only=True)


def _own(option: str, name: str, names: Iterable[str], members: tuple[str, ...], where: str) -> Any:
    own = own_class(option, name, [*names], members, where)
    if not is_dataclass(own):
        raise ValueError(
            f"{option}={name!r}: is no dataclass; put @dataclass(frozen=True, kw_only=True) above the class"
        )
    return own


def _names(kind: Any) -> set[str]:
    return {one.name for one in fields(kind) if one.init}
