"""Two connected peers, and a sender that can be made to misbehave frame by frame."""

from __future__ import annotations

import atexit
import functools
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtransfer import (
    Commit,
    KvReceiver,
    KvSender,
    Push,
    PushResult,
    Region,
    Reservation,
    SharedMemory,
    handshake,
    wire,
)
from kvtransfer.digest import Manifest, commit_context, row_checksum
from kvtransfer.metrics import NoLinkMetrics
from kvtransfer.target import Span, Target
from kvtransfer.transports import Options, shm
from kvtransfer.transports.stream import StreamLink
from kvtransfer.transports.tcp import TcpLink, parse_endpoint
from tests.certificates import Authority, Issued
from tests.fakes import Faults, injected
from twinpool.errors import TransferFailed

KEY = "the cluster's key"
FINGERPRINT = "model-a/int8"
_ISSUED = "KV_TEST_CERTIFICATES"  # paths, for processes that a test starts
PATIENCE_S = 10.0  # for what has to happen soon; nothing asserts how soon


def make_regions(seed: int, *, num_layers: int = 3, num_rows: int = 64, row_bytes: int = 1000) -> list[Region]:
    """Layers of one group "kv", filled with random bytes."""
    return share_regions(seed, None, num_layers=num_layers, num_rows=num_rows, row_bytes=row_bytes)


def share_regions(
    seed: int, memory: SharedMemory | None, *, num_layers: int = 3, num_rows: int = 64, row_bytes: int = 1000
) -> list[Region]:
    """The same, in memory that can be shared."""
    size = num_rows * row_bytes
    whole = memory.allocate(num_layers * size) if memory is not None else memoryview(bytearray(num_layers * size))
    whole[:] = random.Random(seed).randbytes(len(whole))
    return [
        Region(name=f"layer.{layer}", group="kv", buffer=whole[layer * size : (layer + 1) * size], row_bytes=row_bytes)
        for layer in range(num_layers)
    ]


def rows_of(regions: Sequence[Region], rows: Sequence[int]) -> list[list[bytes]]:
    return [[bytes(region.row(row)) for row in rows] for region in regions]


