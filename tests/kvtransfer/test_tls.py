"""Who is let in over TLS, and what all others are told. The transfers themselves: every other test here, as [tls]."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtransfer import KvSender, PushResult, handshake
from kvtransfer.transports import Options
from kvtransfer.transports.tcp import parse_endpoint
from tests.certificates import Authority
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Ends, FakeReceiver, Pair, eventually
from twinpool.errors import PeerLost, TransferTimeout, Unauthenticated


@pytest.fixture
def secure() -> Iterator[Pair]:
    pair = Pair("tls")
    yield pair
    pair.close()


@pytest.fixture
def plain() -> Iterator[Pair]:
    pair = Pair("tcp")
    yield pair
    pair.close()


def send_as(options: Options, pair: Pair) -> PushResult:
    sender = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, transport="tcp", options=options)
    reservation, ends = pair.reserve([1])
    try:
        result = pair.send(reservation, [2], sender=sender)
        assert not ends.is_set
        return result
    finally:
        reservation.release()
        sender.close()


def test_a_certificate_of_another_ca_is_refused_by_both_sides(
    secure: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority(tmp_path / "ca").issue("stranger").load()
    result = send_as(Options(certificates=foreign), secure)
    assert isinstance(result.error, Unauthenticated)
    assert "the certificate of tcp://127.0.0.1" in result.error.message  # the sender checks first
    eventually(lambda: secure.receiver_counters.refusals == ["Unauthenticated"], "the refusal")
    eventually(lambda: "link from 127.0.0.1 refused" in caplog.text, "the log line")
    secure.assert_serves()


def test_a_sender_whose_certificate_the_receiver_does_not_trust_is_told_so(
    secure: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority(tmp_path / "ca").issue("stranger").load()
    assert secure.options.certificates is not None
    foreign.client.load_verify_locations(cadata=secure.options.certificates.ca_pem.decode())  # it trusts the receiver
    result = send_as(Options(certificates=foreign), secure)
    assert isinstance(result.error, Unauthenticated)
    assert "refuses the certificate of this process" in result.error.message
    eventually(lambda: secure.receiver_counters.refusals == ["Unauthenticated"], "the refusal")
    eventually(lambda: "the certificate of 127.0.0.1 is not accepted" in caplog.text, "the log line")
    secure.assert_serves()


def test_a_sender_without_a_certificate_is_refused(secure: Pair, tmp_path: Path) -> None:
    assert secure.options.certificates is not None
    bare = ssl.create_default_context(cadata=secure.options.certificates.ca_pem.decode())
    raw = socket.create_connection(parse_endpoint(secure.receiver.endpoints[-1]), timeout=PATIENCE_S)
    with (
        bare.wrap_socket(raw, server_hostname="127.0.0.1") as stranger,
        pytest.raises(ssl.SSLError, match="CERTIFICATE"),
    ):
        stranger.recv(1)
    eventually(lambda: secure.receiver_counters.refusals == ["Unauthenticated"], "the refusal")
    secure.assert_serves()


def test_an_expired_certificate_is_refused(secure: Pair, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    fresh, expired = authority.issue("fresh").load(), authority.issue("expired", days=-1)
    fresh.client.load_cert_chain(expired.cert, expired.key)  # it has expired since the process started
    receiver = secure.make_receiver(secure.destination, options=Options(certificates=fresh))
    secure.receiver.close()
    secure.receiver = receiver
    result = send_as(Options(certificates=fresh), secure)
    assert isinstance(result.error, Unauthenticated)
    assert "EXPIRED" in result.error.message


def test_a_plain_sender_at_a_tls_port_is_told_so(secure: Pair, caplog: pytest.LogCaptureFixture) -> None:
    result = send_as(Options(), secure)
    assert isinstance(result.error, Unauthenticated)
    assert "over TLS only" in result.error.message
    eventually(lambda: secure.receiver_counters.refusals == ["Unauthenticated"], "the refusal")
    eventually(lambda: "127.0.0.1 does not speak TLS" in caplog.text, "the log line")
    secure.assert_serves()


def test_a_tls_sender_at_a_plain_port_is_told_so(secure: Pair, plain: Pair, caplog: pytest.LogCaptureFixture) -> None:
    result = send_as(secure.options, plain)
    assert isinstance(result.error, Unauthenticated)
    assert "does not speak TLS 1.3" in result.error.message
    eventually(lambda: plain.receiver_counters.refusals == ["Unauthenticated"], "the refusal")
    eventually(lambda: "the sender speaks TLS, the receiver has no certificates" in caplog.text, "the log line")
    plain.assert_serves()


def say_nothing(stranger: socket.socket) -> None:
    pass


def say_half_a_hello(stranger: socket.socket) -> None:
    stranger.sendall(b"\x16\x03\x01\x02\x00\x01")


def speak_http(stranger: socket.socket) -> None:
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")


@pytest.mark.parametrize(
    ("behave", "refusal"),
    [(say_nothing, TransferTimeout), (say_half_a_hello, TransferTimeout), (speak_http, Unauthenticated)],
)
def test_strangers_are_dropped_by_the_deadline_and_hold_up_nobody(
    secure: Pair,
    monkeypatch: pytest.MonkeyPatch,
    behave: Callable[[socket.socket], None],
    refusal: type[Exception],
) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    with socket.create_connection(parse_endpoint(secure.receiver.endpoints[-1]), timeout=PATIENCE_S) as stranger:
        behave(stranger)
        eventually(lambda: secure.receiver_counters.refusals == [refusal.__name__], "the refusal")
    monkeypatch.undo()
    secure.assert_serves()
    eventually(lambda: len(secure.receiver._links) == 1)


def test_a_receiver_that_never_shakes_hands_is_given_up_by_the_deadline(secure: Pair) -> None:
    fake = FakeReceiver(secure.destination)
    try:
        push = secure.sender.open(fake.target(1), request_id="r1", attempt=1, timeout_s=0.1)
        assert push.closed.wait(PATIENCE_S)
        assert isinstance(push.error, TransferTimeout)
    finally:
        fake.close()


def test_a_receiver_that_breaks_off_is_lost_and_not_refused(secure: Pair) -> None:
    fake = FakeReceiver(secure.destination)
    try:
        push = secure.sender.open(fake.target(1), request_id="r1", attempt=1, timeout_s=60)
        fake.accept().cut()
        assert push.closed.wait(PATIENCE_S)
        assert isinstance(push.error, PeerLost)
    finally:
        fake.close()


def test_one_thread_sends_while_another_waits_to_receive(secure: Pair) -> None:
    reservation, ends = secure.reserve(range(64))
    push = secure.open(reservation)
    eventually(lambda: secure.receiver._links)
    link = next(iter(secure.receiver._links))
    eventually(lambda: all(each._link for each in secure.sender._links.values()))  # all hands have been shaken
    stop = threading.Event()

    def chatter() -> None:
        while not stop.wait(0.001):
            link.send(handshake.refused(99, TransferTimeout("not yours")), deadline=time.monotonic() + PATIENCE_S)

    speakers = [threading.Thread(target=chatter) for _ in range(2)]
    for speaker in speakers:
        speaker.start()
    for layer in range(3):
        push.put(layer, range(64), range(64))
    done = Ends()
    push.commit(b"", done)
    result = done.wait()
    stop.set()
    for speaker in speakers:
        speaker.join(PATIENCE_S)
    assert result.error is None
    assert ends.wait().rows == 192


def test_what_travels_is_encrypted(secure: Pair) -> None:
    """Everything that passes between the two is recorded on the way; no row of the cache is in it."""
    recorded = bytearray()
    relay = socket.create_server(("127.0.0.1", 0))
    receiver = secure.make_receiver(secure.destination, advertise=f"127.0.0.1:{relay.getsockname()[1]}")
    secure.receiver.close()
    secure.receiver, direct = receiver, receiver._listeners[0]._sock.getsockname()  # type: ignore[attr-defined]

    def carry(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            recorded.extend(data)
            sink.sendall(data)
        with contextlib.suppress(OSError):  # closed from both sides at once
            sink.shutdown(socket.SHUT_WR)

    def run() -> None:
        near, far = relay.accept()[0], socket.create_connection(direct)
        with near, far:
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join(PATIENCE_S)

    relaying = threading.Thread(target=run)
    relaying.start()
    reservation, ends = secure.reserve([1, 2])
    assert secure.send(reservation, [3, 4]).error is None
    assert ends.wait().rows == 6
    secure.sender.close()
    relaying.join(PATIENCE_S)
    relay.close()
    assert len(recorded) > 6000
    assert bytes(secure.source[0].row(3))[:32] not in recorded
    assert b"TPKV" not in recorded
