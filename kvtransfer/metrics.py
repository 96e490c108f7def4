"""What a transfer reports about itself. Prefill and decode connect these calls to their Prometheus metrics.

A link asks for its own `LinkMetrics` once and calls them for frames and pushes, never for single rows, so that labels
are looked up once a link. `peer` is what the other end calls itself, else its host; `transport` is the link's.
"""

from __future__ import annotations

import re
from typing import Protocol

NONE = "none"  # the transport of what failed before there was a link
LOCAL = "localhost"  # the host of a peer that is reached through none
MAX_PEER_CHARS = 128

# What failures and refusals are called: classes of errors, and two ends that one side wanted.
ABORTED = "Aborted"  # by the sender's owner
RELEASED = "Released"  # by the receiver's owner
ERRORS = (
    "ChecksumMismatch",
    "Incompatible",
    "Malformed",
    "Overloaded",
    "PeerLost",
    "ReservationGone",
    "TransferFailed",
    "TransferTimeout",
    "Unauthenticated",
)
_OTHER_ERROR = "Internal"
_HOST_AND_PORT = re.compile(r"(?:[\w+.-]+://)?(?:\[([^\]]+)\]|([^\s/:]+)):\d+")
_HOST = re.compile(r"[\w.:-]*[.:][\w.:-]*")


class LinkMetrics(Protocol):
    """Of one link. Called from transfer threads, often: implementations must be thread safe and short."""

    def moved(self, rows: int, num_bytes: int) -> None:
        """One frame of rows is out (sender) or in its place and verified (receiver); headers are not counted."""

    def queued(self, rows: int, num_bytes: int) -> None:
        """So many rows more wait to be sent, or fewer (sender only)."""

    def began(self, attempt: int) -> None:
        """A push was opened or a reservation claimed, for that attempt at its request."""

    def finished(self, seconds: float, error: str | None) -> None:
        """What `began` is over, `seconds` after its first rows. error: see `error_name`; None after a commit."""

    def paced(self, bytes_per_s: float) -> None:
        """How fast the rows of a push left that was committed, pauses between them left out (sender only)."""

    def refused(self, error: str) -> None:
        """The receiver turned the link, or a frame of it, away; both ends report it."""

    def quarantined(self, reservations: int, rows: int) -> None:
        """So many more are in quarantine, with so many cache rows, or fewer (receiver only)."""

    def lease_lost(self) -> None:
        """The peer was silent for its lease."""

    def down(self, error: str | None) -> None:
        """The link is of no more use; None: it was no longer needed. Once."""

    def forget(self) -> None:
        """Nothing more is reported. Once, after `down`."""


class TransferMetrics(Protocol):
    def link(self, transport: str, peer: str, *, stranger: bool = False) -> LinkMetrics:
        """Of a new link. A stranger has not proved who it is, and may be anybody's invention."""

    def expired(self, cause: str) -> None:
        """A reservation's time was over: "unclaimed" by any sender, or its rows came "late" (receiver only)."""


class NoLinkMetrics:
    """Reports to nobody."""

    def moved(self, rows: int, num_bytes: int) -> None: ...

    def queued(self, rows: int, num_bytes: int) -> None: ...

    def began(self, attempt: int) -> None: ...

    def finished(self, seconds: float, error: str | None) -> None: ...

    def paced(self, bytes_per_s: float) -> None: ...

    def refused(self, error: str) -> None: ...

    def quarantined(self, reservations: int, rows: int) -> None: ...

    def lease_lost(self) -> None: ...

    def down(self, error: str | None) -> None: ...

    def forget(self) -> None: ...


class NoMetrics:
    """Reports to nobody."""

    def link(self, transport: str, peer: str, *, stranger: bool = False) -> LinkMetrics:
        return NoLinkMetrics()

    def expired(self, cause: str) -> None: ...


def error_name(error: BaseException) -> str:
    """The class of ERRORS that `error` is of; "Internal" for what no transfer should raise."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), _OTHER_ERROR)


def host_of(address: str) -> str:
    """The host of an endpoint or of a link's peer, as one name for all ports and processes there."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is not None:
        return (found[1] or found[2])[:MAX_PEER_CHARS]
    return address[:MAX_PEER_CHARS] if _HOST.fullmatch(address) else LOCAL
