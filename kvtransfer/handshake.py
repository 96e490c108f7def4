"""The first four frames of a link: each side proves that it holds the cluster key, then the sender says what it has.

    sender   -> Hello      protocol, nonce
    receiver -> Challenge  nonce, HMAC(key, "receiver", both nonces)
    sender   -> Identity   fingerprint, regions, receiver's incarnation, name, lease,
                           HMAC(key, "sender", nonces, all of it)
    receiver -> Welcome    the receiver's regions, the lease that holds, the shorter of both; or Refused with the reason

Regions may differ in their row layouts as far as one side's rows can be made from the other's (layout.py).

The key never travels and a recorded handshake is of no use. Without a key (empty on both sides) the same frames are
exchanged and prove nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from kvtransfer import lease, wire
from kvtransfer.layout import RowLayout, Shape, check_mappable
from kvtransfer.region import Region
from kvtransfer.transports import Link
from twinpool import errors
from twinpool.errors import Incompatible, PeerLost, ReservationGone, TransferFailed, TwinpoolError, Unauthenticated

TIMEOUT_S = 5.0  # for a receiver to get through it, so that strangers do not hold links


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """What one process brings to every handshake."""

    fingerprint: str  # of all that both sides must agree on
    regions: Sequence[Region]
    cluster_key: str = field(repr=False)
    lease_s: float = lease.LEASE_S
    name: str = ""  # of the process, for people and metrics

    @property
    def lease_ms(self) -> int:
        return round(1000 * self.lease_s)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(region.shape for region in self.regions)

    def describe_regions(self) -> tuple[wire.RegionList, wire.LayoutList]:
        """All shapes as they travel."""
        layouts = list(dict.fromkeys(region.layout for region in self.regions if region.layout is not None))
        regions = tuple(
            (each.name, each.group, each.row_bytes, 0 if each.layout is None else 1 + layouts.index(each.layout))
            for each in self.regions
        )
        return regions, tuple(layout.pack() for layout in layouts)

    def prove(self, role: str, *transcript: object) -> bytes:
        packed = msgpack.packb([role, *transcript])
        return hmac.digest(self.cluster_key.encode(), packed, hashlib.sha256)


def read_shapes(regions: wire.RegionList, layouts: wire.LayoutList) -> tuple[Shape, ...]:
    """What `describe_regions` of the other side described. Raises wire.Malformed for what contradicts itself."""
    try:
        known = [None, *map(RowLayout.unpack, layouts)]
        shapes = tuple(
            Shape(name=name, group=group, row_bytes=row_bytes, layout=known[index])
            for name, group, row_bytes, index in regions
        )
    except (ValueError, IndexError) as exc:
        raise wire.Malformed(f"a row layout that is none: {exc}") from exc
    for shape in shapes:
        if shape.layout is not None and shape.layout.row_bytes != shape.row_bytes:
            raise wire.Malformed(f"region {shape.name!r} has rows of {shape.row_bytes} bytes, which its layout has not")
    return shapes


def greet(link: Link, me: Party, *, incarnation: bytes, deadline: float) -> tuple[tuple[Shape, ...], float]:
    """The sender's side, to the receiver of that incarnation. The link may be used when it returns.

    Returns what the receiver's regions look like, and the agreed lease in s.

    Raises Unauthenticated, Incompatible or ReservationGone as either side finds; PeerLost, TransferTimeout.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Hello(protocol=wire.PROTOCOL, nonce=nonce), deadline=deadline)
    challenge = link.receive(deadline=deadline).message
    if isinstance(challenge, wire.Refused):
        raise refusal(challenge)
    if not isinstance(challenge, wire.Challenge):
        raise PeerLost(f"{link.peer} answered with {type(challenge).__name__} instead of Challenge")
    if not hmac.compare_digest(challenge.proof, me.prove("receiver", nonce, challenge.nonce)):
        raise Unauthenticated(f"{link.peer} does not hold this process' cluster key: set the same key on all workers")
    regions, layouts = me.describe_regions()
    proof = me.prove(
        "sender", nonce, challenge.nonce, me.fingerprint, regions, layouts, incarnation, me.name, me.lease_ms
    )
    link.send(
        wire.Identity(
            fingerprint=me.fingerprint,
            regions=regions,
            layouts=layouts,
            incarnation=incarnation,
            name=me.name,
            lease_ms=me.lease_ms,
            proof=proof,
        ),
        deadline=deadline,
    )
    answer = link.receive(deadline=deadline).message
    if isinstance(answer, wire.Refused):
        raise refusal(answer)
    if not isinstance(answer, wire.Welcome):
        raise PeerLost(f"{link.peer} answered with {type(answer).__name__} instead of Welcome")
    shapes = read_shapes(answer.regions, answer.layouts)
    check_mappable(shapes, me.shapes)
    return shapes, min(answer.lease_ms, me.lease_ms) / 1000


