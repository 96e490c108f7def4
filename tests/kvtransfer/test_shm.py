"""Shared memory: who may have it, and that nobody's rows are given away while a writer may still be at them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import KvSender, Reservation, SharedMemory, native, wire
from kvtransfer.memory import MappedMemory, address_of
from kvtransfer.transports import shm
from kvtransfer.transports.shm import ShmSenderLink, ShmTransport
from tests.fakes import Faults
from tests.kvtransfer.peers import FINGERPRINT, PATIENCE_S, Ends, Pair, eventually, make_regions, rows_of
from twinpool.errors import ChecksumMismatch, ConfigError, PeerLost, TransferTimeout, Unauthenticated

ROOT = Path(__file__).parents[2]
ANOTHERS = bytes([0xA5]) * 1000  # what another request has in its rows


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("shm")
    yield pair
    pair.close()


class Writer:
    """A prefill worker in a process of its own, which does one layer of each push and waits."""

    def __init__(self, transport: str = "shm") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvtransfer.writer_process", transport],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def push(self, pair: Pair, reservation: Reservation) -> None:
        """Returns when its rows are here."""
        before = pair.receiver_counters.rows
        self.say(f"{reservation.request_id[1:]} {reservation.target.hex()}")
        eventually(lambda: pair.receiver_counters.rows == before + 2, "arrival of the rows")

    def freeze(self) -> None:
        """Returns when it runs no more, which is a moment after the signal."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stop of the writer")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.close()


class Fenced:
    """A reservation of two rows with the times its on_fenced was called."""

    def __init__(self, pair: Pair, rows: list[int], request_id: str = "r1", timeout_s: float = 60) -> None:
        self.times = 0
        self.ends = Ends()
        self.reservation = pair.receiver.reserve(
            request_id=request_id,
            attempt=1,
            rows={"kv": rows},
            timeout_s=timeout_s,
            on_commit=self.ends,
            on_failed=self.ends,
            on_fenced=self._fenced,
        )

    def _fenced(self) -> None:
        self.times += 1


def test_the_memory_cannot_be_resized_and_keeps_its_seals() -> None:
    memory = SharedMemory()
    view = memory.allocate(1 << 16)
    for size in (1 << 15, 1 << 17):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert memory.offset_of(view[100:]) == 100
    assert memory.offset_of(memoryview(bytearray(10))) is None
    memory.close()
    memory.close()


def test_memory_that_could_shrink_or_is_too_small_is_not_mapped() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with pytest.raises(ValueError, match="not sealed"):
        MappedMemory(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    memory = SharedMemory()
    memory.allocate(100)
    with pytest.raises(ValueError, match="smaller"):
        MappedMemory(memory.fileno(), 101)
    mapped = MappedMemory(memory.fileno(), 100)
    for offset in (-1, 91, 1 << 40):
        with pytest.raises(ValueError, match="do not fit"):
            mapped.write([0, offset], [memoryview(bytearray(10))] * 2)
    mapped.close()
    memory.close()


def test_a_cache_outside_shared_memory_is_a_config_error_where_shm_is_asked_for(pair: Pair) -> None:
    for memory in (None, pair.memory):
        with pytest.raises(ConfigError, match="'shm' cannot serve"):
            pair.make_receiver(make_regions(2), memory=memory)


def test_only_who_has_the_key_gets_the_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[object] = []
    monkeypatch.setattr(ShmSenderLink, "attach", lambda link, deadline: attached.append(link))
    stranger = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key="guessed", transport="shm")
    reservation, _ = pair.reserve([1])
    push = pair.open(reservation, sender=stranger)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, Unauthenticated)
    assert not attached
    stranger.close()
    reservation.release()


@pytest.mark.parametrize("has_native", [True, False])
def test_rows_that_land_elsewhere_are_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch, has_native: bool) -> None:
    if not has_native:
        monkeypatch.setattr(native, "library", lambda: None)
    pair.assert_serves()
    elsewhere = memoryview(bytearray(1 << 20))
    with monkeypatch.context() as patch:
        patch.setattr(MappedMemory, "places", lambda self, offsets, num_bytes: [address_of(elsewhere)] * len(offsets))
        reservation, ends = pair.reserve([5, 6])
        result = pair.send(reservation, [0, 1])
    assert isinstance(result.error, ChecksumMismatch)
    assert isinstance(ends.wait(), ChecksumMismatch)
    assert reservation.release()
    pair.assert_serves()


def test_a_layout_that_leaves_the_shared_memory_is_refused_before_a_byte_is_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair.memory, "offset_of", lambda buffer: pair.memory.num_bytes - buffer.nbytes + 1)
        receiver = pair.make_receiver(pair.destination)
    ends = Ends()
    reservation = receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": [1]}, timeout_s=60, on_commit=ends, on_failed=ends
    )
    push = pair.open(reservation)
    eventually(lambda: push.error is not None, "the end of the push")
    receiver.close()
    assert isinstance(push.error, PeerLost)
    assert "outside" in push.error.message
    assert reservation.release()


