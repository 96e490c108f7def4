"""Cache memory that the prefill workers of the same host may be allowed to write into.

It is a memfd: memory with a descriptor, which can be passed to another process over a unix socket and has no name that
anybody else could open. It is sealed against changes of its size, because a mapping of what has shrunk is a SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Sequence

from kvtransfer import native
from kvtransfer.digest import row_checksum
from twinpool.errors import ConfigError

log = logging.getLogger(__name__)


class SharedMemory:
    """One piece of memory, made by `allocate`. It lives as long as somebody looks at it; `close` ends the sharing."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._address = 0
        self.num_bytes = 0

    def allocate(self, num_bytes: int) -> memoryview:
        """Zeroed, writable bytes. Once only. Raises ConfigError when there is no such memory here."""
        if self._descriptor >= 0:
            raise ValueError("the memory has been allocated before")
        try:
            self._descriptor = os.memfd_create("twinpool-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            mapping = mmap.mmap(self._descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (AttributeError, OSError, ValueError) as exc:
            self.close()
            raise ConfigError(
                f"cannot allocate {num_bytes} bytes of shared memory: {exc}; lower --memory or set --kv-transport tcp"
            ) from exc
        self.num_bytes = num_bytes
        self._address = address_of(memoryview(mapping))
        return memoryview(mapping)

    def fileno(self) -> int:
        return self._descriptor

    def offset_of(self, buffer: memoryview) -> int | None:
        """Where `buffer` begins in this memory; None when it is not part of it."""
        offset = address_of(buffer) - self._address
        inside = self._descriptor >= 0 and 0 <= offset <= self.num_bytes - buffer.nbytes
        return offset if inside else None

    def close(self) -> None:
        """Nobody can be given the memory any more; who has it keeps it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def cache_memory(transport: str) -> SharedMemory | None:
    """What a receiver's cache has to be allocated from for the transport of that name; None: any memory will do.

    Raises ConfigError when "shm" is asked for and this system has no such memory.
    """
    if transport not in ("auto", "shm"):
        return None
    try:
        os.close(os.memfd_create("probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as exc:
        if transport == "shm":
            raise ConfigError(f"--kv-transport shm needs memfd_create, which fails here: {exc}; choose tcp") from exc
        log.info("the cache cannot be shared with other processes: %s", exc)
        return None
    return SharedMemory()


class MappedMemory:
    """Another process' SharedMemory, mapped. Owned by one thread."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Raises ValueError for memory that could shrink under the mapping, or that is smaller than `num_bytes`."""
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < num_bytes:
            raise ValueError("it is not sealed against shrinking, or smaller than it should be")
        self.num_bytes = num_bytes
        self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        self._address = address_of(memoryview(self._mapping))

    def write(self, offsets: Sequence[int], rows: Sequence[memoryview]) -> list[int]:
        """Copies each of `rows`, all of one size, to its offset, without the interpreter lock. Returns row checksums.

        Raises ValueError before anything is written when one has no room there.
        """
        if not rows:
            return []
        destinations = self.places(offsets, rows[0].nbytes)
        checksums = native.copy_rows(destinations, rows)
        if checksums is not None:
            return checksums
        checksums = []
        for destination, row in zip(destinations, rows, strict=True):
            ctypes.memmove(destination, address_of(row), row.nbytes)
            checksums.append(row_checksum(row))  # after the copy: the row is in the processor's cache now
        return checksums

    def places(self, offsets: Sequence[int], num_bytes: int) -> list[int]:
        """Addresses of those offsets. Raises ValueError when one has no room for `num_bytes`."""
        for offset in (min(offsets), max(offsets)):
            if not 0 <= offset <= self.num_bytes - num_bytes:
                raise ValueError(f"{num_bytes} bytes at {offset} do not fit into {self.num_bytes}")
        return [self._address + offset for offset in offsets]

    def close(self) -> None:
        self._mapping.close()


def address_of(buffer: memoryview) -> int:
    """Of the first byte of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
