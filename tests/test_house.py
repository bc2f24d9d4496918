"""The house keeps its shape: imports run one way, and planners load no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "engines": set(),
    "research": {"engines"},
    "algos": {"engines"},
    "experiments": {"engines", "research", "algos"},
}


ROOMS = (
    *(
        "serving",
        "fleet",
        "rollout",
        "coordination",
        "replica",
        "relay",
        "speculation",
        "models",
        "sampling",
        "attention",
        "kvcache",
    ),
    *("memory", "control", "parallel", "native"),
)
"""Of `engines`: each imports from those after it alone, and from the values that stand beside them."""


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        ours = {name.split(".")[0] for name in imports_of(path)} & {*MAY_IMPORT, "tests"}
        assert ours <= MAY_IMPORT[room] | {room}, f"{path.relative_to(ROOT)} imports {ours}"


def test_no_room_imports_from_one_above() -> None:
    assert {path.parent.name for path in (ROOT / "engines").glob("*/__init__.py")} == {*ROOMS}
    for path in (ROOT / "engines").glob("*/*.py"):
        below = ROOMS[ROOMS.index(path.parent.name) :]
        rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("engines.")}
        assert not rooms & {*ROOMS, "llm"} - {*below}, f"{path.relative_to(ROOT)} imports from {rooms - {*below}}"
    for path in (ROOT / "engines").glob("[!l_]*.py"):
        assert not {name for name in imports_of(path) if name.startswith(tuple(f"engines.{room}" for room in ROOMS))}


def test_no_command_is_the_library_of_another() -> None:
    """What commands share is in files of its own. `--help` types of a command may be named for the type checker."""
    files = [path for path in (ROOT / "experiments").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    commands = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    assert len(commands) > 15
    for path in (ROOT / "experiments").rglob("*.py"):
        tree = ast.parse(path.read_text())
        typing_only = [
            one for one in ast.walk(tree) if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test)
        ]
        skipped = {id(node) for block in typing_only for node in ast.walk(block)}
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
                found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        assert not found & commands, f"{path.relative_to(ROOT)} imports {found & commands}"


@pytest.mark.parametrize(
    "module",
    [
        "research",
        "research.workloads.lengths",
        "research.simulator.cluster",
        "research.rose.transfer",
        "research.rose.activation",
        "research.rose.admission",
        "research.rose.memory",
        "engines",
        "engines.sequence",
        "engines.models.chat",
        "engines.replica.schedule",
        "engines.replica.admission",
        "engines.replica.scheduler",
        "engines.replica.replica",
        "engines.speculation.ngram",
        "engines.parallel.layout",
        "engines.control.messages",
        "engines.coordination.core",
        "engines.rollout.coordinator",
        "engines.rollout.environment",
        "engines.rollout.worker_core",
        "engines.fleet.launcher",
        "engines.serving.server",
        "engines.coordination.policies",
        "engines.speculation.server",
        "engines.speculation.shared",
        "engines.speculation.suffix",
        "engines.relay.codec",
        "engines.relay.process",
        "engines.relay.server",
    ],
)
def test_planners_load_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_one_module_decodes() -> None:
    """So that all bytes that cannot be decoded are the same error: msgspec raises three kinds."""
    for room in MAY_IMPORT:
        for path in (ROOT / room).rglob("*.py"):
            if path != ROOT / "engines/decoding.py":
                assert not re.search(r"msgspec\.msgpack\.[dD]ecode", path.read_text()), path.relative_to(ROOT)


def test_every_package_is_installed() -> None:
    """`pip install .` takes what setup.cfg's `find:` sees: folders with an `__init__.py`."""
    for room in MAY_IMPORT:
        for path in (ROOT / room).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent
