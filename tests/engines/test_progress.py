"""Bars on a terminal, also on one without a size, and lines in a log."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import termios

import pytest

from tests.worlds import ROOT

CODE = """
from engines.progress import Bar
with Bar(total=300, desc="turns", unit="turn") as bar:
    bar.set_postfix(loss="0.5", refresh=False)
    for _ in range(300):
        bar.refresh()
        bar.update()
for _ in Bar(range(2), unit="cell", disable=True):
    pass
"""


def test_a_log_has_lines_of_finished_units_alone() -> None:
    command = [sys.executable, "-c", CODE]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stderr
    lines = told.splitlines()
    assert "\r" not in told and 1 <= len(lines) <= 300, told
    assert lines[-1].startswith("turns 300/300, 00:0") and lines[-1].endswith(", loss=0.5")
    assert len({line.split(",")[0] for line in lines}) == len(lines), "each number of units at most once"


@pytest.mark.parametrize("size", [(0, 0), (24, 0), (0, 80), (24, 80)])
def test_a_terminal_of_any_size_shows_a_bar(size: tuple[int, int]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    with open(theirs, "wb") as terminal:
        process = subprocess.Popen([sys.executable, "-c", CODE], cwd=ROOT, stderr=terminal)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal
        while some := os.read(ours, 65536):
            shown += some
    os.close(ours)
    assert process.wait(60) == 0
    frames = [frame for frame in shown.decode().split("\r") if "300/300" in frame]
    assert frames and all(frame.startswith("turns: 100%|") and len(frame.rstrip()) <= 80 for frame in frames), shown
