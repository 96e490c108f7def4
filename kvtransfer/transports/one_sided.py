"""What the transports have in common whose payload a library writes into the receiver's memory (mooncake, nixl).

 1. Messages travel on a TCP link of ours, the control link, with its handshake and whatever else protects it.
 2. After the handshake the receiver sends Engine: how its library is reached, and where its regions lie.
 3. The sender asks for each push which rows it may write (Claim, Granted), has the library write them, waits until the
    library says that they are there, and then sends the same messages as on any other link, without payload.

What keeps late bytes away from rows that were given to somebody else:

- A sender closes its control link only when the library has ended every write that was begun on it; until then the
  source rows are pinned (`drained`). Before it closes it says so (Leaving).
- A receiver that cuts the link asks the sender to leave and listens on; nothing but the sender's end is a fence. A
  frozen sender keeps its rows in quarantine until it thaws or dies.
- A sender that ended without Leaving was killed. What it had handed to its kernel or network card may still be on its
  way, so the rows stay in quarantine for DRAIN_S more. This assumes that the network delivers what a dead process left
  behind within that time; it is far above the retransmission times of a working network, for TCP and RDMA alike.
- A host that vanished without a word (no answer to keepalives) may be alive behind a broken network; what its kernel
  holds may arrive once that heals. VANISHED_S is above the time for which TCP retransmits.

The receiver verifies every row's checksum before it counts, so bytes that land in rows of their own transfer only are
found out too. The library's own ports authenticate nobody: see docs/operations.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer import wire
from kvtransfer.digest import row_checksums
from kvtransfer.lease import PeerSilent
from kvtransfer.memory import address_of
from kvtransfer.region import Region
from kvtransfer.transports import Link, lookup, tcp
from kvtransfer.transports.controlled import ControlledLink
from kvtransfer.transports.stream import StreamListener
from kvtransfer.transports.tcp import TcpLink
from twinpool.errors import ConfigError, PeerLost, TransferTimeout, TwinpoolError

log = logging.getLogger(__name__)

DRAIN_S = 5.0
VANISHED_S = 960.0  # TCP gives up after about 924 s (tcp_retries2 = 15)
MAX_SEGMENTS = 256  # of one batch; Mooncake's TCP breaks for good beyond about 2,000
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.005  # between two looks at a write
_TELL_TIMEOUT_S = 0.25
_LOOK_S = 0.02  # between two looks at a sender that is to leave
_ESTABLISHED = 1  # tcpi_state, the first byte of tcp_info
_VANISHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring bytes that go to neighbouring bytes."""

    source: int  # address here
    destination: int  # address in the receiver
    num_bytes: int


class Writes(Protocol):
    """A library's writes to one receiver. Owned by the link's thread; nothing in here waits."""

    failure: str | None  # why a write failed, in words that help; no other can be begun after that

    def begin(self, segments: Sequence[Segment]) -> None:
        """Has them written. Not before all that was begun earlier is over."""

    def poll(self) -> int:
        """How many writes are not over: of those the library may still read the source."""

    def stop(self) -> None:
        """What has not been handed to the library yet never will be."""

    def close(self) -> None:
        """When no write is left: forgets the receiver."""


class Engine(Protocol):
    """One library instance with its memory registered, shared by the links of one transport. Thread safe."""

    name: str  # how other engines call it
    metadata: bytes  # what else they have to know

    def reach(self, name: str, metadata: bytes, peer: str) -> Writes:
        """To the engine that described itself so. Raises PeerLost when the library refuses. May wait for ever."""

    def expect_writes(self, owner: object, push: int) -> None:
        """A push may write into this process from now on, until `forget_writes`."""

    def forget_writes(self, owner: object, push: int | None = None) -> None:
        """That push, or all of this owner, writes no more."""

    def close(self) -> None:
        """Gives the library up, once no link uses it. Idempotent."""


