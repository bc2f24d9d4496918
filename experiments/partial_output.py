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
from engines.sequence import Completion, Finished, FinishReason, RequestOutput, SequenceId, SequenceState
from experiments import launch
from experiments.prompts import ANSWERED
from experiments.run_folder import replace_text

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator


def completion_line(record: Mapping[str, Any], completion: Completion, **more: int) -> str:
    """A line of the output: what was given with the prompt, then the completion."""
    fields = {name: getattr(completion, name) for name in ANSWERED}
    fields["logprobs"] = [round(value, 6) for value in completion.logprobs]
    return json.dumps({**record, **fields, **more}) + "\n"


def write_all(descriptor: int, text: str) -> None:
    """Hands the text to the system at once, in one write unless that is cut short."""
    left = memoryview(text.encode())
    while left:
        left = left[os.write(descriptor, left) :]


_FIRST = b'{"generate": '  # how the file begins


class _Request(msgspec.Struct, frozen=True):
    """What is needed of the first line's request; the rest is only compared."""

    num_prompts: int
    n: int


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is read back of a line; its fields are those of `completion_line`."""

    prompt_index: int
    index: int
    text: str
    finish_reason: FinishReason
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    logprobs: list[float]

    @property
    def is_whole(self) -> bool:
        return len(self.token_ids) == len(self.logprobs) and all(map(math.isfinite, self.logprobs))


class _Kept:
    """The whole lines of a `.partial` file. A line that cannot be read costs its own completion only."""

    def __init__(self, data: bytes) -> None:
        """Raises ValueError when the data are not of such a file."""
        if not data.startswith(_FIRST[: len(data)]):
            raise ValueError(f"it does not begin with {_FIRST.decode()!r}")
        self.whole = data[: data.rfind(b"\n") + 1]
        """Without what a kill or a full disk tore."""
        self.request: dict[str, Any] = {}
        """What the completions were asked of and with: the first line."""
        self.completions: dict[tuple[int, int], Completion] = {}
        """By prompt index and sample index."""
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
                    fields = {name: getattr(line, name) for name in ANSWERED}
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
    """Appends each completion to `<output>.partial` as it ends; at the end makes `<output>`, in the prompts' order.

    All ranks hold one, and write to the same file, one write per line: under torchrun the samples of a prompt may
    end on several ranks. An `<output>` that is there already is replaced at the end, and not touched before.
    """

    def __init__(
        self,
        output: Path,
        group: Communicator,
        *,
        records: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
    ) -> None:
        """`records` are what was given with the prompts; `request` is what decides the completions, beside what `begin`
        adds: it has at least `num_prompts` and `n`."""
        self.output = output.resolve() if output.is_symlink() else output
        self.path = self.output.with_name(self.output.name + ".partial")
        self._is_mine = self._is_published = False
        self._group = group
        self._records = records
        self._request = dict(request)
        self._descriptor = -1
        self.kept: dict[tuple[int, int], Completion] = {}
        """What an earlier run has finished, by prompt index and sample index."""
        self._kept_request: dict[str, Any] = {}

    def open(self, *, resume: bool) -> None:
        """For all ranks together, before anything else.

        Raises ValueError, on every rank, when the file cannot be written, when it keeps completions and `resume` is
        False, or when `resume` is True and it is missing or of another request.
        """
        kept = _Kept(launch.on_rank_0(self._group, lambda: self._open_first(resume)))
        if self._group.rank > 0:
            self._descriptor = self._open()
        self.kept, self._kept_request = kept.completions, kept.request
        self._check(self._request)

    def _open_first(self, resume: bool) -> bytes:
        """Returns the lines to go on from."""
        while not self._is_locked(resume):  # what another run removed at its end while this one was opening it
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
        """Opens and locks the file until this process ends, and returns whether it is still the one at its path."""
        if resume and not self.path.exists():
            raise ValueError(f"resume: there is no {str(self.path)!r} to go on with; leave --resume out to start anew")
        try:
            self._descriptor, self._is_mine = self._open(os.O_EXCL), True
        except ValueError:
            self._descriptor, self._is_mine = self._open(), False
        if not lock(self._descriptor, self.path):
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
        """Adds to the request what is known since the model was loaded. Raises ValueError where it was another one."""
        self._check(more)
        if self._group.rank == 0 and not self.kept:
            self._write(json.dumps({"generate": self._request | more}) + "\n")

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        """See `CompletionStore.find`."""
        keys = {state.sequence_id: (state.key.prompt_uid, state.key.sample_index) for state in states}
        return {id_: self.kept[key] for id_, key in keys.items() if key in self.kept}

    def append(self, finished: Finished) -> None:
        """Raises ValueError when the file cannot be written any more, with what it keeps."""
        index = finished.state.key.prompt_uid
        self._write(completion_line(self._records[index], finished.completion, prompt_index=index))

    def publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Makes the output from all completions. Raises ValueError, on every rank, when it cannot be written."""

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
        """Removes the file, on the rank that made or took it, when the output is published or it keeps nothing."""
        if self._is_mine and (self._is_published or not self._read().completions):
            self.path.unlink(missing_ok=True)

    def tell(self) -> str:
        """Closes, and returns what is where: for a process that ends at once, wherever it is."""
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
