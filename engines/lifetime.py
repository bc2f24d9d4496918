"""How processes end: what the kernel does for those whose parent ends, and what need not be done. Linux, torch-free."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent dies, more exactly the thread of it that has started this one;
    a process that was stopped could not end by itself. Ends at once when `parent` is not its parent any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_without_collection() -> None:
    """Lets this process end without a search for cycles in all that torch has imported, which takes up to a second. The
    kernel takes the memory back in any case."""
    atexit.register(gc.freeze)


def adopt_orphans() -> None:
    """Makes this process the parent of those of its descendants whose own parent ends ("child subreaper")."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
