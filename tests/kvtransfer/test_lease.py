"""A peer that is silent for a lease is lost, one that is only slow or busy is not; a queued request keeps its rows."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import KvSender, Reservation, wire
from kvtransfer.outbound import Outbound
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Ends, FakeReceiver, Pair, eventually, rows_of
from twinpool.errors import PeerLost, TransferTimeout

ROOT = Path(__file__).parents[2]
LEASE_S = 0.6
LONG_S = 3 * LEASE_S


class Peer:
    """The other end, in a process of its own."""

    def __init__(self, role: str, transport: str, lease_s: float = LEASE_S) -> None:
        command = [sys.executable, "-m", "tests.kvtransfer.peer_process", role, str(lease_s), transport]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def push(self, reservation: Reservation, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{reservation.request_id} {reservation.target.hex()} {what}\n")
        self.process.stdin.flush()

    def target(self) -> bytes:
        assert self.process.stdout is not None
        return bytes.fromhex(self.process.stdout.readline())

    def freeze(self) -> None:
        """Returns when it runs no more, which is a moment after the signal."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stop of the peer")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


@pytest.fixture
def brief(transport: str) -> Iterator[Pair]:
    """Both ends in this process, with a short lease."""
    pair = Pair(transport)
    pair.receiver.close()
    pair.sender.close()
    pair.receiver = pair.make_receiver(pair.destination, metrics=pair.receiver_counters, lease_s=LEASE_S)
    pair.sender = make_sender(pair, lease_s=LEASE_S)
    yield pair
    pair.close()


def make_sender(pair: Pair, **options: Any) -> KvSender:
    return KvSender(
        pair.source,
        fingerprint=FINGERPRINT,
        cluster_key=KEY,
        transport=pair.transport,
        options=pair.options,
        metrics=pair.sender_counters,
        **options,
    )


def is_claimed(reservation: Reservation) -> bool:
    return reservation._claim is not None


def test_a_frozen_receiver_ends_the_senders_pushes_within_the_lease(
    pair: Pair, peers: list[Peer], transport: str
) -> None:  # L3
    receiver = Peer("receive", transport)
    peers.append(receiver)
    push = pair.sender.open(receiver.target(), request_id="r1", attempt=1, timeout_s=60)
    push.put(0, range(64), range(64))
    eventually(lambda: push.num_rows == 64)
    receiver.freeze()
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, PeerLost)
    assert "silent for 0.6 s" in push.error.message


def test_a_frozen_sender_ends_its_reservations_within_the_lease(
    pair: Pair, peers: list[Peer], transport: str
) -> None:  # L6
    lease_s = 2.0 if transport == "collective" else LEASE_S  # torch and gloo keep it busy
    sender = Peer("send", transport, lease_s)
    peers.append(sender)
    fenced: list[bool] = []
    ends = {name: Ends() for name in ("rows", "queued")}
    reservations = {}
    for number, name in enumerate(ends):
        reservations[name] = pair.receiver.reserve(
            request_id=name,
            attempt=1,
            rows={"kv": [2 * number, 2 * number + 1]},
            timeout_s=60,
            on_commit=ends[name],
            on_failed=ends[name],
            on_fenced=lambda: fenced.append(True),
        )
        sender.push(reservations[name], name)
    eventually(lambda: pair.receiver_counters.rows == 2 and all(map(is_claimed, reservations.values())))
    sender.freeze()
    for end in ends.values():
        error = end.wait()
        assert isinstance(error, PeerLost)
        assert f"silent for {lease_s:g} s" in error.message
    # Where the receiver does the writing the cut link is a fence. In shared memory the writer may go on when it
    # thaws: quarantine until it has let go.
    assert [each.release() for each in reservations.values()] == [transport != "shm"] * 2
    assert not fenced
    pair.assert_serves()
    sender.thaw()
    eventually(lambda: len(fenced) == (2 if transport == "shm" else 0), "the end of the quarantine")


