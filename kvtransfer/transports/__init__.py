"""The seam between what a transfer means (reservations, pushes, commit) and how its bytes move. One transport a file.

Every transport gives a link an ordered stream of wire messages. They differ in how the payload of a Put gets into the
receiver's memory:

- in band (tcp): behind its header; the receiver asks where it belongs and `fill`s those rows itself;
- one-sided (shared memory, RDMA): the sender `write`s it before the message leaves, to rows it was granted.

A transport is called by its library and, where that has several, what it drives: "mooncake+rdma".

`caps.fences_on_close` states the difference that matters most: after `close` of a fencing link no byte can land any
more. Without it, destination rows must stay in quarantine until `fenced` says that the sender is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.wire import Frame, Message, Put
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError

log = logging.getLogger(__name__)


AUTO = "auto"
PREFERENCE = ("shm", "mooncake", "nixl", "tcp")  # what `auto` offers and tries, in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a transport can do; the layers above ask this and never the transport's name."""

    one_sided: bool  # the sender writes into the receiver's memory
    fences_on_close: bool  # closing the link makes late bytes impossible
    sees_dead_peer: bool  # a killed peer is noticed at once, without a lease
    any_source: bool = False  # rows may be sent from memory that was not registered, and of the receiver's sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a process was told about its transports; each takes what concerns it."""

    certificates: Certificates | None = None  # tcp: TLS with these on every socket
    streams: int = 1  # tcp: connections of a link, 1 to wire.MAX_STREAMS
    collective_backend: str = "gloo"  # of torch.distributed
    collective_plaintext: bool = False  # rows may leave TLS that way


NO_OPTIONS = Options()