def registered_spans(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that the regions lie in, neighbours joined: each registration costs."""
    spans: list[tuple[int, int]] = []
    for address, size in sorted((address_of(region.buffer), region.buffer.nbytes) for region in regions):
        if spans and sum(spans[-1]) == address:
            spans[-1] = (spans[-1][0], spans[-1][1] + size)
        else:
            spans.append((address, size))
    return spans


def layout(engine: Engine, regions: Sequence[Region]) -> wire.Engine:
    """What senders are told. Raises ConfigError when it is more than a frame holds."""
    if len(engine.metadata) > wire.MAX_METADATA_BYTES or len(engine.name) > wire.MAX_ENGINE_NAME_CHARS:
        raise ConfigError(
            f"the transfer library describes its registered memory in {len(engine.metadata)} bytes, over "
            f"{wire.MAX_METADATA_BYTES}: allocate the cache in one piece"
        )
    return wire.Engine(
        name=engine.name,
        metadata=engine.metadata,
        addresses=wire.pack_u64([address_of(region.buffer) for region in regions]),
        num_rows=wire.pack_u32([region.num_rows for region in regions]),
    )


def listen(
    scheme: str,
    address: tuple[str, int, str | None],
    current: Callable[[], Engine | None],
    shared: wire.Engine,
    on_link: Callable[[Link], None],
) -> StreamListener:
    """address: as tcp.listen takes it; current: the transport's engine, which the listener outlives; None: closed."""

    def make_link(sock: socket.socket, peer: str) -> EngineReceiverLink:
        engine = current()
        if engine is None:
            raise OSError("the transport was closed")
        return EngineReceiverLink(TcpLink(sock, peer), engine, shared)

    return tcp.listen(scheme, address, make_link, on_link)


def connect(
    endpoint: str,
    scheme: str,
    engine_at: Callable[[str], Engine],
    regions: Sequence[Region],
    *,
    deadline: float,
) -> EngineSenderLink:
    """engine_at(local address): the transport's engine. Raises PeerLost, also for what that raises."""
    sock = tcp.dial(endpoint, scheme, deadline)
    try:
        return EngineSenderLink(TcpLink(sock, endpoint), engine_at(sock.getsockname()[0]), regions)
    except (ConfigError, PeerLost, OSError) as exc:
        sock.close()
        raise PeerLost(f"cannot use {endpoint}: {exc}") from exc


class _EngineLink(ControlledLink):
    """What both ends share."""

    one_sided = True

    def cut(self) -> None:
        """Ends reading only: the end of a sender's socket, and nothing else, tells that it writes no more."""
        with self._control._closing, contextlib.suppress(OSError):
            socket.socket.shutdown(self._control._sock, socket.SHUT_RD)


class EngineReceiverLink(_EngineLink):
    """The decode worker's end: tells where to write, and knows when the writer is gone."""

    def __init__(self, control: TcpLink, engine: Engine, shared: wire.Engine) -> None:
        super().__init__(control)
        self._engine: Engine | None = engine
        self._layout = shared
        self._is_shared = False
        self._has_left = False
        self._was_told = False
        self._fenced_at: float | None = None  # known once the sender is gone

    def share(self, *, deadline: float) -> None:
        self._is_shared = True
        self.send(self._layout, deadline=deadline)

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        try:
            frame = self._control.receive(deadline=deadline)
        except PeerLost as exc:
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in _VANISHED:
                self._gone(vanished=True)
            raise
        message = frame.message
        if isinstance(message, wire.Leaving):
            self._has_left = True
            raise PeerLost(f"{self.peer} closed the link")
        if self._engine is not None and isinstance(message, wire.Claim):
            self._engine.expect_writes(self, message.push)
        elif self._engine is not None and isinstance(message, wire.Commit | wire.Abort):
            self._engine.forget_writes(self, message.push)
        return frame

    def fenced(self, timeout_s: float) -> bool:
        if not self._is_shared or self._has_left:
            return True
        if not self._was_told:
            self._was_told = True
            self._ask_to_leave()
        end = time.monotonic() + timeout_s
        while True:
            if self._fenced_at is None:
                self._look_for_the_end()
            now = time.monotonic()
            if self._fenced_at is not None and now >= self._fenced_at:
                return True
            if now >= end:
                return False
            time.sleep(min(_LOOK_S, end - now))

    def _ask_to_leave(self) -> None:
        gone = wire.Refused(push=0, error=PeerLost.__name__, reason="the receiver ended the link")
        with contextlib.suppress(PeerLost, TransferTimeout):
            self.send(gone, deadline=time.monotonic() + _TELL_TIMEOUT_S)

    def _look_for_the_end(self) -> None:
        """Of the sender's socket. What it still sends is thrown away, or its end could not arrive behind it."""
        sock, why = self._control._sock, 0
        try:
            while socket.socket.recv(sock, wire.MAX_HEADER_BYTES, socket.MSG_DONTWAIT):
                pass
        except OSError as exc:
            why = exc.errno or 0
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] != _ESTABLISHED:
            self._gone(vanished=why in _VANISHED)

    def _gone(self, *, vanished: bool) -> None:
        wait_s = VANISHED_S if vanished else DRAIN_S
        self._fenced_at = time.monotonic() + wait_s
        if vanished:
            log.warning("the host of %s vanished: rows it may write stay in quarantine for %g s", self.peer, wait_s)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.forget_writes(self)
        super().close()