def test_a_queued_request_keeps_its_rows_for_many_leases(brief: Pair) -> None:  # L3
    reservation, ends = brief.reserve([1, 2])
    push = brief.open(reservation)
    eventually(lambda: is_claimed(reservation))
    link = push._outbound
    time.sleep(LONG_S)  # nothing but heartbeats, either way
    assert push.error is None
    assert not ends.is_set
    for layer in range(3):
        push.put(layer, [0, 1], [3, 4])
    done = Ends()
    push.commit(b"", done)
    assert done.wait().error is None
    assert ends.wait().seconds < LEASE_S  # of the transfer alone, without the wait
    assert rows_of(brief.destination, [1, 2]) == rows_of(brief.source, [3, 4])
    assert push._outbound is link


def test_the_shorter_lease_holds_whoever_wants_it(pair: Pair, brief: Pair) -> None:
    for receiver_of, sender_of in ((pair, brief), (brief, pair)):
        reservation, _ = receiver_of.reserve([1])
        push = receiver_of.open(reservation, sender=sender_of.sender)
        eventually(lambda push=push: push._outbound._link is not None)
        assert push._outbound._link is not None
        assert push._outbound._link.lease_s == LEASE_S
        eventually(lambda of=receiver_of: [link.lease_s for link in of.receiver._links] == [LEASE_S])
        push.abort("enough")
        assert push.closed.wait(PATIENCE_S)
        reservation.release()


def test_an_idle_link_lives_by_its_heartbeats(brief: Pair) -> None:
    brief.assert_serves()
    (link,) = brief.sender._links.values()
    time.sleep(LONG_S)
    brief.assert_serves()
    assert list(brief.sender._links.values()) == [link]


def test_a_silent_sender_is_dropped_and_a_heartbeat_is_enough(brief: Pair, raw: RawSenders) -> None:
    pair = brief
    silent, ends = pair.reserve([1], request_id="silent")
    talking, talking_ends = pair.reserve([2], request_id="talking")
    senders = {}
    for reservation in (silent, talking):
        sender = senders[reservation.request_id] = raw_sender(pair, raw, reservation)
        sender.put(0, [0], [5])
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        senders["talking"].link.send(wire.Heartbeat(), deadline=senders["talking"].deadline)
        time.sleep(LEASE_S / 6)
    assert isinstance(ends.wait(), PeerLost)
    assert not talking_ends.is_set


def test_bytes_of_a_frame_that_takes_many_leases_are_life(brief: Pair, raw: RawSenders) -> None:
    reservation, ends = brief.reserve([1, 2])
    sender = raw_sender(brief, raw, reservation)
    payload = sender.payload(0, [10, 11])
    data = wire.encode(sender.put_frame(0, [0, 1], [10, 11]), len(payload)) + payload
    for first in range(0, len(data), 250):
        sender.socket.sendall(data[first : first + 250])
        time.sleep(LEASE_S / 4)
    eventually(lambda: brief.receiver_counters.rows == 2)
    assert not ends.is_set


def test_a_frame_that_stops_in_the_middle_is_no_life(brief: Pair, raw: RawSenders) -> None:
    reservation, ends = brief.reserve([1, 2])
    sender = raw_sender(brief, raw, reservation)
    payload = sender.payload(0, [10, 11])
    sender.socket.sendall(wire.encode(sender.put_frame(0, [0, 1], [10, 11]), len(payload)) + payload[:1500])
    assert isinstance(ends.wait(), PeerLost)
    assert reservation.release()


def test_a_receiver_that_reads_nothing_but_beats_is_only_slow(brief: Pair, fake: FakeReceiver) -> None:
    push = brief.sender.open(fake.target(64), request_id="r1", attempt=1, timeout_s=60)
    link = fake.admit()
    for layer in range(3):
        push.put(layer, range(64), range(64))
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        link.beat()
        time.sleep(LEASE_S / 6)
    assert push.error is None
    assert push.closed.wait(PATIENCE_S)  # it beats no more
    assert isinstance(push.error, PeerLost)


