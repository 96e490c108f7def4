"""Links over several connections: what joins them, and what happens when one of them does not do its part.

That rows arrive, are refused and are fenced as over one connection is in the tests of all transports ("tcp*3").
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import KvSender, wire
from kvtransfer.target import Target
from kvtransfer.transports import Options, striped
from kvtransfer.transports.striped import Lane, StripedSenderLink, StripedTcpTransport, TcpReceiverLink
from kvtransfer.transports.tcp import TcpLink, dial
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Pair, RawSender, eventually, issued, rows_of
from twinpool.errors import PeerLost, Unauthenticated


@pytest.fixture
def wide() -> Iterator[Pair]:
    pair = Pair("tcp*3")
    yield pair
    pair.close()


@contextlib.contextmanager
def raw(pair: Pair) -> Iterator[RawSender]:
    """A sender without manners, through its handshake on one connection."""
    reservation, _ = pair.reserve([1, 2])
    sender = RawSender(pair.receiver, Target.decode(reservation.target), pair.source)
    try:
        yield sender
    finally:
        sender.close()
        reservation.release()


@contextlib.contextmanager
def connection(pair: Pair, *frames: wire.Message) -> Iterator[TcpLink]:
    """Another one to the receiver, on which those frames leave."""
    deadline = time.monotonic() + PATIENCE_S
    link = TcpLink(dial(pair.receiver.endpoints[-1], "tcp", deadline), "the receiver")
    try:
        for frame in frames:
            link.send(frame, deadline=deadline)
        yield link
    finally:
        link.close()


def secret_of(sender: RawSender, count: int = 3) -> bytes:
    sender.link.send(wire.Widen(count=count), deadline=sender.deadline)
    answer = sender.answer()
    assert isinstance(answer, wire.Streams)
    return answer.secret


def lanes_of(pair: Pair) -> list[Lane]:
    return [lane for link in list(pair.receiver._links) if isinstance(link, TcpReceiverLink) for lane in link._lanes]


def read_to_the_end(link: TcpLink) -> None:
    while True:
        link.receive(deadline=time.monotonic() + PATIENCE_S)


def is_turned_away(link: TcpLink) -> bool:
    answer = link.receive(deadline=time.monotonic() + PATIENCE_S).message
    return isinstance(answer, wire.Refused) and answer.error == Unauthenticated.__name__


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
def test_rows_are_dealt_to_all_connections_in_turn(wide: Pair, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    carried: list[int] = []
    send = StripedSenderLink._send

    def count(stream: TcpLink, put: int, rows: list[memoryview], deadline: float) -> object:
        carried.append(len(rows))
        return send(stream, put, rows, deadline)

    monkeypatch.setattr(StripedSenderLink, "_send", staticmethod(count))
    there, here = list(range(num_rows)), list(range(20, 20 + num_rows))
    reservation, ends = wide.reserve(there)
    assert wide.send(reservation, here).error is None
    assert ends.wait().rows == 3 * num_rows
    assert rows_of(wide.destination, there) == rows_of(wide.source, here)
    assert len(lanes_of(wide)) == 2
    layer = [len(range(index, num_rows, 3)) for index in (1, 2) if index < num_rows]
    assert sorted(carried) == sorted(3 * layer)


def test_a_connection_that_nobody_expects_is_turned_away_and_hurts_no_link() -> None:
    with contextlib.closing(Pair("tcp")) as pair, raw(pair) as sender:
        secret = secret_of(sender)
        for join in (
            wire.Join(secret=bytes(16), index=1),
            wire.Join(secret=secret, index=0),
            wire.Join(secret=secret, index=3),
        ):
            with connection(pair, join) as stranger:
                assert is_turned_away(stranger)
        with connection(pair, wire.Join(secret=secret, index=1)):
            with connection(pair, wire.Join(secret=secret, index=1)) as second:
                assert is_turned_away(second)
            with connection(pair, wire.Join(secret=secret, index=2)):
                eventually(lambda: len(lanes_of(pair)) == 2, "the joining of both")
                with connection(pair, wire.Join(secret=secret, index=2)) as late:
                    assert is_turned_away(late)
                sender.link.send(wire.Heartbeat(), deadline=sender.deadline)
                assert len(lanes_of(pair)) == 2


def test_a_link_whose_further_connections_do_not_come_ends_with_those_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(striped, "_JOIN_TIMEOUT_S", 0.2)
    with contextlib.closing(Pair("tcp")) as pair, raw(pair) as sender:
        secret = secret_of(sender)
        with connection(pair, wire.Join(secret=secret, index=1)) as only:
            for link in (sender.link, only):
                with pytest.raises(PeerLost):
                    read_to_the_end(link)
        eventually(lambda: not pair.receiver._links)


def test_a_receiver_closes_while_a_link_waits_for_its_connections() -> None:
    pair = Pair("tcp")
    with contextlib.closing(pair), raw(pair) as sender:
        secret_of(sender)
        pair.receiver.close()
        assert not pair.receiver._links


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_connection_that_breaks_ends_the_whole_link_and_the_next_is_as_good(wide: Pair, side: str) -> None:
    reservation, ends = wide.reserve([1, 2, 3])
    push = wide.open(reservation)
    push.put(0, [0, 1, 2], [10, 11, 12])
    eventually(lambda: wide.receiver_counters.rows == 3)
    (outbound,) = wide.sender._links.values()
    assert isinstance(outbound._link, StripedSenderLink)
    (outbound._link._lanes if side == "sender" else lanes_of(wide))[1].stream.cut()
    push.put(1, [0, 1, 2], [10, 11, 12])
    assert isinstance(ends.wait(), PeerLost)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, PeerLost)
    assert reservation.release()
    eventually(lambda: not wide.receiver._links)
    wide.assert_serves()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_idle_link_ends_when_any_of_its_connections_does(wide: Pair, side: str) -> None:
    wide.receiver.close()
    wide.receiver = wide.make_receiver(wide.destination, lease_s=0.9)  # it beats every 0.3 s
    wide.assert_serves()
    (outbound,) = wide.sender._links.values()
    assert isinstance(outbound._link, StripedSenderLink)
    (outbound._link._lanes if side == "sender" else lanes_of(wide))[0].stream.cut()
    eventually(lambda: not wide.sender._links, "the end of the idle link")
    wide.assert_serves()


def test_a_connection_that_is_silent_while_its_stripe_is_awaited_ends_the_link_by_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()
    with contextlib.closing(Pair("tcp")) as pair:
        sender = KvSender(
            pair.source,
            fingerprint=FINGERPRINT,
            cluster_key=KEY,
            transport="tcp",
            options=Options(streams=3),
            lease_s=0.3,
        )
        with contextlib.closing(sender), monkeypatch.context() as patch:
            patch.setattr(StripedSenderLink, "_send", staticmethod(lambda *_: goes_on.wait(PATIENCE_S) and []))
            reservation, ends = pair.reserve([1, 2, 3])
            push = pair.open(reservation, sender=sender)
            push.put(0, [0, 1, 2], [10, 11, 12])
            end = ends.wait()
            goes_on.set()
            assert isinstance(end, PeerLost)
            assert "silent for 0.3 s" in end.message
            assert push.closed.wait(PATIENCE_S)
            assert reservation.release()
        pair.assert_serves()


@given(
    noise=st.one_of(
        st.binary(min_size=1, max_size=60),
        st.builds(
            lambda message, size, data: wire.encode(message, size) + data,
            st.one_of(
                st.builds(wire.Stripe, put=st.integers(0, 3)),
                st.builds(wire.Join, secret=st.just(bytes(16)), index=st.integers(0, 255)),
                st.just(wire.Heartbeat()),
            ),
            st.sampled_from([0, 7, 1008, 2016, 1 << 30]),
            st.binary(max_size=1100),
        ),
    )
)
@settings(max_examples=60, deadline=None)
def test_anything_on_a_connection_that_has_joined_ends_that_link_and_nothing_else(noise: bytes) -> None:
    pair = Pair("tcp")
    with raw(pair) as sender:
        secret = secret_of(sender, 2)
        with connection(pair, wire.Join(secret=secret, index=1)) as stream:
            put = sender.put_frame(0, [0, 1], [3, 4])
            sender.link.send(put, [memoryview(sender.payload(0, [3]))], deadline=sender.deadline)
            stream._sock.sendall(noise)
            stream.cut()
            with pytest.raises(PeerLost):
                read_to_the_end(sender.link)
        eventually(lambda: not pair.receiver._links, "the end of the link")
    pair.assert_serves()
    pair.close()


def test_every_connection_needs_a_certificate_where_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that has one, and whose further connections are plain."""
    with contextlib.closing(Pair("tls")) as pair:
        transport = StripedTcpTransport(issued().load(), streams=2)
        plain = StripedTcpTransport(None)
        monkeypatch.setattr(transport, "_dial", plain._dial)
        monkeypatch.setattr(striped, "_JOIN_TIMEOUT_S", 1.0)
        pair.sender._transports["tcp"] = transport
        reservation, ends = pair.reserve([1, 2])
        push = pair.open(reservation)
        push.put(0, [0, 1], [3, 4])
        assert push.closed.wait(PATIENCE_S)
        assert push.error is not None
        assert pair.receiver_counters.rows == 0
        assert Unauthenticated.__name__ in pair.receiver_counters.refusals
        assert not ends.is_set
        reservation.release()
