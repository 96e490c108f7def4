"""What a worker holds in memory, by what it is: its own, the cache, packed weights, libraries."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

OWN, CACHE, WEIGHTS, LIBRARIES = "own", "cache", "weights", "libraries"
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
_EVERY_S = 1.0


def resident(smaps: str) -> dict[str, int]:
    """Bytes in memory of a process, by kind, from its /proc/PID/smaps.

    own: anonymous pages, those of libraries that it wrote to among them; weights lie there as well where workers do
    not share them, and the cache where it is not shared memory. The others are files, whose pages have other users too.
    """
    found = dict.fromkeys((OWN, CACHE, WEIGHTS, LIBRARIES), 0)
    kind, rss = LIBRARIES, 0
    for line in smaps.splitlines():
        if mapping := _MAPPING.fullmatch(line):
            kind = _kind(mapping[1].removesuffix(" (deleted)"))
        elif line.startswith("Rss:"):
            rss = int(line.split()[1]) * 1024
        elif line.startswith("Anonymous:"):
            anonymous = int(line.split()[1]) * 1024
            found[OWN] += anonymous
            found[kind] += rss - anonymous
    return found


def _kind(name: str) -> str:
    if name == "/memfd:twinpool-kv":
        return CACHE
    return WEIGHTS if name.endswith((".packed", ".safetensors")) else LIBRARIES


class Watch:
    """Looks at a process every second within `with`; `most` is what it held when its own memory was largest."""

    def __init__(self, pid: int) -> None:
        self.most: dict[str, int] = {}  # stays empty where the system does not tell
        self._path = Path(f"/proc/{pid}/smaps")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            held = resident(self._path.read_text())
        except OSError:  # it ended, or this is not Linux
            return
        if held[OWN] > self.most.get(OWN, -1):
            self.most = held
