"""Trained models for comparisons, which are made where they are missing, and the problems that they have learnt."""

from __future__ import annotations

from pathlib import Path

from algos.tasks.arithmetic import ArithmeticTask
from algos.warmstart_config import ModelSize, WarmStartConfig
from engines.config import DType, ModelConfig
from engines.models.tokenizer import encode_prompt, load_tokenizer


def make_model(models: Path, widen: int = 1) -> Path:
    """The model that adds numbers, widened: the same function at several times the cost."""
    from algos.widening import widen as make_wide

    tiny = trained(models, "tiny")
    target = models / f"tiny-x{widen}"
    return tiny if widen == 1 else target if (target / "config.json").is_file() else make_wide(tiny, target, widen)


def trained(models: Path, size: ModelSize) -> Path:
    """The embedded model of this size in the folder of models."""
    from algos.warmstart import warm_start

    models.mkdir(parents=True, exist_ok=True)
    return warm_start(models / size, WarmStartConfig(size=size))


def prompts(count: int, median_digits: float = 8.0) -> list[str]:
    problems = ArithmeticTask(median_digits=median_digits).held_out_problems(count)
    return [one.prompt for one in problems if isinstance(one.prompt, str)]


def encode(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(folder, ModelConfig.from_pretrained(folder))
    return [encode_prompt(tokenizer, text, "prompt") for text in texts]


def dtype() -> DType:
    from engines.models.projection import has_bfloat16_products

    return "bfloat16" if has_bfloat16_products() else "float32"
