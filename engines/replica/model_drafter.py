"""Drafts by a small model that draws the next tokens one after the other (Leviathan et al., 2023; Chen et al., 2023).

The engine's verification counts a guess when it equals the draw of the large model, so what matters is how often two
draws agree. With the target's own noise, a draw of q and one of p are the same token i with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): both are the argmax of a log-probability plus the same Gumbel noise. With
independent noise it is sum_i p_i q_i, which is below 1 even for q = p.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import exp
from operator import mul

from engines.config import EngineConfig
from engines.kvcache.block_manager import content_key
from engines.models.loader import checkpoint_tensors, load_weights
from engines.replica.hosted import HostedModel
from engines.replica.schedule import Scheduled, Sequence
from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import Ask, Draft, DraftPass, News
from engines.speculation.verify import num_accepted


@dataclass(eq=False, kw_only=True)
class _Copy:
    """The drafter's own copy of a sequence: its known tokens, then guesses."""

    target: SequenceState
    """The state that it follows."""
    sequence: Sequence
    num_known: int
    """Tokens that the target has drawn, prompt included; the guesses come behind them."""
    limit: int = 0
    """Most guesses that are wanted in this step."""
    probabilities: list[float] = field(default_factory=list)
    """Of each guess: its probability in the small model, given the tokens before it."""

    def follows(self, state: SequenceState) -> bool:
        """Whether the known tokens are this state's first ones. After a turn the trajectory may be another object."""
        if self.target is not state:
            if state.tokens[: self.num_known] != self.sequence.state.tokens[: self.num_known]:
                return False
            self.target = state
        return len(state.tokens) >= self.num_known

    def draft(self) -> Draft:
        guesses = self.sequence.state.tokens[self.num_known : self.num_known + self.limit]
        return Draft(guesses, list(accumulate(self.probabilities[: self.limit], mul)))


