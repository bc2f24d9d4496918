"""How processes begin and end, with real ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.worlds import ROOT

PROGRAM = """
import atexit, sys
from engines.lifetime import exempt_from_collection

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("collected")

Cycle()
if "without" in sys.argv:
    exempt_from_collection()
atexit.register(print, "registered")
"""


@pytest.mark.parametrize(("how", "printed"), [("with", ["registered", "collected"]), ("without", ["registered"])])
def test_an_end_without_collection_calls_what_is_registered(how: str, printed: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == printed


def test_what_is_imported_is_exempt_and_what_comes_then_is_not() -> None:
    program = """
import gc, sys
from engines.lifetime import imports
if "disabled" in sys.argv:
    gc.disable()
searches = []
gc.callbacks.append(lambda phase, info: searches.append(info["generation"]))
with imports():
    import asyncio, email.message, xml.dom.minidom
    kept = [[] for _ in range(10_000)]
print(len(searches), gc.isenabled(), gc.is_tracked(kept[0]), any(one is kept[0] for one in gc.get_objects()))
later = [[] for _ in range(10_000)]
print(len(searches) > 0, any(one is later[0] for one in gc.get_objects()))
try:
    with imports():
        import no_such_module
except ModuleNotFoundError:
    print(gc.isenabled())
"""
    for how, is_enabled in (("enabled", True), ("disabled", False)):
        done = subprocess.run(
            [sys.executable, "-c", program, how], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == [f"0 {is_enabled} True False", f"{is_enabled} True", str(is_enabled)]
