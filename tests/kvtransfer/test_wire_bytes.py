"""What really passes between two processes' sockets for INT8 rows, counted by a relay between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import pytest

from kvtransfer import KvReceiver, KvSender
from kvtransfer.target import Target
from tests.kvtransfer.peers import Ends, make_regions

TOKENS, BLOCK, KV_HEADS, LAYERS = 2048, 64, 4, 4


class Relay:
    """Passes bytes on to another port of this host and counts them, both ways."""

    def __init__(self, port: int) -> None:
        self.num_bytes = 0
        self._to = port
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to), timeout=10)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                with self._lock:
                    self.num_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.close()
        for each in self._sockets:
            each.close()


@pytest.mark.parametrize("head_dim", [128, 64])
def test_int8_rows_take_what_they_should_on_the_wire_with_everything_around_them(head_dim: int) -> None:
    """Handshake, claim, headers, checksums, commit and answers included."""
    row_bytes = 2 * BLOCK * KV_HEADS * (head_dim + 2)  # codes and one fp16 scale a token and head, of K and of V
    num_rows = TOKENS // BLOCK
    here, there = (make_regions(seed, num_layers=LAYERS, num_rows=num_rows, row_bytes=row_bytes) for seed in (1, 2))
    receiver = KvReceiver(there, fingerprint="f", transport="tcp")
    receiver.start()
    relay = Relay(int(receiver.endpoints[0].rpartition(":")[2]))
    sender = KvSender(here, fingerprint="f", transport="tcp")
    try:
        arrived, sent = Ends(), Ends()
        rows = list(range(num_rows))
        reservation = receiver.reserve(
            request_id="0" * 36, attempt=1, rows={"kv": rows}, timeout_s=60, on_commit=arrived, on_failed=arrived
        )
        target = replace(Target.decode(reservation.target), endpoints=(f"tcp://127.0.0.1:{relay.port}",))
        push = sender.open(target.encode(), request_id="0" * 36, attempt=1, timeout_s=60)
        for layer in range(LAYERS):
            push.put(layer, rows, rows)
        push.commit(b"", sent)
        assert sent.wait().error is None
        assert arrived.wait().rows == LAYERS * num_rows
        bf16_bytes = LAYERS * TOKENS * KV_HEADS * head_dim * 2 * 2
        least = (head_dim + 2) / (2 * head_dim)
        assert least < relay.num_bytes / bf16_bytes <= 1.02 * least
    finally:
        sender.close()
        receiver.close()
        relay.close()
