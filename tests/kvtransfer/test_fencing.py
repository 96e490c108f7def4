"""After release() no byte lands: rows may belong to another request by then."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvtransfer import departures, wire
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import PATIENCE_S, Ends, Pair, eventually, rows_of
from twinpool.errors import PeerLost, ReservationGone, TransferTimeout

ANOTHERS = bytes([0xA5]) * 1000  # what another request has in its rows


def give_to_another(pair: Pair, rows: list[int]) -> None:
    for region in pair.destination:
        for row in rows:
            region.row(row)[:] = ANOTHERS


def belongs_to_another(pair: Pair, rows: list[int]) -> bool:
    return all(row == ANOTHERS for layer in rows_of(pair.destination, rows) for row in layer)


def test_release_in_the_middle_of_a_frame_cuts_its_link(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1, 2])
    neighbour, neighbour_ends = pair.reserve([3], request_id="r2")
    sender = raw(reservation)
    payload = sender.payload(0, [10, 11])
    sender.socket.sendall(wire.encode(sender.put_frame(0, [0, 1], [10, 11]), len(payload)) + payload[:1500])
    eventually(lambda: rows_of(pair.destination, [1])[0] == rows_of(pair.source, [10])[0], "arrival of the first row")

    reservation.release()
    give_to_another(pair, [1, 2])
    try:
        sender.socket.sendall(payload[1500:])
        sender.commit()
    except (OSError, PeerLost):
        pass  # the link is cut; how fast the sender sees it is the kernel's business
    with pytest.raises(PeerLost):
        sender.answer()
    assert belongs_to_another(pair, [1, 2])
    assert not ends.is_set
    assert not neighbour_ends.is_set  # another link's reservation is not touched
    pair.send(neighbour, [5])
    assert neighbour_ends.wait().rows == 3


def test_release_waits_for_a_frame_that_does_end(pair: Pair, raw: RawSenders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.reservation.FENCE_WAIT_S", PATIENCE_S)
    reservation, _ = pair.reserve([1, 2])
    sender = raw(reservation)
    payload = sender.payload(0, [10, 11])
    sender.socket.sendall(wire.encode(sender.put_frame(0, [0, 1], [10, 11]), len(payload)) + payload[:1500])
    eventually(lambda: rows_of(pair.destination, [1])[0] == rows_of(pair.source, [10])[0], "arrival of the first row")
    release = threading.Thread(target=reservation.release)
    release.start()
    eventually(lambda: pair.receiver.num_reservations == 0)
    assert release.is_alive()
    sender.socket.sendall(payload[1500:])
    release.join(PATIENCE_S)
    assert not release.is_alive()
    give_to_another(pair, [1, 2])
    sender.put(1, [0, 1], [10, 11])
    assert sender.refusal() == "ReservationGone"  # the link lives, the reservation does not
    assert belongs_to_another(pair, [1, 2])


def test_an_expired_reservation_whose_sender_goes_on_is_fenced(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1, 2], timeout_s=0.05)
    sender = raw(reservation)
    sender.put(0, [0], [10])
    assert isinstance(ends.wait(), TransferTimeout)
    reservation.release()
    give_to_another(pair, [1, 2])
    other, other_ends = pair.reserve([1, 2], request_id="r2")
    for layer in range(3):
        sender.put(layer, [0, 1], [10, 11], push=2 + layer)
        assert sender.refusal() == "ReservationGone"
    assert belongs_to_another(pair, [1, 2])
    assert pair.send(other, [20, 21]).error is None
    assert other_ends.wait().rows == 6
    assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [20, 21])


def test_rows_released_at_random_moments_never_change_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "FRAME_BYTES", 4000)
    rng = random.Random(11)
    rows = list(range(64))
    for attempt in range(1, 101):
        reservation, _ = pair.reserve(rows, attempt=attempt)
        push = pair.open(reservation)
        for layer in range(3):
            push.put(layer, rows, rows)
        done = Ends()
        push.commit(b"", done)
        time.sleep(rng.random() * 0.002)
        reservation.release()
        give_to_another(pair, rows)
        result = done.wait()
        assert result.error is None or isinstance(result.error, ReservationGone | PeerLost)
        assert belongs_to_another(pair, rows)
    pair.assert_serves()


def test_release_from_within_a_callback(pair: Pair) -> None:
    ends = Ends()

    def released(end: object) -> None:
        reservation.release()
        ends(end)  # type: ignore[arg-type]

    reservation = pair.receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": [1]}, timeout_s=60, on_commit=released, on_failed=released
    )
    assert pair.send(reservation, [1]).error is None
    assert ends.wait().rows == 3

    ends = Ends()
    reservation = pair.receiver.reserve(
        request_id="r1", attempt=2, rows={"kv": [1]}, timeout_s=0.01, on_commit=released, on_failed=released
    )
    assert isinstance(ends.wait(), TransferTimeout)


def test_the_end_and_the_release_race_without_a_second_end(pair: Pair) -> None:
    for attempt in range(1, 51):
        reservation, ends = pair.reserve([], attempt=attempt, timeout_s=0.002)
        push = pair.open(reservation)
        push.commit(b"", Ends())
        racers = [
            threading.Thread(target=reservation.release),
            threading.Thread(target=push.abort, args=("raced",)),
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(PATIENCE_S)
        assert push.closed.wait(PATIENCE_S)
        assert len(ends.all) <= 1
    eventually(lambda: pair.receiver.num_reservations == 0)
    pair.assert_serves()
