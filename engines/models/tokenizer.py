"""A checkpoint's tokenizer, where it has one."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.adapter_config import base_folder
from engines.config import EngineConfig, ModelConfig
from engines.models.hugging_face import read_checkpoint
from engines.sequence import Tokenizer, is_unicode

Prompt = str | list[int]


def has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file() or (directory / "tokenizer_config.json").is_file()


def load_tokenizer(directory: str | Path, model: ModelConfig, base_model: str | Path | None = None) -> Any:
    """The checkpoint's tokenizer (an adapter's own, or its base's), or None when it has none. Raises ValueError for a
    broken one, or another model's."""
    base = base_folder(directory, base_model)
    directory = Path(directory) if has_tokenizer(Path(directory)) else base
    if not has_tokenizer(directory):
        return None
    from transformers import AutoConfig, AutoTokenizer

    # Some tokenizers' files do not name their class, which then follows from config.json: an adapter has none.
    config = None if directory == base else read_checkpoint(AutoConfig, base)
    tokenizer = read_checkpoint(AutoTokenizer, directory, config=config)
    try:
        tokenizer.encode("a")
    except Exception as error:  # what a wrong option raises depends on the option
        raise ValueError(f"model={str(directory)!r}: its tokenizer cannot encode a text ({error!r})") from None
    if len(tokenizer) > model.vocab_size:
        raise ValueError(
            f"model={str(directory)!r}: the tokenizer has {len(tokenizer)} tokens, config.json says "
            f"vocab_size={model.vocab_size}; they belong to different models"
        )
    return tokenizer


def with_end_token(model: ModelConfig, tokenizer: Any) -> ModelConfig:
    """Returns the model with the tokenizer's end-of-sequence id among those of its JSON files."""
    token = getattr(tokenizer, "eos_token_id", None)
    if token is None or token in model.eos_token_ids:
        return model
    return replace(model, eos_token_ids=(*model.eos_token_ids, token))


def check_draft_tokenizer(config: EngineConfig, tokenizer: Any) -> None:
    """Raises ValueError when both the model and the draft model have a tokenizer, and their tokens differ."""
    if config.draft_model is None or tokenizer is None or not has_tokenizer(Path(config.draft_model)):
        return
    from transformers import AutoTokenizer

    if read_checkpoint(AutoTokenizer, config.draft_model).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"EngineConfig.draft_model={config.draft_model!r}: its tokenizer has other tokens than the model's; give a "
            f"draft model with the same tokenizer"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """Returns 32 hexadecimal digits that two tokenizers share if they have the same tokens; "" for None."""
    if tokenizer is None:
        return ""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()


def encode_prompt(tokenizer: Any, prompt: Prompt, name: str) -> list[int]:
    """Returns the prompt's token ids. Raises ValueError, whose message begins with `name`, for an invalid prompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name}={prompt!r}: the checkpoint has no tokenizer; give a list of token ids")
        if not is_unicode(prompt):
            raise ValueError(f"{name}={prompt!r}: holds half a surrogate pair, which is no text")
        return list(tokenizer.encode(prompt))
    if isinstance(prompt, int):
        raise ValueError(
            f"{name}={prompt!r}: is a token id, and no prompt; put the ids of each prompt in a list of their own, as "
            "[[40, 41]]"
        )
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"{name}={prompt!r}: give text, or a list of integer token ids") from None


def detokenizer(tokenizer: Any) -> Tokenizer | None:
    """Returns a function from token ids to text, which also spells words; None without a tokenizer."""
    return None if tokenizer is None else _Tokenizer(tokenizer)


class _Tokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def spellings(self, word: str) -> list[list[int]]:
        word = word.lstrip()
        alone, behind = (self._tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word))
        # As vLLM does: a space that is a token of its own, or makes no difference, adds no spelling.
        return [alone, behind] if len(behind) == len(alone) and behind[:1] != alone[:1] else [alone] if alone else []
