"""The first part of `relay.py`: after real GRPO steps, every shard has the trainer's bits, whatever happened between.

Replicas of TP 1 pull each version, those of TP 2 every second and of TP 4 every third. In the long run the relay is
killed behind a push, the trainer starts again from its checkpoint, and a replica of TP 4 comes late.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from experiments import launch
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.turns import short
from research.workloads.shapes import SHAPES

if TYPE_CHECKING:
    from torch import Tensor

    from algos.experience import Experience
    from engines import LLM
    from engines.parallel.groups import GroupCache

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 4, 8, 24
LEARNING_RATE = 1e-5
KILL_RELAY, RESTART, JOIN = 0.35, 0.6, 0.75
"""When things happen, as shares of the steps of the long run."""


@dataclass
class _Run:
    """A trainer and its replicas at one ZeRO stage."""

    groups: GroupCache
    model: str
    stage: Stage
    dtype: str

    def __post_init__(self) -> None:
        from engines import LLM

        options: dict[str, Any] = {"world": self.groups, "dtype": "bfloat16", "kv_cache_bytes": 2**22, "load": False}
        self.engines = {size: LLM(self.model, tensor_parallel_size=size, **options) for size in (1, 2)}
        self.begin()
        self.wrong: list[str] = []
        self.densities: list[float] = []
        self.num_compared = 0
        self._before: dict[str, Tensor] = {}

    def begin(self, checkpoint: Path | None = None) -> None:
        """Makes the trainer, as it is in a checkpoint."""
        from algos.deepspeed_config import TrainerConfig
        from algos.grpo import GRPO
        from algos.trainer import Trainer
        from experiments.relay_shards import ShardedReplica
        from experiments.relay_training import RelayedWeights

        parts = {"zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0}}
        with tempfile.NamedTemporaryFile("wb", suffix=".json") as file:
            file.write(msgspec.json.encode(parts))
            file.flush()
            config = TrainerConfig(
                zero_stage=self.stage,
                dtype=self.dtype,  # type: ignore[arg-type]
                learning_rate=LEARNING_RATE,
                deepspeed_config=Path(file.name),
            )
            self.trainer = Trainer(config, GRPO(), self.model)
        if checkpoint is not None:
            self.trainer.load_checkpoint(checkpoint)
        self.relayed = RelayedWeights(self.engines[1], self.trainer, self.groups, timeout_s=120)
        self.replicas = [ShardedReplica(self.engines[1].model_config, 4, self.relayed.relay)]

    def step(self, number: int) -> None:
        """Pushes version `number`, pulls it where it is due, compares bits, and trains on a rollout with it."""
        self.relayed.pull(number)
        version = self.relayed.version(number)
        weights = {name: tensor.clone() for name, tensor in self.trainer.named_weights()}
        if number % 2 == 0:
            self.engines[2].update_weights(source=self.relayed.relay, version=version)
        for replica in self.replicas if number % 3 == 0 else []:
            replica.pull(version)
            self.note(number, "TP 4", replica.differing(weights))
        for size, llm in self.engines.items():
            if llm.policy_version == number:
                self.note(number, f"TP {size}", _differing(llm, weights))
        self.relayed.finish()
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
        moved = [(tensor != self._before.get(name, tensor)).float().sum() for name, tensor in weights.items()]
        self.densities.append(float(sum(moved)) / sum(tensor.numel() for tensor in weights.values()))
        self._before = weights

    def note(self, number: int, where: str, names: list[str]) -> None:
        self.num_compared += 1
        self.wrong += [f"ZeRO {self.stage}, version {number}, {where}: {name}" for name in names]

    def train(self, number: int) -> None:
        self.trainer.update(_experiences(self.engines[1], number))
        self.relayed.push(number + 1)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.relayed.close()


def weights_part(world: Any, *, steps: int) -> dict[str, Any]:
    """Fields of the result: `steps` GRPO steps at ZeRO-1, three at the other stages. All ranks call it."""
    from algos.deepspeed_engine import start_deepspeed
    from engines.models.projection import has_bfloat16_products
    from engines.parallel.groups import GroupCache, all_layouts

    start_deepspeed()
    groups = GroupCache(world, all_layouts(range(world.size)))
    bf16 = all(launch.gather(world, has_bfloat16_products()))
    wrong: list[str] = []
    compared = 0
    densities: dict[str, float] = {}
    with checkpoint("0.8m", max_positions=256, dtype="float32", world=world) as model:
        for stage in STAGES:
            run = _Run(groups, model, stage, "bfloat16" if bf16 else "float32")
            _train(run, steps if stage == 1 else 3, happens=stage == 1)
            wrong += run.wrong
            compared += run.num_compared
            densities[f"ZeRO {stage}"] = short(statistics.median(run.densities[1:]))
    everywhere = [one for some in launch.gather(world, wrong) for one in some]
    return {
        "weights_equal": not everywhere,
        "wrong": everywhere[:20],
        "num_compared": sum(launch.gather(world, compared)),
        "trained_in": "bfloat16, with float32 masters" if bf16 else "float32, pushed in bfloat16",
        "density_of_grpo_steps": {"learning_rate": LEARNING_RATE, **densities},
    }


def _train(run: _Run, steps: int, *, happens: bool) -> None:
    world = run.groups.world
    at = {name: round(steps * share) for name, share in (("kill", KILL_RELAY), ("restart", RESTART), ("join", JOIN))}
    run.relayed.push(0)
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(world.broadcast_bytes(mine.encode()).decode())
        for number in range(steps):
            if happens and number == at["kill"]:
                if run.relayed.process is not None and run.relayed.process.process is not None:
                    os.kill(run.relayed.process.process.pid, signal.SIGKILL)
                world.barrier()  # the ranks' pushers notice it by themselves
            if happens and number == at["join"]:
                from experiments.relay_shards import ShardedReplica

                run.replicas.append(ShardedReplica(run.engines[1].model_config, 4, run.relayed.relay))
            run.step(number)
            run.train(number)
            if happens and number == at["restart"]:
                run.relayed.finish()
                run.trainer.save_checkpoint(folder)
                run.close()
                run.begin(folder)
                run.relayed.push(number + 1)
        run.step(steps)
        world.barrier()
    run.close()


def _experiences(llm: LLM, number: int) -> list[Experience]:
    """GRPO's experiences of one rollout; the reward is the share of even tokens."""
    from algos.experience import Experience
    from algos.grpo import GRPO
    from engines import SamplingParams

    prompts = random_prompts(NUM_PROMPTS, 12, SHAPES["0.8m"].vocab, seed=number)
    params = SamplingParams(n=GROUP_SIZE, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, prompt_uids=range(NUM_PROMPTS))
    rewards = [[sum(t % 2 == 0 for t in one.token_ids) / NUM_TOKENS for one in output.outputs] for output in outputs]
    return [
        Experience(
            tokens=[*output.prompt_token_ids, *one.token_ids],
            num_prompt_tokens=len(output.prompt_token_ids),
            rollout_logprobs=list(one.logprobs),
            loss_mask=[True] * len(one.token_ids),
            advantage=advantage,
        )
        for output, advantages in zip(outputs, GRPO().advantages(rewards), strict=True)
        for one, advantage in zip(output.outputs, advantages, strict=True)
    ]


def _differing(llm: LLM, weights: dict[str, Tensor]) -> list[str]:
    from experiments.relay_shards import differing

    return differing(llm._engine.decoder, weights)
