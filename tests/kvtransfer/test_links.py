"""Links that break, freeze, or answer nonsense; and what happens to everybody else."""

from __future__ import annotations

import contextlib
import socket
import time
import tracemalloc

import pytest

from kvtransfer import Push, departures, native, wire
from kvtransfer.transports.stream import StreamLink
from kvtransfer.transports.tcp import TcpLink
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import PATIENCE_S, Ends, FakeReceiver, Pair, eventually
from twinpool.errors import InvalidRequest, PeerLost, TransferFailed, TransferTimeout

BIG = {"num_rows": 64, "row_bytes": 64 << 10}  # 12 MiB in all: much more than the small socket buffers below


@pytest.fixture
def big(transport: str) -> object:
    pair = Pair(transport, **BIG)
    yield pair
    pair.close()


@pytest.fixture
def frozen(big: Pair) -> object:
    """A receiver that takes a link and then nothing more."""
    fake = FakeReceiver(big.destination)
    yield fake
    fake.close()


def fill_up(pair: Pair, frozen: FakeReceiver, *, timeout_s: float) -> tuple[Push, TcpLink]:
    """A push whose rows fill the socket until nothing goes any more."""
    push = pair.sender.open(frozen.target(64), request_id="r1", attempt=1, timeout_s=timeout_s)
    link = frozen.admit()
    eventually(lambda: push._outbound._link is not None)
    push._outbound._link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # type: ignore[union-attr]
    for layer in range(3):
        push.put(layer, range(64), range(64))
    eventually(lambda: push._outbound._departures is not None and push._outbound._departures.holds_rows_of(push))
    samples = [-1]
    while samples[-5:] != [samples[-1]] * 5 or samples[-1] < 0:
        time.sleep(0.05)
        samples.append(push.num_rows)
    return push, link


def test_nobody_listens(pair: Pair) -> None:
    reservation, _ = pair.reserve([1])
    pair.receiver.close()
    push = pair.open(reservation)
    push.put(0, [0], [1])
    done = Ends()
    push.commit(b"", done)
    assert isinstance(done.wait().error, PeerLost)
    assert push.closed.is_set()


def test_what_goes_wrong_is_known_before_the_commit(pair: Pair) -> None:
    reservation, _ = pair.reserve([1])
    pair.receiver.close()
    push = pair.open(reservation)
    eventually(lambda: push.error is not None, "the error of the push")
    push.put(0, [0], [1])  # ignored
    assert push.closed.wait(PATIENCE_S)


@pytest.mark.parametrize("target", [b"", b"\x00", b"\xc1", b"\x97" + b"\x01" * 7, b"x" * 20_000])
def test_bytes_that_are_no_target(pair: Pair, target: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair.sender.open(target, request_id="r1", attempt=1, timeout_s=1)
    assert caught.value.field == "transfer_target"


def test_a_frozen_receiver_is_given_up_by_the_deadline(
    big: Pair, frozen: FakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "FRAME_GRACE_S", 0.05)
    push, _ = fill_up(big, frozen, timeout_s=2)
    done = Ends()
    push.commit(b"", done)
    result = done.wait()
    assert isinstance(result.error, TransferTimeout)
    assert result.rows < 192
    assert push.closed.wait(PATIENCE_S)
    eventually(lambda: not big.sender._links, "the end of the frozen link")


def test_source_rows_stay_pinned_while_a_frozen_frame_may_read_them(big: Pair, frozen: FakeReceiver) -> None:
    push, link = fill_up(big, frozen, timeout_s=60)
    push.abort("cancelled")
    eventually(lambda: push.error is not None)
    assert not push.closed.is_set()  # its frame is half out
    link.skip(1 << 20)  # the receiver thaws
    assert push.closed.wait(PATIENCE_S)


def test_an_expired_push_behind_a_frozen_one_is_told_in_time_and_the_link_lives(
    big: Pair, frozen: FakeReceiver
) -> None:
    stuck, link = fill_up(big, frozen, timeout_s=60)
    late = big.sender.open(frozen.target(1, request_id="r2"), request_id="r2", attempt=1, timeout_s=0.05)
    late.put(0, [0], [0])
    done = Ends()
    late.commit(b"", done)
    assert isinstance(done.wait().error, TransferTimeout)
    assert late.closed.is_set()
    assert stuck.error is None
    link.cut()
    assert stuck.closed.wait(PATIENCE_S)
    assert isinstance(stuck.error, PeerLost)


def test_a_frozen_receiver_costs_other_links_nothing(big: Pair, frozen: FakeReceiver) -> None:
    fill_up(big, frozen, timeout_s=60)
    big.assert_serves()


def test_a_frozen_receiver_grows_no_queue_of_bytes(big: Pair, frozen: FakeReceiver) -> None:
    tracemalloc.start()
    try:
        push, _ = fill_up(big, frozen, timeout_s=60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert push.num_rows < 192
    assert peak < 1 << 20  # 12 MiB of rows wait


def test_a_lost_link_fails_every_push_on_it_and_the_next_open_makes_another(pair: Pair) -> None:
    reservations = [pair.reserve([row], request_id=f"r{row}") for row in range(4)]
    pushes = [pair.open(reservation) for reservation, _ in reservations]
    for push in pushes:
        push.put(0, [0], [7])
    eventually(lambda: pair.receiver_counters.rows == 4)
    for link in list(pair.receiver._links):
        link.cut()
    for push, (_, ends) in zip(pushes, reservations, strict=True):
        assert push.closed.wait(PATIENCE_S)
        assert isinstance(push.error, PeerLost)
        assert isinstance(ends.wait(), PeerLost)
    assert pair.receiver.num_reservations == 0
    pair.assert_serves()


def test_a_sender_that_vanishes_frees_what_it_had_claimed_and_nothing_else(pair: Pair, raw: RawSenders) -> None:
    claimed, claimed_ends = pair.reserve([1])
    unclaimed, unclaimed_ends = pair.reserve([2], request_id="r2")
    sender = raw(claimed)
    sender.put(0, [0], [10])
    eventually(lambda: pair.receiver_counters.rows == 1)
    sender.close()
    assert isinstance(claimed_ends.wait(), PeerLost)
    assert not unclaimed_ends.is_set
    assert pair.send(unclaimed, [5]).error is None


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        wire.encode(wire.Hello(protocol=wire.PROTOCOL, nonce=bytes(16))),
        wire.encode(wire.Committed(push=1)),  # it has not committed
    ],
)
def test_a_receiver_that_answers_nonsense_is_left(pair: Pair, fake: FakeReceiver, answer: bytes) -> None:
    push = pair.sender.open(fake.target(2), request_id="r1", attempt=1, timeout_s=60)
    fake.admit()._sock.sendall(answer)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, PeerLost)
    pair.assert_serves()


