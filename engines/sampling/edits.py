"""Changes of single logits of a row before they are scaled: biases, penalties, forbidden tokens, as vLLM defines them.

What changes is a function of the parameters and of the tokens before the row's draw, those of a draft included. So it
does not depend on where or in which pass the token is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.sequence import SequenceState, Tokenizer

_NONE = np.empty((2, 0), dtype=np.int64)
MOST_SPELLINGS = 2**13
"""Words whose spellings are kept. More in one step would be spelled again in each."""
_Spelling = tuple[list[int], int]
"""The token ids before the last one, and the last one."""


class Edit(NamedTuple):
    """What changes in a row: columns with one entry per token id, or one number for all of them."""

    biased: tuple[Any, ...]
    """Token ids, biases."""
    penalised: tuple[Any, ...]
    """Token ids, how often the completion has them, then the repetition, frequency and presence penalties."""
    forbidden: list[int]
    """Token ids."""


class Counts:
    """How often a sequence has each of its tokens, kept while it grows: a pass counts only what it computes."""

    def __init__(self) -> None:
        self._counted: list[int] = []
        self._columns: dict[int, int] = {}
        self._table = np.empty((3, 0), dtype=np.int64)
        """In the first columns: token ids, how often the completion has them, and how often all tokens have them."""

    def follow(self, state: SequenceState, num_same: int) -> None:
        """Counts the tokens of `state`, of which the first `num_same` are those of the last call."""
        first = state.num_prompt_tokens
        if not self._counted:
            ids, places, total = np.unique(np.array(state.tokens), return_inverse=True, return_counts=True)
            self._table = np.array([ids, np.bincount(places[first:], minlength=len(ids)), total])
            self._columns = dict(zip(ids.tolist(), range(len(ids)), strict=True))
            self._counted = list(state.tokens)
            return
        while len(self._counted) > num_same:
            token = self._counted.pop()
            self._add(token, -1, len(self._counted) >= first)
        for token in state.tokens[len(self._counted) :]:
            self._add(token, 1, len(self._counted) >= first)
            self._counted.append(token)

    def _add(self, token: int, change: int, is_generated: bool) -> None:
        last = len(self._columns)
        column = self._columns.setdefault(token, last)
        if last == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table, shape=(3, last))], axis=1)
        if column == last:
            self._table[:, column] = token, 0, 0
        self._table[1, column] += change * is_generated
        self._table[2, column] += change
        if not self._table[2, column]:  # the last column takes its place
            self._table[:, column] = self._table[:, last - 1]
            self._columns[int(self._table[0, column])] = column
            del self._columns[token]

    def behind(self, draft: Sequence[int]) -> np.ndarray:
        """Returns the distinct tokens of the sequence and a draft behind it, and how often the completion then has
        them, int64 [2, n]. Without a draft it is valid until the next call of `follow`."""
        own = self._table[:2, : len(self._columns)]
        if not draft:
            return own
        new = [token for token in dict.fromkeys(draft) if token not in self._columns]
        table = np.concatenate([own, np.array([new, [0] * len(new)], dtype=np.int64)], axis=1)
        for token in draft:
            table[1, own.shape[1] + new.index(token) if token in new else self._columns[token]] += 1
        return table


@dataclass(frozen=True, kw_only=True)
class Editor:
    """Says what changes for which sequence."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    _spell: Callable[[str], list[_Spelling]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        spell = functools.lru_cache(MOST_SPELLINGS)(functools.partial(_spellings, self.tokenizer))
        object.__setattr__(self, "_spell", spell)

    def edit(self, state: SequenceState, counts: Counts | None, draft: Sequence[int] = ()) -> Edit | None:
        """Returns what changes in the row that draws the token behind the sequence's tokens and those of a draft.
        `counts` are the sequence's if it is penalised."""
        params = state.params
        if not params.edits_logits:
            return None
        forbidden = self._completed_by(state, draft)
        if state.num_response_tokens + len(draft) < params.min_tokens:
            forbidden += [*params.stop_token_ids, *self.eos_token_ids]
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return Edit(
            biased=tuple(zip(*params.logit_bias, strict=True)) or ((), ()),
            penalised=(*(_NONE if counts is None else counts.behind(draft)), *penalties),
            forbidden=[token for token in forbidden if 0 <= token < self.vocab_size],
        )

    def _completed_by(self, state: SequenceState, draft: Sequence[int]) -> list[int]:
        """Returns the tokens that would complete one of the words that are not generated."""
        found = []
        for word in state.params.bad_words:
            for before, last in self._spell(word):
                start = max(state.num_prompt_tokens, len(state.tokens) + len(draft) - len(before))
                tail = [*state.tokens[start:], *draft]
                if before == tail[max(0, len(tail) - len(before)) :]:
                    found.append(last)
        return found


def _spellings(tokenizer: Tokenizer | None, word: str) -> list[_Spelling]:
    assert tokenizer is not None
    return [(list(before), last) for *before, last in tokenizer.spellings(word)]


def apply_edits(logits: Tensor, edits: Sequence[Edit | None]) -> Tensor:
    """Returns the edited logits [N, V]; `edits` has an entry per row."""
    rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not rows:
        return logits
    edited = logits.clone().view(-1)
    if parts := [(row, *edit.biased) for row, edit in rows if edit.biased[0]]:
        at, bias = _columns(parts, logits)
        edited[at] += bias
    if parts := [(row, *edit.penalised) for row, edit in rows if len(edit.penalised[0])]:
        at, counts, repetition, frequency, presence = _columns(parts, logits)
        values = edited.index_select(0, at)
        values = torch.where(values > 0, values / repetition, values * repetition)
        edited.index_copy_(0, at, values - frequency * counts - presence * (counts > 0))
    if parts := [(row, edit.forbidden) for row, edit in rows if edit.forbidden]:
        (at,) = _columns(parts, logits)
        edited[at] = -torch.inf
    return edited.view(logits.shape)


def _columns(parts: list[tuple[Any, ...]], logits: Tensor) -> list[Tensor]:
    """Returns the parts' columns, one behind the other: places in the flat logits, int64, then numbers in the logits'
    dtype. A number that is the same in all parts is there once."""
    rows, ids, *numbers = zip(*parts, strict=True)
    lengths = list(map(len, ids))
    places = [np.asarray(one, dtype=np.int64) + row * logits.shape[1] for row, one in zip(rows, ids, strict=True)]
    columns = [torch.from_numpy(np.concatenate(places)).to(logits.device)]
    for one in numbers:
        if np.ndim(one[0]):
            whole = np.concatenate(one)
        else:
            whole = np.array(one[:1]) if len({*one}) == 1 else np.repeat(one, lengths)
        columns.append(torch.from_numpy(whole).to(logits.device, logits.dtype))
    return columns
