"""Sequences as plain data: a caller's request, a replica's state of a sequence, and the finished completion.

Torch-free. A `SequenceState` is enough to continue a sequence anywhere; its KV can always be recomputed from it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from engines.constraints import Count, Fraction, Int64, Share, WholeNumber, check_fields
from engines.decoding import from_msgpack

FinishReason = Literal["stop", "length", "abort"]
SequenceId = tuple[int, int, int]
"""(policy step, prompt uid, sample index): unique among the sequences of a run."""
Detokenize = Callable[[Sequence[int]], str]
"""Token ids to text."""
StopString = Annotated[str, Meta(min_length=1, description="text that is not empty")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
Bias = Annotated[float, Meta(ge=-1e30, le=1e30)]
Biases = Annotated[
    tuple[tuple[Int64, Bias], ...],
    Meta(
        description="a dictionary like {53: -2.0}: keys are token ids, integers; values are numbers from -1e30 to 1e30"
    ),
]
NumLogprobs = Annotated[int, Meta(ge=-1, lt=2**31, description="-1 (all tokens), or an integer of at least 0")]
Ranked = tuple[int, float, int]
"""A token, its log-prob, and its rank: 1 + the number of tokens that are more likely."""
Span = tuple[int, int]
"""The first place, and the one behind the last."""
NOT_GENERATED = -1
"""The `policy_version` of an observed token, whose log-prob is 0."""


class Tokenizer(Protocol):
    """What a replica uses of a tokenizer."""

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids to text."""
        ...

    def spellings(self, word: str) -> Sequence[Sequence[int]]:
        """The token ids of a word at the beginning of a text and behind a space."""
        ...


def is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded: half a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_NOT_HERE = {
    "allowed_token_ids": "give logit_bias or bad_words",
    "best_of": "give n, and choose among the completions",
    "guided_decoding": "no grammar is compiled here",
    "logits_processors": "other processes cannot run a caller's function between two tokens; give logit_bias",
    "spaces_between_special_tokens": "text is as the tokenizer decodes it",
    "structured_outputs": "no grammar is compiled here",
    "truncate_prompt_tokens": "cut the prompt's token ids",
    "use_beam_search": "each completion is sampled for itself; give n",
}
"""Options of vLLM's class that this one does not have, and what to do instead."""
_Class = TypeVar("_Class", bound=type)


