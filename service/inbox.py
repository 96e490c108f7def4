"""Commands for a thread that runs a loop of its own, as a worker's device thread: others put them in, it runs them.

inbox.put(partial(scheduler.cancel, request_id))     # any thread
inbox.run(wait_s=0.5)                                # the owning thread, once a turn of its loop
"""

from __future__ import annotations

import queue
from collections.abc import Callable


class Inbox:
    """`put` is for every thread and never waits; `run` is for the one that owns what the commands touch."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def run(self, wait_s: float) -> None:
        """Runs every command that is there, in order; waits up to wait_s for the first."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return
