"""The shared library of native row operations (csrc/): copying and hashing in one pass, without the interpreter lock.

It is optional. Where it was not built (no compiler) the same is done by ctypes and the xxhash package, in more passes;
the log says so once.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtransfer.region import RowViews
from twinpool import sources

if TYPE_CHECKING:
    from kvtransfer.progress import Place

log = logging.getLogger(__name__)

MIN_ROW_BYTES = 241  # kMinRowBytes of xxh3.h: shorter rows are not worth a call
ISAS = ("generic", "avx2", "avx512")

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _RowStream(ctypes.Structure):
    """struct RowStream of stream.h."""

    _fields_ = (
        ("rows", _POINTER),
        ("num_rows", _SIZE),
        ("row_bytes", _SIZE),
        ("head", ctypes.c_char_p),
        ("head_bytes", _SIZE),
        ("checksums", _POINTER),
        ("moved", _SIZE),
        ("hashed", _SIZE),
        ("looks", _SIZE),
        ("lanes", ctypes.c_uint64 * 8),
    )


# Parameters as in api.cpp, stream.h and shared.h; int is what all of them return, if anything.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "twinpool_kv_hash_rows": (_POINTER, _SIZE, _SIZE, _POINTER),
    "twinpool_kv_copy_rows": (_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER),
    "twinpool_kv_send": (_INT, _POINTER),
    "twinpool_kv_receive": (_INT, _POINTER, _POINTER),
    "twinpool_kv_write": (_INT, _POINTER, _POINTER, _POINTER, ctypes.c_uint32),
    "twinpool_kv_verify": (_INT, _POINTER, _POINTER, _POINTER, ctypes.c_uint32),
    "twinpool_kv_look": (_INT, ctypes.c_long),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it was not built, or was built for another machine or from another source."""
    path = next(iter(sorted(Path(__file__).parent.glob("_native*.so"))), None)
    try:
        if path is None:
            raise OSError("it was not built: install a C++ compiler, then twinpool again")
        loaded = ctypes.CDLL(str(path))  # a CDLL, so that calls release the interpreter lock
        loaded.twinpool_kv_sources.argtypes, loaded.twinpool_kv_sources.restype = (), ctypes.c_char_p
        if loaded.twinpool_kv_sources().decode() != sources.digest(path.parent / "csrc"):
            raise OSError(f"{path} was not built from the sources beside it: install twinpool again")
        for name, parameters in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = parameters, _INT
        loaded.twinpool_kv_isa.argtypes, loaded.twinpool_kv_isa.restype = (), ctypes.c_char_p
        loaded.twinpool_kv_select_isa.argtypes, loaded.twinpool_kv_select_isa.restype = (ctypes.c_char_p,), _INT
    except (OSError, AttributeError) as exc:
        log.warning("KV ROWS MOVE THE SLOW WAY: no native library of kvtransfer: %s", exc)
        return None
    return loaded


def isa() -> str:
    """The instruction set in use; "" without the library."""
    loaded = library()
    return "" if loaded is None else loaded.twinpool_kv_isa().decode()


def select_isa(name: str) -> bool:
    """Switches to another instruction set where this machine has it; for tests, and only while nothing moves."""
    loaded = library()
    return loaded is not None and bool(loaded.twinpool_kv_select_isa(name.encode()))


def hash_rows(rows: Sequence[memoryview]) -> list[int] | None:
    """xxh3_64 of each row; all have one size. None where it has to be done in another way."""
    loaded = library()
    if loaded is None or not rows or rows[0].nbytes < MIN_ROW_BYTES:
        return None
    checksums = (ctypes.c_uint64 * len(rows))()
    loaded.twinpool_kv_hash_rows(addresses(rows), len(rows), rows[0].nbytes, checksums)
    return list(checksums)


def copy_rows(destinations: Sequence[int], rows: Sequence[memoryview]) -> list[int] | None:
    """Copies each row to its address and returns its xxh3_64, in one pass; else as `hash_rows`."""
    loaded = library()
    if loaded is None or not rows or rows[0].nbytes < MIN_ROW_BYTES:
        return None
    count = len(rows)
    checksums = (ctypes.c_uint64 * count)()
    loaded.twinpool_kv_copy_rows(pointers(destinations), addresses(rows), count, rows[0].nbytes, 1, checksums)
    return list(checksums)


