"""The trainer against a plain PyTorch loop, at every ZeRO stage, with real processes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algos import deepspeed_engine, pretrained
from algos.deepspeed_config import TrainerConfig, resolve
from algos.experience import Experience
from algos.grpo import GRPO
from algos.pretrained import load_model
from algos.trainer import Trainer
from tests.worlds import error_of, run_python, run_world

STAGES = (0, 1, 2, 3)
TEMPERATURE = 0.8
VOCAB = 264
GRPO_ARGS: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.01, "num_epochs": 2, "importance_correction": "token"}
# A large epsilon: Adam then neither hides a wrong scale of the gradient nor blows up the rounding of tiny gradients.
OPTIMISER: dict[str, Any] = {"learning_rate": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "adam_eps": 1e-3}
SCHEDULE: dict[str, Any] = {"lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 40}
MAX_GRAD_NORM = 0.5
MINI_BATCH = 8


def trainer_config(stage: int, folder: Path, **changes: Any) -> TrainerConfig:
    """A configuration for each stage; by way of a DeepSpeed JSON at stage 1, where the fields would say otherwise."""
    fields = OPTIMISER | SCHEDULE | {"zero_stage": stage, "max_grad_norm": MAX_GRAD_NORM}
    fields |= {"mini_batch_size": MINI_BATCH, "micro_batch_tokens": 64, "gradient_checkpointing": stage == 2} | changes
    if stage == 1:
        optimizer = {"lr": fields["learning_rate"], "betas": list(fields["betas"]), "eps": fields["adam_eps"]}
        user = {
            "train_batch_size": MINI_BATCH,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
            "gradient_clipping": MAX_GRAD_NORM,
            "optimizer": {"type": "AdamW", "params": optimizer | {"weight_decay": "auto"}},
        }
        # A file per rank: a rank must not read what another is still writing.
        path = folder / f"deepspeed_{os.environ.get('RANK', 'alone')}.json"
        path.write_text(json.dumps(user))
        wrong: dict[str, Any] = {"learning_rate": 7.0, "betas": (0.1, 0.1), "adam_eps": 7.0, "max_grad_norm": 7.0}
        fields |= wrong | {"zero_stage": 0, "mini_batch_size": 3, "deepspeed_config": path}
    return TrainerConfig(**fields)


def rollout(step: int, num: int = 14) -> list[Experience]:
    """`num` random experiences; not a multiple of the mini-batch, the ranks, or anything."""
    rng = random.Random(step)
    experiences = []
    for _ in range(num):
        prompt, completion = rng.randint(1, 9), rng.randint(1, 30)
        experiences.append(
            Experience(
                tokens=[rng.randrange(VOCAB) for _ in range(prompt + completion)],
                num_prompt_tokens=prompt,
                rollout_logprobs=[-5.5 + rng.gauss(0, 0.3) for _ in range(completion)],
                loss_mask=[rng.random() < 0.8 for _ in range(completion)],
                advantage=rng.gauss(0, 1),
            )
        )
    return experiences


def poisoned_rollout() -> list[Experience]:
    """A mini-batch's worth, one advantage not a number: it reaches one rank only."""
    good = rollout(99, MINI_BATCH)
    bad = Experience(tokens=[1, 2, 3], num_prompt_tokens=1, rollout_logprobs=[-5.0] * 2, loss_mask=[True] * 2,
                     advantage=math.nan)  # fmt: skip
    return [*good[1:], bad]


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.named_weights()}


