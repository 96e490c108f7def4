"""A model's weights as the kernels want them, in a file that all workers of a host map and share.

The first worker writes it while it reads the checkpoint, the others find the work done and the pages in memory. The
file is named after what does not change between versions of this code, so that a new version takes the place of an old
one; what has to be the same to the last detail is its `identity`, in the header beside size and checksum. A file that
does not match in all of them is written again.

    folder/NAME.packed   header (4 KiB), tensors of each part, the parts' descriptions as JSON
    folder/NAME.lock     held by the one who writes
    folder/NAME.part     what is being written; renamed when it is whole
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import logging
import math
import mmap
import os
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import xxhash

from engine.part_description import Place, build, describe

WAIT_S = 300.0  # for another worker that is writing
KEPT_S = 30 * 86400.0  # files that nobody has opened for so long are removed
_MAGIC = b"twinpool packed weights 1\n"
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_FIELDS = struct.Struct("<26s32sQQQ16s")  # magic, identity, size, begin and length of the descriptions, checksum

_log = logging.getLogger(__name__)


class Parts(Protocol):
    """Where parts of a model come from."""

    def part(self, name: str, make: Callable[[], Any], given: dict[str, Any]) -> Any:
        """Part `name`, which `make` makes; given: what a part refers to without owning it, by name."""


class Unshared:
    """Every part is made, and lies in this process' own memory."""

    def part(self, name: str, make: Callable[[], Any], given: dict[str, Any]) -> Any:
        return make()


UNSHARED = Unshared()


def shared_parts(
    folder: Path, name: str, identity: str, read: Callable[[Parts], object], wait_s: float = WAIT_S
) -> Parts:
    """Parts of the file NAME of `folder`, which is written first if there is none of this identity.

    read: reads the model by parts. Where the file cannot be written, parts are unshared and a log line says why.
    """
    key = hashlib.sha256(identity.encode()).digest()
    path = folder / f"{name}.packed"
    found = _open(path, key)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.lock", "ab") as lock:
            if not _locked(lock, wait_s):
                raise TimeoutError(f"another worker has been writing {path} for {wait_s:.0f} s")
            found = _open(path, key)
            if found is None:
                with _Writer(path, key) as writer:
                    read(writer)
                    writer.finish()
                gc.collect()  # what was read only to be written: a model refers to itself
                _remove_old(folder)
                found = _open(path, key)
    except (OSError, TypeError) as exc:  # a full disk; a part that holds something which has no description
        _log.warning("weights are not shared with other workers through %s: %s", path, exc)
    return found or UNSHARED


@functools.cache
def source_digest() -> str:
    """Of all code that could have a say in what parts hold and in what layout: this package's."""
    root = Path(__file__).parent
    hasher = xxhash.xxh3_128()
    for path in sorted(root.rglob("*.py")):
        hasher.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return hasher.hexdigest()


class _Mapped:
    """The parts of a whole file."""

    def __init__(self, data: memoryview, descriptions: dict[str, Any]) -> None:
        self._data, self._descriptions = data, descriptions

    def part(self, name: str, make: Callable[[], Any], given: dict[str, Any]) -> Any:
        return build(self._descriptions[name], lambda place: _tensor(self._data, place), given)


class _Writer:
    """Makes parts and writes each."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._path, self._key = path, key
        self._scratch = path.with_suffix(".part")
        self._scratch.unlink(missing_ok=True)  # of a worker that was killed: this one has the lock
        self._file: BinaryIO = open(self._scratch, "xb")  # noqa: SIM115 (closed by __exit__)
        self._checksum = xxhash.xxh3_128()
        self._end = _HEADER_BYTES
        self._descriptions: dict[str, Any] = {}
        self._file.seek(self._end)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)  # renamed by now if all went well

    def part(self, name: str, make: Callable[[], Any], given: dict[str, Any]) -> Any:
        made = make()
        self._descriptions[name] = describe(made, self._write, given)
        return made

    def finish(self) -> None:
        """Makes the file appear, whole and on the disk."""
        descriptions = json.dumps(self._descriptions).encode()
        begin = self._end
        self._put(descriptions)
        self._file.seek(0)
        fields = (_MAGIC, self._key, self._end, begin, len(descriptions), self._checksum.digest())
        self._file.write(_sealed(_FIELDS.pack(*fields)))
        self._file.flush()
        os.fsync(self._file.fileno())
        # Read back through a mapping that asks for large pages, it lies in such: weights stream faster from them.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._scratch.rename(self._path)

    def _write(self, tensor: torch.Tensor) -> Place:
        self._pad(-self._end % _ALIGNMENT)
        place = Place(self._end, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self._put(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return place

    def _pad(self, count: int) -> None:
        if count:
            self._put(bytes(count))

    def _put(self, data: bytes | memoryview) -> None:
        self._checksum.update(data)
        self._file.write(data)
        self._end += len(data)


def _open(path: Path, key: bytes) -> _Mapped | None:
    """The parts of a file that is whole and of this identity; None, and a log line where a file is there, if not."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES or header != _sealed(header[: _FIELDS.size]):
                raise ValueError("its header is damaged")
            magic, identity, whole, begin, length, checksum = _FIELDS.unpack_from(header)
            if magic != _MAGIC or identity != key:
                raise ValueError("it is of another model, format or version")
            if size != whole:
                raise ValueError(f"it has {size} bytes instead of {whole}")
            data = _map(file, size)
            with contextlib.suppress(OSError):  # a folder that is mounted read-only, as others should not write to it
                os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        _log.warning("packed weights %s cannot be used: %s", path, exc)
        return None
    if xxhash.xxh3_128_digest(data[_HEADER_BYTES:]) != checksum:
        _log.warning("packed weights %s cannot be used: the checksum is wrong", path)
        return None
    return _Mapped(data, json.loads(bytes(data[begin : begin + length])))


def _sealed(fields: bytes) -> bytes:
    """A header of these fields, with their own checksum."""
    return (fields + xxhash.xxh3_64_digest(fields)).ljust(_HEADER_BYTES, b"\0")


def _map(file: BinaryIO, size: int) -> memoryview:
    mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with contextlib.suppress(OSError):  # only some kernels and file systems have large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def _tensor(data: memoryview, place: Place) -> torch.Tensor:
    """A tensor on mapped memory, which it keeps mapped. Writing to it would end the process."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=place.begin)
    return flat.view(place.shape)


def _locked(lock: BinaryIO, wait_s: float) -> bool:
    """Whether this process got the lock, which is gone when the file is closed."""
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        else:
            return True


def _remove_old(folder: Path) -> None:
    """Of models that are no longer served, half written ones too; who still maps one keeps it."""
    for path in (*folder.glob("*.packed"), *folder.glob("*.part")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
