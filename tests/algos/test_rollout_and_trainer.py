"""Engine and trainer hold the same policy: weights, log-probs and tokens, over ZeRO stages and numbers of ranks."""

from __future__ import annotations

import json
import random
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from algos import deepspeed_engine
from algos.deepspeed_config import TrainerConfig
from algos.deepspeed_engine import start_deepspeed, stop_deepspeed
from algos.experience import Experience
from algos.grpo import GRPO
from algos.trainer import Trainer
from engines import LLM, SamplingParams
from engines.models.checksums import checksum as checksum_of
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache, all_layouts
from experiments.relay_training import RelayedWeights
from tests.worlds import error_of, join, run_world

STAGES = (0, 1, 2, 3)
RNG = random.Random(2)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 30))] for _ in range(16)]
PARAMS = SamplingParams(max_tokens=40, n=2)


def train_and_roll_out(model: str, stages: list[int]) -> dict[str, Any]:
    """Per stage: one update, the weights into the engine, a rollout, and both sides' log-probs of it."""
    start_deepspeed()
    group = TorchGroup()
    groups = GroupCache(group, [])
    results: dict[str, Any] = {}
    for stage in stages:
        llm = LLM(model, world=groups, kv_cache_bytes=2**22, load=False)
        config = TrainerConfig(zero_stage=stage, learning_rate=1e-3, mini_batch_size=64, micro_batch_tokens=512)  # type: ignore[arg-type]
        trainer = Trainer(config, GRPO(), model)
        llm.update_weights(trainer.named_weights(), version=0)
        first = llm.generate(PROMPTS, PARAMS)
        experiences = [
            Experience(
                tokens=output.prompt_token_ids + c.token_ids,
                num_prompt_tokens=len(output.prompt_token_ids),
                rollout_logprobs=c.logprobs,
                loss_mask=[True] * len(c.token_ids),
                advantage=1.0 if c.index else -1.0,
            )
            for output in first
            for c in output.outputs
        ]
        metrics = trainer.update(experiences)
        checksum = llm.update_weights(trainer.named_weights(), version=1)
        trained = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        second = llm.generate(PROMPTS, PARAMS)
        sequences = [o.prompt_token_ids + c.token_ids for o in second for c in o.outputs]
        results[str(stage)] = {
            "checksums": [int.from_bytes(c, "little") for c in group.all_gather_bytes(checksum.to_bytes(8, "little"))],
            "trainer_checksum": checksum_of(trained),
            "k3": metrics["rollout_corr/k3_kl"],
            "k1": metrics["rollout_corr/kl"],
            "steps": metrics["actor/num_steps"],
            "tokens": [[c.token_ids for c in o.outputs] for o in second],
            "versions": sorted({v for o in second for c in o.outputs for v in c.versions}),
            "rollout": [c.logprobs for o in second for c in o.outputs],
            "trainer": [
                values[len(o.prompt_token_ids) - 1 :]
                for values, o in zip(trainer.logprobs(sequences), [o for o in second for _ in o.outputs], strict=True)
            ],
        }
    stop_deepspeed()
    return results


@pytest.fixture(scope="module")
def results(qwen3: str) -> list[dict[str, Any]]:
    return run_world(train_and_roll_out, 2, qwen3, list(STAGES))


