"""Integrity of a transfer: one checksum a row, one digest over all of them.

A row's checksum is xxh3_64 of its bytes: fast enough to be computed while the row is copied or sent. Both ends keep a
`Manifest` of what they sent or received; equal digests mean that the same rows, each exactly once and at the same
place, hold the same bytes on both sides. This guards against faults, not against forgers: the handshake does that.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

import xxhash

from kvtransfer import native

DIGEST_BYTES = 16


def row_checksum(row: memoryview) -> int:
    """64 bits over the bytes of one row."""
    checksum: int = xxhash.xxh3_64_intdigest(row)
    return checksum


def row_checksums(rows: Sequence[memoryview]) -> list[int]:
    """Of rows of one size, in one call without the interpreter lock where the native library is there."""
    checksums = native.hash_rows(rows)
    return [row_checksum(row) for row in rows] if checksums is None else checksums


def commit_context(request_id: str, attempt: int, note: bytes) -> bytes:
    """What a commit's digest covers besides the rows."""
    return b"\0".join((request_id.encode(), str(attempt).encode(), note))


def in_a_row(positions: Sequence[int]) -> Sequence[int]:
    """The same, as a range where they follow one another: as nearly always."""
    if isinstance(positions, range) and positions.step == 1:
        return positions
    there = tuple(positions)
    if not there or there[-1] - there[0] != len(there) - 1:
        return there
    candidate = range(there[0], there[0] + len(there))
    return candidate if there == tuple(candidate) else there


def lowest_and_highest(positions: Sequence[int]) -> tuple[int, int]:
    return (positions[0], positions[-1]) if isinstance(positions, range) else (min(positions), max(positions))


class Manifest:
    """Which (region, position) pairs of one transfer are done, with their checksums. Owned by one thread at a time."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """sizes: for every region, how many positions the transfer may fill."""
        self._present = [bytearray(size) for size in sizes]
        self._checksums = [array("Q", bytes(8 * len(flags))) for flags in self._present]

    def first_repeated(self, region: int, positions: Sequence[int]) -> int | None:
        """The first of `positions` that is done already or occurs twice, if any."""
        present = self._present[region]
        if isinstance(positions, range):
            place = present.find(1, positions.start, positions.stop)
            return None if place < 0 else place
        if len(set(positions)) == len(positions) and not any(map(present.__getitem__, positions)):
            return None
        seen: set[int] = set()
        for position in positions:
            if present[position] or position in seen:
                return position
            seen.add(position)
        return None

    def add(self, region: int, positions: Sequence[int], checksums: Sequence[int]) -> None:
        """Marks positions as done; each must be new and in range."""
        present, known = self._present[region], self._checksums[region]
        first, count = positions[0], len(positions)
        if isinstance(positions, range) and len(checksums) == count:  # as nearly always
            present[first : first + count] = b"\1" * count
            known[first : first + count] = array("Q", checksums)
            return
        for position, checksum in zip(positions, checksums, strict=True):
            present[position] = 1
            known[position] = checksum

    def counts(self) -> list[int]:
        """Rows done, for every region."""
        return [sum(flags) for flags in self._present]

    def first_missing(self, region: int, first: int) -> int | None:
        """The lowest position from `first` on that is not done, if any."""
        position = self._present[region].find(0, first)
        return None if position < 0 else position

    def digest(self, context: bytes) -> bytes:
        """16 bytes over `context` and every (region, position, checksum)."""
        state = xxhash.xxh3_128(struct.pack("<I", len(context)) + context)
        for flags, checksums in zip(self._present, self._checksums, strict=True):
            state.update(struct.pack("<I", len(flags)))
            state.update(flags)
            state.update(struct.pack(f"<{len(checksums)}Q", *checksums))
        digest: bytes = state.digest()
        return digest
