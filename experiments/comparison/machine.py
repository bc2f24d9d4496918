"""The machine that figures are from, and what else keeps it busy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal


def machine() -> dict[str, Any]:
    """The machine that the figures are from."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def this_tier() -> Literal["live", "gpu"]:
    """The tier of what this machine does at its own speed."""
    return "live" if machine()["device"] == "cpu" else "gpu"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs `count` processes that each keep a core busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
