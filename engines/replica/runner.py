"""The model runner: turns the scheduler's choice into one flat batch, runs the forward pass, and samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engines.attention.batch import ForwardBatch
from engines.config import EngineConfig
from engines.kvcache.paged import PagedKVCache
from engines.memory.plan import rows_sampled_at_once
from engines.models.decoder import Decoder
from engines.replica.graphs import Graphs, PaddedDecodes
from engines.replica.schedule import Drawn, Fork, Scheduled, Sequence
from engines.replica.slot_table import SlotTable
from engines.replica.staging import Readback, Staging
from engines.sampling.edits import Editor
from engines.sampling.sampler import most_likely, ranked, sample
from engines.sequence import SequenceState


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """The inputs of one pass, which draws R tokens."""

    batch: ForwardBatch | None
    """None for a pass of decodes alone whose rows lie padded in static memory."""
    padded_size: int = 0
    slots: np.ndarray
    """int64 [R]: slots of the sequences for which tokens are drawn. One with a draft is there several times."""
    positions: Tensor
    """int64 [R]: positions of the tokens to be drawn."""
    scored: list[tuple[SequenceState, int]] = field(default_factory=list)
    """For each further row of logits: a sequence, and the next token of its prompt, whose log-prob it asks for."""


class ModelRunner:
    """Runs scheduled sequences on one decoder and its KV cache."""

    def __init__(
        self, decoder: Decoder, kv: PagedKVCache, config: EngineConfig, max_model_len: int, editor: Editor
    ) -> None:
        self._decoder = decoder
        self._editor = editor
        self._draw_tokens = decoder.kernels.draw
        self._kv = kv
        self._block_size = config.block_size
        self._slots = SlotTable(config.max_num_seqs, -(-max_model_len // config.block_size), kv.physical)
        self._staging = Staging(decoder.device)
        self._most_draws = config.most_draws
        self._readback = Readback(decoder.device, self._most_draws)
        self._padded: PaddedDecodes | None = None
        self._graphs: Graphs | None = None
        if config.cuda_graphs and decoder.capturable:
            self.pad_decodes()
            self._graphs = Graphs(self._forward_padded, decoder.device)

    def pad_decodes(self) -> None:
        """Makes passes of decodes alone run padded, as CUDA graphs require. Without graphs it works on any device."""
        self._padded = PaddedDecodes(
            num_slots=self._slots.block_table.shape[0],
            max_blocks=self._slots.block_table.shape[1],
            max_rows=self._most_draws,
            block_size=self._block_size,
            scratch_block=self._kv.scratch_block,
            device=self._decoder.device,
        )

    def drop_graphs(self) -> None:
        """Must be called before the memory of the weights or of the KV cache is released."""
        if self._graphs is not None:
            self._graphs.drop()

    def run(self, scheduled: list[Scheduled]) -> list[Drawn]:
        """Runs one forward pass. Returns tokens and their log-probs, in order: for each item that samples, the token
        after its known tokens, and one after each token of its draft. Log-probs of a prompt go to its sequence's state.

        Raises FloatingPointError when logits are not finite; it zeroes the KV cache first.
        """
        has_forks = any(item.forks for item in scheduled)
        if has_forks:
            self._copy_last_blocks(scheduled)
        what = self._build(scheduled, has_forks)
        logits = self._forward(what)
        if not len(what.slots):
            return []
        return self._draw(logits, what, scheduled)

    def _copy_last_blocks(self, scheduled: list[Scheduled]) -> None:
        """Copies to each fork what its sequence's last block holds, where the sequence goes on in that block."""
        pairs = [
            (item.sequence.blocks[fork.num_shared], fork.blocks[0])
            for item in scheduled
            for fork in item.forks
            if fork.num_shared * self._block_size < fork.start
        ]
        if pairs:
            self._kv.copy_blocks(*map(list, zip(*pairs, strict=True)))

    def _forward(self, what: _Pass) -> Tensor:
        """Returns the logits of the rows that draw a token, [R, vocab_size]."""
        if what.batch is not None and what.scored:
            hidden = self._decoder.hidden(what.batch, self._kv)
            if len(hidden) == len(what.batch.tokens):  # all rows are asked for, and come in the batch's order
                hidden = hidden.index_select(0, what.batch.logit_rows)
            self._score_prompts(hidden[len(what.slots) :], what.scored)
            return self._decoder.logits(hidden[: len(what.slots)])
        if what.batch is not None:
            return self._decoder.forward(what.batch, self._kv)
        hidden = (self._graphs or self._forward_padded)(what.padded_size)
        return self._decoder.logits(hidden[: len(what.slots)])

    def _score_prompts(self, hidden: Tensor, scored: list[tuple[SequenceState, int]]) -> None:
        """Appends an entry to a state's `prompt_logprobs` for each row; some rows at a time, to bound memory."""
        step = rows_sampled_at_once(self._decoder.config.vocab_size, hidden.device.type)
        for start in range(0, len(hidden), step):
            states, tokens = zip(*scored[start : start + step], strict=True)
            logits = self._decoder.logits(hidden[start : start + step])
            logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
            ids = torch.tensor(tokens, device=hidden.device)
            own = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
            counts = [_count(state.params.prompt_logprobs, logprobs) for state in states]
            top = most_likely(logprobs, ids, max(count or 0 for count in counts))
            for state, entry in zip(states, ranked(tokens, own, top, counts), strict=True):
                state.prompt_logprobs.append(entry)

    def _draw(self, logits: Tensor, what: _Pass, scheduled: list[Scheduled]) -> list[Drawn]:
        """Raises FloatingPointError when logits are not finite; it zeroes the KV cache first."""
        batch = self._slots.sampling_batch(what.slots, what.positions)
        counts: list[int | None] = []
        if self._slots.any_special:
            draws = list(_draws(scheduled))
            counts = [_count(state.params.logprobs, logits) for state, _ in draws]
            edits = [
                self._editor.edit(state, self._slots.counts.get(slot), draft)
                for slot, (state, draft) in zip(what.slots.tolist(), draws, strict=True)
            ]
            num_top = max((count for count in counts if count is not None), default=None)
            batch = replace(batch, edits=edits if any(edits) else None, num_top=num_top)
        sampled = sample(logits, batch, self._draw_tokens)
        read = self._readback.read(sampled)
        if not np.isfinite(read[1]).all():
            self._kv.clear()  # NaN in a block would reach its later holders even where it is masked: 0 * NaN is NaN
            raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinity")
        tokens, logprobs = (column.tolist() for column in read)
        if sampled.top is None:
            return list(zip(tokens, logprobs, strict=True))
        rows = zip(tokens, logprobs, ranked(tokens, logprobs, sampled.top, counts), strict=True)
        return [(token, logprob, top) if top else (token, logprob) for token, logprob, top in rows]

    def _forward_padded(self, size: int) -> Tensor:
        assert self._padded is not None
        return self._decoder.hidden(self._padded.batch(size), self._kv)

    def _follow(self, sequences: list[Sequence], contexts: np.ndarray) -> None:
        """Takes over the blocks that sequences have got for their new tokens."""
        num_known = np.array([sequence.num_table_blocks for sequence in sequences])
        for row in np.flatnonzero(num_known * self._block_size < contexts).tolist():
            self._slots.follow(sequences[row])

    def _build(self, scheduled: list[Scheduled], has_forks: bool) -> _Pass:
        sequences = [item.sequence for item in scheduled]
        starts = np.array([sequence.num_computed for sequence in sequences])
        lengths = np.array([item.num_tokens for item in scheduled])
        forks: dict[int, Fork] = {}
        if has_forks:
            sequences, starts, lengths, forks = _with_forks(scheduled)
        slots = np.array([sequence.slot for sequence in sequences])
        contexts = starts + lengths
        block_size = self._block_size
        self._follow(sequences, contexts)
        self._slots.count(sequences, slots, starts)
        known = np.array([len(sequence.state.tokens) for sequence in sequences])
        num_seqs, num_tokens = len(sequences), int(lengths.sum())
        ends = np.cumsum(lengths)
        rows, positions, next_positions, row_slots = np.arange(num_seqs), starts, contexts, slots
        if num_tokens != num_seqs:
            rows = np.repeat(rows, lengths)
            positions = np.arange(num_tokens) - (ends - lengths - starts)[rows]
            next_positions, row_slots, known = positions + 1, slots[rows], known[rows]
        drawing = np.flatnonzero(next_positions >= known)
        num_drawn = len(drawing)
        scored: list[tuple[SequenceState, int]] = []
        if num_drawn < num_tokens and self._slots.scores_prompt.any():
            drawing, scored = _add_prompt_rows(drawing, sequences, starts, lengths)
        drawn_slots = row_slots[drawing[:num_drawn]]
        tokens = _new_tokens(scheduled)
        if self._padded is not None and not has_forks and num_drawn == num_tokens and self._padded.fits(num_tokens):
            # Each token of a draft is a row of its own: a pass writes the KV of all rows before any row reads it.
            size = self._padded.fill(tokens, positions, drawn_slots, self._slots.take_changes())
            drawn_positions = self._padded.next_positions(num_drawn)
            return _Pass(batch=None, padded_size=size, slots=drawn_slots, positions=drawn_positions)
        width = -(-int(contexts.max()) // block_size)
        arrays = self._staging.arrays(
            {
                "tokens": (np.int64, (num_tokens,)),
                "positions": (np.int64, (num_tokens,)),
                "slot_mapping": (np.int64, (num_tokens,)),
                "logit_rows": (np.int64, (len(drawing),)),
                "drawn_positions": (np.int64, (num_drawn,)),
                "cu_seqlens_q": (np.int32, (num_seqs + 1,)),
                "context_lens": (np.int32, (num_seqs,)),
                "block_table": (np.int32, (num_seqs, width)),
            }
        )
        arrays["tokens"][:] = tokens
        arrays["cu_seqlens_q"][0] = 0
        arrays["cu_seqlens_q"][1:] = ends
        arrays["context_lens"][:] = contexts
        table = arrays["block_table"]
        table[:] = self._slots.block_table[slots, :width]
        for row, fork in forks.items():
            table[row, fork.num_shared : fork.num_shared + len(fork.blocks)] = self._kv.physical(fork.blocks)
        arrays["positions"][:] = positions
        block, offset = np.divmod(positions, block_size)
        np.multiply(table[rows, block], np.int64(block_size), out=arrays["slot_mapping"])
        arrays["slot_mapping"] += offset
        arrays["logit_rows"][:] = drawing
        arrays["drawn_positions"][:] = next_positions[drawing[:num_drawn]]
        tensors = dict(self._staging.move())
        positions_drawn = tensors.pop("drawn_positions")
        return _Pass(
            batch=ForwardBatch(**tensors, seqlens_q=lengths.tolist()),
            slots=drawn_slots,
            positions=positions_drawn,
            scored=scored,
        )


def _add_prompt_rows(
    drawing: np.ndarray, sequences: list[Sequence], starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, list[tuple[SequenceState, int]]]:
    """Returns the rows of logits with those of prompts behind them that ask for log-probs; and see `_Pass.scored`."""
    rows, scored, first_row = drawing.tolist(), [], 0
    for sequence, start, length in zip(sequences, starts.tolist(), lengths.tolist(), strict=True):
        state = sequence.state
        if state.lacks_prompt_logprobs:
            known = max(start, len(state.prompt_logprobs))
            places = range(known, min(start + length, state.num_prompt_tokens - 1))
            rows += [first_row + place - start for place in places]
            scored += [(state, state.tokens[place + 1]) for place in places]
        first_row += length
    return np.array(rows, dtype=np.int64), scored


def _draws(scheduled: list[Scheduled]) -> Iterator[tuple[SequenceState, tuple[int, ...]]]:
    """Yields for each draw its sequence, and the tokens of the draft that come before it."""
    for item in scheduled:
        if item.samples:
            state = item.sequence.state
            paths = [(0, item.draft), *((fork.start + 1 - len(state.tokens), fork.draft) for fork in item.forks)]
            for first, draft in paths:
                for num_before in range(first, len(draft) + 1):
                    yield state, draft[:num_before]


def _count(asked: int | None, logits: Tensor) -> int | None:
    """Returns how many of the most likely tokens -1 stands for."""
    return logits.shape[-1] if asked == -1 else asked


def _with_forks(scheduled: list[Scheduled]) -> tuple[list[Sequence], np.ndarray, np.ndarray, dict[int, Fork]]:
    """Returns the rows of the pass's block table, with the forks of an item behind it: their sequences, first positions
    and numbers of tokens; and the forks by the number of their row."""
    sequences, starts, lengths, of_rows = [], [], [], {}
    for sequence, num_tokens, _, forks in scheduled:
        sequences += [sequence] * (1 + len(forks))
        starts += [sequence.num_computed, *(fork.start for fork in forks)]
        lengths.append(num_tokens)
        for fork in forks:
            of_rows[len(lengths)] = fork
            lengths.append(len(sequence.state.tokens) + len(fork.draft) - fork.start)
    return sequences, np.array(starts), np.array(lengths), of_rows


def _new_tokens(scheduled: list[Scheduled]) -> list[int]:
    """Returns the tokens that the pass computes, sequence after sequence."""
    tokens: list[int] = []
    for sequence, num_tokens, draft, forks in scheduled:
        start = sequence.num_computed
        if num_tokens == 1:
            tokens.append(sequence.state.tokens[start])
        else:
            tokens += sequence.state.tokens[start : start + num_tokens]
            tokens += draft
        for fork in forks:
            tokens += sequence.state.tokens[fork.start :]
            tokens += fork.draft[max(0, fork.start - len(sequence.state.tokens)) :]
    return tokens