@pytest.fixture(scope="module")
def swept() -> None:
    """Mappings of tests before, which hold descriptors, are gone."""
    gc.collect()


@pytest.mark.usefixtures("swept")
@given(
    passed=st.lists(st.sampled_from(["memory", "loose memory", "empty memory", "pipe", "file", "socket"]), max_size=5),
    layout=st.builds(
        wire.Memory,
        size=st.one_of(st.just(4096), st.integers(0, 2**63 - 1)),
        offsets=st.lists(st.one_of(st.integers(0, 4096), st.integers(0, 2**64 - 1)), max_size=3).map(wire.pack_u64),
        num_rows=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)), max_size=3).map(wire.pack_u32),
    ),
    noise=st.one_of(st.none(), st.binary(max_size=60)),
    cut=st.integers(0, 200),
)
@settings(max_examples=400, deadline=None)
def test_a_receiver_that_passes_anything_gets_a_typed_error_or_no_byte_out_of_bounds(
    passed: list[str], layout: wire.Memory, noise: bytes | None, cut: int
) -> None:
    regions = make_regions(4)[:2]
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    link = ShmSenderLink(ours, "a stranger", regions)
    try:
        with contextlib.ExitStack() as stack:
            descriptors = [stack.enter_context(_opened(kind)) for kind in passed]
            socket.send_fds(theirs, [b"\0"], descriptors)
            theirs.sendall((wire.encode(layout) if noise is None else noise)[:cut])
            theirs.shutdown(socket.SHUT_WR)
            try:
                link.attach(deadline=time.monotonic() + PATIENCE_S)
            except (PeerLost, wire.Malformed):
                return
        assert (passed[0], passed[2]) == ("memory", "memory")
        assert len(passed) >= 3  # the kernel closes what is beyond the three that are taken
        assert layout.size <= 4096
        for region, num_rows in enumerate(wire.unpack_u32(layout.num_rows)):
            for row in (num_rows - 1, num_rows):  # the last, and one behind it
                source = memoryview(bytearray(regions[region].row_bytes))
                with contextlib.nullcontext() if 0 <= row < num_rows else pytest.raises(wire.Malformed):
                    link.write(region, [row], [source], deadline=time.monotonic() + PATIENCE_S)
    finally:
        link.close()
        theirs.close()
        assert set(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def _opened(kind: str) -> Iterator[int]:
    """A descriptor of the kind that a confused or malicious receiver could pass."""
    if kind == "pipe":
        reading, descriptor = os.pipe()
        os.close(reading)
    elif kind == "file":
        descriptor = os.open(os.devnull, os.O_RDWR)
    elif kind == "socket":
        descriptor = socket.socket().detach()
    else:
        descriptor = os.memfd_create("passed", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 0 if kind == "empty memory" else 4096)
        if kind != "loose memory":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_another_user_is_turned_away_by_both_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: object) -> int:
        raise PermissionError("the other end runs as another user")

    monkeypatch.setattr(shm, "_check_user", refuse)
    with pytest.raises(PeerLost, match="another user"):
        ShmTransport().connect(pair.receiver.endpoints[0], deadline=time.monotonic() + PATIENCE_S)
    eventually(lambda: not pair.receiver._links)


def test_another_host_is_told_by_its_boot_id(pair: Pair) -> None:
    name = pair.receiver.endpoints[0].rpartition("/")[2]
    elsewhere = f"shm://00000000-0000-0000-0000-000000000000/{name}"
    with pytest.raises(PeerLost, match="another host"):
        ShmTransport().connect(elsewhere, deadline=time.monotonic() + PATIENCE_S)


def test_a_sender_never_learns_of_rows_that_are_not_to_be_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reservation, ends = pair.reserve([7, 8, 9], first=2)
    push = pair.open(reservation)
    push.put(0, [0, 1, 2], [1, 2, 3])
    eventually(lambda: pair.receiver_counters.rows == 1)
    assert push.granted == {"kv": [9]}
    push.abort("enough")
    ends.wait()
    assert reservation.release()


def test_release_stops_an_idle_writer_at_once(pair: Pair) -> None:  # L5: its rows may be given away
    fenced = Fenced(pair, [1, 2])
    push = pair.open(fenced.reservation)
    push.put(0, [0], [10])
    eventually(lambda: pair.receiver_counters.rows == 1)
    assert fenced.reservation.release()
    for region in pair.destination:
        region.row(2)[:] = ANOTHERS
    push.put(0, [1], [11])
    assert push.closed.wait(PATIENCE_S)
    assert push.error is not None
    assert all(layer == [ANOTHERS] for layer in rows_of(pair.destination, [2]))
    assert fenced.times == 0
    assert pair.receiver.num_writers == 0
    pair.assert_serves()