class Link(Protocol):
    """A connection to one peer. All methods but `cut` and `send` belong to the thread that owns the link.

    Deadlines are time.monotonic() values. A broken or silent peer raises PeerLost, a deadline TransferTimeout, bytes
    that are no frame wire.Malformed; after any of them the link is good for `close` only.
    """

    peer: str  # for people and metrics
    one_sided: bool
    checksums_follow: bool  # one-sided: a Put may leave first, with each row's checksum as payload once it is in place
    takes_several: bool  # `start_rows` may be called again before `advance` has returned True
    frame_share: int  # how many times as large as elsewhere a frame may be: it does not keep others waiting for long

    def fileno(self) -> int:
        """Readable when `receive_ready` may have something."""

    def send(self, message: Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        """Sends a whole message, waiting as long as it takes. From any thread that does not also `start` messages."""

    @property
    def lease_s(self) -> float:
        """As agreed."""

    def agree(self, lease_s: float) -> None:
        """The handshake is over. From now on `receive` and `fill` raise PeerSilent when no byte comes for so long."""

    def beat(self) -> None:
        """From any thread of a receiver: sends a Heartbeat, if it goes without waiting and nothing else is leaving."""

    def share(self, *, deadline: float) -> None:
        """The receiver's part after the handshake: gives the sender what it needs to `write`."""

    def attach(self, *, deadline: float) -> None:
        """The sender's part after the handshake: takes it."""

    def expect(self, row_bytes: Sequence[int]) -> None:
        """The sender's part between handshake and `attach`, where caps.any_source: the receiver's rows, by region."""

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        """One-sided links: copies each of `sources` to its row of the receiver's region; done when it returns.

        Returns the rows' checksums (digest.row_checksum of every source). A write that does not end by the deadline is
        a TransferTimeout; it may still go on, see `drained`.
        """

    def fenced(self, timeout_s: float) -> bool:
        """The receiver's question about a link that was cut: can no byte of the sender land any more? Waits for it."""

    def start(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Begins to send; the payload's memory must not change until `advance` returns True."""

    def start_rows(
        self, message: Put, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        """Begins to send `message`, which has no checksums yet, and has `rows`, all of one size, get to the receiver.

        there: on one-sided links the receiver's rows for them; such a link may `write` them in here, until `deadline`.
        Returns the checksums, which are complete when `advance` has returned True.
        """

    def advance(self) -> bool:
        """Sends what goes without waiting. True when the message begun by `start` or `start_rows` is out."""

    def receive(self, *, deadline: float | None = None) -> Frame:
        """The next message; its payload must be taken by `fill` or `skip` before the next call."""

    def fill(self, destination: Sequence[memoryview]) -> None:
        """Makes the payload of the frame just received be in `destination`, which has exactly its size."""

    def fill_rows(self, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        """`fill` for the payload that `start_rows` sends. Returns the rows' checksums as they arrived, and as sent."""

    def skip(self, num_bytes: int) -> None:
        """Throws the payload of the frame just received away."""

    def receive_ready(self) -> list[Message]:
        """Messages without payload that have arrived, without waiting."""

    def cut(self) -> None:
        """From any thread, at any time: ends the link; whatever its owner waits for raises PeerLost."""

    def drained(self, timeout_s: float) -> bool:
        """The sender's question about a link that was closed: is no source row read any more? Waits for it."""

    def close(self) -> None:
        """Frees the link."""


class Listener(Protocol):
    endpoint: str  # scheme://...: what senders connect to

    def close(self) -> None:
        """No link is accepted after this returns; links that exist are not touched."""


class Transport(Protocol):
    caps: Caps

    def actual(self) -> str:
        """The transport that is really in use. A configured one that is not active is a ConfigError at start."""

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        """Prepares memory for transfers; called once, before any link exists.

        memory: where the regions lie, when other processes may be given it.
        """

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> Listener:
        """Accepts links; `on_link` is called for each on the listener's thread and must return at once.

        Raises ConfigError when this transport cannot serve here.
        """

    def connect(self, endpoint: str, *, deadline: float) -> Link:
        """A link to a listener, or PeerLost."""

    def close(self) -> None:
        """Gives up what `register` took, when its links have been closed. Idempotent."""


def create(name: str, options: Options = NO_OPTIONS) -> Transport:
    """The transport called `name`. Raises ConfigError for one that does not exist or is not really active here.

    A name without a fabric ("mooncake") is one with what this host has ("mooncake+rdma"): see `actual`.
    """
    from kvtransfer.transports.collective import CollectiveTransport
    from kvtransfer.transports.mooncake import FABRICS, MooncakeTransport
    from kvtransfer.transports.nixl import UCX_TLS, NixlTransport
    from kvtransfer.transports.shm import ShmTransport
    from kvtransfer.transports.striped import StripedTcpTransport

    known: dict[str, Callable[[], Transport]] = {
        "shm": ShmTransport,
        "tcp": lambda: StripedTcpTransport(options.certificates, options.streams),
        "collective": lambda: CollectiveTransport(
            options.collective_backend, options.certificates, options.collective_plaintext
        ),
        "mooncake": MooncakeTransport,
        "nixl": NixlTransport,
        **{f"mooncake+{fabric}": partial(MooncakeTransport, fabric) for fabric in FABRICS},
        **{f"nixl+{fabric}": partial(NixlTransport, fabric) for fabric in UCX_TLS},
    }
    if options.certificates is not None and name.partition("+")[0] in ("mooncake", "nixl"):
        raise ConfigError(f"KV transport {name!r} encrypts nothing: with certificates choose tcp", field="kv_transport")
    if name not in known:
        raise ConfigError(f"no KV transport is called {name!r}: choose one of {', '.join(sorted(known))}")
    transport = known[name]()
    if name not in (transport.actual(), transport.actual().partition("+")[0]):
        raise ConfigError(f"KV transport {name!r} is configured but {transport.actual()!r} is what would be used")
    return transport


def choose(name: str, options: Options = NO_OPTIONS) -> dict[str, Transport]:
    """The transports that `name` stands for by their actual names, best first: for "auto" all that are active here."""
    if name != AUTO:
        transport = create(name, options)
        return {transport.actual(): transport}
    made: dict[str, Transport] = {}
    for each in PREFERENCE:
        try:
            transport = create(each, options)
        except ConfigError as exc:
            log.info("%s", exc)
        else:
            made[transport.actual()] = transport
    return made
