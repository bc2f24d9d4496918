"""The options of `generate.py` and `train.py` on the model's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engines.models.chat import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How prompts become tokens. Prompts that are messages are always rendered with the chat template."""

    chat: bool = False
    """Render text prompts with the model's chat template, too, as a user's message. Both options below imply it."""
    system_prompt: str | None = None
    """System message of each conversation that begins without one."""
    chat_template_kwargs: str = "{}"
    """Arguments for the chat template, as JSON: '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        self.template(None)  # checks the arguments

    def template(self, tokenizer: Any) -> ChatTemplate:
        try:
            kwargs = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"chat_template_kwargs={self.chat_template_kwargs!r}: is no JSON ({error})") from None
        is_asked = self.chat or self.system_prompt is not None or bool(kwargs)
        return ChatTemplate(tokenizer=tokenizer, kwargs=kwargs, system_prompt=self.system_prompt, renders_text=is_asked)