class EngineSenderLink(_EngineLink):
    """The prefill worker's end: has the library write into the memory that it was told of."""

    def __init__(self, control: TcpLink, engine: Engine, regions: Sequence[Region]) -> None:
        super().__init__(control)
        self._engine: Engine | None = engine
        self._row_bytes = [region.row_bytes for region in regions]
        self._writes: Writes | None = None
        self._addresses: tuple[int, ...] = ()
        self._num_rows: tuple[int, ...] = ()
        self._is_cut = False
        self._is_closed = False

    def attach(self, *, deadline: float) -> None:
        shared = self.receive(deadline=deadline).message
        if not isinstance(shared, wire.Engine):
            raise PeerLost(f"{self.peer} sent {type(shared).__name__} instead of Engine")
        self._addresses = wire.unpack_u64(shared.addresses)
        self._num_rows = wire.unpack_u32(shared.num_rows)
        if not len(self._addresses) == len(self._num_rows) == len(self._row_bytes):
            raise PeerLost(f"{self.peer} shares {len(self._addresses)} regions; {len(self._row_bytes)} are expected")
        if self._engine is not None:
            self._writes = lookup.reach(self._engine, shared, self.peer, deadline=deadline)

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        writes, segments = self._writes, self._segments(region, rows, sources)
        if writes is None:
            raise PeerLost(f"the link to {self.peer} was closed by this side")
        checksums: list[int] | None = None
        num_begun, pause_s = 0, _FIRST_PAUSE_S
        lease_ends = time.monotonic() + self.lease_s  # nothing is sent meanwhile: the peer gives up no later
        while True:
            num_left = writes.poll()
            if writes.failure is not None or self._is_cut:
                writes.stop()
                raise PeerLost(writes.failure or f"the link to {self.peer} was closed by this side")
            if not num_left and num_begun < len(segments):
                writes.begin(segments[num_begun : num_begun + MAX_SEGMENTS])
                num_begun += MAX_SEGMENTS
                pause_s = _FIRST_PAUSE_S
            elif checksums is None:
                checksums = row_checksums(sources)  # while the library works
            elif not num_left:
                return checksums
            elif time.monotonic() >= deadline:
                writes.stop()
                raise TransferTimeout(f"{self.peer} did not take the rows in time; {num_left} writes may go on")
            elif time.monotonic() >= lease_ends:
                writes.stop()
                raise PeerSilent.after(self.peer, self.lease_s)
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LAST_PAUSE_S)

    def _segments(self, region: int, rows: Sequence[int], sources: Sequence[memoryview]) -> list[Segment]:
        if region >= len(self._num_rows):
            raise wire.Malformed(f"rows of region {region}; there are {len(self._num_rows)}")
        size, segments = self._row_bytes[region], list[Segment]()
        for row, source in zip(rows, sources, strict=True):
            if not 0 <= row < self._num_rows[region] or source.nbytes != size:
                raise wire.Malformed(f"row {row} of region {region} with {source.nbytes} bytes")
            here, there = address_of(source), self._addresses[region] + row * size
            last = segments[-1] if segments else None
            if last and (last.source + last.num_bytes, last.destination + last.num_bytes) == (here, there):
                segments[-1] = Segment(last.source, last.destination, last.num_bytes + size)
            else:
                segments.append(Segment(here, there, size))
        return segments

    def drained(self, timeout_s: float) -> bool:
        end, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while self._writes is not None and self._writes.poll():
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_PAUSE_S)
        if self._is_closed:
            self._leave()
        return True

    def cut(self) -> None:
        self._is_cut = True
        super().cut()

    def close(self) -> None:
        """While a write is not over the socket stays open; `drained` closes it."""
        self._is_closed = True
        if self._writes is not None:
            self._writes.stop()
        if self._writes is None or not self._writes.poll():
            self._leave()

    def _leave(self) -> None:
        writes, self._writes, self._engine = self._writes, None, None
        if writes is not None:
            writes.close()
            if not self._control._unsent:  # else the receiver would take this for the rest of a frame
                with contextlib.suppress(TwinpoolError):
                    self.send(wire.Leaving(), deadline=time.monotonic())
        self._control.close()


__all__ = [
    "Engine",
    "EngineReceiverLink",
    "EngineSenderLink",
    "Segment",
    "Writes",
    "connect",
    "layout",
    "listen",
    "registered_spans",
]
