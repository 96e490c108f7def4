"""Whatever does not belong into a reservation is refused with its reason, and hurts nobody else."""

from __future__ import annotations

import time

import pytest

from kvtransfer import wire
from kvtransfer.target import Target
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import PATIENCE_S, Ends, Pair, eventually, rows_of
from twinpool.errors import (
    ChecksumMismatch,
    InvalidRequest,
    Overloaded,
    PeerLost,
    ReservationGone,
    TransferFailed,
    TransferTimeout,
)


def test_a_used_reservation_is_refused(pair: Pair) -> None:
    reservation, ends = pair.reserve([1])
    assert pair.send(reservation, [1]).error is None
    before = rows_of(pair.destination, [1])
    assert isinstance(pair.send(reservation, [2]).error, ReservationGone)
    assert rows_of(pair.destination, [1]) == before
    assert len(ends.all) == 1


def test_a_released_reservation_is_refused_and_calls_nobody(pair: Pair) -> None:
    before = rows_of(pair.destination, [1])
    reservation, ends = pair.reserve([1])
    reservation.release()
    reservation.release()
    assert isinstance(pair.send(reservation, [2]).error, ReservationGone)
    assert rows_of(pair.destination, [1]) == before
    assert not ends.is_set


def test_an_expired_reservation_fails_once_and_is_refused(pair: Pair) -> None:
    before = rows_of(pair.destination, [1])
    reservation, ends = pair.reserve([1], timeout_s=0.01)
    failure = ends.wait()
    assert isinstance(failure, TransferTimeout)
    assert "'r1'" in failure.message
    assert isinstance(pair.send(reservation, [2]).error, ReservationGone)
    assert rows_of(pair.destination, [1]) == before
    assert pair.receiver.num_reservations == 0
    assert len(ends.all) == 1


def test_a_reservation_expires_in_the_middle_of_a_push(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2], timeout_s=0.05)
    push = pair.open(reservation)
    push.put(0, [0], [5])
    assert isinstance(ends.wait(), TransferTimeout)
    before = rows_of(pair.destination, [2])
    push.put(0, [1], [6])
    eventually(lambda: isinstance(push.error, ReservationGone), "the refusal of the late row")
    if pair.transport == "tcp":  # a one-sided sender writes until it hears: the rows are the reservation's until then
        assert rows_of(pair.destination, [2]) == before
    assert reservation.release()
    pair.assert_serves()


def test_reservations_expire_in_order_of_their_time_not_of_their_making(pair: Pair) -> None:
    late, late_ends = pair.reserve([1], timeout_s=60)
    _, early_ends = pair.reserve([2], timeout_s=0.01, request_id="r2")
    assert isinstance(early_ends.wait(), TransferTimeout)
    assert not late_ends.is_set
    late.release()


def test_a_second_push_for_one_reservation_is_refused_and_the_first_goes_on(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2])
    first, second = pair.open(reservation), pair.open(reservation)
    first.put(0, [0, 1], [10, 11])
    eventually(lambda: pair.receiver_counters.rows == 2)
    second.put(1, [0, 1], [20, 21])
    done = Ends()
    second.commit(b"", done)
    assert isinstance(done.wait().error, ReservationGone)
    for layer in (1, 2):
        first.put(layer, [0, 1], [10, 11])
    first.commit(b"", Ends())
    assert ends.wait().rows == 6
    assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [10, 11])


def test_a_second_sender_on_one_reservation_is_refused_and_the_first_goes_on(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1])
    first, second = raw(reservation), raw(reservation)
    first.put(0, [0], [10])
    eventually(lambda: pair.receiver_counters.rows == 1)
    second.put(1, [0], [20])
    assert second.refusal() == "ReservationGone"
    second.close()
    first.put(1, [0], [10])
    first.put(2, [0], [10])
    first.commit()
    assert isinstance(first.answer(), wire.Committed)
    assert ends.wait().rows == 3


