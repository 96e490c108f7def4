"""How far the sender of a link over shared memory is: one page that both ends see, so that no message need say it.

It speeds things up and is of no authority: rows count by their checksums, which come over the socket (csrc/shared.h).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from kvtransfer.memory import MappedMemory, SharedMemory, address_of

PROGRESS_BYTES = mmap.PAGESIZE
_NUMBERS = 1 << 24  # of messages, then again from 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where to write or read the progress of one message."""

    address: int
    put: int  # its number on the link


class Progress:
    """One end's view. Owned by the thread of its link."""

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: of the receiver's page, which the caller closes; None: makes it.

        Raises ConfigError where there is no such memory, ValueError for a descriptor of anything else.
        """
        self._put = 0
        self._shared: SharedMemory | None = None
        self._mapped: MappedMemory | None = None
        if descriptor is None:
            self._shared = SharedMemory()
            self._view = self._shared.allocate(PROGRESS_BYTES)
            self._address = address_of(self._view)
        else:
            self._mapped = MappedMemory(descriptor, PROGRESS_BYTES)
            self._address = self._mapped.places([0], PROGRESS_BYTES)[0]

    def fileno(self) -> int:
        """Of the page, at the end that made it."""
        return -1 if self._shared is None else self._shared.fileno()

    def next(self) -> Place:
        """For the next message with rows: both ends count every one."""
        self._put = (self._put + 1) % _NUMBERS
        return Place(self._address, self._put)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._view.release()  # the last look at it
        if self._mapped is not None:
            self._mapped.close()
