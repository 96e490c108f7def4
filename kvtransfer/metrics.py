"""What a transfer reports about itself. Prefill and decode connect these calls to their Prometheus metrics."""

from __future__ import annotations

from typing import Protocol


class TransferMetrics(Protocol):
    """Called from transfer threads, often: implementations must be thread safe and short.

    peer is the receiver's endpoint on the sending side, the sender's host on the receiving side.
    """

    def moved(self, peer: str, rows: int, num_bytes: int) -> None:
        """One frame of rows is out (sender) or in its place and verified (receiver)."""

    def finished(self, peer: str, seconds: float, error: str | None) -> None:
        """One push or reservation ended; `error` is the class name of what failed, None after a commit."""

    def queued(self, peer: str, rows: int) -> None:
        """Rows now waiting to be sent to this peer, over all its pushes (sender only)."""

    def refused(self, peer: str, error: str) -> None:
        """A link or a frame of this peer was turned away (receiver only)."""


class NoMetrics:
    """Reports to nobody."""

    def moved(self, peer: str, rows: int, num_bytes: int) -> None: ...

    def finished(self, peer: str, seconds: float, error: str | None) -> None: ...

    def queued(self, peer: str, rows: int) -> None: ...

    def refused(self, peer: str, error: str) -> None: ...