class ModelDrafter:
    """Draws guesses from a small model, which keeps the KV of its own copies of the sequences.

    A step's first pass computes the tokens that the copies lack: mostly the target's last one or two, but all of a
    sequence that is new. Each further pass draws one more guess. Guesses that the target has drawn, too, cost nothing
    any more, and those behind them stay valid. Members of a group share the blocks of their prompt; blocks with guesses
    are never shared, as other tokens may be written there later.
    """

    def __init__(self, hosted: HostedModel, config: EngineConfig) -> None:
        """`config` is the target's. The weights are not loaded yet; `load` reads them."""
        assert config.draft_model is not None
        self.hosted = hosted
        self._folder, self._config = config.draft_model, config
        self._runner, self._blocks = hosted.runner, hosted.blocks
        self._max_model_len = hosted.max_model_len
        self._eos = frozenset(hosted.editor.eos_token_ids)
        self._has_weights = self._is_disturbed = False
        self.passes: list[DraftPass] = []
        self._reset()

    def load(self) -> None:
        """Reads the weights if they are not in memory. Raises FileNotFoundError or ValueError for a damaged folder."""
        if not self._has_weights:
            load_weights(self.hosted.decoder, checkpoint_tensors(self._folder))
            self._has_weights = True

    def sleep(self, *, weights: bool) -> None:
        """Releases the KV cache; with `weights` also the weights. There must be no sequences."""
        self._reset()
        self.hosted.sleep(weights=weights)
        self._has_weights = self._has_weights and not weights

    def wake_up(self) -> None:
        self.hosted.wake_up()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        """See `Drafter`. A sequence that lacks more tokens than a pass takes, or blocks, gets no draft."""
        self.passes = []
        with self._undisturbed():
            drawn = self._run(self._follow_each(asks))
            while drawn:
                drawn = self._run(drawn)
            return [self._copies[ask.state.sequence_id].draft() for ask in asks]

    def follow(self, news: News) -> None:
        """A trajectory may go on here after its turn, and is forgotten only when others need the room."""
        ended = [state.sequence_id for state in news.ended if not state.in_turns]
        if ended:
            with self._undisturbed():
                for sequence_id in ended:
                    self._forget(sequence_id)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Forgets all sequences first if the last call has not come to its end: a pass failed, or an interrupt came."""
        if self._is_disturbed:
            self._reset()
        self._is_disturbed = True
        yield
        self._is_disturbed = False

    def _reset(self) -> None:
        self._blocks.reset()
        self._free_slots = list(range(self._config.max_num_seqs - 1, -1, -1))
        self._copies: OrderedDict[SequenceId, _Copy] = OrderedDict()  # the one used longest ago first

    def _forget(self, sequence_id: SequenceId) -> None:
        copy = self._copies.pop(sequence_id, None)
        if copy is not None:
            self._blocks.release(copy.sequence)
            self._free_slots.append(copy.sequence.slot)

    def _follow_each(self, asks: list[Ask]) -> Iterator[_Copy]:
        """Yields the sequences' copies, each with the state's tokens and with blocks for as many guesses as its limit;
        the limit is 0 where too few blocks are free, even after all other sequences were forgotten, and lower at the
        end of the model's context, beyond which a drafter that runs ahead is asked for guesses."""
        busy = {ask.state.sequence_id for ask in asks}
        for sequence_id in self._copies.keys() & busy:
            self._copies.move_to_end(sequence_id)
        for state, limit, _ in asks:
            copy = self._follow(state)
            limit = max(0, min(limit, self._max_model_len - copy.num_known))
            copy.limit = limit if self._make_room(copy, copy.num_known + limit - 1, busy) else 0
            yield copy

    def _follow(self, state: SequenceState) -> _Copy:
        copy = self._copies.get(state.sequence_id)
        if copy is not None and not copy.follows(state):
            self._forget(state.sequence_id)  # after an interrupt
            copy = None
        if copy is None:
            while not self._free_slots:
                self._forget(next(iter(self._copies)))
            copy = self._copies[state.sequence_id] = self._enter(state)
        tokens, num_known = copy.sequence.state.tokens, len(state.tokens)
        num_right = copy.num_known + num_accepted(tokens[copy.num_known :], state.tokens[copy.num_known :])
        if num_right < num_known:
            tokens[num_right:] = state.tokens[num_right:]
            copy.probabilities.clear()
            copy.sequence.num_computed = min(copy.sequence.num_computed, num_right)
        del copy.probabilities[: num_known - copy.num_known]
        copy.num_known = num_known
        return copy

    def _make_room(self, copy: _Copy, num_tokens: int, busy: Container[SequenceId]) -> bool:
        """Allocates blocks, those of sequences that are not `busy` if need be; returns whether they suffice."""
        while not self._blocks.can_grow(copy.sequence, num_tokens):
            oldest = next(iter(self._copies))
            if oldest in busy:
                return False
            self._forget(oldest)
        self._blocks.grow(copy.sequence, num_tokens)
        copy.sequence.blocks = self._blocks.table(copy.sequence)
        return True

    def _enter(self, state: SequenceState) -> _Copy:
        """Returns a copy that shares the blocks of its prompt, as far as they have been computed."""
        key, params = state.key, state.params
        if self._config.draft_noise == "own":
            key, params = replace(key, run_seed=key.noise_key(params.seed)), replace(params, seed=None)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            params = replace(params, logprobs=None, prompt_logprobs=None)
        own = replace(state, key=key, params=params, tokens=list(state.tokens), logprobs=[], versions=[])
        sequence = Sequence(state=own, max_len=self._max_model_len, release_len=self._max_model_len)
        size = self._config.block_size
        if self._config.prefix_caching:
            ends = range(size, state.num_prompt_tokens + 1, size)
            blocks = (state.tokens[end - size : end] for end in ends)
            sequence.content_keys = list(accumulate(blocks, content_key, initial=b""))[1:]
        shared = self._blocks.find(sequence.content_keys[: (len(state.tokens) - 1) // size])
        self._blocks.share(sequence, shared)
        sequence.num_computed = len(shared) * size
        sequence.slot = self._free_slots.pop()
        return _Copy(target=state, sequence=sequence, num_known=len(state.tokens))

    def _wants_guess(self, copy: _Copy) -> bool:
        state = copy.sequence.state
        last, params = state.tokens[-1], state.params
        is_end = last in params.stop_token_ids or (last in self._eos and not params.ignore_eos)
        return len(copy.probabilities) < copy.limit and not is_end

    def _run(self, copies: Iterable[_Copy]) -> list[_Copy]:
        """Runs a pass over what the copies that want a guess lack, up to its most tokens; returns those that got one.

        The copies are taken one by one: each shares prompt blocks that those before it fill in this very pass.
        """
        budget = self._config.max_num_batched_tokens
        batch: list[tuple[_Copy, Scheduled]] = []
        for copy in copies:
            sequence = copy.sequence
            num_tokens = min(len(sequence.state.tokens) - sequence.num_computed, budget)
            if num_tokens and self._wants_guess(copy):
                batch.append((copy, Scheduled(sequence, num_tokens)))
                budget -= num_tokens
                self._publish(sequence, sequence.num_computed + num_tokens)
        if not batch:
            return []
        batch.sort(key=lambda pair: pair[1].num_tokens > 1)  # single tokens first, as attention needs it
        context = sum(item.sequence.num_computed + item.num_tokens for _, item in batch)
        self.passes.append(DraftPass(sum(item.num_tokens for _, item in batch), context))
        drawn = [copy for copy, item in batch if item.samples]
        try:
            results = self._runner.run([item for _, item in batch])
        except FloatingPointError as error:
            raise FloatingPointError(f"EngineConfig.draft_model={self._folder!r}: {error}") from None
        for _, item in batch:
            item.sequence.num_computed += item.num_tokens
        for copy, (token, logprob, *_) in zip(drawn, results, strict=True):
            copy.sequence.state.tokens.append(token)
            copy.probabilities.append(min(1.0, exp(logprob)))
        return drawn

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        """Publishes the prompt's blocks that are full after the pass: a pass writes KV before it reads any."""
        num_full = min(num_computed // self._config.block_size, len(sequence.content_keys))
        for index in range(sequence.num_published, num_full):
            self._blocks.publish(sequence, index, sequence.content_keys[index])
        sequence.num_published = max(sequence.num_published, num_full)
