"""Progress: tqdm's bar on a terminal, and lines in a log file. Torch-free."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from tqdm import tqdm


class Bar(tqdm):
    """tqdm's bar, also on a terminal that does not tell its size. Without a terminal there is a line when units have
    been finished: at most one in ten seconds, and one at the end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._num_told = 0
        self._on_terminal = sys.stderr.isatty()
        if not self._on_terminal:
            options |= {"file": io.StringIO(), "mininterval": 10.0, "miniters": 1}
        elif 0 in (size := os.get_terminal_size(sys.stderr.fileno())):
            options |= {"ncols": size.columns or 80, "nrows": size.lines or 24}
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        if self._on_terminal:
            return bool(super().display(msg, pos))
        if self.n > self._num_told:
            self._num_told = self.n
            told = [f"{(self.desc or self.unit).removesuffix(': ')} {self.n}/{self.total}", self.postfix]
            told.insert(1, self.format_interval(self.format_dict["elapsed"]))
            print(", ".join(filter(None, told)), file=sys.stderr, flush=True)
        return True
