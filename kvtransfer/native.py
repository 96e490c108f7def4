"""The shared library of native row operations (csrc/): copying and hashing in one pass, without the interpreter lock.

It is optional. Where it was not built (no compiler) the same is done by ctypes and the xxhash package, in more passes;
the log says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

MIN_ROW_BYTES = 241  # kMinRowBytes of xxh3.h: shorter rows are not worth a call
ISAS = ("generic", "avx2", "avx512")

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

# Parameters as in api.cpp; all return nothing.
_FUNCTIONS = {
    "twinpool_kv_hash_rows": (_POINTER, _SIZE, _SIZE, _POINTER),
    "twinpool_kv_copy_rows": (_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it was not built, or was built for another machine or from another source."""
    path = next(iter(sorted(Path(__file__).parent.glob("_native*.so"))), None)
    try:
        if path is None:
            raise OSError("it was not built: install a C++ compiler, then twinpool again")
        loaded = ctypes.CDLL(str(path))  # a CDLL, so that calls release the interpreter lock
        for name, parameters in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = parameters, None
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
    there = (_POINTER * count)(*destinations)
    loaded.twinpool_kv_copy_rows(there, addresses(rows), count, rows[0].nbytes, 1, checksums)
    return list(checksums)


def addresses(rows: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    """Of the first bytes of writable buffers, as a C array."""
    return (_POINTER * len(rows))(*[ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows])
