"""Finished completions on disk, so that a run that was killed in the middle of a rollout goes on from them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engines.parallel.collectives import Communicator
from engines.sequence import Completion, Finished, SequenceId, SequenceKey, SequenceState


class CompletionStore(Protocol):
    """What `LLM.generate` asks of a journal."""

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """The completions that need not be generated again, the same on every rank."""
        ...

    def append(self, finished: Finished) -> None:
        """Takes a completion that was generated; see `on_finished` for who is called."""
        ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal."""

    weights: int
    """Checksum of the weights that sampled it."""
    key: SequenceKey
    request: str
    """Digest of the prompt's tokens and the sampling parameters."""
    completion: Completion


class Journal:
    """`<folder>/rank-<r>.jsonl`: what rank r was the first to hear, a line each, handed to the system at once.

    A completion is found again by its key, the weights' checksum, and the prompt and parameters: what differs in any
    of them is not there. All ranks hold one; `recover` and `find` are for all of them together.
    """

    def __init__(self, folder: Path, world: Communicator, *, whole_shares: bool = False) -> None:
        """With `whole_shares` a replica's sequences are found all or none, for a static dispatch: what is left to
        generate then runs in the batches that it would have had, which decide how log-probs are rounded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{world.rank}.jsonl"
        self.weights = 0
        """Checksum of the weights in use; set it when they change."""
        self.num_found = 0
        """Completions found since the start."""
        self.num_found_tokens = 0
        """Their tokens."""
        self._world = world
        self._whole_shares = whole_shares
        self._has_warned = False
        self._found: dict[tuple[int, SequenceKey, str], Completion] = {}
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, finished: Finished) -> None:
        """One write of one line: a kill can tear the last one only.

        A line that cannot be written is left out, with one warning: the rollout has what it says.
        """
        entry = Entry(
            weights=self.weights,
            key=finished.state.key,
            request=_request(finished.state),
            completion=finished.completion,
        )
        line = memoryview(msgspec.json.encode(entry) + b"\n")
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"journal: cannot write to {self.path} ({error.strerror}); the rollout goes on, but a resumed run "
                    "samples again what is not there. Make room on that disk",
                    stacklevel=2,
                )

    def recover(self, policy_step: int) -> None:
        """Makes every rank's lines of this policy step and later ones findable, and drops what a kill tore."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        entries = []
        for line in whole.splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # not ours: a damaged line costs its own completion only
            if entry.key.policy_step >= policy_step and entry.completion.finish_reason != "abort":
                entries.append(entry)
        decode = msgspec.msgpack.Decoder(list[Entry]).decode
        for part in self._world.all_gather_bytes(msgspec.msgpack.encode(entries)):
            self._found |= {(entry.weights, entry.key, entry.request): entry.completion for entry in decode(part)}

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """The journaled completions of these sequences, which `num_replicas` replicas take in turn."""
        found: Mapping[SequenceId, Completion] = {
            state.sequence_id: completion
            for state in (states if self._found else ())
            if (completion := self._found.get((self.weights, state.key, _request(state)))) is not None
        }
        shares = [[state.sequence_id for state in states[i::num_replicas]] for i in range(num_replicas)]
        taken = {
            id_: found[id_]
            for share in shares
            if not self._whole_shares or all(id_ in found for id_ in share)
            for id_ in share
            if id_ in found
        }
        self.num_found += len(taken)
        self.num_found_tokens += sum(len(completion.token_ids) for completion in taken.values())
        return taken

    def clear(self) -> None:
        """Forgets everything: a resume point has been published, and no run goes back behind it."""
        self._found.clear()
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _request(state: SequenceState) -> str:
    request = msgspec.msgpack.encode((state.tokens[: state.num_prompt_tokens], state.params))
    return hashlib.blake2b(request, digest_size=8).hexdigest()