def admit(link: Link, me: Party, *, incarnation: bytes, deadline: float) -> tuple[str, float]:
    """The receiver's side; `incarnation` is its own. Returns what the sender calls itself and the agreed lease in s.

    Raises what it refused the sender with, after having told it.
    """
    try:
        identity = _check_sender(link, me, incarnation, deadline)
    except (Unauthenticated, Incompatible, ReservationGone) as exc:
        link.send(refused(0, exc), deadline=deadline)
        raise
    regions, layouts = me.describe_regions()
    lease_ms = min(identity.lease_ms, me.lease_ms)
    welcome = wire.Welcome(protocol=wire.PROTOCOL, regions=regions, layouts=layouts, lease_ms=lease_ms)
    link.send(welcome, deadline=deadline)
    return identity.name, lease_ms / 1000


def _check_sender(link: Link, me: Party, incarnation: bytes, deadline: float) -> wire.Identity:
    try:
        hello = link.receive(deadline=deadline).message
    except wire.SpeaksTls as exc:
        with contextlib.suppress(wire.Malformed):
            link.receive_ready()  # the rest of it: what is unread at the close would make the answer be lost
        raise Unauthenticated(
            "the sender speaks TLS, the receiver has no certificates: "
            "set --tls-cert, --tls-key and --tls-ca on all workers or on none"
        ) from exc
    if not isinstance(hello, wire.Hello):
        raise wire.Malformed(f"{type(hello).__name__} before Hello")
    if hello.protocol != wire.PROTOCOL:
        raise Incompatible(f"the receiver speaks KV protocol {wire.PROTOCOL}, the sender {hello.protocol}")
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Challenge(nonce=nonce, proof=me.prove("receiver", hello.nonce, nonce)), deadline=deadline)
    identity = link.receive(deadline=deadline).message
    if not isinstance(identity, wire.Identity):
        raise wire.Malformed(f"{type(identity).__name__} instead of Identity")
    claims = (
        identity.fingerprint,
        identity.regions,
        identity.layouts,
        identity.incarnation,
        identity.name,
        identity.lease_ms,
    )
    proof = me.prove("sender", hello.nonce, nonce, *claims)
    if not hmac.compare_digest(identity.proof, proof):
        raise Unauthenticated("the sender does not hold the receiver's cluster key: set the same key on all workers")
    if identity.fingerprint != me.fingerprint:
        raise Incompatible(
            "another model, cache layout or version: "
            f"the receiver's fingerprint is {me.fingerprint!r}, the sender's {identity.fingerprint!r}"
        )
    check_mappable(me.shapes, read_shapes(identity.regions, identity.layouts))
    if identity.incarnation != incarnation:
        raise ReservationGone("the receiver has been restarted since it made this reservation")
    return identity


def refused(push: int, error: TwinpoolError) -> wire.Refused:
    """The frame that carries `error` to a sender."""
    return wire.Refused(push=push, error=type(error).__name__, reason=error.message[: wire.MAX_REASON_CHARS])


def refusal(frame: wire.Refused) -> TwinpoolError:
    """The error that a receiver put into `frame`; never one that transfers cannot have."""
    kind = errors.by_name(frame.error)
    if not issubclass(kind, TransferFailed | Incompatible | Unauthenticated):
        kind = TransferFailed
    return kind(frame.reason)