def test_an_error_class_that_transfers_cannot_have_becomes_transfer_failed(pair: Pair, fake: FakeReceiver) -> None:
    push = pair.sender.open(fake.target(2), request_id="r1", attempt=1, timeout_s=60)
    link = fake.admit()
    link.send(wire.Refused(push=99, error="PeerLost", reason="not yours"), deadline=time.monotonic() + PATIENCE_S)
    link.send(wire.Refused(push=1, error="UnknownModel", reason="odd"), deadline=time.monotonic() + PATIENCE_S)
    assert push.closed.wait(PATIENCE_S)
    assert type(push.error) is TransferFailed
    assert push.error.message == "odd"


def test_a_sender_that_takes_no_answer_is_cut_off(pair: Pair, raw: RawSenders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.receiver.REPLY_TIMEOUT_S", 0.1)
    reservation, _ = pair.reserve([1])
    listener = pair.receiver._listeners[0]
    listener._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # type: ignore[attr-defined]
    sender = raw(reservation)
    frames = wire.encode(sender.put_frame(0, [0], [10], token=bytes(16)), 1000) + bytes(1000)
    with contextlib.suppress(OSError):
        while True:
            sender.socket.sendall(frames * 100)
    eventually(lambda: not pair.receiver._links, "the end of the link")
    reservation.release()
    pair.assert_serves()


def test_frames_leave_in_the_order_in_which_they_were_begun_however_small_their_rows() -> None:
    """Short rows go without the native library, long ones with it; over shared memory both ends count the frames."""
    ours, theirs = socket.socketpair()
    sending, receiving = StreamLink(ours, "decode"), StreamLink(theirs, "prefill")
    sizes = [native.MIN_ROW_BYTES - 1, 5000, 8, 300]
    payloads = [memoryview(bytearray(bytes([number]) * size)) for number, size in enumerate(sizes)]
    deadline = time.monotonic() + PATIENCE_S
    for number, row in enumerate(payloads):
        put = wire.Put(
            push=1,
            token=b"t" * 16,
            request_id="r",
            attempt=1,
            region=number,
            positions=wire.pack_u32([0]),
            checksums=b"",
        )
        sending.start_rows(put, [row], [0], deadline=deadline)
    assert sending.advance()
    for number, row in enumerate(payloads):
        message = receiving.receive(deadline=deadline).message
        assert isinstance(message, wire.Put)
        assert message.region == number
        landed = memoryview(bytearray(row.nbytes))
        computed, sent = receiving.fill_rows([landed])
        assert list(computed) == list(sent)
        assert landed == row
    sending.close()
    receiving.close()
