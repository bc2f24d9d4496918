"""How processes end, with real ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.worlds import ROOT

PROGRAM = """
import atexit, sys
from engines.lifetime import end_without_collection

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("collected")

Cycle()
if "without" in sys.argv:
    end_without_collection()
atexit.register(print, "registered")
"""


@pytest.mark.parametrize(("how", "printed"), [("with", ["registered", "collected"]), ("without", ["registered"])])
def test_an_end_without_collection_calls_what_is_registered(how: str, printed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == printed
