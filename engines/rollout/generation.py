"""Turns a call of `LLM.generate` into sequences, and checks that all ranks were given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from engines.decoding import from_msgpack
from engines.sequence import (
    Completion,
    Finished,
    Logprob,
    Ranked,
    RequestOutput,
    SamplingParams,
    SequenceId,
    SequenceKey,
    SequenceState,
    is_int64,
)

if TYPE_CHECKING:
    from engines.models.chat import ChatTemplate
    from engines.parallel.collectives import Communicator


def as_prompts(prompts: Any) -> list[Any]:
    """Returns the prompts: one that is no list is a list of one, and vLLM's dictionaries are what they hold.

    Raises ValueError for an empty list, or a dictionary of another kind.
    """
    many = [prompts] if isinstance(prompts, str | Mapping) else prompts
    if isinstance(many, bytes) or not hasattr(many, "__len__") or not len(many):
        raise ValueError(f"prompts={prompts!r}: give a list of at least one prompt")
    return [_held(one, f"prompts[{index}]") if isinstance(one, Mapping) else one for index, one in enumerate(many)]


def _held(prompt: Mapping[str, Any], name: str) -> Any:
    given = {key: value for key, value in prompt.items() if value is not None}
    tokens, text = given.pop("prompt_token_ids", None), given.pop("prompt", None)
    if given or (tokens is None and text is None):
        raise ValueError(f"{name}={prompt!r}: give `prompt`, a text, or `prompt_token_ids`; messages go to LLM.chat")
    return text if tokens is None else tokens


@dataclass(frozen=True, kw_only=True)
class Requests:
    """A call of `LLM.generate`: an entry per prompt in each field."""

    prompts: list[Any]
    """As given."""
    tokens: list[list[int]]
    params: list[SamplingParams]
    uids: Sequence[int]
    rendered: list[bool]
    """Whether the chat template has rendered it."""
    in_turns: bool
    """Whether each completion is a trajectory. A rendered prompt is then without the opening of an answer."""

    @staticmethod
    def read(
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        uids: Sequence[int] | None,
        template: ChatTemplate,
        *,
        first_uid: int,
        max_model_len: int,
        in_turns: bool,
    ) -> Requests:
        """Prompts are numbered from `first_uid` on unless there are `uids`. Raises ValueError for an invalid prompt or
        invalid parameters."""
        given = as_prompts(prompts)
        tokens = [
            template.encode(prompt, f"prompts[{index}]", add_generation_prompt=not in_turns)
            for index, prompt in enumerate(given)
        ]
        params = one_per_prompt(sampling_params, len(given))
        for index, one in enumerate(params):
            if one.max_turns is not None and not in_turns:
                raise ValueError(
                    f"prompts[{index}]: SamplingParams.max_turns={one.max_turns}: is for trajectories; give an "
                    "environment, or leave it out"
                )
        params = [
            replace(one, max_tokens=max(1, max_model_len - len(ids))) if one.max_tokens is None else one
            for one, ids in zip(params, tokens, strict=True)
        ]
        return Requests(
            prompts=given,
            tokens=tokens,
            params=params,
            uids=range(first_uid, first_uid + len(given)) if uids is None else uids,
            rendered=[template.is_rendered(prompt) for prompt in given],
            in_turns=in_turns,
        )

    def states(self, *, run_seed: int, policy_step: int) -> list[SequenceState]:
        """See `make_states`."""
        return make_states(
            self.tokens, self.params, self.uids, run_seed=run_seed, policy_step=policy_step, in_turns=self.in_turns
        )

    def columns(self, columns: Sequence[Mapping[str, Any]] | None) -> dict[int, Mapping[str, Any]]:
        """Returns what each prompt's environments are reset with, by uid. Raises ValueError for another number."""
        given = [{}] * len(self.prompts) if columns is None else list(columns)
        if len(given) != len(self.prompts):
            raise ValueError(f"columns: {len(given)} for {len(self.prompts)} prompts; give a mapping for each")
        return dict(zip(self.uids, given, strict=True))

    def outputs(
        self, completions: Mapping[tuple[int, int], Completion], decode: Callable[[list[int]], str] | None
    ) -> list[RequestOutput]:
        """Returns the outputs in the order of the prompts; `completions` are by (prompt uid, sample index)."""
        groups = ([completions[uid, n] for n in range(one.n)] for uid, one in zip(self.uids, self.params, strict=True))
        rows = zip(self.uids, self.prompts, self.tokens, self.params, groups, strict=True)
        return [request_output(*row, decode) for row in rows]


