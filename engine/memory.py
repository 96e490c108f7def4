"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """The lesser of what the machine and the container's limit leave; None where neither can be read (not Linux)."""
    limits = [limit for limit in (_machine_bytes(meminfo), _container_bytes(cgroup)) if limit is not None]
    return min(limits, default=None)


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
