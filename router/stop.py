"""Stop strings in streamed text: found across token and character boundaries, whatever the pieces are."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string to be complete, and holds back only what could still become one.

    Where several are complete at the same character, the longest counts, so the least text is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string was found; after that nothing may be pushed."""
        if not self._stops or not text:
            return text, False
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)[1]], True
        keep = max(self._longest_start(buffer, stop) for stop in self._stops)
        shown = len(buffer) - keep
        self._held = buffer[shown:]
        return buffer[:shown], False

    def flush(self) -> str:
        """What was held back and, as no more text comes, is no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _longest_start(buffer: str, stop: str) -> int:
        """Length of the longest end of `buffer` that `stop` begins with; `stop` itself is not in `buffer`."""
        at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(buffer[at:]):
                return len(buffer) - at
            at = buffer.find(stop[0], at + 1)
        return 0
