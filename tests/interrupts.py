"""Interrupts at every line of a call, one after the other: what Ctrl-C may do at any moment."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from tests.worlds import ROOT


class Interrupter:
    """Raises KeyboardInterrupt in one call, before the `number`-th line that runs in one of the files.

    Never before a line that begins a `with`: it is traced again when the block is left, where Python lets no signal
    come between the block and what leaves it.
    """

    def __init__(self, files: Collection[str], number: int) -> None:
        self._files = {str((ROOT / file).resolve(strict=True)) for file in files}
        self._left = number

    @property
    def has_fired(self) -> bool:
        return self._left < 0

    def run(self, call: Callable[[], object]) -> None:
        """Returns normally when the call has fewer lines, or does not let the interrupt out."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            call()
        except KeyboardInterrupt:
            assert self.has_fired
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._on_line if frame.f_code.co_filename in self._files else None

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt(f"before {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._on_line


def interrupts(*files: str, step: int = 1) -> Iterator[Interrupter]:
    """One after the other until a call has ended before its interrupt. At least one must come."""
    number = 0
    while True:
        interrupter = Interrupter(files, number)
        yield interrupter
        if not interrupter.has_fired:
            assert number, f"no line of {files} runs"
            return
        number += step