@pytest.mark.parametrize("change", [{"request_id": "r2"}, {"attempt": 2}, {"token": bytes(16)}])
def test_another_request_attempt_or_token_is_refused(pair: Pair, raw: RawSenders, change: dict[str, object]) -> None:
    before = rows_of(pair.destination, [1])
    reservation, ends = pair.reserve([1])
    sender = raw(reservation)
    sender.put(0, [0], [10], **change)
    assert sender.refusal() == "ReservationGone"
    sender.commit(**change)
    assert sender.refusal() == "ReservationGone"
    assert rows_of(pair.destination, [1]) == before
    assert not ends.is_set  # the reservation itself is as good as before
    for layer in range(3):
        sender.put(layer, [0], [10], push=2)
    sender.commit(push=2)
    assert ends.wait().rows == 3


def test_the_sender_checks_request_and_attempt_of_its_target(pair: Pair) -> None:
    reservation, _ = pair.reserve([1])
    with pytest.raises(ReservationGone, match="'r1', attempt 1"):
        pair.sender.open(reservation.target, request_id="r1", attempt=2, timeout_s=1)
    with pytest.raises(ReservationGone, match="not for 'r2'"):
        pair.sender.open(reservation.target, request_id="r2", attempt=1, timeout_s=1)
    reservation.release()


def test_damaged_rows_are_a_typed_error_on_both_sides(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1])
    sender = raw(reservation)
    sender.put(0, [0], [10], checksums=[1234])
    assert sender.refusal() == "ChecksumMismatch"
    failure = ends.wait()
    assert isinstance(failure, ChecksumMismatch)
    assert "'layer.0'" in failure.message
    sender.commit()
    assert sender.refusal() == "ReservationGone"
    assert len(ends.all) == 1


def test_a_wrong_digest_is_a_checksum_mismatch(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1])
    sender = raw(reservation)
    for layer in range(3):
        sender.put(layer, [0], [10])
    sender.commit(digest=bytes(16))
    assert sender.refusal() == "ChecksumMismatch"
    assert isinstance(ends.wait(), ChecksumMismatch)


def test_the_note_is_covered_by_the_digest(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([])
    sender = raw(reservation)
    sender.link.send(
        wire.Commit(
            push=1,
            token=sender.target.token,
            request_id="r1",
            attempt=1,
            counts=wire.pack_u32([0, 0, 0]),
            digest=sender.manifest.digest(b"another note"),
        ),
        [memoryview(b"note")],
        deadline=sender.deadline,
    )
    assert sender.refusal() == "ChecksumMismatch"
    assert isinstance(ends.wait(), ChecksumMismatch)


def test_a_missing_row_is_refused_at_commit(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1, 2])
    sender = raw(reservation)
    for layer in range(3):
        sender.put(layer, [0, 1] if layer != 1 else [0], [10, 11] if layer != 1 else [10])
    sender.commit()
    assert sender.refusal() == "TransferFailed"
    assert "position 1 of region 'layer.1' never arrived" in ends.wait().message


def test_a_push_that_forgets_a_layer_is_refused(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2])
    push = pair.open(reservation)
    push.put(0, [0, 1], [1, 2])
    push.put(2, [0, 1], [1, 2])
    done = Ends()
    push.commit(b"", done)
    assert "'layer.1' never arrived" in done.wait().error.message
    assert isinstance(ends.wait(), TransferFailed)


def test_counts_that_differ_are_refused(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1])
    sender = raw(reservation)
    for layer in range(3):
        sender.put(layer, [0], [10])
    sender.commit(counts=wire.pack_u32([1, 1, 2]))
    assert sender.refusal() == "TransferFailed"
    assert "counts" in ends.wait().message


def test_a_position_sent_twice_is_refused_before_it_is_written(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1, 2])
    sender = raw(reservation)
    sender.put(0, [0], [10])
    sender.put(0, [0], [20])
    assert sender.refusal() == "TransferFailed"
    assert "sent twice" in ends.wait().message
    assert rows_of(pair.destination, [1])[0] == rows_of(pair.source, [10])[0]


def test_a_position_twice_in_one_frame_is_refused(pair: Pair, raw: RawSenders) -> None:
    reservation, ends = pair.reserve([1, 2])
    raw(reservation).put(0, [1, 1], [10, 11])
    assert "sent twice" in ends.wait().message