@pytest.mark.parametrize("stage", STAGES)
def test_log_probs_agree_after_an_update(results: list[dict[str, Any]], stage: int) -> None:
    result = results[0][str(stage)]
    assert result["steps"] == 1 and result["versions"] == [1]
    worst = max(
        abs(a - b)
        for mine, theirs in zip(result["rollout"], result["trainer"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    assert worst < 1e-4
    assert 0 < result["k3"] < 1e-8
    assert abs(result["k1"]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_s_engine_holds_the_trainer_s_weights(results: list[dict[str, Any]], stage: int) -> None:
    assert len(set(results[0][str(stage)]["checksums"])) == 1
    assert results[0][str(stage)]["tokens"] == results[1][str(stage)]["tokens"]
    assert results[0][str(stage)]["checksums"][0] == results[0][str(stage)]["trainer_checksum"]


def sync_every_stage_and_size(model: str, stages: list[int], parts: str) -> dict[str, Any]:
    """Per ZeRO stage: one update, then the weights into engines of TP 1, 2 and 4, directly, and by a relay; all
    checksums. `parts` is a DeepSpeed file by which ZeRO-3 keeps no parameter whole."""
    deepspeed_engine._PIECE_BYTES = 500  # so that these small parameters are gathered in pieces, the last a shorter one
    start_deepspeed()
    import deepspeed  # only now: see start_deepspeed

    world = TorchGroup()
    groups = GroupCache(world, all_layouts(range(world.size)))
    engines = {
        size: LLM(model, world=groups, tensor_parallel_size=size, kv_cache_bytes=2**20, load=False)
        for size in (1, 2, 4)
    }
    checksums: dict[str, Any] = {}
    for stage in stages:
        config = TrainerConfig(
            zero_stage=stage,  # type: ignore[arg-type]
            learning_rate=1e-3,
            mini_batch_size=8,
            micro_batch_tokens=512,
            deepspeed_config=Path(parts) if stage == 3 else None,
        )
        trainer = Trainer(config, GRPO(), model)
        relayed = {size: RelayedWeights(llm, trainer, groups, timeout_s=60) for size, llm in engines.items()}
        for one in relayed.values():
            one.push(stage)
        for one in relayed.values():
            one.pull(stage)
            one.finish()
        rng = random.Random(stage)
        trainer.update(
            [
                Experience(
                    tokens=[rng.randrange(131) for _ in range(20)],
                    num_prompt_tokens=5,
                    rollout_logprobs=[-4.0] * 15,
                    loss_mask=[True] * 15,
                    advantage=rng.gauss(0, 1),
                )
                for _ in range(8)
            ]
        )
        trained = dict(trainer.engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(trained.values()), enabled=stage == 3):
            mine = [checksum_of({name: parameter.data for name, parameter in trained.items()})]
        for one in relayed.values():
            one.push(stage + 1)
        mine += [one.pull(stage + 1) for one in relayed.values()]
        for one in relayed.values():
            one.finish()
            one.close()
        mine += [llm.update_weights(trainer.named_weights(), version=stage) for llm in engines.values()]
        checksums[str(stage)] = [format(value, "x") for value in mine]
        if stage == 3:
            assert not any(len(one.tensor) == trained[name].ds_numel for name, one in trainer.held_weights().items())
    stop_deepspeed()
    return checksums


def test_weights_reach_every_shard(qwen3: str, tmp_path: Path) -> None:
    """ZeRO 0 to 3 x TP 1, 2, 4: every replica's logical checksum is the trainer's, and every stage learnt something."""
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    for checksums in run_world(sync_every_stage_and_size, 4, qwen3, list(STAGES), str(parts), timeout=400):
        assert all(len(set(values)) == 1 for values in checksums.values())
        assert len({values[0] for values in checksums.values()}) > 1


def generate_here(model: str) -> list[Any]:
    llm = LLM(model, world=join([]), dtype="float64", kv_cache_bytes=2**22)
    out = llm.generate(PROMPTS, PARAMS)
    refused = error_of(lambda: llm.generate(PROMPTS[: 1 + dist.get_rank()], PARAMS))
    return [[[c.token_ids for c in o.outputs] for o in out], refused, len(llm.step_records)]


def test_one_or_two_ranks_draw_the_same_tokens(qwen3: str) -> None:
    alone = LLM(qwen3, dtype="float64", kv_cache_bytes=2**22).generate(PROMPTS, PARAMS)
    for tokens, refused, num_steps in run_world(generate_here, 2, qwen3):
        assert tokens == [[c.token_ids for c in o.outputs] for o in alone]
        assert "were given other prompts" in refused
        assert num_steps > 0


def test_extra_memory_of_an_update_is_one_parameter(qwen3: str) -> None:
    """The stream is consumed tensor by tensor: no earlier one is alive when the next is made."""
    llm = LLM(qwen3)
    alive: list[Any] = []

    def stream() -> Any:
        for name, view in llm._engine.decoder.logical_views().items():
            assert not any(reference() is not None for reference in alive[:-1])
            tensor = view.clone()
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    llm.update_weights(stream(), version=1)
    assert len(alive) > 10


def test_group_needs_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"RuntimeError: \[Rank 0\]: Ranks 1 failed to pass monitoredBarrier"):
        run_world(miss_a_barrier, 2)


def miss_a_barrier() -> int:
    group = join([]).world
    group._timeout = timedelta(seconds=2)  # type: ignore[attr-defined]  # both have come
    if dist.get_rank() == 0:
        group.all_gather_bytes(b"x")
    else:
        time.sleep(20)
    return 0
