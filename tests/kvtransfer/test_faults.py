"""Every fault that can be injected is one the transfer notices: a typed end on both sides, or no difference at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtransfer import KvSender, PushResult
from tests.fakes import Faults
from tests.kvtransfer.peers import Pair, rows_of
from tests.kvtransfer.test_processes import process
from twinpool.errors import ChecksumMismatch, PeerLost, ReservationGone, TransferFailed, TransferTimeout

PUTS = 3  # of a transfer of one or two rows: one a layer


@contextmanager
def faulty(pair: Pair, faults: Faults) -> Iterator[KvSender]:
    sender = pair.faulty_sender(faults)
    try:
        yield sender
    finally:
        sender.close()


def ends_of(pair: Pair, faults: Faults) -> tuple[PushResult, object]:
    """How a transfer of two rows ends under these faults: for the sender, and for the receiver."""
    with faulty(pair, faults) as sender:
        reservation, ends = pair.reserve([1, 2])
        result = pair.send(reservation, [3, 4], note=b"note", sender=sender)
        end = ends.wait()
        reservation.release()
    return result, end


def assert_refused(pair: Pair, faults: Faults, kind: type[TransferFailed]) -> None:
    result, end = ends_of(pair, faults)
    assert isinstance(result.error, kind), result.error
    assert isinstance(end, TransferFailed)
    assert pair.receiver.num_reservations == 0
    pair.assert_serves()


def test_delay_makes_rows_and_commit_late_and_changes_nothing_else(pair: Pair) -> None:
    begun = time.monotonic()
    result, end = ends_of(pair, Faults(delay_ms=100))
    assert time.monotonic() - begun >= 0.1
    assert result.error is None
    assert (end.rows, end.note) == (6, b"note")  # type: ignore[attr-defined]
    assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [3, 4])


def test_a_delay_from_one_layer_on_lets_the_layers_before_it_through(pair: Pair) -> None:  # L11
    with faulty(pair, Faults(delay_ms=200, delay_from_region=2)) as sender:
        reservation, ends = pair.reserve([1, 2])
        before = rows_of(pair.destination, [1, 2])[2]
        begun = time.monotonic()
        push = pair.open(reservation, sender=sender)
        for layer in range(PUTS):
            push.put(layer, [0, 1], [3, 4])
        while pair.receiver_counters.rows < 4:
            time.sleep(0.001)
        assert rows_of(pair.destination, [1, 2])[2] == before
        assert not ends.is_set
        push.commit(b"", lambda _: None)
        assert ends.wait().rows == 6
        assert time.monotonic() - begun >= 0.2
        assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [3, 4])


def test_delayed_rows_of_a_released_reservation_are_fenced(pair: Pair) -> None:  # L5
    with faulty(pair, Faults(delay_ms=50)) as sender:
        reservation, _ = pair.reserve([1, 2])
        push = pair.open(reservation, sender=sender)
        for layer in range(PUTS):
            push.put(layer, [0, 1], [3, 4])
        reservation.release()
        other, ends = pair.reserve([1, 2], request_id="r2")
        assert pair.send(other, [5, 6]).error is None
        assert ends.wait().rows == 6
        time.sleep(0.1)  # the late rows arrive
        assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [5, 6])


def test_a_link_breaks_after_so_many_rows(pair: Pair) -> None:  # L7
    with faulty(pair, Faults(break_after_rows=4)) as sender:
        reservation, ends = pair.reserve([1, 2])
        assert isinstance(pair.send(reservation, [3, 4], sender=sender).error, PeerLost)
        assert isinstance(ends.wait(), PeerLost)
        assert reservation.release()
        small, small_ends = pair.reserve([1], request_id="r2")
        assert pair.send(small, [3], sender=sender).error is None  # another link, three rows
        assert small_ends.wait().rows == 3


def test_a_lost_put_is_found_at_the_commit(pair: Pair) -> None:
    assert_refused(pair, Faults(drop="Put", drop_every=2), TransferFailed)


def test_a_lost_write_is_found_by_its_checksum() -> None:
    pair = Pair("shm")
    try:
        assert_refused(pair, Faults(drop="write", drop_every=2), ChecksumMismatch)
    finally:
        pair.close()


def test_a_lost_commit_ends_both_sides_by_their_deadlines(pair: Pair) -> None:  # L7
    with faulty(pair, Faults(drop="Commit")) as sender:
        reservation, ends = pair.reserve([1, 2])
        push = pair.open(reservation, timeout_s=1, sender=sender)  # enough to make the link
        for layer in range(PUTS):
            push.put(layer, [0, 1], [3, 4])
        push.commit(b"", lambda _: None)
        assert push.closed.wait(10)
        assert isinstance(push.error, TransferTimeout)
        assert isinstance(ends.wait(), TransferFailed)
        assert reservation.release()
    pair.assert_serves()


@pytest.mark.parametrize("delay_ms", [0, 1])
def test_corrupted_rows_are_found_and_the_source_is_untouched(pair: Pair, delay_ms: float) -> None:
    before = rows_of(pair.source, range(64))
    with faulty(pair, Faults(delay_ms=delay_ms, corrupt_every=7)) as sender:
        fine, _ = pair.reserve([1, 2])
        assert pair.send(fine, [3, 4], sender=sender).error is None  # six rows
        reservation, ends = pair.reserve([1, 2], request_id="r2")
        assert isinstance(pair.send(reservation, [3, 4], sender=sender).error, ChecksumMismatch)
        assert isinstance(ends.wait(), ChecksumMismatch)
    assert rows_of(pair.source, range(64)) == before


@pytest.mark.parametrize("byte", [0, 999])
def test_one_bit_of_the_first_or_last_byte_of_a_row_is_found(pair: Pair, byte: int) -> None:
    assert_refused(pair, Faults(corrupt_every=6, corrupt_byte=byte), ChecksumMismatch)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("token", ReservationGone),
        ("request_id", ReservationGone),
        ("attempt", ReservationGone),
        ("positions", TransferFailed),
        ("checksums", ChecksumMismatch),
        ("push", ReservationGone),
    ],
)
def test_a_header_with_one_other_bit_is_refused(pair: Pair, field: str, kind: type[TransferFailed]) -> None:  # C2
    with faulty(pair, Faults(mangle_every=2, mangle_field=field, seed=3)) as sender:
        reservation, ends = pair.reserve([1, 2])
        result = pair.send(reservation, [3, 4], sender=sender)
        assert isinstance(result.error, TransferFailed)
        refusals = pair.receiver_counters.refusals
        assert any(issubclass(kind, TransferFailed) and name == kind.__name__ for name in refusals), refusals
        reservation.release()
        assert not [end for end in ends.all if not isinstance(end, TransferFailed)]
    pair.assert_serves()


def test_any_bit_of_a_header_may_be_another_and_nothing_is_committed(pair: Pair) -> None:
    for seed in range(1, 40):
        with faulty(pair, Faults(mangle_every=2, seed=seed)) as sender:
            reservation, ends = pair.reserve([1, 2], attempt=seed)
            assert pair.send(reservation, [3, 4], sender=sender).error is not None
            reservation.release()
            assert not [end for end in ends.all if not isinstance(end, TransferFailed)]
    pair.assert_serves()


@pytest.mark.parametrize("every", [1, 2, PUTS])
def test_a_put_that_comes_twice_is_refused_and_counted_once(pair: Pair, every: int) -> None:
    result, end = ends_of(pair, Faults(duplicate_every=every))
    # the last put's repetition meets the commit behind it: one of the two is what the receiver objects to
    assert isinstance(result.error, TransferFailed)
    assert "sent twice" in str(end)
    assert pair.receiver_counters.rows == 2 * every
    pair.assert_serves()


def test_a_commit_before_its_last_put_is_refused(pair: Pair) -> None:
    result, end = ends_of(pair, Faults(reorder_every=PUTS))
    assert isinstance(result.error, TransferFailed)
    assert "4 rows that arrived" in str(end)
    pair.assert_serves()


def test_puts_in_another_order_are_the_same_transfer(pair: Pair) -> None:
    result, end = ends_of(pair, Faults(reorder_every=2))  # the second layer's after the third's
    assert result.error is None
    assert end.rows == 6  # type: ignore[attr-defined]
    assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [3, 4])


def test_a_process_that_ends_itself_in_the_middle_frees_what_it_had(pair: Pair, transport: str) -> None:
    reservation, ends = pair.reserve([1, 2, 3, 4])
    with process("sender_process", transport, reservation.target.hex(), "4") as sender:
        assert isinstance(ends.wait(), PeerLost)
        assert sender.wait(timeout=10) == -9
    assert reservation.release()
    pair.assert_serves()


def test_a_fraction_of_transfers_fails_repeatably(pair: Pair) -> None:
    def outcomes(first: int) -> list[bool]:
        with faulty(pair, Faults(fail_fraction=0.3, seed=4)) as sender:
            results = []
            for attempt in range(first, first + 60):
                reservation, ends = pair.reserve([1], attempt=attempt)
                error = pair.send(reservation, [3], sender=sender).error
                assert error is None or isinstance(error, ChecksumMismatch)
                assert (error is None) == (not isinstance(ends.wait(), ChecksumMismatch))
                results.append(error is None)
            return results

    first = outcomes(1)
    assert 8 <= first.count(False) <= 30
    assert outcomes(100) == first