def test_delayed_writes_keep_the_rows_in_quarantine_until_they_have_landed(pair: Pair) -> None:  # L4, L11
    late = pair.faulty_sender(Faults(delay_ms=1000))
    fenced = Fenced(pair, [1, 2])
    push = pair.open(fenced.reservation, sender=late)
    push.put(0, [0, 1], [10, 11])
    eventually(lambda: push.num_rows == 2)  # it believes that they have left
    before = rows_of(pair.destination, [1, 2])
    assert not fenced.reservation.release()
    assert not fenced.reservation.release()
    assert fenced.times == 0
    assert rows_of(pair.destination, [1, 2]) == before
    eventually(lambda: fenced.times == 1, "the end of the quarantine")
    assert rows_of(pair.destination, [1, 2])[0] == rows_of(pair.source, [10, 11])[0]  # so it was needed
    assert fenced.reservation.release()
    assert not fenced.ends.is_set
    late.close()
    pair.assert_serves()


def test_an_expired_reservation_with_a_late_writer_is_fenced_before_its_rows_are_free(pair: Pair) -> None:  # L4
    fenced = Fenced(pair, [1, 2], timeout_s=0.1)
    push = pair.open(fenced.reservation)
    push.put(0, [0], [10])
    assert isinstance(fenced.ends.wait(), TransferTimeout)
    assert fenced.reservation.release()
    other, other_ends = pair.reserve([1, 2], request_id="r2")
    push.put(0, [1], [11])
    assert pair.send(other, [20, 21]).error is None
    assert other_ends.wait().rows == 6
    assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [20, 21])


def test_a_killed_writer_frees_at_once(pair: Pair, writer: Writer) -> None:
    fenced = Fenced(pair, [1, 2])
    writer.push(pair, fenced.reservation)
    writer.process.kill()
    assert isinstance(fenced.ends.wait(), PeerLost)
    assert fenced.reservation.release()
    assert fenced.times == 0
    eventually(lambda: not pair.receiver.num_writers and not pair.receiver._links)
    pair.assert_serves()


@pytest.mark.parametrize("end", ["kill", "thaw"])
def test_a_frozen_writer_keeps_its_rows_in_quarantine_and_nobody_elses(pair: Pair, writer: Writer, end: str) -> None:
    fenced, neighbour = Fenced(pair, [1, 2]), Fenced(pair, [3, 4], "r2")
    writer.push(pair, fenced.reservation)
    writer.push(pair, neighbour.reservation)
    writer.freeze()
    assert not fenced.reservation.release()
    other, other_ends = pair.reserve([5, 6], request_id="r3")
    assert pair.send(other, [20, 21]).error is None  # another sender's transfers go on
    assert other_ends.wait().rows == 6
    other.release()
    assert fenced.times == 0
    assert pair.receiver.num_writers == 2
    writer.process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGCONT)
    eventually(lambda: fenced.times == 1, "the end of the quarantine")
    if end == "kill":
        assert isinstance(neighbour.ends.wait(), PeerLost)
    else:
        assert not neighbour.ends.is_set
        writer.say("abort 2")
        neighbour.ends.wait()
    assert neighbour.reservation.release()
    eventually(lambda: pair.receiver.num_writers == 0)
    assert fenced.times == 1


def test_a_cut_link_is_no_fence_until_the_writer_is_gone(pair: Pair, writer: Writer) -> None:
    fenced = Fenced(pair, [1, 2])
    writer.push(pair, fenced.reservation)
    writer.freeze()
    for link in list(pair.receiver._links):
        link.cut()
    assert isinstance(fenced.ends.wait(), PeerLost)
    assert not fenced.reservation.release()
    assert fenced.times == 0
    writer.process.kill()
    eventually(lambda: fenced.times == 1, "the end of the quarantine")


def test_a_receiver_closes_in_spite_of_a_frozen_writer(pair: Pair, writer: Writer) -> None:
    fenced = Fenced(pair, [1, 2])
    writer.push(pair, fenced.reservation)
    writer.freeze()
    pair.receiver.close()
    assert not fenced.reservation.release()
    assert fenced.times == 0  # not in this process' life


def test_releases_at_random_moments_of_many_transfers_leave_nothing(pair: Pair) -> None:
    def give_back(fenced: Fenced) -> None:
        with contextlib.suppress(ValueError):
            fenced.reservation.release()

    for attempt in range(200):
        fenced = Fenced(pair, [1, 2])
        push = pair.open(fenced.reservation)
        releasing = threading.Thread(target=give_back, args=(fenced,))
        releasing.start() if attempt % 2 else push.put(0, [0, 1], [10, 11])
        push.put(1, [0, 1], [10, 11]) if attempt % 2 else releasing.start()
        releasing.join(PATIENCE_S)
        assert push.closed.wait(PATIENCE_S)
    eventually(lambda: pair.receiver.num_writers == 0)
    pair.assert_serves()
