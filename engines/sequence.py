"""Sequences as plain data: a caller's request, a replica's state of a sequence, and the finished completion.

Torch-free. A `SequenceState` is enough to continue a sequence anywhere; its KV can always be recomputed from it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engines.constraints import Count, Fraction, Int64, Share, check_fields
from engines.decoding import from_msgpack

FinishReason = Literal["stop", "length", "abort"]
SequenceId = tuple[int, int, int]
"""(policy step, prompt uid, sample index): unique among the sequences of a run."""
Detokenize = Callable[[Sequence[int]], str]
"""Token ids to text."""
StopString = Annotated[str, Meta(min_length=1, description="text that is not empty")]


def is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded: half a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings follow vLLM's class of the same name.

    The processors apply in Hugging Face's order: temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Meta(ge=0, le=1e6, description="0 (greedy), or in [1e-6, 1e6]")] = 1.0
    """0 is greedy: the most likely token; log-probs are then from the unscaled distribution."""
    top_k: Annotated[int, Meta(ge=-1, lt=2**31, description="-1 (off), or an integer from 1 to 2^31 - 1")] = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    n: Count = 1
    """Completions per prompt."""
    max_tokens: Count = 16
    """Most tokens generated per completion."""
    stop_token_ids: tuple[Int64, ...] = ()
    """Token ids that end a completion, beside the model's own end-of-sequence ids."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a completion; the text is cut before the string, the tokens are kept.

    U+FFFD matches bytes that are not valid text, once more bytes follow: until then they may be half a character.
    """
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids (`stop_token_ids` still end a completion)."""
    seed: Int64 | None = None
    """Makes the completions of this request independent of the run's seed, policy step and prompt uid."""

    def __post_init__(self) -> None:
        # Callers naturally pass lists, and a lone stop string; keep the value hashable.
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable):
                raise ValueError(f"SamplingParams.{name}={value!r}: must be a list or tuple")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        check_fields(self)
        if not all(map(is_unicode, self.stop)):
            raise ValueError(f"SamplingParams.stop={self.stop!r}: must be text, and half a surrogate pair is none")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"SamplingParams.temperature={self.temperature!r}: must be 0 (greedy), or in [1e-6, 1e6]")
        if self.top_k == 0:
            raise ValueError("SamplingParams.top_k=0: must be -1 (off), or an integer from 1 to 2^31 - 1")


@dataclass(frozen=True, kw_only=True)
class SequenceKey:
    """All that a sequence's random numbers depend on."""

    run_seed: int
    policy_step: int
    prompt_uid: int
    sample_index: int

    def noise_key(self, seed: int | None = None) -> int:
        """Returns the 64-bit key of this sequence's noise, as a signed integer that fits in an int64 tensor.

        With a request's own `seed`, the key depends only on that seed and the sample index.
        """
        if seed is None:
            name = struct.pack("<4sqqqq", b"run\0", self.run_seed, self.policy_step, self.prompt_uid, self.sample_index)
        else:
            name = struct.pack("<4sqq", b"req\0", seed, self.sample_index)
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


@dataclass(kw_only=True)
class SequenceState:
    """A sequence between two steps: enough to resume it in any process. It grows as tokens are generated.

    `logprobs` and `versions` have one entry per generated token, `tokens[num_prompt_tokens:]`.
    """

    key: SequenceKey
    group_id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def sequence_id(self) -> SequenceId:
        return (self.key.policy_step, self.key.prompt_uid, self.key.sample_index)

    def cut(self, length: int) -> None:
        """Removes generated tokens until `length` tokens are left, prompt included."""
        del self.tokens[length:]
        del self.logprobs[length - self.num_prompt_tokens :]
        del self.versions[length - self.num_prompt_tokens :]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> SequenceState:
        """Raises `DecodeError` when `data` is not a sequence state."""
        return from_msgpack(data, SequenceState)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished (or aborted) completion: lists with one entry per generated token."""

    index: int
    """Sample index within the group."""
    token_ids: list[int]
    """Generated tokens; the stop token, when one ended the completion, included."""
    logprobs: list[float]
    """Log-probability of each token under the processed distribution."""
    versions: list[int]
    """`policy_version` of the weights that sampled each token."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded without special tokens, cut before a stop string; empty when the engine has no tokenizer."""


@dataclass(frozen=True, kw_only=True)
class KVPart:
    """The KV of some neighbouring tokens and KV heads, all layers, as one piece of storage."""

    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int
    location: str
    """Where the bytes lie, in the format of the store that wrote them."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVHandle:
    """Names the stored KV of a sequence's first tokens, in ranges that are split by KV heads. Holds no KV itself."""

    policy_version: int
    """Version of the weights that computed this KV; for other weights it must be recomputed."""
    dtype: str
    parts: tuple[KVPart, ...]

    @property
    def ranges(self) -> list[tuple[KVPart, ...]]:
        """The parts of each range of tokens, as far as the ranges follow each other from the first token on."""
        start = attrgetter("first_token")
        ranges: list[tuple[KVPart, ...]] = []
        end = 0
        for first, group in groupby(sorted(self.parts, key=start), start):
            parts = tuple(group)
            lengths = {part.num_tokens for part in parts}
            if first != end or len(lengths) > 1 or min(lengths) < 1:
                break
            ranges.append(parts)
            end = first + parts[0].num_tokens
        return ranges

    def lacking(self, num_known: int, num_tokens: int) -> list[tuple[KVPart, ...]]:
        """Returns the ranges that a cache lacks which has the first `num_known` of these tokens."""
        return [
            parts
            for parts in self.ranges
            if parts[0].first_token < num_tokens and parts[0].first_token + parts[0].num_tokens > num_known
        ]

    @property
    def num_tokens(self) -> int:
        """Leading tokens whose KV is stored."""
        return sum(parts[0].num_tokens for parts in self.ranges)

    def first(self, num_tokens: int) -> KVHandle | None:
        """Returns the handle of the ranges that end within the first `num_tokens` tokens; None when there is none."""
        parts = tuple(part for part in self.parts if part.first_token + part.num_tokens <= num_tokens)
        return replace(self, parts=parts) if parts else None


@dataclass(frozen=True, kw_only=True)
class Work:
    """A sequence for a replica to continue, for `max_new_tokens` tokens, or to its end when None."""

    state: SequenceState
    max_new_tokens: int | None = None
    kv: KVHandle | None = None
    """Stored KV of its first tokens; the KV of the other tokens is recomputed."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished sequence: its state, and the completion made from it."""

    state: SequenceState
    completion: Completion


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions, in sample order."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt: str | None = None
