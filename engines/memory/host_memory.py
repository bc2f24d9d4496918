"""How much memory a host and its control groups still give. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the kernel can give without swapping, and the control groups of this process allow; None where that cannot
    be known. Pages of files count as free: they are dropped when memory is wanted.
    """
    limits = list(_cgroup_rooms(proc, cgroups))
    if (kib := _fields(proc / "meminfo").get("MemAvailable:")) is not None:
        limits.append(kib * 1024)
    return max(0, min(limits)) if limits else None


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each limited control group that holds this process can still take: versions 2 and 1 of the interface."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = cgroups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = root / name.strip("/")
        # The name may be one outside this container, whose own group is then the root.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                room = _room(place, limit, usage, prefix)
                if room is not None:
                    yield room


def _room(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
    except (OSError, ValueError):
        return None  # there is no such group, none that may be read, or its limit is "max"
    pages = _fields(folder / "memory.stat")
    return most - used + pages.get(f"{prefix}active_file", 0) + pages.get(f"{prefix}inactive_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """Of a file of lines that begin with a name and a number."""
    words = [line.split() for line in _lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) >= 2}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