def test_the_sender_finds_its_own_repetition(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2])
    push = pair.open(reservation)
    push.put(0, [0], [1])
    push.put(0, [0, 1], [1, 2])
    done = Ends()
    push.commit(b"", done)
    assert "put twice" in done.wait().error.message
    assert isinstance(ends.wait(), TransferFailed)


def test_positions_outside_the_reservation_write_nothing(pair: Pair, raw: RawSenders) -> None:
    before = rows_of(pair.destination, range(64))
    for positions in ([2], [0, 2**32 - 1]):
        reservation, ends = pair.reserve([8, 9])
        raw(reservation).put(0, positions, [20 + position % 2 for position in positions])
        assert "are expected" in ends.wait().message
    assert rows_of(pair.destination, range(64)) == before


def test_positions_that_the_receiver_holds_write_nothing(pair: Pair, raw: RawSenders) -> None:
    before = rows_of(pair.destination, range(64))
    reservation, ends = pair.reserve([8, 9], first=1)
    raw(reservation).put(0, [0, 1], [20, 21])
    assert "1 to 1 are expected" in ends.wait().message
    assert rows_of(pair.destination, range(64)) == before


def test_the_senders_positions_beyond_the_reservation_fail_the_push(pair: Pair) -> None:
    reservation, ends = pair.reserve([8, 9])
    push = pair.open(reservation)
    push.put(0, [1, 2], [1, 2])
    assert push.closed.wait(PATIENCE_S)
    assert "2 rows that were reserved" in str(push.error)
    done = Ends()
    push.commit(b"", done)
    assert done.wait().error is push.error
    assert isinstance(ends.wait(), TransferFailed)


def test_rows_that_the_sender_does_not_have_are_a_bug_and_raise(pair: Pair) -> None:
    reservation, _ = pair.reserve([8, 9])
    push = pair.open(reservation)
    for rows in ([64], [-1]):
        with pytest.raises(ValueError, match="rows 0 to 63"):
            push.put(0, [0], rows)
    with pytest.raises(ValueError, match="1 rows for 2 positions"):
        push.put(0, [0, 1], [1])
    push.abort("test over")


def test_a_push_is_committed_once(pair: Pair) -> None:
    reservation, _ = pair.reserve([])
    push = pair.open(reservation)
    push.commit(b"", Ends())
    with pytest.raises(ValueError, match="committed before"):
        push.commit(b"", Ends())


def test_a_note_that_is_too_long_is_refused_at_once(pair: Pair) -> None:
    reservation, ends = pair.reserve([])
    push = pair.open(reservation)
    with pytest.raises(ValueError, match="a note of"):
        push.commit(bytes(wire.MAX_NOTE_BYTES + 1), Ends())
    push.commit(bytes(wire.MAX_NOTE_BYTES), Ends())
    assert len(ends.wait().note) == wire.MAX_NOTE_BYTES


def test_an_abort_frees_the_receivers_side_at_once(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2])
    push = pair.open(reservation)
    push.put(0, [0, 1], [1, 2])
    for _ in range(3):
        push.abort("the client went away")
    assert push.closed.wait(PATIENCE_S)
    failure = ends.wait()
    assert "the client went away" in failure.message
    done = Ends()
    push.commit(b"", done)
    assert "the client went away" in done.wait().error.message
    assert pair.receiver.num_reservations == 0
    pair.assert_serves()


def test_an_abort_after_commit_reports_once(pair: Pair) -> None:
    reservation, ends = pair.reserve([1, 2])
    push = pair.open(reservation)
    done = Ends()
    push.commit(b"", done)  # incomplete: refused or aborted, whichever is first
    push.abort("too late")
    assert isinstance(done.wait().error, TransferFailed)
    assert isinstance(ends.wait(), TransferFailed)


def test_an_abort_after_the_end_changes_nothing(pair: Pair) -> None:
    reservation, ends = pair.reserve([1])
    push = pair.open(reservation)
    for layer in range(3):
        push.put(layer, [0], [1])
    done = Ends()
    push.commit(b"", done)
    assert done.wait().error is None
    push.abort("late")
    assert push.error is None
    assert ends.wait().rows == 3


