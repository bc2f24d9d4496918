"""Changes of single logits of a row before they are scaled: biases, penalties, forbidden tokens, as vLLM defines them.

What changes is a function of the parameters and of the tokens before the row's draw, those of a draft included. So it
does not depend on where or in which pass the token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.sequence import SequenceState, Tokenizer


class Edit(NamedTuple):
    """What changes in a row: columns with one entry per token id, or one number for all of them."""

    biased: tuple[Any, ...]
    """Token ids, biases."""
    penalised: tuple[Any, ...]
    """Token ids, how often the completion has them, then the repetition, frequency and presence penalties."""
    forbidden: list[int]
    """Token ids."""


@dataclass(frozen=True, kw_only=True)
class Editor:
    """Says what changes for which sequence."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    _spellings: dict[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def edit(self, state: SequenceState, draft: Sequence[int] = ()) -> Edit | None:
        """Returns what changes in the row that draws the token behind the sequence's tokens and those of a draft."""
        params, first = state.params, state.num_prompt_tokens
        if not params.edits_logits:
            return None
        tokens = [*state.tokens, *draft]
        ids, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        if params.is_penalised:
            ids, places = np.unique(np.array(tokens), return_inverse=True)
            counts = np.bincount(places[first:], minlength=len(ids))
        forbidden = self._completed_by(params.bad_words, tokens[first:])
        if len(tokens) - first < params.min_tokens:
            forbidden += [*params.stop_token_ids, *self.eos_token_ids]
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return Edit(
            biased=tuple(zip(*params.logit_bias, strict=True)) or ((), ()),
            penalised=(ids, counts, *penalties),
            forbidden=[token for token in forbidden if 0 <= token < self.vocab_size],
        )

    def _completed_by(self, words: tuple[str, ...], generated: list[int]) -> list[int]:
        """Returns the tokens that would complete one of the words."""
        found = []
        for word in words:
            if word not in self._spellings:
                assert self.tokenizer is not None
                self._spellings[word] = self.tokenizer.spellings(word)
            for *before, last in self._spellings[word]:
                if before == generated[max(0, len(generated) - len(before)) :]:
                    found.append(last)
        return found


def apply_edits(logits: Tensor, edits: Sequence[Edit | None]) -> Tensor:
    """Returns the edited logits [N, V]; `edits` has an entry per row."""
    rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not rows:
        return logits
    logits = logits.clone()
    at, ids, bias = _columns([(row, *edit.biased) for row, edit in rows], logits)
    logits[at, ids] += bias
    at, ids, counts, repetition, frequency, presence = _columns([(row, *edit.penalised) for row, edit in rows], logits)
    values = logits[at, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at, ids] = values - frequency * counts - presence * (counts > 0)
    at, ids = _columns([(row, edit.forbidden) for row, edit in rows], logits)
    logits[at, ids] = -torch.inf
    return logits


def _columns(parts: list[tuple[Any, ...]], logits: Tensor) -> list[Tensor]:
    """Returns the parts' columns, one behind the other: rows and token ids int64, the others in the logits' dtype."""
    lengths = [len(part[1]) for part in parts]
    columns = zip(*parts, strict=True)
    whole = [np.concatenate(one) if np.ndim(one[0]) else np.repeat(one, lengths) for one in columns]
    kinds = [torch.int64, torch.int64] + [logits.dtype] * (len(whole) - 2)
    return [torch.from_numpy(column).to(logits.device, kind) for column, kind in zip(whole, kinds, strict=True)]
