"""Conversations: messages, checked, and rendered as tokens by the chat template of the model's tokenizer. Torch-free.

The text of a special token in a message becomes that token, as in transformers and vLLM; the template argument
`sanitize_control_tokens` keeps it text. Sampled tokens are never decoded and encoded again: the next prompt of a
conversation is the last one, the sampled tokens as they are, and `render_next`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.models.tokenizer import Prompt, encode_prompt
from engines.sequence import is_unicode

Messages = list[dict[str, Any]]
"""[{"role": "user", "content": "12+34="}, ...]; a message may have more fields, which the template sees."""
Tools = Sequence[dict[str, Any] | Callable[..., Any]]
"""JSON schemas, or typed functions with a docstring, of which transformers makes them."""
_ANSWER = "QzxAnswer"
"""Stands for what was sampled; it ends in a letter, so that a tokenizer does not merge it with a following newline."""
_MOST_KNOWN = 10_000
_RESERVED = {
    *("self", "where", "messages", "conversation", "tools", "add_generation_prompt", "chat_template", "tokenize"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation"),
    "max_length",
}


def is_conversation(prompt: object) -> bool:
    """Whether `prompt` is meant as messages, and not as text or token ids."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def check_messages(messages: object, where: str) -> Messages:
    """Returns the messages of a conversation, each with its content as one text: parts {"type": "text", "text": "..."}
    become lines, as in vLLM. Raises ValueError, whose message begins with `where`, for anything else."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f'{where}: must be a list of messages, as [{{"role": "user", "content": "..."}}]')
    plain: Messages = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {index} needs a `role`, as system, user, assistant or tool")
        content = message.get("content")
        if isinstance(content, list) and content:
            kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
            if others := [kind for kind in kinds if kind != "text"]:
                raise ValueError(
                    f"{where}: message {index} has a part {others[0]!r}; only parts of type 'text' are taken"
                )
            texts = [part.get("text") for part in content]
            content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{where}: message {index} ({message['role']}) needs `content`, a text")
        if isinstance(content, str) and not is_unicode(content):
            raise ValueError(f"{where}: the content of message {index} holds half a surrogate pair, which is no text")
        plain.append({**message, "content": content} if "content" in message else dict(message))
    return plain


def check_template_kwargs(kwargs: object) -> None:
    """Raises ValueError unless `kwargs` are arguments for a template, and none that is given otherwise."""
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"chat_template_kwargs={kwargs!r}: must be a dictionary, as {{'enable_thinking': False}}")
    if taken := sorted(_RESERVED & {*kwargs}):
        raise ValueError(f"chat_template_kwargs: {taken[0]!r} is no argument for a template; leave it out")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """How prompts become tokens. Only messages need a template; one that is missing or fails is a ValueError then."""

    tokenizer: Any
    """The checkpoint's, or None."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for each rendering, as {"enable_thinking": False}."""
    system_prompt: str | None = None
    """The system message of a conversation that begins without one."""
    tools: Tools | None = None
    """What the model may call, where a rendering names no others."""
    renders_text: bool = False
    """Whether text is a user's message, too, and not encoded as it stands."""
    _whole: set[tuple[str, ...]] = field(default_factory=set, init=False, compare=False, repr=False)
    """The roles of conversations, with the call's template, of which the template is known to keep each message."""

    def __post_init__(self) -> None:
        check_template_kwargs(self.kwargs)

    def is_rendered(self, prompt: Prompt | Messages) -> bool:
        """Whether the template renders this prompt."""
        return is_conversation(prompt) or (isinstance(prompt, str) and self.renders_text)

    def encode(self, prompt: Prompt | Messages, where: str, *, add_generation_prompt: bool = True) -> list[int]:
        """Returns the token ids of text, token ids or messages; the latter with the opening of an answer, unless
        `observe` adds it.

        Raises ValueError, whose message begins with `where`, for an invalid prompt.
        """
        if self.is_rendered(prompt):
            messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.render(messages, where=where, add_generation_prompt=add_generation_prompt)
        return encode_prompt(self.tokenizer, prompt, where)  # type: ignore[arg-type]

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        where: str = "messages",
        **kwargs: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation. `kwargs` are arguments for the template.

        Raises ValueError if there is no template, if it fails, or if it drops a message.
        """
        messages = check_messages(messages, where)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        options = {**self.kwargs, **kwargs, "tools": tools or self.tools}
        options["add_generation_prompt"] = add_generation_prompt
        tokens: list[int] = self._apply(messages, where, options, tokenize=True)
        self._check_whole(messages, where, options)
        return tokens

    def render_next(
        self,
        observation: Messages,
        *,
        after: Sequence[int] = (),
        tools: Tools | None = None,
        where: str = "observation",
        **kwargs: Any,
    ) -> list[int]:
        """Returns the token ids that go on from a sampled answer: its end, the observation, and the next opening.

        `after` are the sampled tokens; where they have the end of a turn already, it is not added again. The ids are
        the difference of two renderings of a fixed conversation, so templates that change earlier thoughts work.
        Raises ValueError if the first is no prefix of the second from the answer on, or as `render` does.
        """
        observation = check_messages(observation, where)
        begin = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}]
        options = {**self.kwargs, **kwargs, "tools": tools or self.tools}
        first = self._apply(begin, where, {**options, "add_generation_prompt": False}, tokenize=False)
        both, options = [*begin, *observation], {**options, "add_generation_prompt": True}
        head, _, rest = self._apply(both, where, options, tokenize=False).partition(_ANSWER)
        self._check_whole(both, where, options)
        _, found, end = first.partition(_ANSWER)
        tokens: list[int] = self._apply(both, where, options, tokenize=True)
        before = self._encode(head + _ANSWER)
        if not (found and rest.startswith(end) and tokens[: len(before)] == before):
            raise ValueError(
                f"{where}: the model's chat template writes the end of an answer otherwise when a message follows "
                f"({end[:80]!r}, then {rest[:80]!r}), so a conversation cannot go on; use another chat_template.jinja"
            )
        added = tokens[len(before) :]
        most = min(len(after), len(self._encode(end)))
        known = next((k for k in range(most, 0, -1) if list(after[-k:]) == added[:k]), 0)
        return added[known:]

    def render_first(self, observation: Messages, *, where: str = "observation") -> list[int]:
        """Returns the token ids behind a prompt that was rendered without the opening of an answer: those of the
        observation, which may be empty, and the opening. Raises ValueError as `render_next` does."""
        begin = [{"role": "user", "content": "A question."}]
        options = {**self.kwargs, "tools": self.tools}
        first: list[int] = self._apply(begin, where, {**options, "add_generation_prompt": False}, tokenize=True)
        both: list[int] = self._apply(
            [*begin, *observation], where, {**options, "add_generation_prompt": True}, tokenize=True
        )
        if both[: len(first)] != first:
            raise ValueError(
                f"{where}: the model's chat template writes a question otherwise when a message follows, so that "
                "nothing can be observed behind a prompt; use another chat_template.jinja"
            )
        return both[len(first) :]

    def observe(self, text: str | None, role: str, after: Sequence[int], *, is_rendered: bool) -> list[int]:
        """Returns the token ids of what a trajectory observes behind these sampled tokens, or, without any, behind its
        prompt: of a prompt that `is_rendered`, one without the opening of an answer. Raises ValueError as
        `render_next` does, or for text that cannot be encoded."""
        if text is not None and not is_unicode(text):
            raise ValueError("observation: holds half a surrogate pair, which is no text")
        if not is_rendered:
            return self._encode(text or "")
        observation = [] if text is None else [{"role": role, "content": text}]
        return self.render_next(observation, after=after) if after else self.render_first(observation)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check_whole(self, messages: Messages, where: str, options: Mapping[str, Any]) -> None:
        """Raises ValueError if the template drops one of the messages. Done once for each succession of roles."""
        roles = tuple(message["role"] for message in messages)
        known = (*roles, str(options.get("chat_template")))
        if known in self._whole:
            return
        marks = {index: f" (mark {index})" for index, message in enumerate(messages) if message.get("content")}
        marked = [
            {**one, "content": one["content"] + marks[i]} if i in marks else one for i, one in enumerate(messages)
        ]
        text = self._apply(marked, where, options, tokenize=False)
        if lost := [index for index, mark in marks.items() if mark.strip() not in text]:
            raise ValueError(
                f"{where}: the model's chat template drops message {lost[0]} ({roles[lost[0]]}) of roles "
                f"{', '.join(roles)}; leave it out, or use another chat_template.jinja"
            )
        if len(self._whole) >= _MOST_KNOWN:
            self._whole.clear()
        self._whole.add(known)

    def _apply(self, messages: Messages, where: str, options: Mapping[str, Any], *, tokenize: bool) -> Any:
        """Returns token ids, or text."""
        given = options.get("chat_template") or getattr(self.tokenizer, "chat_template", None)
        if self.tokenizer is None or given is None:
            raise ValueError(
                f"{where}: the model has no chat template; give text, or a chat model (its template stands in "
                "chat_template.jinja or tokenizer_config.json)"
            )
        options = {**options, "tokenize": tokenize, "return_dict": False}
        if not tokenize:
            options.pop("sanitize_control_tokens", None)
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template raises what it likes, besides jinja's errors
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where}: the model's chat template cannot render it ({told})") from None
