"""The first four frames of a link: each side proves that it holds the cluster key, then the sender says what it has.

    sender   -> Hello      protocol, nonce
    receiver -> Challenge  nonce, HMAC(key, "receiver", both nonces)
    sender   -> Identity   fingerprint, regions, the receiver's incarnation, HMAC(key, "sender", both nonces, all of it)
    receiver -> Welcome, or Refused with the reason

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

from kvtransfer import wire
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

    def describe_regions(self) -> tuple[tuple[str, str, int], ...]:
        return tuple((region.name, region.group, region.row_bytes) for region in self.regions)

    def prove(self, role: str, *transcript: object) -> bytes:
        packed = msgpack.packb([role, *transcript])
        return hmac.digest(self.cluster_key.encode(), packed, hashlib.sha256)


def greet(link: Link, me: Party, *, incarnation: bytes, deadline: float) -> None:
    """The sender's side, to the receiver of that incarnation. Returns when the link may be used.

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
    regions = me.describe_regions()
    proof = me.prove("sender", nonce, challenge.nonce, me.fingerprint, regions, incarnation)
    link.send(
        wire.Identity(fingerprint=me.fingerprint, regions=regions, incarnation=incarnation, proof=proof),
        deadline=deadline,
    )
    answer = link.receive(deadline=deadline).message
    if isinstance(answer, wire.Refused):
        raise refusal(answer)
    if not isinstance(answer, wire.Welcome):
        raise PeerLost(f"{link.peer} answered with {type(answer).__name__} instead of Welcome")


def admit(link: Link, me: Party, *, incarnation: bytes, deadline: float) -> None:
    """The receiver's side; `incarnation` is its own. Raises what it refused the sender with, after having told it."""
    try:
        _check_sender(link, me, incarnation, deadline)
    except (Unauthenticated, Incompatible, ReservationGone) as exc:
        link.send(refused(0, exc), deadline=deadline)
        raise
    link.send(wire.Welcome(protocol=wire.PROTOCOL), deadline=deadline)


def _check_sender(link: Link, me: Party, incarnation: bytes, deadline: float) -> None:
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
    claims = (identity.fingerprint, identity.regions, identity.incarnation)
    proof = me.prove("sender", hello.nonce, nonce, *claims)
    if not hmac.compare_digest(identity.proof, proof):
        raise Unauthenticated("the sender does not hold the receiver's cluster key: set the same key on all workers")
    if identity.fingerprint != me.fingerprint:
        raise Incompatible(
            "another model, cache layout or version: "
            f"the receiver's fingerprint is {me.fingerprint!r}, the sender's {identity.fingerprint!r}"
        )
    if identity.regions != me.describe_regions():
        raise Incompatible(_first_difference(me.describe_regions(), identity.regions))
    if identity.incarnation != incarnation:
        raise ReservationGone("the receiver has been restarted since it made this reservation")


def _first_difference(mine: Sequence[tuple[str, str, int]], theirs: Sequence[tuple[str, str, int]]) -> str:
    if len(mine) != len(theirs):
        return f"the receiver has {len(mine)} cache regions, the sender {len(theirs)}"
    index = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return (
        f"cache region {index} (name, group, row bytes) is {mine[index]} at the receiver, {theirs[index]} at the sender"
    )


def refused(push: int, error: TwinpoolError) -> wire.Refused:
    """The frame that carries `error` to a sender."""
    return wire.Refused(push=push, error=type(error).__name__, reason=error.message[: wire.MAX_REASON_CHARS])


def refusal(frame: wire.Refused) -> TwinpoolError:
    """The error that a receiver put into `frame`; never one that transfers cannot have."""
    kind = errors.by_name(frame.error)
    if not issubclass(kind, TransferFailed | Incompatible | Unauthenticated):
        kind = TransferFailed
    return kind(frame.reason)