def request_output(
    uid: int,
    prompt: Any,
    tokens: list[int],
    params: SamplingParams,
    completions: list[Completion],
    decode: Callable[[list[int]], str] | None,
) -> RequestOutput:
    """Returns a prompt's completions, with log-probs in vLLM's form where `params` ask for them."""

    def named(entries: list[list[Ranked]]) -> list[Any]:
        text = decode if decode is not None and params.detokenize else lambda _: None
        return [
            {token: Logprob(logprob=value, rank=rank, decoded_token=text([token])) for token, value, rank in entry}
            for entry in entries
        ]

    scores = None if params.prompt_logprobs is None else [None, *named(completions[0].prompt_logprobs)]
    if params.logprobs is not None:
        completions = [
            replace(one, logprobs=named(one.top_logprobs), cumulative_logprob=sum(one.logprobs)) for one in completions
        ]
    return RequestOutput(
        prompt_token_ids=tokens,
        outputs=completions,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_logprobs=scores,
        request_id=str(uid),
    )


def make_states(
    token_lists: list[list[int]],
    params: list[SamplingParams],
    uids: Sequence[int],
    *,
    run_seed: int,
    policy_step: int,
    in_turns: bool = False,
) -> list[SequenceState]:
    """Returns one state per completion. Raises ValueError unless uids are distinct 64-bit integers, one per prompt."""
    wrong = [uid for uid in uids if not is_int64(uid)]
    if wrong:
        raise ValueError(f"prompt_uids: {wrong[0]!r} is not an integer of 64 bits")
    if len(set(uids)) != len(token_lists):
        raise ValueError(f"prompt_uids: {len(set(uids))} distinct values for {len(token_lists)} prompts; give one each")
    return [
        SequenceState(
            key=SequenceKey(run_seed=run_seed, policy_step=policy_step, prompt_uid=uid, sample_index=index),
            group_id=uid,
            tokens=list(tokens),
            num_prompt_tokens=len(tokens),
            params=one,
            in_turns=in_turns,
        )
        for tokens, one, uid in zip(token_lists, params, uids, strict=True)
        for index in range(one.n)
    ]


def one_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Returns `count` SamplingParams. Raises ValueError unless `params` is None, one, or a list of `count` of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not hasattr(params, "__len__"):
        raise ValueError(f"sampling_params={params!r}: give SamplingParams, or a list of one per prompt")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} for {count} prompts; give one, or one per prompt")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params[{index}]={one!r}: give SamplingParams")
    return list(params)


def split_done(
    states: Sequence[SequenceState], done: Mapping[SequenceId, Completion]
) -> tuple[list[Finished], list[SequenceState]]:
    """Returns the sequences that are in `done`, as if they had just ended, and the states of the others."""
    known = []
    for state in states:
        if state.sequence_id in done:
            completion = done[state.sequence_id]
            ended = replace(
                state,
                tokens=state.tokens + completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                top_logprobs=completion.top_logprobs,
                prompt_logprobs=completion.prompt_logprobs,
                observed=[(len(state.tokens) + start, len(state.tokens) + end) for start, end in completion.observed],
            )
            known.append(Finished(state=ended, completion=completion))
    return known, [state for state in states if state.sequence_id not in done]


def check_same_states(world: Communicator, states: list[SequenceState]) -> None:
    """Raises ValueError, on every rank, if the ranks would generate different sequences."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(states), digest_size=16).digest()
    others = [rank for rank, other in enumerate(world.all_gather_bytes(digest)) if other != digest]
    if others:
        raise ValueError(
            f"generate: ranks {others} were given other prompts or parameters than rank {world.rank}; give all ranks "
            "the same"
        )


def check_same_options(world: Communicator, options: Mapping[str, object]) -> None:
    """Raises ValueError, on every rank, if any rank's `LLM` was given other options than rank 0's."""
    mine = {name: repr(value) for name, value in options.items()}
    everyone = world.all_gather_bytes(msgspec.msgpack.encode(mine))
    first, *others = [from_msgpack(one, dict[str, str]) for one in everyone]
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"LLM: {name}: rank {rank} has {other[name]}, rank 0 has {value}; give all ranks the same"
                )