class SendingRows:
    """Rows on their way into a plain stream socket, behind `head` and followed by their checksums; or, with `there`, to
    those addresses while only `head` and the checksums go into the socket, and `progress` shows how far they are.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        head: bytes,
        rows: Sequence[memoryview],
        there: Sequence[int] | None,
        progress: Place | None,
    ) -> None:
        self.checksums: Any = (ctypes.c_uint64 * len(rows))()  # int each, complete when `advance` has returned True
        self._library = library
        self._there = None if there is None else pointers(there)
        self._progress = progress
        self._kept = (rows, addresses(rows))  # the stream points into them
        self._stream = _stream(self._kept[1], rows, self.checksums, head)

    def advance(self, descriptor: int) -> bool:
        """Hashes and sends what goes without waiting. True when all is out. OSError of the socket."""
        if self._there is None or self._progress is None:
            result = self._library.twinpool_kv_send(descriptor, ctypes.byref(self._stream))
        else:
            result = self._library.twinpool_kv_write(
                descriptor, ctypes.byref(self._stream), self._there, self._progress.address, self._progress.put
            )
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return bool(result)


def sending(
    head: bytes, rows: Sequence[memoryview], there: Sequence[int] | None = None, progress: Place | None = None
) -> SendingRows | None:
    """there, progress: both or none. None where it has to be done in another way."""
    loaded = library()
    return (
        None if loaded is None or rows[0].nbytes < MIN_ROW_BYTES else SendingRows(loaded, head, rows, there, progress)
    )


def receive_rows(
    descriptor: int, rows: Sequence[memoryview], on_silence: Callable[[int], None], *, in_place: Place | None = None
) -> tuple[list[int], list[int]] | None:
    """Waits for rows and their checksums on a blocking plain stream socket. (checksums computed, checksums sent).

    in_place: only the checksums come, and the other end writes the rows by itself; it shows there how far it is.
    on_silence(bytes received so far): when the socket's own timeout has passed; it raises, or the wait goes on.
    None where it has to be done in another way. EOFError when the other end has closed, OSError of the socket.
    """
    loaded = library()
    if loaded is None or rows[0].nbytes < MIN_ROW_BYTES:
        return None
    computed, sent = (ctypes.c_uint64 * len(rows))(), (ctypes.c_uint64 * len(rows))()
    there = addresses(rows)
    stream = _stream(there, rows, computed, b"")
    receive: Callable[..., int] = loaded.twinpool_kv_receive
    if in_place is not None:
        receive = functools.partial(_verify, loaded, in_place)
    while (result := receive(descriptor, ctypes.byref(stream), sent)) == -errno.EAGAIN:
        on_silence(stream.moved)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    if not result:
        raise EOFError
    return list(computed), list(sent)


def _verify(loaded: ctypes.CDLL, progress: Place, descriptor: int, stream: Any, sent: Any) -> int:
    result: int = loaded.twinpool_kv_verify(descriptor, stream, sent, progress.address, progress.put)
    return result


def look(descriptor: int, seconds: float) -> bool:
    """Whether something comes on a socket so soon; does not sleep. False without the library."""
    loaded = library()
    return loaded is not None and bool(loaded.twinpool_kv_look(descriptor, int(seconds * 1e9)))


def _stream(there: Any, rows: Sequence[memoryview], checksums: Any, head: bytes) -> _RowStream:
    return _RowStream(
        ctypes.cast(there, _POINTER),
        len(rows),
        rows[0].nbytes,
        head,
        len(head),
        ctypes.cast(checksums, _POINTER),
    )


def addresses(rows: Sequence[memoryview]) -> Any:
    """Of the first bytes of writable buffers, as a C array."""
    if isinstance(rows, RowViews):
        return pointers(rows.addresses())
    return pointers([ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows])


def pointers(addresses: Sequence[int]) -> Any:
    """As a C array; by way of `array`, which takes a fifth of the time of ctypes."""
    return (_POINTER * len(addresses)).from_buffer(array("Q", addresses))
