"""Which sequences can run on a replica at all. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engines.sequence import SamplingParams, SequenceState


@dataclass(frozen=True, kw_only=True)
class SequenceLimits:
    """SequenceLimits that a sequence must meet to run on a replica."""

    vocab_size: int
    max_model_len: int
    """Tokens of the longest sequence, prompt included."""
    num_kv_tokens: int
    """Tokens of the longest sequence that may run: the largest replica's KV cache holds it in each layout that the run
    may have. Other replicas may hold less."""
    has_tokenizer: bool
    eos_token_ids: tuple[int, ...]

    def check(self, tokens: list[int], params: SamplingParams, name: str = "prompt") -> int:
        """Returns the length in tokens, prompt included, at which the sequence must end.

        Raises ValueError, whose message begins with `name`, when the prompt cannot run here.
        """
        if not tokens:
            raise ValueError(f"{name}: has no tokens; give at least one")
        wrong = [token for token in (min(tokens), max(tokens)) if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(f"{name}: token id {wrong[0]} is outside the model's vocabulary of {self.vocab_size}")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"{name}: {len(tokens)} tokens leave no room in max_model_len={self.max_model_len}; shorten the prompt"
            )
        for option, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            if (words := getattr(params, option)) and not self.has_tokenizer:
                raise ValueError(f"{name}: SamplingParams.{option}={words}: strings need a tokenizer; use {instead}")
        wrong = [token for token, _ in params.logit_bias if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(
                f"{name}: SamplingParams.logit_bias: token id {wrong[0]} is outside the model's vocabulary of "
                f"{self.vocab_size}"
            )
        stops = {*params.stop_token_ids, *self.eos_token_ids} if params.min_tokens else set()
        if len(stops) >= self.vocab_size and stops >= {*range(self.vocab_size)}:
            raise ValueError(
                f"{name}: SamplingParams.min_tokens={params.min_tokens} forbids all tokens: each is in "
                "stop_token_ids, or an end-of-sequence id; give fewer stop_token_ids, or min_tokens=0"
            )
        max_len = min(len(tokens) + params.most_tokens, self.max_model_len)
        if max_len > self.num_kv_tokens:
            raise ValueError(
                f"{name}: {len(tokens)} tokens with max_tokens={params.max_tokens} can reach {max_len} tokens, the KV "
                f"cache holds {self.num_kv_tokens} in the largest replica of a layout that the run may have; raise "
                f"kv_cache_bytes or lower max_tokens or max_model_len"
            )
        return max_len

    def check_state(self, state: SequenceState) -> int:
        """As `check`, for a sequence that may have generated tokens; raises ValueError also when it has finished."""
        max_len = self.check(state.tokens[: state.num_prompt_tokens], state.params)
        if len(state.tokens) >= max_len:
            raise ValueError(f"sequence {state.sequence_id}: is finished, {len(state.tokens)} of {max_len} tokens")
        return max_len
