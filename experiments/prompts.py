"""Prompts as JSONL: each line is an object with `prompt` (text), `messages` or `prompt_token_ids`, or a string."""

from __future__ import annotations

from typing import Any

from engines.json_files import loads_finite
from engines.models.chat import check_messages

Records = list[dict[str, Any]]
ANSWERED = ("index", "text", "finish_reason", "token_ids", "logprobs")
"""The fields that a line of the output adds to those of its prompt."""
ASKED_FOR = ("top_logprobs", "prompt_logprobs")
"""Those that it adds with --logprobs and --prompt-logprobs, as lists of [token id, log-prob, rank]."""


def read_prompts(data: bytes, source: str) -> tuple[Records, list[str]]:
    """Returns a record for each non-blank line, and the place of each record, "file:line".

    Raises ValueError, with the place, for a line that cannot be read.
    """
    records, places = [], []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            places.append(f"{source}:{number}")
            records.append(_read_record(line, places[-1]))
    if not records:
        raise ValueError(f"{source}: holds no prompts; give at least one")
    return records, places


def _read_record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = loads_finite(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: is not UTF-8 ({error})") from None
    except (ValueError, RecursionError) as error:  # no JSON, or more digits or brackets than Python reads
        raise ValueError(f'{place}: not valid JSON ({error}); a line is {{"prompt": "..."}} or a string') from None
    record = {"prompt": record} if isinstance(record, str) else record
    ids = record.get("prompt_token_ids") if isinstance(record, dict) else None
    is_ids = isinstance(ids, list) and len(ids) > 0 and all(type(token) is int for token in ids)
    is_chat = ids is None and isinstance(record, dict) and "messages" in record
    if is_chat:
        check_messages(record["messages"], f"{place}: `messages`")
    is_text = ids is None and isinstance(record, dict) and isinstance(record.get("prompt"), str)
    if not (is_ids or is_chat or is_text):
        raise ValueError(f"{place}: needs `prompt`, a string, `messages`, or `prompt_token_ids`, integers")
    if is_text and not record["prompt"]:
        raise ValueError(f"{place}: `prompt` is empty; give some text")
    if is_text and any("\ud800" <= character <= "\udfff" for character in record["prompt"]):
        raise ValueError(f"{place}: `prompt` holds half a surrogate pair, which is no text")
    if taken := [name for name in ANSWERED + ASKED_FOR if name in record]:
        raise ValueError(f"{place}: the output has a field `{taken[0]}` of its own; rename the input's")
    return record
