"""Stores finished completions on disk, so that a run killed in the middle of a rollout can resume from them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engines.decoding import DecodeError, from_json, from_msgpack
from engines.parallel.collectives import Communicator
from engines.sequence import Completion, Finished, SequenceId, SequenceKey, SequenceState


class CompletionStore(Protocol):
    """The methods of a journal that `LLM.generate` calls."""

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """Returns the completions that need not be generated again, the same on every rank."""
        ...

    def append(self, finished: Finished) -> None:
        """Stores a generated completion; called on the ranks on which `generate` calls `on_finished`."""
        ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal."""

    weights: int
    """Checksum of the weights that sampled it."""
    key: SequenceKey
    request: str
    """Digest of the prompt's tokens, the sampling parameters and the environment."""
    completion: Completion


class Journal:
    """`<folder>/rank-<r>.jsonl`: a line for each completion that rank r appended, written to the file at once.

    A completion is found again only if its key, the weights' checksum, the prompt, the parameters and the digest of its
    environment are the same.
    Every rank makes a journal; all ranks call `recover` and `find` together.
    """

    def __init__(self, folder: Path, world: Communicator, *, whole_shares: bool = False, environment: str = "") -> None:
        """`environment`: a digest of what trajectories talk to.

        With `whole_shares`, either all sequences of a replica are found or none. With a static dispatch, the rest then
        runs in the same batches as without an interruption; the batch decides how log-probs are rounded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{world.rank}.jsonl"
        self.weights = 0
        """Checksum of the weights in use; set it when they change."""
        self.num_found = 0
        """Completions found since the start."""
        self.left_out: Container[SequenceId] = frozenset()
        """Sequences that `append` does not store, as trajectories whose environment failed: a resumed run samples them
        again."""
        self._world = world
        self._environment = environment
        self._whole_shares = whole_shares
        self._has_warned = False
        self._found: dict[tuple[int, SequenceKey, str], Completion] = {}
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, finished: Finished) -> None:
        """Appends one line in one write, so that a kill can damage only the last line.

        A line that cannot be written is left out, with one warning: the rollout itself still has the completion.
        """
        if finished.state.sequence_id in self.left_out:
            return
        entry = Entry(
            weights=self.weights,
            key=finished.state.key,
            request=_request(finished.state, self._environment),
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
        """Lets `find` return every rank's completions since this policy step; drops a line that a kill damaged."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        entries = []
        for line in whole.splitlines():
            try:
                entry: Entry = from_json(line, Entry)
            except DecodeError:
                continue  # a damaged or foreign line loses only its own completion
            if entry.key.policy_step >= policy_step and entry.completion.finish_reason != "abort":
                entries.append(entry)
        for part in self._world.all_gather_bytes(msgspec.msgpack.encode(entries)):
            recovered = from_msgpack(part, list[Entry])
            self._found |= {(entry.weights, entry.key, entry.request): entry.completion for entry in recovered}

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """Returns the journaled completions of these sequences; sequence i is of replica i mod `num_replicas`."""
        found: Mapping[SequenceId, Completion] = {
            state.sequence_id: completion
            for state in (states if self._found else ())
            if (completion := self._found.get((self.weights, state.key, _request(state, self._environment))))
            is not None
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
        return taken

    def clear(self) -> None:
        """Deletes all entries: for when a resume point is published, before which no run starts again."""
        self._found.clear()
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _request(state: SequenceState, environment: str) -> str:
    request = msgspec.msgpack.encode((state.tokens[: state.num_prompt_tokens], state.params))
    if environment:
        request += environment.encode()
    return hashlib.blake2b(request, digest_size=8).hexdigest()
