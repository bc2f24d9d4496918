"""The trainer: a DeepSpeed engine that trains on a rollout's experiences and yields its weights.

Every rank constructs a `Trainer` and calls the same methods with the same arguments: all are collective.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from algos import deepspeed_engine, pretrained
from algos.algorithm import Algorithm
from algos.batch import Batch, collate, spread
from algos.deepspeed_config import TrainerConfig, resolve
from algos.experience import Experience, LossInputs, LossOutput
from algos.logprobs import token_logprobs
from algos.micro_batches import MicroBatchPlan, plan_micro_batches
from engines.json_files import read_json
from engines.relay.held import Held

CHECKPOINT_TAG = "deepspeed"
CHECKPOINT_FACTS = "trainer.json"


Sample = tuple[Experience, np.ndarray | None, np.ndarray | None]
"""(experience, the trainer's log-probs of its completion, the reference's); None for log-probs not computed."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step: this rank's shares and maxima, not yet reduced over ranks; the rest is equal on all ranks."""

    shares: dict[str, Tensor]
    maxima: dict[str, Tensor]
    plan: MicroBatchPlan
    grad_norm: float
    learning_rate: float
    stepped: bool


class Trainer:
    """Trains the policy of `model_path`. All methods are collective."""

    def __init__(
        self, config: TrainerConfig, algorithm: Algorithm, model_path: str | Path, *, temperature: float = 1.0
    ) -> None:
        """`temperature` is the rollout's: log-probs are of softmax(logits / temperature).

        The KL term's reference model is read from `model_path`; a checkpoint that is loaded later does not change it.
        With LoRA it is the model without its adapters, which takes no memory.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature!r}: must be above 0; greedy rollouts cannot be trained on")
        self.algorithm = algorithm
        self.model_path = Path(model_path)
        self.temperature = temperature
        self.device = deepspeed_engine.start_deepspeed()
        self.config = config.on(self.device.type)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.resolved = resolve(config, num_ranks=self.num_ranks)
        model = pretrained.load_model(
            self.model_path, self.resolved, self.device, gradient_checkpointing=config.gradient_checkpointing
        )
        if config.lora_rank:
            pretrained.add_adapter(model, config, self.model_path)
        self.engine = deepspeed_engine.make_engine(model, config, self.resolved)
        self.reference: Any = None
        if algorithm.needs_reference and not config.lora_rank:
            frozen = pretrained.load_model(self.model_path, self.resolved, self.device, gradient_checkpointing=False)
            self.reference = deepspeed_engine.make_frozen(frozen, self.resolved)

    # -- training

    def update(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Trains `num_epochs` epochs on a rollout's experiences. All ranks pass the same whole list.

        Returns metrics under verl's names, equal on all ranks: means over the optimizer steps (maxima where so named).
        Mini-batches are consecutive parts of the list, the same in each epoch; the list is not shuffled. A step whose
        loss or gradient is not finite changes no weight and counts in `actor/skipped_steps`. A mini-batch without
        unmasked tokens makes no step. Raises ValueError for an empty list.
        """
        if not experiences:
            raise ValueError("experiences=[]: must hold at least one sequence; skip the update of an empty rollout")
        size = self.resolved.mini_batch_size or len(experiences)
        num_steps = self.algorithm.num_epochs * math.ceil(len(experiences) / size)
        sequences = [(experience.tokens, experience.num_prompt_tokens) for experience in experiences]
        # With one optimizer step per rollout, the training pass itself runs the policy before the first update, so it
        # also gives `trainer_logprobs_BT`. This saves a third of the computation.
        known = self._score(self.engine, sequences) if num_steps > 1 else [None] * len(sequences)
        reference = self._score_reference(sequences) if self.algorithm.needs_reference else [None] * len(sequences)
        samples = list(zip(experiences, known, reference, strict=True))
        records = [
            self._optimizer_step(samples[start : start + size])
            for _ in range(self.algorithm.num_epochs)
            for start in range(0, len(samples), size)
        ]
        return self._metrics([record for record in records if record is not None])

    def _optimizer_step(self, samples: list[Sample]) -> StepRecord | None:
        """One optimizer step on a mini-batch, in micro-batches. Returns None when all tokens are masked."""
        unmasked = [sum(experience.loss_mask) for experience, _, _ in samples]
        if not any(unmasked):
            return None
        num_tokens, num_sequences = sum(unmasked), sum(count > 0 for count in unmasked)
        plan = self._plan([len(experience.tokens) for experience, _, _ in samples])
        micro_batches = plan.of_rank(self.rank)
        shares: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for number, members in enumerate(micro_batches, start=1):
            deepspeed_engine.set_boundary(self.engine, is_last=number == len(micro_batches))
            output = self._loss([samples[index] for index in members], num_tokens, num_sequences)
            deepspeed_engine.backward(self.engine, output.loss)
            shares = {name: share + shares.get(name, 0.0) for name, share in output.metrics.items()}
            maxima = {name: torch.maximum(maxima.get(name, value), value) for name, value in output.maxima.items()}
        learning_rate = self.engine.get_lr()[0]
        grad_norm, stepped = deepspeed_engine.step_if_finite(self.engine)
        return StepRecord(
            shares=shares, maxima=maxima, plan=plan, grad_norm=grad_norm, learning_rate=learning_rate, stepped=stepped
        )

    def _loss(self, samples: list[Sample], num_tokens: int, num_sequences: int) -> LossOutput:
        """The algorithm's loss on one micro-batch; on a dummy row when this rank has no sequence in it."""
        experiences = [experience for experience, _, _ in samples]
        trainer = [logprobs for _, logprobs, _ in samples if logprobs is not None]
        ref = [logprobs for _, _, logprobs in samples if logprobs is not None]
        batch = collate([(one.tokens, one.num_prompt_tokens) for one in experiences], self.device)
        logprobs_BT, entropy_BT = self._forward(self.engine, batch)
        dtype = logprobs_BT.dtype
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            trainer_logprobs_BT=spread(trainer, batch, dtype) if trainer else logprobs_BT.detach(),
            rollout_logprobs_BT=spread([one.rollout_logprobs for one in experiences], batch, dtype),
            ref_logprobs_BT=spread(ref, batch, dtype) if self.algorithm.needs_reference else None,
            entropy_BT=entropy_BT,
            advantages_BT=spread([[one.advantage] * one.num_completion_tokens for one in experiences], batch, dtype),
            loss_mask_BT=spread([one.loss_mask for one in experiences], batch, torch.bool),
            num_tokens=num_tokens,
            num_sequences=num_sequences,
        )
        return self.algorithm.loss(inputs)

    def _forward(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """(log-probs of the targets, entropies), both [B, T], zeros outside the completions."""
        logits_BTV = model(input_ids=batch.input_ids_BL, logits_to_keep=batch.num_kept, use_cache=False).logits
        logprobs_N, entropy_N = token_logprobs(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), self.temperature)
        outside_BT = ~batch.is_target_BT
        logprobs_BT, entropy_BT = logprobs_N.view_as(outside_BT), entropy_N.view_as(outside_BT)
        return logprobs_BT.masked_fill(outside_BT, 0.0), entropy_BT.masked_fill(outside_BT, 0.0)

    def _plan(self, lengths: list[int]) -> MicroBatchPlan:
        budget, max_rows = self.config.micro_batch_tokens, self.resolved.max_micro_batch_rows
        assert budget is not None
        return plan_micro_batches(lengths, budget, self.num_ranks, max_rows=max_rows)

    def _metrics(self, records: list[StepRecord]) -> dict[str, float]:
        """Means (of maxima: the largest) over the steps, with one all-reduce for all shares and one for all maxima."""
        metrics = {
            "actor/skipped_steps": float(sum(not record.stepped for record in records)),
            "actor/num_steps": float(sum(record.stepped for record in records)),
        }
        if not records:
            return metrics
        for field, op in (("shares", dist.ReduceOp.SUM), ("maxima", dist.ReduceOp.MAX)):
            names = sorted(getattr(records[0], field))
            if not names:
                continue
            table = torch.stack(
                [torch.stack([getattr(record, field)[name].double() for name in names]) for record in records]
            )
            dist.all_reduce(table, op=op)
            values = table.mean(0) if op == dist.ReduceOp.SUM else table.amax(0)
            metrics |= dict(zip(names, values.tolist(), strict=True))
        norms = [record.grad_norm for record in records if record.stepped]
        num_tokens = sum(record.plan.num_tokens for record in records)
        return metrics | {
            "actor/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "actor/lr": records[-1].learning_rate,
            "actor/num_micro_batches": float(sum(len(record.plan.micro_batches) for record in records)),
            "perf/total_num_tokens": float(num_tokens),
            "perf/padding_fraction": 1 - num_tokens / sum(record.plan.num_padded_tokens for record in records),
        }

    # -- log-probs and weights

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs of each sequence's tokens except the first, given the tokens before. Equal on all ranks."""
        return [values.tolist() for values in self._score(self.engine, [(tokens, 1) for tokens in sequences])]

    @torch.no_grad()
    def _score(self, model: Any, sequences: Sequence[tuple[list[int], int]]) -> list[np.ndarray]:
        """Log-probs of the completions of (tokens, number of prompt tokens) pairs. Ranks split the work."""
        ends = np.cumsum([len(tokens) - num_prompt for tokens, num_prompt in sequences])
        flat = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self.device)
        for members in self._plan([len(tokens) for tokens, _ in sequences]).of_rank(self.rank):
            batch = collate([sequences[index] for index in members], self.device)
            logprobs_BT, _ = self._forward(model, batch)
            for row, index in enumerate(members):
                start, end = batch.spans[row]
                flat[ends[index] - (end - start) : ends[index]] = logprobs_BT[row, start:end]
        dist.all_reduce(flat)
        return np.split(flat.cpu().numpy(), ends[:-1])

    def _score_reference(self, sequences: Sequence[tuple[list[int], int]]) -> list[np.ndarray]:
        if self.reference is not None:
            return self._score(self.reference, sequences)
        self.engine.module.disable_adapters()
        try:
            return self._score(self.engine, sequences)
        finally:
            self.engine.module.enable_adapters()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterates over (Hugging Face name, whole tensor); see `deepspeed_engine.named_weights`."""
        return deepspeed_engine.named_weights(self.engine)

    def held_weights(self) -> dict[str, Held]:
        """Returns this rank's part of each parameter; see `deepspeed_engine.held_weights`. Not collective."""
        return deepspeed_engine.held_weights(self.engine)

    # -- checkpoints

    def save_checkpoint(self, directory: str | Path) -> None:
        """Writes trained weights, optimizer states and learning-rate schedule, so that training can go on bit for bit.

        A rank that cannot write its files raises the error after all ranks are done.
        """
        try:
            deepspeed_engine.save_states(self.engine, Path(directory), CHECKPOINT_TAG)
            if self.rank == 0:
                (Path(directory) / CHECKPOINT_FACTS).write_text(json.dumps(self._facts(), indent=2))
        finally:
            dist.barrier()

    def load_checkpoint(self, directory: str | Path) -> None:
        """Loads what `save_checkpoint` wrote. Executes no code from its files.

        Raises ValueError for a checkpoint that is missing, unreadable or of other settings (`_facts`). Damage in files
        that are still readable is not detected here, but by the run folder's digests.
        """
        path = Path(directory) / CHECKPOINT_FACTS
        if not path.is_file():
            raise ValueError(
                f"directory={str(directory)!r}: holds no {CHECKPOINT_FACTS}; give one that save_checkpoint wrote"
            )
        saved = read_json(path, dict[str, Any])
        for name, value in self._facts().items():
            if name == "reference_digest" and name not in saved:
                continue  # of a version that did not write it
            if saved.get(name) != value:
                fix = "resume with the same"
                if name == "reference_digest":
                    fix = (
                        f"the KL term (kl_coef) would have another reference: restore the model in {self.model_path} "
                        "as it was when the run began, or start anew under another --name"
                    )
                raise ValueError(f"{path}: {name}={saved.get(name)!r}, but this run has {value!r}; {fix}")
        deepspeed_engine.load_states(self.engine, Path(directory), CHECKPOINT_TAG)

    def _facts(self) -> dict[str, Any]:
        resolved = self.resolved
        facts: dict[str, Any] = {"num_ranks": self.num_ranks, "zero_stage": resolved.zero_stage}
        facts |= {"dtype": resolved.dtype, "lora": self._lora_facts}
        if self.reference is not None:
            facts["reference_digest"] = self._model_digest
        return facts

    @functools.cached_property
    def _model_digest(self) -> str:
        return pretrained.weights_digest(self.model_path)

    @property
    def _lora_facts(self) -> dict[str, Any] | None:
        """The adapter's shape and its base, which is not in a checkpoint."""
        config = self.config
        if not config.lora_rank:
            return None
        shape = {"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": sorted(config.lora_targets)}
        return shape | {"base_digest": self._model_digest}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a Hugging Face checkpoint: safetensors, config and tokenizer files. With LoRA, an adapter in peft's
        format, which names the folder of its base."""
        directory, dtype = Path(directory), getattr(torch, self.resolved.dtype)
        if self.config.lora_rank:
            weights = deepspeed_engine.adapter_weights(self.engine)
            pretrained.save_adapter(self.engine.module, self.model_path, directory, weights, dtype)
            return
        shapes = deepspeed_engine.weight_shapes(self.engine)
        pretrained.save_pretrained(self.model_path, directory, self.named_weights(), shapes, dtype)

    @property
    def num_parameters(self) -> tuple[int, int]:
        """(those that are trained, all), adapters included."""
        counts = [
            (parameter.requires_grad, getattr(parameter, "ds_numel", parameter.numel()))
            for parameter in self.engine.module.parameters()
        ]
        return sum(count for is_trained, count in counts if is_trained), sum(count for _, count in counts)
