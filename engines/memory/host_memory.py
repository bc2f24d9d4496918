"""The free memory of a host, within the limits of its control groups. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes that the kernel can allocate without swapping and that the control groups of this process
    allow; None if unknown. Pages of files count as free, since the kernel drops them when memory is needed.
    """
    limits = list(_cgroup_rooms(proc, cgroups))
    if (kib := _fields(proc / "meminfo").get("MemAvailable:")) is not None:
        limits.append(kib * 1024)
    return max(0, min(limits)) if limits else None


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the bytes that each limited control group of this process still allows, for cgroup versions 2 and 1."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = cgroups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = root / name.strip("/")
        # The name may be from outside this container; the container's own group is then the root.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                room = _room(place, limit, usage, prefix)
                if room is not None:
                    yield room


def _room(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
    except (OSError, ValueError):
        return None  # the group is missing or not readable, or its limit is "max"
    pages = _fields(folder / "memory.stat")
    return most - used + pages.get(f"{prefix}active_file", 0) + pages.get(f"{prefix}inactive_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers in a file by name; its lines begin with a name and a number."""
    words = [line.split() for line in _lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) >= 2}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
