"""Native row operations against the xxhash package and plain copies: the same checksums and bytes, and no others."""

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from kvtransfer import native
from kvtransfer.digest import row_checksums
from kvtransfer.memory import MappedMemory, SharedMemory, address_of

LENGTHS = [*range(241, 261), *range(1000, 1100, 3), 1024, 1025, 2047, 2048, 2049, 4096, 65_537, (1 << 18) + 13, 1 << 20]


@pytest.fixture(params=native.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    usual = native.isa()
    if not usual:
        pytest.skip("the native library was not built")
    if not native.select_isa(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert native.select_isa(usual)


def test_hashes_are_xxh3_whatever_the_length_and_alignment(isa: str) -> None:
    for index, length in enumerate(LENGTHS):
        offset = index % 65
        buffer = memoryview(bytearray(os.urandom(2 * length + offset)))
        rows = [buffer[offset : offset + length], buffer[offset + length :]]
        assert native.hash_rows(rows) == [xxhash.xxh3_64_intdigest(row) for row in rows], length


def test_copies_are_exact_and_touch_nothing_else(isa: str) -> None:
    for index, length in enumerate(LENGTHS):
        source = memoryview(bytearray(os.urandom(3 * length)))
        rows = [source[:length], source[2 * length :]]
        there = memoryview(bytearray(b"\xee" * (2 * length + 256)))
        align = -address_of(there) % 64
        places = [align + index % 3, align + index % 3 + length + (0 if index % 2 else 64)]
        checksums = native.copy_rows([address_of(there) + place for place in places], rows)
        assert checksums == [xxhash.xxh3_64_intdigest(row) for row in rows], length
        expected = bytearray(b"\xee" * len(there))
        for place, row in zip(places, rows, strict=True):
            expected[place : place + length] = row
        assert there == expected, length


def test_short_rows_are_left_to_the_package() -> None:
    rows = [memoryview(bytearray(os.urandom(native.MIN_ROW_BYTES - 1))) for _ in range(2)]
    assert native.hash_rows(rows) is None
    assert native.copy_rows([0, 0], rows) is None
    assert row_checksums(rows) == [xxhash.xxh3_64_intdigest(row) for row in rows]
    assert row_checksums([]) == []


def test_without_the_library_the_same_is_done_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    rows = [memoryview(bytearray(os.urandom(1000))) for _ in range(3)]
    expected = [xxhash.xxh3_64_intdigest(row) for row in rows]
    assert (native.isa(), native.select_isa("generic")) == ("", False)
    assert row_checksums(rows) == expected
    memory = SharedMemory()
    view = memory.allocate(4000)
    mapped = MappedMemory(memory.fileno(), 4000)
    assert mapped.write([3000, 0, 1000], rows) == expected
    assert view == bytes(rows[1]) + bytes(rows[2]) + bytes(1000) + bytes(rows[0])
    mapped.close()
    memory.close()


def test_a_library_that_cannot_be_used_is_said_loudly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with caplog.at_level(logging.WARNING, logger="kvtransfer.native"):
        assert native.library.__wrapped__() is None
        (tmp_path / "_native.so").write_bytes(b"no library")
        assert native.library.__wrapped__() is None
        monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
        assert native.library.__wrapped__() is None
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("KV ROWS MOVE THE SLOW WAY") for line in lines] == [True] * 3
    assert "was not built" in lines[0]
    assert str(tmp_path) in lines[1]
    assert "twinpool_kv_hash_rows" in lines[2]