def train_all_stages(model: str, folder: str, stages: list[int]) -> dict[str, Any]:
    """In a world: at each stage a poisoned update, then four good ones, with a checkpoint after the second."""
    results: dict[str, Any] = {}
    for stage in stages:
        config = trainer_config(stage, Path(folder))
        trainer = Trainer(config, GRPO(**GRPO_ARGS), model, temperature=TEMPERATURE)
        before = weights_of(trainer)
        poisoned = trainer.update(poisoned_rollout())
        after = weights_of(trainer)
        metrics = []
        for step in range(4):
            metrics.append(trainer.update(rollout(step)))
            if step == 1:
                trainer.save_checkpoint(f"{folder}/checkpoint_{stage}")
        sequences = [experience.tokens for experience in rollout(7)]
        results[str(stage)] = {
            "poisoned": poisoned,
            "unchanged": all(torch.equal(before[name], after[name]) for name in before),
            "metrics": metrics,
            "weights": weights_of(trainer),
            "logprobs": trainer.logprobs([*sequences, [5]]),
        }
        if stage == 3:
            loaded = pretrained.load_model(Path(model), trainer.resolved, trainer.device, gradient_checkpointing=False)
            results["3"]["num_whole"] = sum(parameter.numel() > 0 for parameter in loaded.parameters())
        trainer.save_pretrained(f"{folder}/pretrained_{stage}")
        shapes = deepspeed_engine.weight_shapes(trainer.engine)
        pretrained.save_pretrained(
            Path(model), Path(f"{folder}/sharded_{stage}"), trainer.named_weights(), shapes, torch.float32,
            max_shard_bytes=50_000,
        )  # fmt: skip
    deepspeed_engine.stop_deepspeed()
    return results


def resume_all_stages(model: str, folder: str) -> dict[str, Any]:
    """In a fresh world: at each stage the checkpoint, then the last two updates; and bf16 training."""
    results: dict[str, Any] = {}
    for stage in STAGES:
        trainer = Trainer(trainer_config(stage, Path(folder)), GRPO(**GRPO_ARGS), model, temperature=TEMPERATURE)
        trainer.load_checkpoint(f"{folder}/checkpoint_{stage}")
        metrics = [trainer.update(rollout(step)) for step in (2, 3)]
        results[str(stage)] = {"metrics": metrics, "weights": weights_of(trainer)}
    for stage in STAGES:
        trainer = Trainer(trainer_config(stage, Path(folder), dtype="bfloat16"), GRPO(), model)
        metrics = [trainer.update(rollout(step)) for step in range(3)]
        weights = weights_of(trainer)
        poisoned = trainer.update(poisoned_rollout())
        after = weights_of(trainer)
        unchanged = all(torch.equal(weights[name], after[name]) for name in weights)
        results[f"bf16_{stage}"] = {"weights": weights, "poisoned": poisoned, "unchanged": unchanged}
    with pytest.raises(ValueError, match=r"trainer\.json: zero_stage=0, but this run has 3"):
        trainer.load_checkpoint(f"{folder}/checkpoint_0")
    deepspeed_engine.stop_deepspeed()
    return results


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def load_what_is_spoilt(model: str, folder: str, stage: int) -> list[str]:
    """In a world: what `load_checkpoint` says where the states are a hostile pickle, truncated, or missing."""
    trainer = Trainer(trainer_config(stage, Path(folder)), GRPO(), model)
    trainer.save_checkpoint(f"{folder}/point")
    states = sorted(Path(folder).glob("point/deepspeed/*_states.pt"))
    told = []
    for spoil in (
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"module": 3, "optimizer_state_dict": 3}, path),
        lambda path: torch.save({"module": Touch(f"{folder}/ran")}, path),
        lambda path: os.truncate(path, 1000),
        lambda path: path.unlink(),
    ):
        if trainer.rank == 0:
            for path in states:
                spoil(path)
        torch.distributed.barrier()
        told.append(error_of(lambda: trainer.load_checkpoint(f"{folder}/point")))
    deepspeed_engine.stop_deepspeed()
    return told


def resume_beside_another_reference(model: str, folder: str) -> list[str]:
    """In a world: what `load_checkpoint` says with another reference, the same, and another without a digest."""
    path = Path(shutil.copytree(model, f"{folder}/other")) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    same, other = (Trainer(TrainerConfig(), GRPO(kl_coef=0.1), one) for one in (model, f"{folder}/other"))
    point = Path(folder) / "point"
    same.save_checkpoint(point)
    told = [error_of(lambda: other.load_checkpoint(point)), error_of(lambda: same.load_checkpoint(point))]
    facts = json.loads((point / "trainer.json").read_text())
    facts.pop("reference_digest", None)
    (point / "trainer.json").write_text(json.dumps(facts))
    told.append(error_of(lambda: other.load_checkpoint(point)))
    deepspeed_engine.stop_deepspeed()
    return told


# -- the reference


def plain_logprobs(model: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """(log-prob of each token but the first, entropies), one sequence, no padding."""
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0] / TEMPERATURE
    log_p = torch.log_softmax(logits, -1)
    return log_p[range(len(tokens) - 1), tokens[1:]], -(log_p.exp() * log_p).sum(-1)