def eventually(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not become true"
        time.sleep(0.002)


def named(transport: str) -> tuple[str, Options]:
    """The name and the options that a parameter of the contract tests stands for."""
    name, _, streams = transport.partition("*")
    certificates = issued().load() if name == "tls" else None
    return ("tcp" if name == "tls" else name), Options(certificates=certificates, streams=int(streams or 1))


@functools.cache
def issued() -> Issued:
    """What this process, and those that it starts, prove themselves with over TLS."""
    if paths := os.environ.get(_ISSUED):
        cert, key, ca = map(Path, paths.split(os.pathsep))
        return Issued(cert=cert, key=key, ca=ca)
    folder = tempfile.TemporaryDirectory(prefix="twinpool-certificates")
    atexit.register(folder.cleanup)
    made = Authority(Path(folder.name) / "ca").issue("worker")
    os.environ[_ISSUED] = os.pathsep.join(map(str, (made.cert, made.key, made.ca)))
    return made


class Ends:
    """Records what a reservation or a push ended with; ending twice is an error of its own."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._ended = threading.Event()

    def __call__(self, end: Commit | TransferFailed | PushResult) -> None:
        self.all.append(end)
        self._ended.set()

    @property
    def is_set(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Any:
        assert self._ended.wait(PATIENCE_S), "no end"
        assert len(self.all) == 1
        return self.all[0]


class Counters:
    """A TransferMetrics that remembers, over all links."""

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0
        self.ends: list[tuple[str, str | None]] = []  # peer and error
        self.depths: list[int] = []  # rows queued, after every change
        self.refusals: list[str] = []

    def link(self, transport: str, peer: str, *, stranger: bool = False) -> LinkCounters:
        return LinkCounters(self, peer)

    def expired(self, cause: str) -> None:
        """Shows as an end of the reservation's."""


class LinkCounters(NoLinkMetrics):
    def __init__(self, counters: Counters, peer: str) -> None:
        self._counters = counters
        self._peer = peer

    def moved(self, rows: int, num_bytes: int) -> None:
        self._counters.rows += rows
        self._counters.bytes += num_bytes

    def finished(self, seconds: float, error: str | None) -> None:
        assert seconds >= 0
        self._counters.ends.append((self._peer, error))

    def queued(self, rows: int, num_bytes: int) -> None:
        self._counters.depths.append((self._counters.depths or [0])[-1] + rows)

    def refused(self, error: str) -> None:
        self._counters.refusals.append(error)


class Pair:
    """A receiver and a sender in this process, joined by a real link of the given transport."""

    def __init__(self, transport: str, *, options: Options | None = None, **shape: int) -> None:
        self.shape = shape
        self.transport, self.options = named(transport)
        self.options = options or self.options
        self.source = make_regions(1, **shape)
        self.memory = SharedMemory()
        self.destination = share_regions(2, self.memory, **shape)
        self.sender_counters, self.receiver_counters = Counters(), Counters()
        self.receiver = self.make_receiver(self.destination, metrics=self.receiver_counters)
        self.sender = KvSender(
            self.source,
            fingerprint=FINGERPRINT,
            cluster_key=KEY,
            transport=self.transport,
            options=self.options,
            metrics=self.sender_counters,
        )

    def make_receiver(self, regions: Sequence[Region], **changes: Any) -> KvReceiver:
        options = {
            "fingerprint": FINGERPRINT,
            "cluster_key": KEY,
            "transport": self.transport,
            "options": self.options,
            "memory": self.memory,
        } | changes
        receiver = KvReceiver(regions, **options)
        receiver.start()
        return receiver

    def faulty_sender(self, faults: Faults) -> KvSender:
        """The caller closes it."""
        with injected(faults):
            return KvSender(
                self.source,
                fingerprint=FINGERPRINT,
                cluster_key=KEY,
                transport=self.transport,
                options=self.options,
            )

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.memory.close()

    def reserve(
        self, rows: Sequence[int], *, request_id: str = "r1", attempt: int = 1, timeout_s: float = 60, first: int = 0
    ) -> tuple[Reservation, Ends]:
        ends = Ends()
        reservation = self.receiver.reserve(
            request_id=request_id,
            attempt=attempt,
            rows={"kv": rows},
            timeout_s=timeout_s,
            on_commit=ends,
            on_failed=ends,
            expected_from={"kv": first},
        )
        return reservation, ends

    def open(self, reservation: Reservation, *, timeout_s: float = 60, sender: KvSender | None = None) -> Push:
        return (sender or self.sender).open(
            reservation.target,
            request_id=reservation.request_id,
            attempt=reservation.attempt,
            timeout_s=timeout_s,
        )

    def send(
        self, reservation: Reservation, rows: Sequence[int], *, note: bytes = b"", sender: KvSender | None = None
    ) -> PushResult:
        """Pushes `rows` of every layer to positions 0.. and waits for the end."""
        push = self.open(reservation, sender=sender)
        for layer in range(len(self.source)):
            push.put(layer, range(len(rows)), rows)
        ends = Ends()
        push.commit(note, ends)
        result: PushResult = ends.wait()
        assert push.closed.wait(PATIENCE_S)
        return result

    def assert_serves(self) -> None:
        """One more transfer works and leaves nothing behind."""
        reservation, ends = self.reserve([1, 2], request_id="probe")
        assert self.send(reservation, [3, 4], note=b"probe").error is None
        assert ends.wait().note == b"probe"
        assert rows_of(self.destination, [1, 2]) == rows_of(self.source, [3, 4])
        reservation.release()
        assert self.receiver.num_reservations == 0


class RawSender:
    """An authenticated sender without manners: it sends the frames, or the bytes, that a test tells it to."""

    def __init__(self, receiver: KvReceiver, target: Target, regions: Sequence[Region], *, greet: bool = True) -> None:
        self.target = target
        self.regions = regions
        endpoint = receiver.endpoints[-1]
        self.link: StreamLink
        if endpoint.startswith("shm:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(shm._address(shm.parse_endpoint(endpoint)[1]))
            self.link = StreamLink(self.socket, endpoint)
        else:
            self.socket = socket.create_connection(parse_endpoint(endpoint), timeout=PATIENCE_S)
            self.link = TcpLink(self.socket, endpoint)
        self.manifest = Manifest(target.spans["kv"].size for _ in regions)
        if greet:
            handshake.greet(
                self.link,
                handshake.Party(fingerprint=FINGERPRINT, regions=regions, cluster_key=KEY),
                incarnation=target.incarnation,
                deadline=self.deadline,
            )

    @property
    def deadline(self) -> float:
        return time.monotonic() + PATIENCE_S

    def put_frame(self, region: int, positions: Sequence[int], rows: Sequence[int], **changes: Any) -> wire.Put:
        fields: dict[str, Any] = {
            "push": 1,
            "token": self.target.token,
            "request_id": self.target.request_id,
            "attempt": self.target.attempt,
            "region": region,
            "positions": wire.pack_u32(positions),
            "checksums": b"",
        }
        return wire.Put(**fields | changes)

    def payload(self, region: int, rows: Sequence[int], checksums: Sequence[int] | None = None) -> bytes:
        """The rows and, behind them, their checksums (or others)."""
        pieces = [self.regions[region].row(row) for row in rows]
        return b"".join(pieces) + wire.pack_u64(
            [row_checksum(row) for row in pieces] if checksums is None else checksums
        )

    def put(
        self,
        region: int,
        positions: Sequence[int],
        rows: Sequence[int],
        checksums: Sequence[int] | None = None,
        **changes: Any,
    ) -> None:
        payload = self.payload(region, rows, checksums)
        self.link.send(
            self.put_frame(region, positions, rows, **changes), [memoryview(payload)], deadline=self.deadline
        )
        if max(positions) < self.target.spans["kv"].size:
            self.manifest.add(region, positions, wire.unpack_u64(payload[-8 * len(rows) :]))

    def commit(self, note: bytes = b"", **changes: Any) -> None:
        fields: dict[str, Any] = {
            "push": 1,
            "token": self.target.token,
            "request_id": self.target.request_id,
            "attempt": self.target.attempt,
            "counts": wire.pack_u32(self.manifest.counts()),
            "digest": self.manifest.digest(commit_context(self.target.request_id, self.target.attempt, note)),
        }
        pieces = [memoryview(note)] if note else []
        self.link.send(wire.Commit(**fields | changes), pieces, deadline=self.deadline)

    def answer(self) -> wire.Message:
        while isinstance(message := self.link.receive(deadline=self.deadline).message, wire.Heartbeat):
            pass
        return message

    def refusal(self) -> str:
        """The error class that the receiver answers with."""
        answer = self.answer()
        assert isinstance(answer, wire.Refused), answer
        return answer.error

    def close(self) -> None:
        self.link.close()


class FakeReceiver:
    """Listens and hands the test one link to do with as it likes; nothing else of a receiver is there."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = regions
        self.incarnation = bytes(range(16))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # full soon when nobody reads
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._links: list[TcpLink] = []

    def target(self, num_rows: int, *, request_id: str = "r1") -> bytes:
        return Target(
            endpoints=(self.endpoint,),
            incarnation=self.incarnation,
            token=bytes(16),
            request_id=request_id,
            attempt=1,
            spans={"kv": Span(first=0, size=num_rows)},
        ).encode()

    def accept(self) -> TcpLink:
        """The next link, before its handshake."""
        self._socket.settimeout(PATIENCE_S)
        link = TcpLink(self._socket.accept()[0], "sender")
        self._links.append(link)
        return link

    def admit(self) -> TcpLink:
        """The next link, through its handshake."""
        link = self.accept()
        handshake.admit(
            link,
            handshake.Party(fingerprint=FINGERPRINT, regions=self.regions, cluster_key=KEY),
            incarnation=self.incarnation,
            deadline=time.monotonic() + PATIENCE_S,
        )
        return link

    def close(self) -> None:
        self._socket.close()
        for link in self._links:
            link.close()
