"""`<output>.partial`: the completions that `generate.py` has finished, on disk before the run ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from algos.publish import lock
from engines.sequence import Completion, Finished, FinishReason, Ranked, RequestOutput, SequenceId, SequenceState
from experiments import launch
from experiments.prompts import ANSWERED, ASKED_FOR
from experiments.run_folder import replace_text

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator


def completion_line(record: Mapping[str, Any], completion: Completion, **more: int) -> str:
    """A line of the output: the fields given with the prompt, then the completion."""
    fields = {name: getattr(completion, name) for name in ANSWERED}
    logprobs = [own[1] for own, *_ in completion.top_logprobs] or completion.logprobs
    fields["logprobs"] = [round(value, 6) for value in logprobs]
    fields |= {name: value for name in ASKED_FOR if (value := getattr(completion, name))}
    return json.dumps({**record, **fields, **more}) + "\n"


def write_all(descriptor: int, text: str) -> None:
    """Writes the text without a buffer, in one system call unless a write is cut short."""
    left = memoryview(text.encode())
    while left:
        left = left[os.write(descriptor, left) :]


_FIRST = b'{"generate": '  # how the file begins


class _Request(msgspec.Struct, frozen=True):
    """The fields of the first line's request that are used; the others are only compared."""

    num_prompts: int
    n: int


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `completion_line` that are read back."""

    prompt_index: int
    index: int
    text: str
    finish_reason: FinishReason
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    logprobs: list[float]
    top_logprobs: list[list[Ranked]] = []
    prompt_logprobs: list[list[Ranked]] = []

    @property
    def is_whole(self) -> bool:
        whole = len(self.token_ids) == len(self.logprobs) and len(self.top_logprobs) in (0, len(self.token_ids))
        return whole and all(map(math.isfinite, self.logprobs))


class _Kept:
    """The complete lines of a `.partial` file. A line that cannot be read loses only its own completion."""

    def __init__(self, data: bytes) -> None:
        """Raises ValueError when `data` is not from a `.partial` file."""
        if not data.startswith(_FIRST[: len(data)]):
            raise ValueError(f"it does not begin with {_FIRST.decode()!r}")
        self.whole = data[: data.rfind(b"\n") + 1]
        """The data without a last line that a kill or a full disk cut short."""
        self.request: dict[str, Any] = {}
        """The prompts and settings that the completions are for, from the first line."""
        self.completions: dict[tuple[int, int], Completion] = {}
        """Completions by (prompt index, sample index)."""
        if not self.whole:
            return
        first, *others = self.whole.splitlines()
        try:
            self.request = json.loads(first)["generate"]
            asked = msgspec.convert(self.request, _Request)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its first line is damaged: {error}") from None
        for text in others:
            with contextlib.suppress(ValueError, RecursionError):
                line = msgspec.convert(json.loads(text), _Line)
                if line.is_whole and 0 <= line.prompt_index < asked.num_prompts and 0 <= line.index < asked.n:
                    fields = {name: getattr(line, name) for name in ANSWERED + ASKED_FOR}
                    completion = Completion(**fields, versions=[0] * len(line.token_ids))
                    self.completions[line.prompt_index, line.index] = completion

    def __str__(self) -> str:
        if not self.completions:
            return "nothing yet"
        num_prompts, num_samples = self.request["num_prompts"], self.request["n"]
        samples = Counter(prompt_index for prompt_index, _ in self.completions)
        num_whole = sum(count == num_samples for count in samples.values())
        num_asked = num_prompts * num_samples
        return f"{num_whole} of {num_prompts} prompts ({len(self.completions)} of {num_asked} completions)"


class PartialOutput:
    """Appends each completion to `<output>.partial` as it ends; at the end writes `<output>` in the prompts' order.

    Every rank holds a `PartialOutput` and writes to the same file, one write per line: under torchrun the samples of a
    prompt may end on several ranks. An existing `<output>` is replaced at the end and not touched before.
    """

    def __init__(
        self,
        output: Path,
        group: Communicator,
        *,
        records: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
    ) -> None:
        """`records` holds the fields given with each prompt. `request` holds the settings that determine the
        completions, at least `num_prompts` and `n`; `begin` adds more."""
        self.output = output.resolve() if output.is_symlink() else output
        self.path = self.output.with_name(self.output.name + ".partial")
        self._is_mine = self._is_published = False
        self._group = group
        self._records = records
        self._request = dict(request)
        self._descriptor = -1
        self.kept: dict[tuple[int, int], Completion] = {}
        """Completions of an earlier run by (prompt index, sample index)."""
        self._kept_request: dict[str, Any] = {}

    def open(self, *, resume: bool) -> None:
        """Opens the file and reads its completions. Collective; the first call of all.

        Raises ValueError, on every rank, when the file cannot be written, when it keeps completions and `resume` is
        False, or when `resume` is True and the file is missing or has another request.
        """
        kept = _Kept(launch.on_rank_0(self._group, lambda: self._open_first(resume)))
        if self._group.rank > 0:
            self._descriptor = self._open()
        self.kept, self._kept_request = kept.completions, kept.request
        self._check(self._request)

    def _open_first(self, resume: bool) -> bytes:
        """Opens and locks the file on rank 0; returns the complete lines to continue from."""
        while not self._is_locked(resume):  # another run removed the file at its end while this run was opening it
            os.close(self._descriptor)
        try:
            kept = self._read()
        except ValueError as error:
            raise ValueError(
                f"output={str(self.output)!r}: would be written to {str(self.path)!r}, which is another file "
                f"({error}); move it away, or give another --output"
            ) from None
        if kept.completions and not resume:
            raise ValueError(
                f"output={str(self.output)!r}: {str(self.path)!r} keeps {kept} of a run that ended early; add --resume "
                "to go on with it, or delete it to start anew"
            )
        self._is_mine = True
        whole = kept.whole if kept.completions else b""
        os.ftruncate(self._descriptor, len(whole))
        return whole

    def _is_locked(self, resume: bool) -> bool:
        """Opens the file, locks it until this process ends, and returns whether its path still names this file."""
        if resume and not self.path.exists():
            raise ValueError(f"resume: there is no {str(self.path)!r} to go on with; leave --resume out to start anew")
        try:
            self._descriptor, self._is_mine = self._open(os.O_EXCL), True
        except ValueError:
            self._descriptor, self._is_mine = self._open(), False
        if not lock(self._descriptor, self.path):
            self._is_mine = False  # another run has locked it since it was created
            raise ValueError(f"output={str(self.output)!r}: another run is writing {str(self.path)!r}")
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _open(self, more: int = 0) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | more, 0o666)
        except OSError as error:
            raise ValueError(f"output={str(self.output)!r}: {str(self.path)!r} cannot be written ({error})") from None

    def _read(self) -> _Kept:
        return _Kept(self.path.read_bytes() if self.path.exists() else b"")

    def _check(self, request: Mapping[str, Any]) -> None:
        for name, value in request.items() if self.kept else ():
            if (before := self._kept_request.get(name)) != value:
                raise ValueError(
                    f"resume: {name}={value!r} now, {before!r} in {str(self.path)!r}; give the same, or delete that "
                    "file to start anew"
                )

    def begin(self, **more: Any) -> None:
        """Adds settings that are known once the model is loaded. Raises ValueError if the kept ones are different."""
        self._check(more)
        if self._group.rank == 0 and not self.kept:
            self._write(json.dumps({"generate": self._request | more}) + "\n")

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """See `CompletionStore.find`."""
        keys = {state.sequence_id: (state.key.prompt_uid, state.key.sample_index) for state in states}
        return {id_: self.kept[key] for id_, key in keys.items() if key in self.kept}

    def append(self, finished: Finished) -> None:
        """Writes a completion. Raises ValueError, with what the file keeps, when it cannot be written any more."""
        index = finished.state.key.prompt_uid
        self._write(completion_line(self._records[index], finished.completion, prompt_index=index))

    def publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Writes the output from all completions. Raises ValueError, on every rank, when it cannot be written."""

        def write() -> None:
            pairs = zip(self._records, outputs, strict=True)
            text = "".join(completion_line(record, one) for record, output in pairs for one in output.outputs)
            try:
                replace_text(self.output, text)
            except OSError as error:
                raise self._unwritable(error) from None

        launch.on_rank_0(self._group, write)
        self._is_published = True

    def close(self) -> None:
        """Removes the file, on the rank that opened it first, if the output is published or it keeps no completion."""
        if self._is_mine and (self._is_published or not self._read().completions):
            self.path.unlink(missing_ok=True)

    def tell(self) -> str:
        """Closes the file and returns a message on where completions are, for a process that ends at any moment."""
        if not self._is_mine:
            return "nothing was generated"
        self.close()
        if self._is_published:
            return f"all completions are in {str(self.output)!r}"
        if not self.path.exists():
            return "no completion had ended, nothing is kept"
        old = f" ({str(self.output)!r} is of an earlier run)" if self.output.exists() else ""
        return f"{str(self.path)!r} keeps {self._read()}{old}; run the same command with --resume to go on"

    def _write(self, line: str) -> None:
        try:
            write_all(self._descriptor, line)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"output={str(self.output)!r}: cannot be written ({error}); {str(self.path)!r} keeps {self._read()}; make "
            "room, then run the same command with --resume"
        )
