"""The contract of a transport, which the layers above rely on; each transport is held to all of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from kvtransfer import SharedMemory, transports, wire
from kvtransfer.transports import Link, Transport
from tests.kvtransfer.peers import PATIENCE_S, eventually, named, share_regions
from twinpool.errors import PeerLost, TransferTimeout

NOTE = wire.Commit(push=1, token=bytes(16), request_id="r1", attempt=1, counts=b"", digest=bytes(16))
ANSWERS = [wire.Committed(push=1), wire.Refused(push=2, error="PeerLost", reason="gone"), wire.Committed(push=3)]


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def create(transport: str) -> Transport:
    return transports.create(*named(transport))


class Joined:
    """Both ends of one link."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.memory = SharedMemory()
        self.regions = share_regions(1, self.memory)
        transport.register(self.regions, self.memory)
        accepted: SimpleQueue[Link] = SimpleQueue()
        self.listener = transport.listen("127.0.0.1", 0, None, accepted.put)
        self.sender = transport.connect(self.listener.endpoint, deadline=soon())
        self.receiver = accepted.get(timeout=PATIENCE_S)
        self._begin()

    def _begin(self) -> None:
        """The first message, which both ends take part in where a transport has a handshake of its own."""
        hello = wire.Hello(protocol=wire.PROTOCOL, nonce=bytes(wire.NONCE_BYTES))
        sending = threading.Thread(target=self.sender.send, args=(hello,), kwargs={"deadline": soon()})
        sending.start()
        assert self.receiver.receive(deadline=soon()).message == hello
        sending.join(PATIENCE_S)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.listener.close()
        self.transport.close()
        self.memory.close()


@pytest.fixture
def joined(transport: str) -> Iterator[Joined]:
    joined = Joined(create(transport))
    yield joined
    joined.close()


def fill_until_full(link: Link) -> None:
    payload = [memoryview(bytes(wire.MAX_NOTE_BYTES))]
    link.start(NOTE, payload)
    while link.advance():
        link.start(NOTE, payload)


def test_a_transport_says_what_it_is(transport: str) -> None:
    made = create(transport)
    assert made.actual() == named(transport)[0]
    assert made.caps.sees_dead_peer
    assert made.caps.fences_on_close or made.caps.one_sided


def test_messages_arrive_whole_and_in_order_with_their_payload(joined: Joined) -> None:
    pieces = [memoryview(b"first"), memoryview(b""), memoryview(b"second")]
    joined.sender.send(NOTE, pieces, deadline=soon())
    joined.sender.send(wire.Abort(push=2, token=bytes(16), request_id="r", attempt=1, reason=""), deadline=soon())
    frame = joined.receiver.receive()
    assert frame == wire.Frame(NOTE, 11)
    first, second = bytearray(3), bytearray(8)
    joined.receiver.fill([memoryview(first), memoryview(second)])
    assert first + second == b"firstsecond"
    assert isinstance(joined.receiver.receive(deadline=soon()).message, wire.Abort)


def test_a_payload_can_be_thrown_away(joined: Joined) -> None:
    payload = memoryview(bytes(wire.MAX_NOTE_BYTES))
    sending = threading.Thread(target=joined.sender.send, args=(NOTE, [payload]), kwargs={"deadline": soon()})
    sending.start()
    joined.receiver.skip(joined.receiver.receive().payload_bytes)
    sending.join(PATIENCE_S)
    joined.sender.send(NOTE, deadline=soon())
    assert joined.receiver.receive() == wire.Frame(NOTE, 0)


def test_answers_are_taken_without_waiting(joined: Joined) -> None:
    assert joined.sender.receive_ready() == []
    for answer in ANSWERS:
        joined.receiver.send(answer, deadline=soon())
    received: list[wire.Message] = []
    eventually(lambda: received.extend(joined.sender.receive_ready()) or len(received) == 3)
    assert received == ANSWERS


def test_a_full_link_says_so_and_goes_on_when_there_is_room(joined: Joined) -> None:
    fill_until_full(joined.sender)
    assert not joined.sender.advance()

    def drain() -> None:
        with contextlib.suppress(PeerLost):
            while True:
                joined.receiver.skip(joined.receiver.receive().payload_bytes)

    draining = threading.Thread(target=drain)
    draining.start()
    eventually(joined.sender.advance)
    joined.sender.close()
    draining.join(PATIENCE_S)
    assert not draining.is_alive()


def test_every_wait_with_a_deadline_ends(joined: Joined) -> None:
    with pytest.raises(TransferTimeout):
        joined.receiver.receive(deadline=time.monotonic() + 0.01)
    fill_until_full(joined.sender)
    with pytest.raises(TransferTimeout):
        joined.sender.send(NOTE, deadline=time.monotonic() + 0.01)


@pytest.mark.parametrize("waits_in", ["receive", "fill"])
def test_a_cut_from_another_thread_ends_a_wait(joined: Joined, waits_in: str) -> None:
    ended: SimpleQueue[Exception] = SimpleQueue()

    def wait() -> None:
        try:
            joined.receiver.receive() if waits_in == "receive" else joined.receiver.fill([memoryview(bytearray(10))])
        except PeerLost as exc:
            ended.put(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    joined.receiver.cut()
    assert isinstance(ended.get(timeout=PATIENCE_S), PeerLost)
    waiting.join(PATIENCE_S)


def test_nothing_lands_after_close(joined: Joined, transport: str) -> None:
    if not create(transport).caps.fences_on_close:
        return
    destination = bytearray(4)
    joined.sender.send(NOTE, [memoryview(b"late")], deadline=soon())
    assert joined.receiver.receive().payload_bytes == 4
    joined.receiver.close()
    with pytest.raises(PeerLost):
        joined.receiver.fill([memoryview(destination)])
    assert destination == bytes(4)


def test_the_other_end_is_missed_at_once(joined: Joined) -> None:
    joined.receiver.close()
    with pytest.raises(PeerLost):
        joined.sender.receive()
    with pytest.raises(PeerLost):
        fill_until_full(joined.sender)


def test_cut_and_close_may_be_repeated(joined: Joined) -> None:
    for _ in range(2):
        joined.sender.cut()
        joined.sender.close()
    joined.sender.cut()


def test_nobody_is_accepted_after_the_listener_closed(transport: str) -> None:
    made = create(transport)
    joined = Joined(made)
    joined.close()
    with pytest.raises(PeerLost):
        made.connect(joined.listener.endpoint, deadline=soon())


@pytest.mark.parametrize("rest", ["", "nowhere", "127.0.0.1:0", "127.0.0.1:65536", ":80"])
def test_endpoints_that_are_none(transport: str, rest: str) -> None:
    with pytest.raises(PeerLost):
        create(transport).connect(f"{named(transport)[0]}://{rest}", deadline=soon())
