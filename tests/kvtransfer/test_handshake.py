"""Who may send to whom: cluster key, fingerprint, regions, incarnation."""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time

import pytest

from kvtransfer import KvSender, handshake, wire
from kvtransfer.transports.tcp import TcpTransport, parse_endpoint
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import (
    FINGERPRINT,
    KEY,
    PATIENCE_S,
    FakeReceiver,
    Pair,
    eventually,
    make_regions,
    rows_of,
)
from twinpool.errors import ConfigError, Incompatible, PeerLost, ReservationGone, TransferTimeout, Unauthenticated


def test_another_fingerprint_is_refused_with_both(pair: Pair) -> None:
    before = rows_of(pair.destination, [1])
    reservation, ends = pair.reserve([1])
    stranger = KvSender(
        pair.source, fingerprint="model-b/int8", cluster_key=KEY, transport=pair.transport, options=pair.options
    )
    try:
        error = pair.send(reservation, [1], sender=stranger).error
    finally:
        stranger.close()
    assert isinstance(error, Incompatible)
    assert "model-a/int8" in error.message
    assert "model-b/int8" in error.message
    assert rows_of(pair.destination, [1]) == before
    assert not ends.is_set  # the reservation waits for a sender that fits
    eventually(lambda: pair.receiver_counters.refusals == ["Incompatible"])
    assert pair.send(reservation, [1]).error is None


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"num_layers": 2}, "3 cache regions, the sender 2"),
        (
            {"row_bytes": 500},
            "opaque rows of 1000 bytes at the receiver, 'layer.0' in group 'kv': opaque rows of 500 bytes",
        ),
    ],
)
def test_other_regions_are_refused_with_the_first_difference(pair: Pair, shape: dict[str, int], reason: str) -> None:
    reservation, _ = pair.reserve([])
    stranger = KvSender(
        make_regions(1, **shape),
        fingerprint=FINGERPRINT,
        cluster_key=KEY,
        transport=pair.transport,
        options=pair.options,
    )
    try:
        push = pair.open(reservation, sender=stranger)
        assert push.closed.wait(PATIENCE_S)
        assert isinstance(push.error, Incompatible)
        assert re.search(reason, push.error.message)
    finally:
        stranger.close()
    reservation.release()
    pair.assert_serves()


def test_another_number_of_rows_is_no_difference(pair: Pair) -> None:
    other = make_regions(5, num_rows=200)
    sender = KvSender(other, fingerprint=FINGERPRINT, cluster_key=KEY, transport=pair.transport, options=pair.options)
    try:
        reservation, ends = pair.reserve([3])
        assert pair.send(reservation, [199], sender=sender).error is None
        ends.wait()
        assert rows_of(pair.destination, [3]) == rows_of(other, [199])
    finally:
        sender.close()


@pytest.mark.parametrize("key", ["", "another key"])
def test_a_sender_with_another_key_stops_and_says_why(pair: Pair, key: str) -> None:
    reservation, ends = pair.reserve([1])
    stranger = KvSender(
        pair.source, fingerprint=FINGERPRINT, cluster_key=key, transport=pair.transport, options=pair.options
    )
    try:
        error = pair.send(reservation, [1], sender=stranger).error
    finally:
        stranger.close()
    assert isinstance(error, Unauthenticated)
    assert "cluster key" in error.message
    assert not ends.is_set
    assert pair.send(reservation, [1]).error is None


def test_a_sender_that_cannot_prove_the_key_is_refused(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1])
    sender = raw(reservation, greet=False)
    sender.link.send(wire.Hello(protocol=wire.PROTOCOL, nonce=secrets.token_bytes(16)), deadline=sender.deadline)
    challenge = sender.answer()
    assert isinstance(challenge, wire.Challenge)
    sender.link.send(
        wire.Identity(
            fingerprint=FINGERPRINT,
            regions=tuple((region.name, region.group, region.row_bytes, 0) for region in pair.source),
            layouts=(),
            incarnation=sender.target.incarnation,
            name="",
            lease_ms=6000,
            proof=challenge.proof,  # the receiver's own, reflected
        ),
        deadline=sender.deadline,
    )
    assert sender.refusal() == "Unauthenticated"
    with pytest.raises(PeerLost):
        sender.answer()
    assert not ends.is_set
    pair.send(reservation, [1])


def test_a_recorded_handshake_is_of_no_use(pair: Pair, raw: RawSenders) -> None:
    reservation, _ = pair.reserve([1])
    host, port = parse_endpoint(pair.receiver.endpoints[-1])
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:
        tapped = TcpTransport().connect(
            f"tcp://127.0.0.1:{tap.getsockname()[1]}", deadline=time.monotonic() + PATIENCE_S
        )
        between = tap.accept()[0]
        with socket.create_connection((host, port)) as onward, between:
            honest = raw(reservation, greet=False)

            def relay() -> None:
                for _ in range(2):
                    data = between.recv(65536)
                    recorded.extend(data)
                    onward.sendall(data)
                    between.sendall(onward.recv(65536))

            thread = threading.Thread(target=relay)
            thread.start()
            handshake.greet(
                tapped,
                handshake.Party(fingerprint=FINGERPRINT, regions=pair.source, cluster_key=KEY),
                incarnation=honest.target.incarnation,
                deadline=time.monotonic() + PATIENCE_S,
            )
            thread.join()
            tapped.close()
    replayed = raw(reservation, greet=False)
    replayed.socket.sendall(recorded)
    assert isinstance(replayed.answer(), wire.Challenge)
    assert replayed.refusal() == "Unauthenticated"
    reservation.release()


