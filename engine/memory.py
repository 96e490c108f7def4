"""How much memory a process may still take, and giving back what it no longer needs."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """The lesser of what the machine and the container's limit leave; None where neither can be read (not Linux)."""
    limits = [limit for limit in (_machine_bytes(meminfo), _container_bytes(cgroup)) if limit is not None]
    return min(limits, default=None)


def return_freed() -> None:
    """What was freed goes back to the system, which C libraries put off: of a model's tensors that may be gigabytes."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that has no such function
        ctypes.CDLL(None).malloc_trim(0)


def _machine_bytes(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _container_bytes(cgroup: Path) -> int | None:
    """cgroup v2: the limit less what is used, page cache not counted as used."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