def plain_loss(model: Any, batch: list[Experience], old: list[Tensor], ref: list[Tensor]) -> dict[str, Tensor]:
    """GRPO's Eq. 3 by a loop over sequences and tokens."""
    terms: dict[str, list[Tensor]] = {"pg": [], "kl": [], "entropy": []}
    entropies, num_sequences = [], sum(any(experience.loss_mask) for experience in batch)
    for experience, old_i, ref_i in zip(batch, old, ref, strict=True):
        logprobs, entropy = plain_logprobs(model, experience.tokens)
        first = experience.num_prompt_tokens - 1
        rows: dict[str, list[Tensor]] = {"pg": [], "kl": [], "entropy": []}
        for j, (rollout_logprob, kept) in enumerate(
            zip(experience.rollout_logprobs, experience.loss_mask, strict=True)
        ):
            if not kept:
                continue
            t = first + j
            ratio, advantage = torch.exp(logprobs[t] - old_i[t]), experience.advantage
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            weight = min(math.exp(old_i[t].item() - rollout_logprob), 2.0)
            rows["pg"].append(-weight * objective)
            rows["kl"].append(torch.exp(ref_i[t] - logprobs[t]) - (ref_i[t] - logprobs[t]) - 1)
            rows["entropy"].append(entropy[t])
            entropies.append(entropy[t].detach())
        for name, values in rows.items():
            if values:
                terms[name].append(torch.stack(values).mean())
    means = {name: torch.stack(values).sum() / num_sequences for name, values in terms.items()}
    loss = means["pg"] + GRPO_ARGS["kl_coef"] * means["kl"] - GRPO_ARGS["entropy_coef"] * means["entropy"]
    return {
        "loss": loss,
        "actor/loss": loss.detach(),
        "actor/pg_loss": means["pg"].detach(),
        "actor/kl_loss": means["kl"].detach(),
        "actor/entropy": torch.stack(entropies).mean(),
    }


