"""Peers that are killed, frozen and restarted, as real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtransfer.transports.tcp import parse_endpoint
from tests.kvtransfer.peers import PATIENCE_S, Ends, Pair, eventually
from twinpool.errors import PeerLost, ReservationGone

ROOT = Path(__file__).parents[2]


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(
        [sys.executable, "-m", f"tests.kvtransfer.{module}", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=PATIENCE_S)


def endpoint_and_target(running: subprocess.Popen[str]) -> tuple[str, bytes]:
    assert running.stdout is not None
    endpoint, target = running.stdout.readline().split()
    return endpoint, bytes.fromhex(target)


def test_a_receiver_killed_in_the_middle_of_a_transfer_and_restarted_on_its_port(transport: str) -> None:
    pair = Pair(transport, row_bytes=64 << 10)
    try:
        with process("receiver_process", transport, "0") as receiver:
            endpoint, target = endpoint_and_target(receiver)
            receiver.send_signal(signal.SIGSTOP)  # so that the transfer cannot be over before the kill
            push = pair.sender.open(target, request_id="r1", attempt=1, timeout_s=60)
            for layer in range(3):
                push.put(layer, range(64), range(64))
            done = Ends()
            push.commit(b"", done)
            receiver.kill()
            assert isinstance(done.wait().error, PeerLost)
            assert push.closed.wait(PATIENCE_S)

        port = parse_endpoint(endpoint)[1] if pair.transport == "tcp" else 0
        with process("receiver_process", transport, str(port)) as receiver:
            same_endpoint, new_target = endpoint_and_target(receiver)
            assert (same_endpoint == endpoint) == (pair.transport == "tcp")
            stale = pair.sender.open(target, request_id="r1", attempt=1, timeout_s=60)
            assert stale.closed.wait(PATIENCE_S)
            assert isinstance(stale.error, ReservationGone if pair.transport == "tcp" else PeerLost)

            push = pair.sender.open(new_target, request_id="r1", attempt=1, timeout_s=60)
            for layer in range(3):
                push.put(layer, range(64), range(64))
            done = Ends()
            push.commit(b"", done)
            assert done.wait().error is None
    finally:
        pair.close()


def test_a_sender_killed_in_the_middle_of_a_transfer(pair: Pair, transport: str) -> None:
    reservation, ends = pair.reserve([1, 2, 3, 4])
    with process("sender_process", transport, reservation.target.hex()) as sender:
        eventually(lambda: pair.receiver_counters.rows == 4, "arrival of the first layer")
        sender.kill()
        assert isinstance(ends.wait(), PeerLost)
    assert pair.receiver.num_reservations == 0
    pair.assert_serves()
