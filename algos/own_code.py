"""A user's own function or class, named on a command line as "package.module:name" or "path/to/file.py:name"."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load(spec: str, kind: str = "function") -> Callable[..., Any]:
    """Returns what is named, which messages call a `kind`.

    Raises the errors of the import, and `ValueError` when there is no such name, or it cannot be called.
    """
    (found,) = load_all(spec, kind)
    return found


def load_all(spec: str, kind: str = "function") -> list[Callable[..., Any]]:
    """The same for several names of one module, "path/to/file.py:one,two"."""
    module_name, _, names = spec.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    everything: list[Callable[..., Any]] = []
    for attribute in map(str.strip, names.split(",")):
        try:
            found = functools.reduce(getattr, attribute.split("."), module)
        except AttributeError:
            name = Path(module_name).name if module_name.endswith(".py") else module_name
            raise ValueError(f"{name} has no {kind} {attribute!r}; check the name after the colon") from None
        if not callable(found):
            raise ValueError(f"{attribute!r} is a {type(found).__name__}, not a {kind}")
        everything.append(found)
    return everything


def source_of(spec: str) -> Path | None:
    """Returns the file of what is named as for `load`; None for a name without a colon, or one without a file."""
    module_name, colon, _ = spec.rpartition(":")
    if not colon or module_name.endswith(".py"):
        return Path(module_name) if colon else None
    found = importlib.util.find_spec(module_name)
    return Path(found.origin) if found and found.has_location and found.origin else None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    # The file may import its neighbours. Their folder comes last, so that a neighbour called math.py shadows nothing.
    sys.path.append(str(path.parent))
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if found and found.origin and Path(found.origin).resolve() == path.resolve():
        return importlib.import_module(path.stem)  # processes of a "spawn" or "forkserver" pool can do so, too
    module_spec = importlib.util.spec_from_file_location(f"own_file_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look their module up
    module_spec.loader.exec_module(module)
    return module