def plain_training(model_path: str, adapter: str | None = None) -> tuple[list[dict[str, float]], Any]:
    """Metrics of four updates, and the model after them, by a plain loop with torch's AdamW. With an `adapter`, that is
    trained instead of the model."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        trained,
        lr=OPTIMISER["learning_rate"],
        betas=OPTIMISER["betas"],
        eps=OPTIMISER["adam_eps"],
        weight_decay=OPTIMISER["weight_decay"],
    )
    metrics: list[dict[str, float]] = []
    num_steps = 0
    for step in range(4):
        experiences = rollout(step)
        with torch.no_grad():
            old = [plain_logprobs(model, experience.tokens)[0] for experience in experiences]
            ref = [plain_logprobs(reference, experience.tokens)[0] for experience in experiences]
        records = []
        for _ in range(GRPO_ARGS["num_epochs"]):
            for start in range(0, len(experiences), MINI_BATCH):
                cut = slice(start, start + MINI_BATCH)
                values = plain_loss(model, experiences[cut], old[cut], ref[cut])
                optimizer.zero_grad()
                values.pop("loss").backward()
                norm = torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
                warm, total = SCHEDULE["warmup_steps"], SCHEDULE["total_steps"]
                progress = (num_steps - warm) / (total - warm)
                factor = (num_steps + 1) / (warm + 1) if num_steps < warm else 0.5 + 0.5 * math.cos(math.pi * progress)
                optimizer.param_groups[0]["lr"] = OPTIMISER["learning_rate"] * factor
                optimizer.step()
                num_steps += 1
                records.append(
                    {name: value.item() for name, value in values.items()} | {"actor/grad_norm": norm.item()}
                )
        metrics.append({name: sum(record[name] for record in records) / len(records) for name in records[0]})
    return metrics, model


# -- fixtures


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=256,
        initializer_range=0.1, attention_dropout=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trained(tiny_model: str, folder: str) -> list[dict[str, Any]]:
    return run_world(train_all_stages, 2, tiny_model, folder, list(STAGES))


@pytest.fixture(scope="module")
def resumed(tiny_model: str, folder: str, trained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_world(resume_all_stages, 2, tiny_model, folder)


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> tuple[list[dict[str, float]], Any]:
    return plain_training(tiny_model)


# -- tests


def assert_like_plain(result: dict[str, Any], plain: tuple[list[dict[str, float]], Any]) -> None:
    metrics, model = plain
    for got, want in zip(result["metrics"], metrics, strict=True):
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert got["actor/num_steps"] == 4 and got["actor/skipped_steps"] == 0
    expected = dict(model.named_parameters())
    assert set(result["weights"]) == set(expected)
    for name, weight in result["weights"].items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_in_micro_batches_train_like_a_plain_loop(
    trained: list[dict[str, Any]], plain: tuple[list[dict[str, float]], Any], stage: int
) -> None:
    result = trained[0][str(stage)]
    assert result["metrics"][0]["actor/num_micro_batches"] > result["metrics"][0]["actor/num_steps"]
    assert max(record["actor/grad_norm"] for record in plain[0]) > MAX_GRAD_NORM  # clipping had something to do
    assert_like_plain(result, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_changes_weights_by_rounding_only(trained: list[dict[str, Any]], tiny_model: str, stage: int) -> None:
    """After 16 optimizer steps in float32; moved is by how much they have learned."""
    start, whole = load_file(f"{tiny_model}/model.safetensors"), trained[0]["0"]["weights"]
    for name, weight in trained[0][str(stage)]["weights"].items():
        moved = (whole[name] - start[name]).abs().max()
        assert (weight - whole[name]).abs().max() < 1e-3 * moved, name


def test_a_plain_python_process_is_a_world_of_one(
    tiny_model: str, tmp_path: Path, plain: tuple[list[dict[str, float]], Any]
) -> None:
    (result,) = run_world(train_all_stages, 1, tiny_model, str(tmp_path), [1], as_torchrun=False)
    assert_like_plain(result["1"], plain)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_return_the_same_metrics_weights_and_logprobs(trained: list[dict[str, Any]], stage: int) -> None:
    first, second = (result[str(stage)] for result in trained)
    assert first["metrics"] == second["metrics"]
    assert first["logprobs"] == second["logprobs"]
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_changes_nothing(trained: list[dict[str, Any]], stage: int) -> None:
    result = trained[0][str(stage)]
    assert result["unchanged"]
    assert result["poisoned"]["actor/skipped_steps"] == 2  # two epochs
    assert result["poisoned"]["actor/num_steps"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_resuming_is_bit_exact(trained: list[dict[str, Any]], resumed: list[dict[str, Any]], stage: int) -> None:
    want, got = trained[0][str(stage)], resumed[0][str(stage)]
    assert got["metrics"] == want["metrics"][2:]
    for name, weight in want["weights"].items():
        assert torch.equal(got["weights"][name], weight), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"weights \['model\.layers\.2\..* are missing; copy the checkpoint",
        ),
        ({"initializer_range": "wide"}, "AutoConfig cannot read it"),
        ({"intermediate_size": 100}, "AutoModelForCausalLM cannot read it"),
    ],
)
def test_a_model_that_is_not_whole_is_not_trained_on(
    tiny_model: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"'{path.parent}': {message}"):
        load_model(
            path.parent, resolve(TrainerConfig(), num_ranks=1), torch.device("cpu"), gradient_checkpointing=False
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_are_spoilt_are_refused_and_run_no_code(tiny_model: str, tmp_path: Path, stage: int) -> None:
    for told in run_world(load_what_is_spoilt, 2, tiny_model, str(tmp_path), stage):
        assert all(error.startswith(f"ValueError: directory='{tmp_path}/point': DeepSpeed's") for error in told), told
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_is_not_resumed_beside_another_reference(tiny_model: str, tmp_path: Path) -> None:
    """One of an earlier version has no digest of it, and is resumed."""
    ((refused, *others),) = run_world(resume_beside_another_reference, 1, tiny_model, str(tmp_path))
    assert refused.startswith(f"ValueError: {tmp_path}/point/trainer.json: reference_digest='")
    assert f"the KL term (kl_coef) would have another reference: restore the model in {tmp_path}/other as it" in refused
    assert others == ["", ""]


@pytest.mark.parametrize("kind", ["pretrained", "sharded"])
@pytest.mark.parametrize("stage", STAGES)
def test_save_pretrained_is_read_by_transformers(
    trained: list[dict[str, Any]], folder: str, stage: int, kind: str
) -> None:
    path = Path(folder) / f"{kind}_{stage}"
    num_files = len(list(path.glob("*.safetensors")))
    assert num_files == 1 if kind == "pretrained" else num_files > 1
    assert (path / "tokenizer_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trained[0][str(stage)]["weights"][name]), name


def test_zero3_holds_no_whole_parameter_from_the_load_on(trained: list[dict[str, Any]]) -> None:
    assert [result["3"]["num_whole"] for result in trained] == [0, 0]


def test_logprobs_are_those_of_transformers(trained: list[dict[str, Any]], folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(Path(folder) / "pretrained_3")
    *values, last = trained[0]["3"]["logprobs"]
    assert last == []  # one token is predicted by nothing
    for experience, got in zip(rollout(7), values, strict=True):
        with torch.no_grad():
            want, _ = plain_logprobs(model, experience.tokens)
        torch.testing.assert_close(torch.tensor(got), want, rtol=1e-5, atol=1e-5)


def test_bf16_trains_alike_at_every_stage(resumed: list[dict[str, Any]], tiny_model: str) -> None:
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).named_parameters())
    moved = {}
    for stage in STAGES:
        weights = resumed[0][f"bf16_{stage}"]["weights"]
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
        assert resumed[0][f"bf16_{stage}"]["unchanged"]
        assert resumed[0][f"bf16_{stage}"]["poisoned"]["actor/skipped_steps"] == 1
        moved[stage] = torch.cat([(weights[name].float() - start[name].float()).flatten() for name in start])
    assert moved[3].norm() > 0.01
    for stage in (0, 1, 2):
        assert (moved[stage] - moved[3]).norm() < 0.1 * moved[3].norm(), stage


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"fp16": {"enabled": True}}, r"fp16\.enabled=True: not supported; use bf16"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
         r"train_batch_size=12: must be .* = 2 x 2 x 2 = 8"),
        ({"train_batch_size": "many"}, r"train_batch_size='many': must be an integer"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation=False: not supported"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage=4: must be 0, 1, 2 or 3"),
        ([], r"Expected `object`, got `array`"),
        ({"zero_optimization": True}, r"zero_optimization=True: must be an object"),
        ({"optimizer": {"params": [1]}}, r"optimizer\.params=\[1\]: must be an object"),
        ({"optimizer": {"type": "Lamb2"}}, r"optimizer\.type='Lamb2': is unknown; give one of adam, .*torch\.optim"),
        ({"optimizer": {"params": {"lr": "1e-5"}}}, r"optimizer\.params\.lr='1e-5': must be a number; leave the"),
        ({"scheduler": {"type": "Nope"}}, r"scheduler\.type='Nope': is unknown; give one of WarmupLR, .*lr_scheduler"),
        ({"scheduler": {"type": "auto"}}, r"scheduler\.type=None: is unknown"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
         r"scheduler\.params\.warmup_num_steps=0: must be an integer of at least 1; give 1 or more"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
         r"scheduler\.params\.total_num_steps=None: must be .*; give it, or total_steps \(--total-steps\)"),
    ],
)  # fmt: skip
def test_a_json_that_cannot_be_followed_is_refused_by_name(tmp_path: Path, user: Any, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(user))
    with pytest.raises(ValueError, match=message) as error:
        resolve(TrainerConfig(deepspeed_config=path), num_ranks=2)
    assert "ds.json" in str(error.value)


@pytest.mark.parametrize(
    ("user", "mini_batch_size", "max_rows"),
    [
        ({}, 48, None),
        ({"train_batch_size": 32}, 32, None),
        ({"train_micro_batch_size_per_gpu": 4}, 48, 4),
        ({"gradient_accumulation_steps": 8}, 48, 3),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, 64, 4),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 48, None),
    ],
)
def test_batch_sizes_of_a_json_keep_their_meanings(
    tmp_path: Path, user: Any, mini_batch_size: int, max_rows: int | None
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(user))
    resolved = resolve(TrainerConfig(deepspeed_config=path, mini_batch_size=48), num_ranks=2)
    assert (resolved.mini_batch_size, resolved.max_micro_batch_rows) == (mini_batch_size, max_rows)


def test_sections_of_a_json_win(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 5}}
    user = {"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.5}}}
    path.write_text(json.dumps(user | {"scheduler": scheduler}))
    config = TrainerConfig(deepspeed_config=path, learning_rate=0.25, weight_decay=0.0)
    resolved = resolve(config, num_ranks=1)
    assert resolved.dtype == "bfloat16" and not resolved.owns_scheduler
    assert resolved.deepspeed["optimizer"] == {
        "type": "SGD",
        "params": {"lr": 0.25, "weight_decay": 0.0, "momentum": 0.5},
    }
    assert resolved.deepspeed["scheduler"]["params"] == {"warmup_max_lr": 0.25, "warmup_num_steps": 5}


AUTO: dict[str, Any] = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
SCHEDULERS: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": AUTO},
    {"type": "WarmupDecayLR", "params": AUTO | {"total_num_steps": "auto"}},
    {"type": "OneCycle", "params": {"cycle_max_lr": 1.0}},
    {"type": "WarmupLR", "params": {"steps": 5}},
]


def start_schedulers(folder: str) -> list[str]:
    """In a world: what is said of each of SCHEDULERS where DeepSpeed starts."""
    deepspeed_engine.start_deepspeed()
    path, told = Path(folder) / "ds.json", []
    for scheduler in SCHEDULERS:
        path.write_text(json.dumps({"scheduler": scheduler}))
        config = TrainerConfig(deepspeed_config=path, total_steps=9)
        model = torch.nn.Linear(4, 4)
        resolved = resolve(config, num_ranks=1)
        told.append(error_of(lambda: deepspeed_engine.make_engine(model, config, resolved)))  # noqa: B023
    deepspeed_engine.stop_deepspeed()
    return told


def test_a_json_of_auto_starts_and_what_deepspeed_refuses_has_its_file(tmp_path: Path) -> None:
    (told,) = run_world(start_schedulers, 1, str(tmp_path))
    assert told[:2] == ["", ""]
    for name, error in (("cycle_min_lr", told[2]), ("steps", told[3])):
        assert error.startswith(f"ValueError: TrainerConfig.deepspeed_config='{tmp_path}/ds.json': DeepSpeed"), error
        assert f"'{name}'" in error and "mend it there" in error


@pytest.mark.parametrize(
    ("field", "value"), [("zero_stage", 4), ("learning_rate", 0.0), ("lr_schedule", "linear"), ("mini_batch_size", 0)]
)
def test_trainer_config_refuses_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.\w+=.*: must be"):
        TrainerConfig(**{field: value})


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_only_muon_brings_inductor_and_others_may_still_compile(optimizer: str, tmp_path: Path) -> None:
    """DeepSpeed's Muon compiles a function, and is imported for every optimizer. Neither needs a C++ compiler to start:
    DeepSpeed's own Adam, which it gives Muon for biases, embeddings and norms, would be built for minutes."""
    path, kernels = tmp_path / "deepspeed.json", tmp_path / "kernels"
    path.write_text(json.dumps({"optimizer": {"type": optimizer}, "zero_optimization": {"stage": 1}}))
    done = run_python(["-c", STEP, str(path), optimizer], env=os.environ | {"TORCH_EXTENSIONS_DIR": str(kernels)})
    assert not kernels.exists(), list(kernels.rglob("*"))
    found = done.stdout.split()[-4:]
    assert found == ["(0.5,0.75)", "0.125", str(optimizer == "Muon"), "True"], done.stdout + done.stderr


STEP = """
import sys, torch
from pathlib import Path
from algos.deepspeed_config import TrainerConfig, resolve
from algos.deepspeed_engine import backward, make_engine, start_deepspeed, stop_deepspeed
start_deepspeed()
config = TrainerConfig(deepspeed_config=Path(sys.argv[1]), betas=(0.5, 0.75), adam_eps=0.125)
model = torch.nn.Linear(4, 4)
for parameter in model.parameters():
    parameter.use_muon = sys.argv[2] == "Muon" and parameter.ndim == 2
engine = make_engine(model, config, resolve(config, num_ranks=1))
if not model.weight.use_muon:  # compiling would take a minute
    backward(engine, engine(torch.ones(2, 4, dtype=model.weight.dtype)).sum())
    engine.step()
adam = engine.basic_optimizer.param_groups[-1]
print("({},{})".format(*adam["betas"]), adam["eps"], "torch._inductor.compile_fx" in sys.modules, end=" ")
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
print(len(graphs) == 1)
stop_deepspeed()
"""