def _refuses_unknown(kind: _Class) -> _Class:
    """Makes the constructor raise ValueError for an option that the class does not have. None is no option."""
    init, names = kind.__init__, [one.name for one in fields(kind)]  # type: ignore[misc]

    @functools.wraps(init)
    def named(self: object, *args: Any, **options: Any) -> None:
        for name in options.keys() - set(names):
            if options[name] is not None:
                why = _NOT_HERE.get(name, f"there are {', '.join(names)}")
                raise ValueError(f"{kind.__name__}.{name}={options[name]!r}: there is no such option; {why}")
            del options[name]
        init(self, *args, **options)

    kind.__init__ = named  # type: ignore[misc]
    return kind


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings follow vLLM's class of the same name.

    `logit_bias`, penalties and forbidden tokens change the logits first, as in vLLM; the processors follow in Hugging
    Face's order: temperature, top-k, top-p, min-p (vLLM's min-p comes before top-k).
    """

    temperature: Annotated[float, Meta(ge=0, le=1e6, description="0 (greedy), or in [1e-6, 1e6]")] = 1.0
    """0 is greedy: the most likely token; log-probs are then from the unscaled distribution."""
    top_k: Annotated[int, Meta(ge=-1, lt=2**31, description="0 or -1 (off), or an integer from 1 to 2^31 - 1")] = -1
    """Keep the k most likely tokens; 0 and -1 keep all."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the completion has, as often as it has them."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100, description="a number from 0.01 to 100")] = 1.0
    """Divides positive logits, and multiplies others, of tokens that the prompt or the completion has."""
    logit_bias: Biases = ()
    """Added to the logits of single tokens: a dictionary, or pairs of a token id and a number."""
    bad_words: tuple[StopString, ...] = ()
    """Words that are not generated: a token that would complete one in the completion is forbidden. A word counts as it
    is tokenised at the beginning of a text, and behind a space where that takes as many tokens."""
    n: Count = 1
    """Completions per prompt."""
    max_tokens: Count | None = 16
    """Most tokens of a completion, observed ones included; None: as many as `max_model_len` leaves."""
    max_turns: Count | None = None
    """Most turns of a trajectory (`LLM.generate` with an environment); None: as many as the environment takes."""
    min_tokens: WholeNumber = 0
    """Tokens before which `stop`, `stop_token_ids` and end-of-sequence ids end no completion; the ids are forbidden."""
    stop_token_ids: tuple[Int64, ...] = ()
    """Token ids that end a completion, beside the model's own end-of-sequence ids."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a completion; the text is cut before the string, the tokens are kept. The text also leaves out a
    last token of `stop_token_ids`.

    U+FFFD matches bytes that are not valid text, once more bytes follow: until then they may be half a character.
    """
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids (`stop_token_ids` still end a completion)."""
    seed: Int64 | None = None
    """Makes the completions of this request independent of the run's seed, policy step and prompt uid."""
    logprobs: NumLogprobs | None = None
    """Also returns the log-probs of this many most likely tokens at each place; -1: of all. They are those of the
    distribution that is sampled from, so tokens that it excludes are left out (vLLM's default is the model's own)."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the prompt's tokens, under the model's own distribution. The prompt is then computed as a whole."""
    detokenize: bool = True
    """Whether completions have a text."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string, or the last token, that ended it."""

    def __post_init__(self) -> None:
        # Callers naturally pass lists, dictionaries, None and a lone string; keep the value hashable.
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
            value = getattr(self, name)
            if isinstance(value, tuple) and not value:
                continue
            if isinstance(value, Mapping):
                value = value.items()
            value = () if value is None else value
            if not isinstance(value, Iterable):
                raise ValueError(f"SamplingParams.{name}={value!r}: must be a list or tuple")
            value = [value] if isinstance(value, str) else value
            object.__setattr__(self, name, tuple(tuple(one) if isinstance(one, list) else one for one in value))
        check_fields(self)
        for name in ("stop", "bad_words"):
            if not all(map(is_unicode, getattr(self, name))):
                raise ValueError(
                    f"SamplingParams.{name}={getattr(self, name)!r}: must be text, and half a surrogate pair is none"
                )
        object.__setattr__(self, "logit_bias", tuple((token, float(bias)) for token, bias in self.logit_bias))
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"SamplingParams.temperature={self.temperature!r}: must be 0 (greedy), or in [1e-6, 1e6]")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError(f"SamplingParams.logit_bias={self.logit_bias!r}: a token id repeats; give each one once")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if not all(map(str.strip, self.bad_words)):
            raise ValueError(f"SamplingParams.bad_words={self.bad_words!r}: a word must be more than spaces")
        if self.min_tokens > self.most_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"SamplingParams.detokenize=False: stop={self.stop!r} is looked for in text; leave one out"
            )

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or what exceeds any context."""
        return 2**31 if self.max_tokens is None else self.max_tokens

    @property
    def is_penalised(self) -> bool:
        """Whether a penalty depends on the tokens before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits of single tokens are changed before they are scaled."""
        return bool(self.is_penalised or self.logit_bias or self.bad_words or self.min_tokens)


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

    `logprobs` and `versions` have one entry per token of the response, `tokens[num_prompt_tokens:]`; so has
    `top_logprobs` where `params.logprobs` asks for it.

    A trajectory is a sequence `in_turns`: a stop ends only its turn. Then it is parked until an observation follows
    (`observe`) or its end. Heddle, §2.1.
    """

    key: SequenceKey
    group_id: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[list[Ranked]] = field(default_factory=list)
    prompt_logprobs: list[list[Ranked]] = field(default_factory=list)
    """As far as the prompt has been computed: an entry per token from the second one on."""
    in_turns: bool = False
    observed: list[Span] = field(default_factory=list)
    """The places in `tokens` of each observation; one without tokens has a place, too."""

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt must be computed for their log-probs: a group's first sample does it for all."""
        is_asked = self.params.prompt_logprobs is not None and self.key.sample_index == 0
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_response_tokens(self) -> int:
        """Tokens behind the prompt, observed ones included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_observed(self) -> int:
        return sum(end - start for start, end in self.observed) if self.observed else 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens - self.num_observed

    @property
    def num_turns(self) -> int:
        """Turns that have begun. An observation right behind the prompt comes before the first one."""
        num_before = sum(start > self.num_prompt_tokens for start, _ in self.observed)
        return num_before + (len(self.tokens) > self.turn_start)

    @property
    def turn_start(self) -> int:
        """The place in `tokens` where the present turn begins."""
        return self.observed[-1][1] if self.observed else self.num_prompt_tokens

    @property
    def num_returning(self) -> int:
        """Tokens that were computed by the end of the turn before, if a later turn than the first begins; else 0."""
        begins = bool(self.observed) and len(self.tokens) == self.turn_start
        # The last token of a turn is computed by the next pass.
        return self.observed[-1][0] - 1 if begins and self.num_turns else 0

    @property
    def sequence_id(self) -> SequenceId:
        return (self.key.policy_step, self.key.prompt_uid, self.key.sample_index)

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends an observation, behind which the next turn begins."""
        start = len(self.tokens)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NOT_GENERATED] * len(tokens)
        if self.params.logprobs is not None:
            self.top_logprobs += [[] for _ in tokens]
        self.observed.append((start, len(self.tokens)))

    def cut(self, length: int) -> None:
        """Removes tokens until `length` tokens are left, prompt included."""
        self.observed = [span for span in self.observed if span[1] <= length]
        del self.tokens[length:]
        del self.logprobs[length - self.num_prompt_tokens :]
        del self.versions[length - self.num_prompt_tokens :]
        del self.top_logprobs[length - self.num_prompt_tokens :]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> SequenceState:
        """Raises `DecodeError` when `data` is not a sequence state."""
        return from_msgpack(data, SequenceState)


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """What vLLM says of a token at a place."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished (or aborted) completion: lists with one entry per token."""

    index: int
    """Sample index within the group."""
    token_ids: list[int]
    """Generated tokens, the stop token included that ended the completion; of a trajectory, observed ones, too."""
    logprobs: list[float]
    """Log-probability of each token under the processed distribution. With `SamplingParams.logprobs`, `LLM.generate`
    returns vLLM's form instead: for each token a dictionary {token id: `Logprob`}, the token itself first."""
    versions: list[int]
    """`policy_version` of the weights that sampled each token; -1 for an observed one."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded without special tokens, cut before a stop string; empty when the engine has no tokenizer."""
    stop_reason: int | str | None = None
    """The token of `stop_token_ids`, or the stop string, that ended it."""
    top_logprobs: list[list[Ranked]] = field(default_factory=list)
    """With `SamplingParams.logprobs`: for each token itself, then the most likely others."""
    prompt_logprobs: list[list[Ranked]] = field(default_factory=list)
    """With `SamplingParams.prompt_logprobs`, in sample 0: the same for the prompt's tokens from the second one on."""
    cumulative_logprob: float | None = None
    """As in vLLM, `LLM.generate` gives it with `SamplingParams.logprobs`."""
    observed: list[Span] = field(default_factory=list)
    """Of a trajectory: the places in `token_ids` of each observation."""
    reward: float | None = None
    """Of a trajectory: what its environment's `get_reward` returned."""

    @staticmethod
    def of(
        state: SequenceState, reason: FinishReason, text: str = "", stop_reason: int | str | None = None
    ) -> Completion:
        """Returns the completion of a sequence that has ended so."""
        first = state.num_prompt_tokens
        return Completion(
            index=state.key.sample_index,
            token_ids=state.tokens[first:],
            logprobs=list(state.logprobs),
            versions=list(state.versions),
            finish_reason=reason,
            text=text,
            stop_reason=stop_reason,
            top_logprobs=list(state.top_logprobs),
            prompt_logprobs=list(state.prompt_logprobs),
            observed=[(start - first, end - first) for start, end in state.observed],
        )

    @property
    def loss_mask(self) -> list[bool]:
        """Which tokens were generated."""
        mask = [True] * len(self.token_ids)
        for start, end in self.observed:
            mask[start:end] = [False] * (end - start)
        return mask

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - sum(end - start for start, end in self.observed)

    @property
    def turns(self) -> list[Span]:
        """The places in `token_ids` of each turn: what was generated without a break."""
        starts = [0, *(end for _, end in self.observed)]
        ends = [*(start for start, _ in self.observed), len(self.token_ids)]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


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
    """A sequence for a replica to continue, for `max_new_tokens` tokens, or to its end when None. Or one comes back."""

    state: SequenceState
    max_new_tokens: int | None = None
    kv: KVHandle | None = None
    """Stored KV of its first tokens; the KV of the other tokens is recomputed."""
    turn: str | None = None
    """Of a trajectory that comes back since its turn has ended: the turn's text."""
    priority: float = 0.0
    """The replica admits a sequence of higher priority first, and preempts one of lower priority for it: see
    `EngineConfig.priority_margin`. The order among equals is that of their coming."""


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With `SamplingParams.prompt_logprobs`: None for the first token, then {token id: `Logprob`} for each."""
    request_id: str = ""
    """The prompt's uid."""
    finished: bool = True
