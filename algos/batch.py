"""Turns experiences into tensors: right-padded rows, with logits kept only where a row predicts completion tokens.

Shape suffixes: B sequences, L input positions, T kept positions (the last T of L, which cover all completions).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's micro-batch. Kept position t of row b predicts `targets_BT[b, t]`; targets outside completions are 0."""

    input_ids_BL: Tensor
    targets_BT: Tensor
    spans: list[tuple[int, int]]
    """(start, end) of each row's completion within the T kept positions."""

    @property
    def num_kept(self) -> int:
        return self.targets_BT.shape[1]

    @functools.cached_property
    def is_target_BT(self) -> Tensor:
        return spread([[True] * (end - start) for start, end in self.spans], self, torch.bool)


def collate(sequences: Sequence[tuple[list[int], int]], device: torch.device) -> Batch:
    """Makes a batch of (tokens, number of prompt tokens) sequences, one per row; of one dummy row if there are none.

    Rows need no attention mask, because attention is causal and the padding is on the right.
    """
    rows = list(sequences) or [([0], 1)]
    num_inputs = max(1, *(len(tokens) - 1 for tokens, _ in rows))
    first = min(num_inputs - 1, *(num_prompt_tokens - 1 for _, num_prompt_tokens in rows))
    input_ids_BL = np.zeros((len(rows), num_inputs), dtype=np.int64)
    targets_BT = np.zeros((len(rows), num_inputs - first), dtype=np.int64)
    spans = []
    for row, (tokens, num_prompt_tokens) in enumerate(rows):
        assert 1 <= num_prompt_tokens <= len(tokens), "the first token is predicted by nothing: it is a prompt's"
        input_ids_BL[row, : len(tokens) - 1] = tokens[:-1]
        start, end = num_prompt_tokens - 1 - first, len(tokens) - 1 - first
        targets_BT[row, start:end] = tokens[num_prompt_tokens:]
        spans.append((start, end))
    return Batch(
        input_ids_BL=torch.from_numpy(input_ids_BL).to(device),
        targets_BT=torch.from_numpy(targets_BT).to(device),
        spans=spans,
    )


def spread(values: Sequence[Sequence[float] | np.ndarray], batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns each row's values per completion token as [B, T], zeros elsewhere. No values (a dummy row): all zeros."""
    spread_BT = np.zeros(tuple(batch.targets_BT.shape), dtype=bool if dtype == torch.bool else np.float64)
    for row, row_values in enumerate(values):
        start, end = batch.spans[row]
        spread_BT[row, start:end] = row_values
    return torch.from_numpy(spread_BT).to(batch.targets_BT.device, dtype)
