"""Makes a small, partly trained policy: supervised training of a random Qwen3 on a task's demonstrations.

Reinforcement learning needs right answers to reinforce. In about a minute on two cores the default, worked additions,
gives a *partial* policy: its greedy answers are mostly right, but sampling at temperature 1 spoils about half of them,
mostly long ones. Label smoothing keeps the policy that uncertain, so that reinforcement learning has right answers to
find. What a demonstration observes is tokenised as in a rollout, and not learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from algos.batch import collate, spread
from algos.micro_batches import plan_micro_batches
from algos.muon import Muon
from algos.publish import as_recorded, check_replaceable, only_writer, publish_directory, read_record
from algos.tasks.task import Demonstrated, Problem
from algos.tokenizer import PAD_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from algos.warmstart_config import MODEL_SIZES, ModelSize, WarmStartConfig
from engines.models.chat import ChatTemplate
from engines.progress import Bar


class Example(NamedTuple):
    tokens: list[int]
    """Of the prompt, and of all turns with what was observed between them. An end of sequence is each turn's last."""
    num_prompt_tokens: int
    loss_mask: list[bool]
    """Per token behind the prompt: False where it is observed."""


def warm_start(directory: str | Path, config: WarmStartConfig) -> Path:
    """Trains and publishes a Hugging Face checkpoint in `directory`, unless the same config already made one there.

    Returns `directory`, which is complete or absent even if a call is killed. Concurrent calls wait for each other.
    A checkpoint of another config is replaced. Raises ValueError when the directory holds other files.
    """
    target, recipe = Path(directory), as_recorded(config)
    with only_writer(target):
        record = read_record(target)
        if record is not None and record.get("warm_start") == recipe:
            return target
        check_replaceable(target)  # before the minute of training
        model, loss = train(config)

        def write(path: Path) -> None:
            model.save_pretrained(path)
            tokenizer_of(config.size).save_pretrained(path)

        publish_directory(target, {"warm_start": recipe, "loss": loss}, write)
    return target


def tokenizer_of(size: ModelSize) -> PreTrainedTokenizerFast:
    return byte_tokenizer(is_chat=size == "tiny-chat")


def template_of(size: ModelSize) -> ChatTemplate:
    """What encodes the prompts that the model learns from."""
    return ChatTemplate(tokenizer=tokenizer_of(size), renders_text=size == "tiny-chat")


def new_config(size: ModelSize) -> Qwen3Config:
    """The shape of an embedded model."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        **MODEL_SIZES[size],
        num_key_value_heads=MODEL_SIZES[size]["num_attention_heads"] // 2,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer_of(size).eos_token_id,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
    )


def new_model(size: ModelSize, seed: int) -> Qwen3ForCausalLM:
    """A random fp32 model; the caller's random state does not change."""
    config = new_config(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def train(config: WarmStartConfig) -> tuple[Qwen3ForCausalLM, float]:
    """The trained model, and the mean loss (nats per generated token) of its last steps. Progress goes to stderr."""
    model = new_model(config.size, config.seed)
    template = template_of(config.size)
    optimizers = _make_optimizers(model, config.learning_rate)
    schedule = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_at(step, config.steps))
        for optimizer in optimizers
    ]
    smoothed = None
    model.train()
    with Bar(range(config.steps), f"warm start {config.size}", unit="step") as progress:
        for step in progress:
            first = step * config.batch_size
            examples = [demonstrate(template, config.task, first + offset) for offset in range(config.batch_size)]
            loss = _accumulate_gradients(model, examples, config.label_smoothing)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, schedule, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
            smoothed = loss if smoothed is None else 0.9 * smoothed + 0.1 * loss
            progress.set_postfix(loss=f"{smoothed:.3f}", refresh=False)
    assert smoothed is not None
    return model.eval(), smoothed


def _make_optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    # Muon learns the carries in a third of AdamW's steps here, but it is only for matrices that map hidden states.
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
    return [
        Muon(matrices, lr=learning_rate, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.3 * learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _rate_at(step: int, num_steps: int) -> float:
    """Factor on the peak rate: linear warm-up over 10 steps, times linear decay to 0 over the whole run."""
    return min(1.0, (step + 1) / 10) * (1 - step / num_steps)


def demonstrate(template: ChatTemplate, task: Demonstrated, index: int) -> Example:
    """Returns the demonstration of the task's training problem `index`, in the tokens that a rollout would have."""
    return example_of(template, task, task.train_problem(index))


def example_of(template: ChatTemplate, task: Demonstrated, problem: Problem) -> Example:
    """Returns the demonstration of one of the task's problems."""
    tokenizer = template.tokenizer
    parts = task.demonstration(problem)
    if not parts or parts[-1].observed:
        raise ValueError(f"demonstration of problem {problem.uid}: must end with a turn of the model, not {parts[-1:]}")
    is_rendered = template.is_rendered(problem.prompt)
    # What is observed before the first turn has the opening of the answer behind it.
    tokens = template.encode(problem.prompt, "prompt", add_generation_prompt=not parts[0].observed)
    num_prompt_tokens, loss_mask, said = len(tokens), list[bool](), list[int]()
    for part in parts:
        if part.observed:
            added = template.observe(part.text, part.role, said, is_rendered=is_rendered)
        else:
            added = said = [*tokenizer.encode(part.text, add_special_tokens=False), tokenizer.eos_token_id]
        tokens += added
        loss_mask += [not part.observed] * len(added)
    return Example(tokens, num_prompt_tokens, loss_mask)


def _accumulate_gradients(
    model: Qwen3ForCausalLM, examples: list[Example], label_smoothing: float, max_tokens: int = 3072
) -> float:
    """Adds the gradient of the mean loss per generated token, over all of `examples`; returns that loss."""
    num_targets = sum(sum(example.loss_mask) for example in examples)
    total = 0.0
    for members in plan_micro_batches([len(tokens) for tokens, *_ in examples], max_tokens, 1).of_rank(0):
        rows = [examples[index] for index in members]
        batch = collate([(row.tokens, row.num_prompt_tokens) for row in rows], model.device)
        is_target_BT = spread([row.loss_mask for row in rows], batch, torch.bool)
        hidden_BTD = model.model(batch.input_ids_BL, use_cache=False).last_hidden_state[:, -batch.num_kept :]
        logits_NV = model.lm_head(hidden_BTD[is_target_BT])  # the output head computes only these positions
        targets_N = batch.targets_BT[is_target_BT]
        loss = cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=label_smoothing) / num_targets
        loss.backward()
        total += loss.item()
    return total
