"""Native row operations against the xxhash package and plain copies: the same checksums and bytes, and no others."""

import contextlib
import ctypes
import functools
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import native
from kvtransfer.digest import row_checksums
from kvtransfer.memory import MappedMemory, SharedMemory, address_of
from kvtransfer.progress import Place, Progress
from twinpool import sources

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


def test_a_library_of_other_sources_is_not_used_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not native.isa():
        pytest.skip("the native library was not built")
    monkeypatch.setattr(sources, "digest", lambda _: "0" * 32)
    assert native.library.__wrapped__() is None
    assert "was not built from the sources beside it: install twinpool again" in caplog.text


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


@pytest.mark.parametrize("length", [241, 1000, 4096, (1 << 18) + 13])
def test_rows_are_in_place_when_their_checksum_comes(isa: str, length: int) -> None:
    source, there = (memoryview(bytearray(size)) for size in (6 * length, 6 * length + 128))
    source[:] = os.urandom(len(source))
    rows = [source[index * length : (index + 1) * length] for index in (5, 0, 3)]
    begin = -address_of(there) % 64
    landed = [there[begin + index * length : begin + (index + 1) * length] for index in (1, 2, 4)]
    expected = [xxhash.xxh3_64_intdigest(row) for row in rows]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writes, reads = _both_ends()
        sending = native.sending(b"head", rows, [address_of(row) for row in landed], writes)
        assert sending is not None
        assert sending.advance(ours.fileno())
        assert list(sending.checksums) == expected
        assert theirs.recv(4) == b"head"
        received = native.receive_rows(theirs.fileno(), landed, _never_silent, in_place=reads)
        assert received == (expected, expected)
    assert [bytes(row) for row in landed] == [bytes(row) for row in rows]
    assert bytes(there[: begin + length]) == bytes(begin + length)  # and nothing else was touched
    assert bytes(there[begin + 5 * length :]) == bytes(len(there) - begin - 5 * length)


def test_a_row_that_changes_on_its_way_has_another_checksum_than_was_sent(isa: str) -> None:
    row = memoryview(bytearray(os.urandom(5000)))
    landed = memoryview(bytearray(5000))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writes, reads = _both_ends()
        sending = native.sending(b"", [row], [address_of(landed)], writes)
        assert sending is not None
        assert sending.advance(ours.fileno())
        landed[4999] ^= 1
        received = native.receive_rows(theirs.fileno(), [landed], _never_silent, in_place=reads)
    assert received == ([xxhash.xxh3_64_intdigest(landed)], [xxhash.xxh3_64_intdigest(row)])


def test_no_row_is_written_before_the_receiver_has_taken_what_came_earlier(isa: str) -> None:
    num_rows, length = 4096, 1 << 12
    source, there = (memoryview(bytearray(os.urandom(length))) for _ in range(2))
    before = bytes(there)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        filler = _fill(ours)
        sending = native.sending(b"head", [source] * num_rows, [address_of(there)] * num_rows, _both_ends()[0])
        assert sending is not None
        assert not sending.advance(ours.fileno())
        assert there == before
        reader = threading.Thread(target=_read, args=(theirs, filler + 4 + 8 * num_rows))
        reader.start()
        while not sending.advance(ours.fileno()):
            pass
        reader.join(timeout=60)
        assert not reader.is_alive()
    assert list(sending.checksums) == [xxhash.xxh3_64_intdigest(source)] * num_rows
    assert there == source


def test_a_link_that_breaks_or_is_silent_is_told_while_rows_are_awaited(isa: str) -> None:
    row = memoryview(bytearray(1000))
    for in_place in (_both_ends()[1], None):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 8 + (1000).to_bytes(8, "little"))
            with pytest.raises(TimeoutError, match="0 bytes"):
                native.receive_rows(theirs.fileno(), [row], _silent, in_place=in_place)
            ours.close()
            with pytest.raises(EOFError):
                native.receive_rows(theirs.fileno(), [row], _never_silent, in_place=in_place)
            sending = native.sending(b"head", [row], [address_of(row)] if in_place else None, in_place)
            assert sending is not None
            with pytest.raises(BrokenPipeError):
                sending.advance(theirs.fileno())