@pytest.mark.parametrize("transport", ["tcp", "tls", "shm"])  # the others beat on links of these kinds
def test_a_busy_process_beats_all_the_same(pair: Pair) -> None:
    lease_s = 2.0  # long enough for a machine that is busy with other things, too
    pair.receiver.close()
    pair.sender.close()
    pair.receiver = pair.make_receiver(pair.destination, lease_s=lease_s)
    pair.sender = make_sender(pair, lease_s=lease_s)
    reservation, ends = pair.reserve([1])
    push = pair.open(reservation)
    eventually(lambda: is_claimed(reservation))
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(10_000))  # keeps the interpreter to itself as much as a thread can

    busy = [threading.Thread(target=compute) for _ in range(3)]
    for thread in busy:
        thread.start()
    time.sleep(1.3 * lease_s)
    stop.set()
    for thread in busy:
        thread.join()
    assert push.error is None
    assert not ends.is_set


def test_a_reservation_that_nobody_claims_expires_early(pair: Pair) -> None:
    receiver = pair.make_receiver(pair.destination, claim_within_s=0.2)
    ends, claimed_ends = Ends(), Ends()
    unclaimed, claimed = (
        receiver.reserve(request_id=name, attempt=1, rows={"kv": [row]}, timeout_s=60, on_commit=end, on_failed=end)
        for name, row, end in (("unclaimed", 1, ends), ("claimed", 2, claimed_ends))
    )
    push = pair.open(claimed)
    error = ends.wait()
    assert isinstance(error, TransferTimeout)
    assert "no prefill worker claimed" in error.message
    assert unclaimed.release()
    late = pair.open(unclaimed)
    assert late.closed.wait(PATIENCE_S)
    assert late.error is not None
    assert push.error is None
    assert not claimed_ends.is_set
    receiver.close()


def test_a_claimed_token_is_of_no_use_to_another_peer(pair: Pair) -> None:  # X2
    reservation, ends = pair.reserve([1])
    thief = make_sender(pair)
    push = pair.open(reservation)
    eventually(lambda: is_claimed(reservation))
    for sender in (thief, pair.sender):
        stolen = pair.open(reservation, sender=sender)  # the same cluster key, the same token
        stolen.put(0, [0], [9])
        assert stolen.closed.wait(PATIENCE_S)
        assert stolen.error is not None
        assert type(stolen.error).__name__ == "ReservationGone"
    for layer in range(3):
        push.put(layer, [0], [3])
    done = Ends()
    push.commit(b"", done)
    assert done.wait().error is None
    assert ends.wait().rows == 3
    assert rows_of(pair.destination, [1]) == rows_of(pair.source, [3])
    thief.close()


@pytest.mark.parametrize("lease_s", [0, 0.05, -1, 601, float("nan")])
def test_leases_that_cannot_be_agreed_on(pair: Pair, lease_s: float) -> None:
    with pytest.raises(ValueError, match=r"0\.1 to 600 s"):
        make_sender(pair, lease_s=lease_s)
    with pytest.raises(ValueError, match=r"0\.1 to 600 s"):
        pair.make_receiver(pair.destination, lease_s=lease_s)


def raw_sender(pair: Pair, raw: RawSenders, reservation: Reservation) -> Any:
    raw._pair = pair
    return raw(reservation)


def test_pushes_to_one_receiver_share_one_link_however_many_are_queued(pair: Pair) -> None:
    opened = [pair.open(pair.reserve([row], request_id=f"r{row}")[0]) for row in range(64)]
    links: set[Outbound] = {push._outbound for push in opened}
    assert len(links) == 1
    eventually(lambda: len(pair.receiver._links) == 1)
    for push in opened:
        push.abort("enough")
    eventually(lambda: pair.receiver.num_reservations == 0)