def test_the_table_of_reservations_is_bounded(pair: Pair) -> None:
    receiver = pair.make_receiver(pair.destination, max_reservations=2)
    try:

        def reserve() -> object:
            return receiver.reserve(
                request_id="r", attempt=1, rows={"kv": [1]}, timeout_s=60, on_commit=Ends(), on_failed=Ends()
            )

        first, _ = reserve(), reserve()
        with pytest.raises(Overloaded, match="2 KV reservations"):
            reserve()
        first.release()  # type: ignore[attr-defined]
        reserve()
    finally:
        receiver.close()


@pytest.mark.parametrize(
    ("rows", "first", "problem"),
    [
        ({"kv": [64]}, {}, "below 64"),
        ({"kv": [-1]}, {}, "below 64"),
        ({"kv": [1, 1]}, {}, "distinct"),
        ({"other": [1]}, {}, "group 'other'"),
        ({"kv": [1]}, {"kv": 2}, "beyond the 1 rows"),
        ({"kv": [1]}, {"kv": -1}, "beyond the 1 rows"),
    ],
)
def test_rows_that_cannot_be_reserved(
    pair: Pair, rows: dict[str, list[int]], first: dict[str, int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        pair.receiver.reserve(
            request_id="r",
            attempt=1,
            rows=rows,
            timeout_s=1,
            on_commit=Ends(),
            on_failed=Ends(),
            expected_from=first,
        )


@pytest.mark.parametrize("request_id", ["", "r" * 129])
def test_request_ids_that_cannot_travel(pair: Pair, request_id: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair.reserve([1], request_id=request_id)
    assert caught.value.field == "request_id"


def test_tokens_are_long_random_and_never_printed(pair: Pair) -> None:
    reservations = [pair.reserve([1], request_id=f"r{i}")[0] for i in range(100)]
    targets = [Target.decode(reservation.target) for reservation in reservations]
    assert len({target.token for target in targets}) == 100
    assert all(len(target.token) == 16 for target in targets)
    assert all(repr(target.token)[2:-1] not in repr(target) for target in targets)
    for reservation in reservations:
        reservation.release()


def test_the_deadline_of_a_push_ends_both_sides(pair: Pair) -> None:
    reservation, ends = pair.reserve([1])
    push = pair.open(reservation, timeout_s=0.05)
    push.put(0, [0], [1])
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, TransferTimeout)
    assert isinstance(ends.wait(), TransferFailed)  # told by the sender's abort, long before its own expiry
    pair.assert_serves()


def test_a_target_that_names_no_reachable_transport(pair: Pair) -> None:
    reservation, _ = pair.reserve([1])
    target = Target.decode(reservation.target)
    other = Target(
        endpoints=("carrier-pigeon://loft",),
        incarnation=target.incarnation,
        token=target.token,
        request_id="r1",
        attempt=1,
        spans=target.spans,
    )
    with pytest.raises(PeerLost, match="carrier-pigeon://loft"):
        pair.sender.open(other.encode(), request_id="r1", attempt=1, timeout_s=1)
    reservation.release()


def test_closing_the_receiver_fails_what_is_open(pair: Pair) -> None:
    _, unclaimed = pair.reserve([1])
    reservation, claimed = pair.reserve([2], request_id="r2")
    push = pair.open(reservation)
    push.put(0, [0], [1])
    eventually(lambda: pair.receiver_counters.rows == 1)
    pair.receiver.close()
    assert isinstance(unclaimed.wait(), TransferFailed)
    assert isinstance(claimed.wait(), TransferFailed)
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, PeerLost)
    with pytest.raises(Overloaded):
        pair.reserve([3])


def test_closing_the_sender_fails_what_is_open(pair: Pair) -> None:
    reservation, ends = pair.reserve([1])
    push = pair.open(reservation)
    done = Ends()
    push.put(0, [0], [1])
    eventually(lambda: pair.receiver_counters.rows == 1)
    begun = time.monotonic()
    pair.sender.close()
    assert time.monotonic() - begun < PATIENCE_S
    push.commit(b"", done)
    assert isinstance(done.wait().error, PeerLost)
    assert push.closed.is_set()
    assert isinstance(ends.wait(), PeerLost)
    with pytest.raises(TransferFailed, match="closed"):
        pair.open(reservation)
