"""A receiver under random and mutated frames: it does not crash, does not grow, writes nothing, and goes on serving."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import tracemalloc

import pytest

from kvtransfer import wire
from tests.kvtransfer.conftest import RawSenders
from tests.kvtransfer.peers import PATIENCE_S, Pair, RawSender, eventually, rows_of
from twinpool.errors import PeerLost

NUM_FRAMES = 10_000
FRAMES_A_LINK = 4  # the first malformed one ends it


def random_frame(rng: random.Random, valid: list[bytes]) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:  # a plausible prefix before noise
        return b"TPKV" + bytes([wire.PROTOCOL, rng.randrange(28), 0, 0]) + rng.randbytes(rng.randrange(60))
    frame = bytearray(rng.choice(valid))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame[: rng.randrange(len(frame))] if kind == 2 else frame)


def drain(sender: RawSender) -> None:
    """Reads what there is, so that a full buffer is not what ends the link."""
    with contextlib.suppress(BlockingIOError):
        while sender.socket.recv(65536, socket.MSG_DONTWAIT):
            pass


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_ten_thousand_random_and_mutated_frames(
    pair: Pair, raw: RawSenders, monkeypatch: pytest.MonkeyPatch
) -> None:  # X1
    monkeypatch.setattr(pair.receiver, "_claim_within_s", 600.0)  # the attack takes its time
    rng = random.Random(5)
    before = rows_of(pair.destination, range(64))
    reservation, ends = pair.reserve([1, 2])  # what the frames resemble, and must not get at
    model = raw(reservation)
    foreign = bytes(16)  # a fuzzer does not know the token
    valid = [
        wire.encode(wire.Hello(protocol=wire.PROTOCOL, nonce=bytes(16))),
        wire.encode(model.put_frame(0, [0, 1], [3, 4], token=foreign), 2000) + bytes(2000),
        wire.encode(model.put_frame(0, [0, 1], [3, 4], token=foreign), 16) + bytes(16),  # one-sided: checksums alone
        wire.encode(wire.Claim(push=1, token=foreign, request_id="r1", attempt=1)),
        wire.encode(
            wire.Commit(push=1, token=foreign, request_id="r1", attempt=1, counts=bytes(12), digest=bytes(16)), 4
        )
        + b"note",
        wire.encode(wire.Abort(push=1, token=foreign, request_id="r1", attempt=1, reason="no")),
        wire.encode(wire.Refused(push=1, error="PeerLost", reason="")),
        wire.encode(wire.Engine(name="here:1", metadata=b"", addresses=bytes(24), num_rows=bytes(12))),
        wire.encode(wire.Leaving()),
        wire.encode(wire.Join(secret=foreign, index=1)),
        wire.encode(wire.Stripe(put=1), 2000) + bytes(2000),
    ]
    model.close()

    def attack(num_frames: int) -> None:
        for number in range(num_frames // FRAMES_A_LINK):
            sender = raw(reservation, greet=number % 2 == 0)
            with contextlib.suppress(OSError):
                for _ in range(FRAMES_A_LINK):
                    sender.socket.sendall(random_frame(rng, valid))
                    drain(sender)
            raw.close()
        eventually(lambda: not pair.receiver._links, "the end of the links")
        pair.receiver_counters.refusals.clear()
        gc.collect()

    attack(1000)
    tracemalloc.start()
    try:
        attack(1000)
        base = tracemalloc.get_traced_memory()[0]
        attack(NUM_FRAMES - 2000)
        grown = tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()
    assert grown < 100_000
    assert rows_of(pair.destination, range(64)) == before
    assert not ends.is_set
    assert pair.send(reservation, [5, 6]).error is None
    assert ends.wait().rows == 6
    pair.assert_serves()


def test_mutated_frames_of_a_sender_with_the_token_reach_no_other_rows(pair: Pair, raw: RawSenders) -> None:
    rng = random.Random(6)
    others = [row for row in range(64) if row not in (1, 2)]
    before = rows_of(pair.destination, others)
    for attempt in range(1, 201):
        reservation, ends = pair.reserve([1, 2], attempt=attempt)
        sender = raw(reservation)
        payload = sender.payload(0, [3, 4])
        frame = bytearray(wire.encode(sender.put_frame(0, [0, 1], [3, 4]), len(payload)))
        frame[rng.randrange(len(frame))] = rng.randrange(256)
        with contextlib.suppress(OSError, PeerLost):
            sender.socket.sendall(frame + payload)
            sender.commit()
        raw.close()
        reservation.release()
        assert len(ends.all) <= 1
        assert not [end for end in ends.all if not isinstance(end, Exception)]  # never a commit: two layers are missing
    assert rows_of(pair.destination, others) == before
    pair.assert_serves()


def test_links_that_say_nothing_do_not_keep_others_out(pair: Pair, port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        pair.assert_serves()


def test_more_links_than_allowed_are_turned_away(pair: Pair, raw: RawSenders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.receiver.MAX_LINKS", 2)
    reservation, _ = pair.reserve([1])
    first, second = raw(reservation), raw(reservation)
    with pytest.raises(PeerLost):
        raw(reservation)
    first.close()
    second.close()
    eventually(lambda: not pair.receiver._links)
    reservation.release()
    pair.assert_serves()
