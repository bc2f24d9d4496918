"""Whether a token ends its sequence, or its turn, and what is then delivered. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engines.replica.schedule import Sequence
from engines.replica.stop_strings import StopSearch, cut_at_stop
from engines.sequence import Completion, Detokenize, FinishReason, SamplingParams, SequenceState, Tokenizer

HiddenStop = Callable[[SequenceState], bool]


class Endings:
    """The rules by which sequences end: end-of-sequence tokens, stop ids and strings, lengths."""

    def __init__(
        self, *, eos_token_ids: tuple[int, ...], detokenize: Tokenizer | None, hidden_stop: HiddenStop | None = None
    ) -> None:
        """A sequence, or its turn, ends with "stop" when `hidden_stop` returns True."""
        self._eos = frozenset(eos_token_ids)
        self._detokenize = detokenize
        self._hidden_stop = hidden_stop

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """Returns why the sequence, or its turn, ends with its last token; None if it goes on. Must be called after
        each token."""
        state, params = sequence.state, sequence.state.params
        if self._ends_by_id(state):
            return "stop"
        if params.stop and state.num_response_tokens > params.min_tokens and self._hits_stop_string(sequence):
            return "stop"
        if self._hidden_stop is not None and self._hidden_stop(state):
            return "stop"
        return "length" if len(state.tokens) >= sequence.max_len else None

    def _ends_by_id(self, state: SequenceState) -> bool:
        token, params = state.tokens[-1], state.params
        return token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)

    def _hits_stop_string(self, sequence: Sequence) -> bool:
        state = sequence.state
        first = state.turn_start
        if sequence.stop_search is None:
            sequence.stop_search = StopSearch(
                state.params.stop,
                self._detokenize_as(state.params),
                state.tokens[first:-1],
                num_free=_num_free(state),
            )
        return sequence.stop_search.hits(state.tokens, first)

    def _detokenize_as(self, params: SamplingParams) -> Detokenize:
        assert self._detokenize is not None
        return partial(self._detokenize, skip_special_tokens=params.skip_special_tokens)

    def turn(self, state: SequenceState) -> str:
        """Returns the text of the turn that has just ended: what the environment gets. Empty without a tokenizer."""
        return self._text(state, state.turn_start, "stop")[0]

    def completion(self, state: SequenceState, reason: FinishReason) -> Completion:
        """Returns the completion of a sequence that has ended so. The text of a trajectory is that of all its turns and
        observations, and no stop string cuts it."""
        if not state.in_turns:
            return Completion.of(state, reason, *self._text(state, state.num_prompt_tokens, reason))
        text = ""
        if self._detokenize is not None and state.params.detokenize:
            text = self._detokenize_as(state.params)(state.tokens[state.num_prompt_tokens :])
        return Completion.of(state, reason, text)

    def _text(self, state: SequenceState, first: int, reason: FinishReason) -> tuple[str, int | str | None]:
        """Returns the text from place `first` on, without what ended it, and the stop token or string that did."""
        params, generated = state.params, state.tokens[first:]
        stop_reason: int | str | None = None
        text = ""
        last = generated[-1] if reason == "stop" else None
        is_eos = last in self._eos and not params.ignore_eos
        if last in params.stop_token_ids and not is_eos:
            stop_reason = last
        if self._detokenize is not None and params.detokenize:
            detokenize = self._detokenize_as(params)
            ends = (is_eos or stop_reason is not None) and not params.include_stop_str_in_output
            text = detokenize(generated[:-1] if ends else generated)
            if reason == "stop" and stop_reason is None and not is_eos:
                text, stop_reason = cut_at_stop(text, params, detokenize(generated[: _num_free(state)]))
        return text, stop_reason


def _num_free(state: SequenceState) -> int:
    """The leading tokens of its turn that no stop string ends, as they are among the first `min_tokens`."""
    return max(0, state.params.min_tokens - (state.turn_start - state.num_prompt_tokens))
