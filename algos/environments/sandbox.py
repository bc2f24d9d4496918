"""What the kernel keeps from an environment's process: network, writes outside its folder, signals to others, too much
memory. What else it may do stands in docs/trajectories.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterable
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock, landlock(7); the numbers are those of every architecture."""
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))
"""Remove and make files, folders, links, sockets, pipes and devices."""
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def leave_network() -> str:
    """Leaves this process, which must have one thread, without a network, by a namespace of its own. Returns why not,
    if the kernel refuses it. A fork tries first, since half a namespace could not be left again."""
    if (child := os.fork()) == 0:
        refused = errno.EIO
        try:
            _enter_namespace()
            refused = 0
        except OSError as error:
            refused = error.errno or refused
        finally:
            os._exit(refused)
    if refused := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return os.strerror(refused)
    _enter_namespace()
    return ""


def _enter_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    if _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def landlock_version() -> int:
    """The version of Landlock that this kernel has; -1: none."""
    return int(_libc().syscall(_CREATE_RULESET, None, 0, 1))


def restrict(folders: Iterable[str]) -> None:
    """Lets this process, and those that it starts, change files below `folders` only, and, from version 6 on, signal
    only each other. Needs Landlock; raises OSError for a folder that does not exist."""
    libc, version = _libc(), landlock_version()
    kept = [access for access, since in ((_REFER, 2), (_TRUNCATE, 3)) if version >= since]
    changes = sum(kept, _WRITE_FILE | _CHANGE_FOLDERS)
    size = ctypes.sizeof(_Ruleset) if version >= 6 else 8
    rules = _Ruleset(changes, 0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    for path, allowed in (*((folder, changes) for folder in folders), (os.devnull, _WRITE_FILE | changes & _TRUNCATE)):
        opened = os.open(path, os.O_PATH)
        beneath = _PathBeneath(allowed, opened)
        libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(beneath), 0)
        os.close(opened)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def limit(*, memory_mib: int, file_mib: int, num_processes: int | None) -> None:
    """Limits this process, and each that it starts: memory beyond what it has now, the size of a file, and how many
    processes this user may have in this namespace, which binds all users but root."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: num_pages * resource.getpagesize() + (memory_mib << 20),
        resource.RLIMIT_FSIZE: file_mib << 20,
        resource.RLIMIT_CORE: 0,
    }
    if num_processes is not None:
        limits[resource.RLIMIT_NPROC] = num_processes
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
