"""What a transfer that goes well does."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import KvSender, departures, outbound
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Ends, Pair, eventually, rows_of


def test_rows_of_every_layer_arrive_at_their_positions_and_nowhere_else(pair: Pair) -> None:
    before = rows_of(pair.destination, range(64))
    reservation, ends = pair.reserve([9, 5, 6, 7, 63])
    result = pair.send(reservation, [1, 2, 3, 40, 0], note=b"first tokens")

    assert result.error is None
    assert (result.rows, result.bytes) == (15, 15_000)
    assert result.first_put_at <= result.done_at
    commit = ends.wait()
    assert (commit.note, commit.rows, commit.bytes) == (b"first tokens", 15, 15_000)
    assert rows_of(pair.destination, [9, 5, 6, 7, 63]) == rows_of(pair.source, [1, 2, 3, 40, 0])
    others = [row for row in range(64) if row not in (9, 5, 6, 7, 63)]
    assert rows_of(pair.destination, others) == [[layer[row] for row in others] for layer in before]


def test_pieces_may_come_layer_by_layer_in_any_order_and_size(pair: Pair) -> None:
    reservation, ends = pair.reserve(list(range(10, 30)))
    push = pair.open(reservation)
    pieces = [(layer, first) for layer in range(3) for first in range(0, 20, 4)]
    random.Random(7).shuffle(pieces)
    for layer, first in pieces:
        positions = list(range(first, first + 4))
        push.put(layer, positions[::-1], [40 + position for position in positions][::-1])
    push.commit(b"", Ends())
    assert ends.wait().rows == 60
    assert rows_of(pair.destination, range(10, 30)) == rows_of(pair.source, range(40, 60))


@pytest.mark.parametrize("frame_bytes", [1, 1000, 2999, 1 << 20])
def test_any_frame_size_carries_the_same_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch, frame_bytes: int) -> None:
    monkeypatch.setattr(departures, "FRAME_BYTES", frame_bytes)
    reservation, ends = pair.reserve(list(range(64)))
    assert pair.send(reservation, list(range(64))[::-1]).error is None
    assert ends.wait().rows == 192
    assert rows_of(pair.destination, range(64)) == rows_of(pair.source, list(range(64))[::-1])


def test_more_rows_than_one_system_call_can_gather(transport: str) -> None:
    pair = Pair(transport, num_layers=2, num_rows=6000, row_bytes=16)
    try:
        rows = random.Random(3).sample(range(6000), 5000)  # hardly two neighbours
        reservation, ends = pair.reserve(rows)
        assert pair.send(reservation, rows[::-1]).error is None
        assert ends.wait().rows == 10_000
        assert rows_of(pair.destination, rows) == rows_of(pair.source, rows[::-1])
    finally:
        pair.close()


def test_rows_larger_than_a_frame_and_than_the_socket_buffers(transport: str) -> None:
    pair = Pair(transport, num_layers=1, num_rows=4, row_bytes=9_000_001)
    try:
        reservation, ends = pair.reserve([3, 0])
        assert pair.send(reservation, [1, 2]).error is None
        assert ends.wait().bytes == 18_000_002
        assert rows_of(pair.destination, [3, 0]) == rows_of(pair.source, [1, 2])
    finally:
        pair.close()


def test_no_rows_at_all_is_a_complete_transfer(pair: Pair) -> None:
    reservation, ends = pair.reserve([])
    result = pair.send(reservation, [], note=b"all known")
    assert (result.error, result.rows, result.bytes) == (None, 0, 0)
    assert ends.wait().note == b"all known"


def test_rows_that_the_receiver_holds_already_are_not_sent_and_not_written(pair: Pair) -> None:
    held = rows_of(pair.destination, [8, 9])
    reservation, ends = pair.reserve([8, 9, 10, 11], first=2)
    push = pair.open(reservation)
    assert push.expected_from == {"kv": 2}
    push.abort("only looked at")
    reservation.release()

    reservation, ends = pair.reserve([8, 9, 10, 11], first=2)
    result = pair.send(reservation, [0, 1, 2, 3])
    assert (result.error, result.rows) == (None, 6)
    assert ends.wait().rows == 6
    assert rows_of(pair.destination, [8, 9]) == held
    assert rows_of(pair.destination, [10, 11]) == rows_of(pair.source, [2, 3])


def test_everything_held_already_is_a_complete_transfer(pair: Pair) -> None:
    before = rows_of(pair.destination, [8, 9])
    reservation, ends = pair.reserve([8, 9], first=2)
    assert pair.send(reservation, [0, 1]).rows == 0
    assert ends.wait().rows == 0
    assert rows_of(pair.destination, [8, 9]) == before


def test_many_pushes_share_one_link(pair: Pair) -> None:
    transfers = []
    for number in range(16):
        rows = [number * 4 + offset for offset in range(4)]
        reservation, ends = pair.reserve(rows, request_id=f"r{number}")
        transfers.append((pair.open(reservation), rows, ends))
    for layer in range(3):
        for push, rows, _ in transfers:
            push.put(layer, range(4), rows[::-1])
    for number, (push, _, _) in enumerate(transfers):
        push.commit(str(number).encode(), Ends())
    for number, (_, rows, ends) in enumerate(transfers):
        assert ends.wait().note == str(number).encode()
        assert rows_of(pair.destination, rows) == rows_of(pair.source, rows[::-1])
    assert len({peer for peer, _ in pair.receiver_counters.ends}) == 1
    assert len(pair.sender._links) == 1


def test_one_receiver_serves_several_senders_at_once(pair: Pair) -> None:
    senders = [
        KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, transport=pair.transport, options=pair.options)
        for _ in range(3)
    ]
    try:
        for number, sender in enumerate(senders):
            reservation, ends = pair.reserve([number], request_id=f"r{number}")
            assert pair.send(reservation, [60 + number], sender=sender).error is None
            ends.wait()
        assert rows_of(pair.destination, [0, 1, 2]) == rows_of(pair.source, [60, 61, 62])
    finally:
        for sender in senders:
            sender.close()


def test_idle_links_are_closed_and_made_again_when_needed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "IDLE_S", 0.01)
    pair.assert_serves()
    eventually(lambda: not pair.sender._links, "closing of the idle link")
    pair.assert_serves()


def test_metrics_count_what_travelled_on_both_sides(pair: Pair, transport: str) -> None:
    reservation, ends = pair.reserve([0, 1, 2])
    assert pair.send(reservation, [5, 6, 7]).error is None
    ends.wait()
    for counters in (pair.sender_counters, pair.receiver_counters):
        assert (counters.rows, counters.bytes) == (9, 9000)
        eventually(lambda counters=counters: [error for _, error in counters.ends] == [None])
    assert pair.sender_counters.ends[0][0] == ("localhost" if transport == "shm" else "127.0.0.1")
    assert max(pair.sender_counters.depths) >= 3
    assert pair.sender_counters.depths[-1] == 0
    assert pair.receiver_counters.refusals == []


def test_an_owners_fault_in_a_callback_hurts_nobody_else(pair: Pair) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the owner is broken")

    reservation = pair.receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": [1]}, timeout_s=60, on_commit=broken, on_failed=broken
    )
    push = pair.open(reservation)
    for layer in range(3):
        push.put(layer, [0], [1])
    push.commit(b"", broken)
    assert push.closed.wait(PATIENCE_S)
    pair.assert_serves()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mapping_of_rows_arrives_exactly(pair: Pair, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 64))
    to = data.draw(st.permutations(range(64)))[:count]
    source = [data.draw(st.integers(0, 63)) for _ in range(count)]
    first = data.draw(st.integers(0, count))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    expected = rows_of(pair.destination, to[:first]), rows_of(pair.source, source[first:])

    reservation, ends = pair.reserve(to, first=first)
    push = pair.open(reservation)
    for layer in range(3):
        for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
            push.put(layer, range(begin, end), source[begin:end])
    push.commit(b"", Ends())
    assert ends.wait().rows == 3 * (count - first)
    assert (rows_of(pair.destination, to[:first]), rows_of(pair.destination, to[first:])) == expected