@pytest.mark.parametrize("length", [300, 5000, 300_000])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_receiver_follows_while_rows_are_written(isa: str, length: int, is_told: bool) -> None:
    """is_told: by the progress page; else, as by a sender that shows none, by the socket alone."""
    num_rows = 16
    source = memoryview(bytearray(os.urandom(num_rows * length)))
    there = memoryview(bytearray(num_rows * length))
    rows, landed = ([each[i * length : (i + 1) * length] for i in range(num_rows)] for each in (source, there))
    results: list[object] = []
    writes, reads = _both_ends()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        receive = functools.partial(native.receive_rows, theirs.fileno(), landed, _never_silent, in_place=reads)
        receiving = threading.Thread(target=lambda: results.append(receive()))
        receiving.start()
        sending = native.sending(b"", rows, [address_of(row) for row in landed], writes if is_told else _both_ends()[0])
        assert sending is not None
        assert sending.advance(ours.fileno())
        receiving.join(timeout=60)
        assert not receiving.is_alive()
    expected = [xxhash.xxh3_64_intdigest(row) for row in rows]
    assert results == [(expected, expected)]
    assert there == source


@given(
    words=st.lists(
        st.one_of(
            st.integers(0, 2**64 - 1),
            st.builds(lambda put, placed: put << 40 | placed, st.integers(0, 3), st.integers(0, 4000)),
        ),
        min_size=1,
        max_size=20,
    ),
    sleeps=st.booleans(),
    end=st.sampled_from(["silent", "closed", "whole"]),
)
@settings(max_examples=60, deadline=None)
def test_a_progress_page_that_lies_neither_holds_the_receiver_nor_has_it_believe_anything(
    words: list[int], sleeps: bool, end: str
) -> None:
    """The page says anything, and changes all the time; what counts is the socket."""
    page = Progress()
    place = page.next()
    rows = [memoryview(bytearray(os.urandom(1500))) for _ in range(2)]
    sent = b"".join(xxhash.xxh3_64_intdigest(row).to_bytes(8, "little") for row in rows)
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def lie() -> None:
        while not stop.is_set():
            for word in words:
                ctypes.c_uint64.from_address(place.address).value = word
                ctypes.c_uint32.from_address(place.address + 64).value = sleeps

    liar = threading.Thread(target=lie)
    with theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 8 + (1000).to_bytes(8, "little"))
        liar.start()
        try:
            if end == "whole":
                ours.sendall(sent)
                checksums = native.receive_rows(theirs.fileno(), rows, _silent, in_place=place)
                assert checksums == ([xxhash.xxh3_64_intdigest(row) for row in rows],) * 2
            elif end == "silent":
                with pytest.raises(TimeoutError):
                    native.receive_rows(theirs.fileno(), rows, _silent, in_place=place)
            else:
                ours.close()
                with pytest.raises(EOFError):
                    native.receive_rows(theirs.fileno(), rows, _never_silent, in_place=place)
        finally:
            stop.set()
            liar.join(timeout=60)
            ours.close()
            page.close()


_pages: list[Progress] = []  # of a test: a place is good for as long as its page is there


def _both_ends() -> tuple[Place, Place]:
    """Of a progress page, for one message: the sender's and the receiver's."""
    theirs = Progress()
    ours = Progress(theirs.fileno())
    _pages[:] = [*_pages[-6:], ours, theirs]
    return ours.next(), theirs.next()


def _never_silent(num_bytes: int) -> None:
    raise AssertionError(f"no byte after {num_bytes}")


def _silent(num_bytes: int) -> None:
    raise TimeoutError(f"{num_bytes} bytes")


def _fill(sock: socket.socket) -> int:
    """Sends until there is no more room. Returns how many bytes."""
    filler = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filler += sock.send(bytes(1000), socket.MSG_DONTWAIT)
    return filler


def _read(sock: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(sock.recv(num_bytes))


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
    assert "twinpool_kv_sources" in lines[2]
