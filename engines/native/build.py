"""Compiles a C++ file into a shared library, once per machine. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
COMPILE_S = 120.0
MARCH_VARIABLE = "CURTAIL_MARCH"
"""Environment variable with the processor to compile for, as in the compiler's -march; by default this machine's. With
x86-64-v3 (any AVX2 processor) one machine shows how the kernels run on another."""

logger = logging.getLogger(__name__)


def build(source: Path, flags: Sequence[str], instead: str) -> Path | None:
    """Returns the library's path in the user's cache, named by sources, flags, compiler and processor.

    Sources are the file and the headers beside it. Without a working compiler it returns None, and logs the reason and
    what runs `instead`.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("no C++ compiler (c++, g++, clang++, or $CXX): %s, which is slower", instead)
        return None
    try:
        sources = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
        what = "\n".join((*sources, *FLAGS, *flags, compiler, _processor()))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "curtail"
        path = folder / f"{source.stem}-{hashlib.blake2b(what.encode(), digest_size=12).hexdigest()}.so"
        with contextlib.suppress(OSError):  # not compiled yet, or damaged
            ctypes.CDLL(str(path))
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / path.name
            command = [*shlex.split(compiler), *FLAGS, *flags, str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
            built.replace(path)  # whole or absent, also when other processes compile it now
        ctypes.CDLL(str(path))
        return path
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        logger.warning("%s cannot compile %s: %s; %s", compiler, source.name, told[-300:], instead)
        return None


def march() -> str:
    """Returns the compiler's option for the processor."""
    return f"-march={os.environ.get(MARCH_VARIABLE, 'native')}"


def _processor() -> str:
    """Returns all that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return "\n".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features")))