def test_a_receiver_that_cannot_prove_the_key_gets_no_rows(pair: Pair, fake: FakeReceiver) -> None:
    push = pair.sender.open(fake.target(1), request_id="r1", attempt=1, timeout_s=60)
    push.put(0, [0], [1])
    link = fake.accept()
    hello = link.receive(deadline=time.monotonic() + PATIENCE_S).message
    assert isinstance(hello, wire.Hello)
    link.send(wire.Challenge(nonce=hello.nonce, proof=secrets.token_bytes(32)), deadline=time.monotonic() + PATIENCE_S)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, Unauthenticated)
    with pytest.raises(PeerLost):
        link.receive(deadline=time.monotonic() + PATIENCE_S)


def test_without_keys_on_both_sides_transfers_work(pair: Pair) -> None:
    pair.sender.close()
    pair.receiver.close()
    pair.receiver = pair.make_receiver(pair.destination, cluster_key="")
    pair.sender = KvSender(pair.source, fingerprint=FINGERPRINT, transport=pair.transport, options=pair.options)
    pair.assert_serves()


def test_another_protocol_is_refused(pair: Pair, raw: RawSenders) -> None:
    reservation, _ = pair.reserve([1])
    sender = raw(reservation, greet=False)
    sender.link.send(wire.Hello(protocol=wire.PROTOCOL + 1, nonce=bytes(16)), deadline=sender.deadline)
    answer = sender.answer()
    assert isinstance(answer, wire.Refused)
    assert answer.error == "Incompatible"
    assert f"protocol {wire.PROTOCOL}, the sender {wire.PROTOCOL + 1}" in answer.reason
    reservation.release()


def test_rows_before_the_handshake_close_the_link(pair: Pair, raw: RawSenders) -> None:
    before = rows_of(pair.destination, range(64))
    reservation, ends = pair.reserve([1])
    sender = raw(reservation, greet=False)
    sender.put(0, [0], [10])
    with pytest.raises(PeerLost):
        sender.answer()
    assert rows_of(pair.destination, range(64)) == before
    assert not ends.is_set
    reservation.release()
    pair.assert_serves()


def test_a_silent_stranger_is_dropped(pair: Pair, raw: RawSenders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    reservation, _ = pair.reserve([1])
    with pytest.raises(PeerLost):
        raw(reservation, greet=False).answer()
    eventually(lambda: not pair.receiver._links)
    reservation.release()


def test_a_peer_that_never_answers_the_handshake_is_given_up_by_the_deadline(pair: Pair, fake: FakeReceiver) -> None:
    push = pair.sender.open(fake.target(1), request_id="r1", attempt=1, timeout_s=0.05)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, TransferTimeout)


def test_a_restarted_receiver_trusts_nothing_of_its_former_life(pair: Pair, port: int) -> None:
    old, _ = pair.reserve([1])
    pair.send(old, [2])
    stale, _ = pair.reserve([1])
    pair.receiver.close()
    before = rows_of(pair.destination, range(64))
    pair.receiver = pair.make_receiver(pair.destination, port=port, metrics=pair.receiver_counters)
    assert isinstance(pair.send(stale, [3]).error, ReservationGone)
    assert rows_of(pair.destination, range(64)) == before
    pair.assert_serves()


def test_a_port_in_use_is_a_config_error_that_names_it(pair: Pair, port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        pair.make_receiver(pair.destination, port=port)


def test_an_unknown_transport_is_a_config_error_that_lists_the_known(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"'smoke'.*tcp"):
        pair.make_receiver(pair.destination, transport="smoke")


@pytest.mark.parametrize(
    ("advertise", "endpoint"),
    [
        (None, "tcp://127.0.0.1:{port}"),
        ("decode-1", "tcp://decode-1:{port}"),
        ("decode-1:7999", "tcp://decode-1:7999"),
        ("::1", "tcp://[::1]:{port}"),
        ("[::1]:7999", "tcp://[::1]:7999"),
    ],
)
def test_the_endpoint_is_what_is_advertised(pair: Pair, advertise: str | None, endpoint: str) -> None:
    receiver = pair.make_receiver(pair.destination, transport="tcp", advertise=advertise)
    try:
        port = receiver._listeners[0]._sock.getsockname()[1]  # type: ignore[attr-defined]
        assert receiver.endpoints[-1] == endpoint.format(port=port)
    finally:
        receiver.close()
