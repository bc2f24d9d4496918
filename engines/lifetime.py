"""How processes begin and end: what need not be done, and what the kernel does for those whose parent ends. Linux,
torch-free."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent dies, more exactly the thread of it that has started this one;
    a process that was stopped could not end by itself. Ends at once when `parent` is not its parent any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def exempt_from_collection() -> None:
    """Lets Python look for unused cycles only in what is made from here on, and for none when the process ends. A full
    search through what torch has imported takes 0.2 s in the middle of a rollout, and up to a second at the end, where
    the kernel takes the memory back in any case."""
    gc.freeze()
    atexit.register(gc.freeze)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Exempts what is imported within it, for which Python would look seven times for cycles, half a second in all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def adopt_orphans() -> None:
    """Makes this process the parent of those of its descendants whose own parent ends ("child subreaper")."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
