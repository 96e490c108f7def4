"""A thousand transfers that fail leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc

import pytest

from kvtransfer import KvSender
from tests.fakes import Faults
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Ends, Pair, eventually
from twinpool.errors import ChecksumMismatch


def fail_by_abort(pair: Pair, attempt: int) -> None:
    reservation, ends = pair.reserve([1, 2], attempt=attempt)
    push = pair.open(reservation)
    push.put(0, [0, 1], [3, 4])
    push.abort("test")
    assert push.closed.wait(PATIENCE_S)
    ends.wait()
    reservation.release()


def fail_by_expiry(pair: Pair, attempt: int) -> None:
    reservation, ends = pair.reserve([1, 2], attempt=attempt, timeout_s=0.001)
    push = pair.open(reservation)
    push.put(0, [0, 1], [3, 4])
    ends.wait()
    reservation.release()
    push.commit(b"", done := Ends())
    assert done.wait().error is not None


def fail_by_release(pair: Pair, attempt: int) -> None:
    reservation, _ = pair.reserve([1, 2], attempt=attempt)
    push = pair.open(reservation)
    push.put(0, [0, 1], [3, 4])
    reservation.release()
    push.commit(b"", done := Ends())
    assert done.wait().error is not None


def fail_by_missing_rows(pair: Pair, attempt: int) -> None:
    reservation, ends = pair.reserve([1, 2], attempt=attempt)
    push = pair.open(reservation)
    push.put(0, [0], [3])
    push.commit(b"", done := Ends())
    assert done.wait().error is not None
    ends.wait()
    reservation.release()


def fail_by_damage_and_lost_link(pair: Pair, attempt: int) -> None:
    damaging = pair.faulty_sender(Faults(corrupt_every=1))
    reservation, ends = pair.reserve([1, 2], attempt=attempt)
    push = pair.open(reservation, sender=damaging)
    push.put(0, [0], [3])
    assert isinstance(ends.wait(), ChecksumMismatch)
    damaging.close()
    reservation.release()


def fail_by_incompatibility(pair: Pair, attempt: int) -> None:
    stranger = KvSender(
        pair.source, fingerprint=FINGERPRINT + "?", cluster_key=KEY, transport=pair.transport, options=pair.options
    )
    reservation, _ = pair.reserve([1, 2], attempt=attempt)
    push = pair.open(reservation, sender=stranger)
    assert push.closed.wait(PATIENCE_S)
    stranger.close()
    reservation.release()


KINDS = (
    fail_by_abort,
    fail_by_expiry,
    fail_by_release,
    fail_by_missing_rows,
    fail_by_damage_and_lost_link,
    fail_by_incompatibility,
)


@pytest.mark.usefixtures("quiet")
def test_a_thousand_failed_transfers_leave_everything_flat(pair: Pair) -> None:
    def threads_and_descriptors() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def fail(first: int, last: int) -> None:
        for attempt in range(first, last):
            KINDS[attempt % len(KINDS)](pair, attempt)
            pair.sender_counters.ends.clear()
            pair.receiver_counters.ends.clear()
            pair.sender_counters.depths.clear()
            pair.receiver_counters.refusals.clear()
        eventually(lambda: threads_and_descriptors() == flat, "return to as many threads and descriptors")
        assert pair.receiver.num_reservations == pair.receiver.num_writers == 0
        gc.collect()

    pair.assert_serves()
    gc.collect()  # memory of earlier tests
    flat = threads_and_descriptors()
    tracemalloc.start()
    try:
        fail(1, 121)
        base = tracemalloc.get_traced_memory()[0]
        fail(121, 1121)
        grown = tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()
    assert grown < 100_000
    assert len(pair.sender._links) == 1
    pair.assert_serves()
