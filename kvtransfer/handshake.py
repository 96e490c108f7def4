"""The first four frames of a link: each side proves that it holds the cluster key, then the sender says what it has.

    sender   -> Hello      protocol, nonce
    receiver -> Challenge  nonce, HMAC(key, "receiver", both nonces)
    sender   -> Identity   fingerprint, regions, the receiver's incarnation, HMAC(key, "sender", both nonces, all of it)
    receiver -> Welcome, or Refused with the reason

The key never travels and a recorded handshake is of no use. Without a key (empty on both sides) the same frames are
exchanged and prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import msgpack

from kvtransfer import wire
from kvtransfer.region import Region
from kvtransfer.transports import Link
from twinpool import errors
from twinpool.errors import Incompatible, PeerLost, ReservationGone, TransferFailed, TwinpoolError, Unauthenticated

TIMEOUT_S = 5.0  # for a receiver to get through it, so that strangers do not hold links


def greet(
    link: Link, *, fingerprint: str, regions: Sequence[Region], cluster_key: str, incarnation: bytes, deadline: float
) -> None:
    """The sender's side. Returns when the link may be used.

    Raises Unauthenticated, Incompatible or ReservationGone as either side finds; PeerLost, TransferTimeout.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Hello(protocol=wire.PROTOCOL, nonce=nonce), deadline=deadline)
    challenge = link.receive(deadline=deadline).message
    if isinstance(challenge, wire.Refused):
        raise refusal(challenge)
    if not isinstance(challenge, wire.Challenge):
        raise PeerLost(f"{link.peer} answered with {type(challenge).__name__} instead of Challenge")
    if not hmac.compare_digest(challenge.proof, _receiver_proof(cluster_key, nonce, challenge.nonce)):
        raise Unauthenticated(f"{link.peer} does not hold this process' cluster key: set the same key on all workers")
    mine = _describe(regions)
    proof = _sender_proof(cluster_key, nonce, challenge.nonce, fingerprint, mine, incarnation)
    link.send(
        wire.Identity(fingerprint=fingerprint, regions=mine, incarnation=incarnation, proof=proof), deadline=deadline
    )
    answer = link.receive(deadline=deadline).message
    if isinstance(answer, wire.Refused):
        raise refusal(answer)
    if not isinstance(answer, wire.Welcome):
        raise PeerLost(f"{link.peer} answered with {type(answer).__name__} instead of Welcome")


def admit(
    link: Link, *, fingerprint: str, regions: Sequence[Region], cluster_key: str, incarnation: bytes, deadline: float
) -> None:
    """The receiver's side. Raises what it refused the sender with, after having told it."""
    try:
        _check_sender(link, fingerprint, _describe(regions), cluster_key, incarnation, deadline)
    except (Unauthenticated, Incompatible, ReservationGone) as exc:
        link.send(refused(0, exc), deadline=deadline)
        raise
    link.send(wire.Welcome(protocol=wire.PROTOCOL), deadline=deadline)


def _check_sender(
    link: Link,
    fingerprint: str,
    regions: tuple[tuple[str, str, int], ...],
    cluster_key: str,
    incarnation: bytes,
    deadline: float,
) -> None:
    hello = link.receive(deadline=deadline).message
    if not isinstance(hello, wire.Hello):
        raise wire.Malformed(f"{type(hello).__name__} before Hello")
    if hello.protocol != wire.PROTOCOL:
        raise Incompatible(f"the receiver speaks KV protocol {wire.PROTOCOL}, the sender {hello.protocol}")
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    link.send(wire.Challenge(nonce=nonce, proof=_receiver_proof(cluster_key, hello.nonce, nonce)), deadline=deadline)
    identity = link.receive(deadline=deadline).message
    if not isinstance(identity, wire.Identity):
        raise wire.Malformed(f"{type(identity).__name__} instead of Identity")
    proof = _sender_proof(cluster_key, hello.nonce, nonce, identity.fingerprint, identity.regions, identity.incarnation)
    if not hmac.compare_digest(identity.proof, proof):
        raise Unauthenticated("the sender does not hold the receiver's cluster key: set the same key on all workers")
    if identity.fingerprint != fingerprint:
        raise Incompatible(
            f"other model or cache: the receiver's fingerprint is {fingerprint!r}, the sender's"
            f" {identity.fingerprint!r}"
        )
    if identity.regions != regions:
        raise Incompatible(_first_difference(regions, identity.regions))
    if identity.incarnation != incarnation:
        raise ReservationGone("the receiver has been restarted since it made this reservation")


def _first_difference(mine: Sequence[tuple[str, str, int]], theirs: Sequence[tuple[str, str, int]]) -> str:
    if len(mine) != len(theirs):
        return f"the receiver has {len(mine)} cache regions, the sender {len(theirs)}"
    index = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return (
        f"cache region {index} (name, group, row bytes) is {mine[index]} at the receiver, {theirs[index]} at the sender"
    )


def _describe(regions: Sequence[Region]) -> tuple[tuple[str, str, int], ...]:
    return tuple((region.name, region.group, region.row_bytes) for region in regions)


def _receiver_proof(key: str, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return _proof(key, ["receiver", sender_nonce, receiver_nonce])


def _sender_proof(
    key: str,
    sender_nonce: bytes,
    receiver_nonce: bytes,
    fingerprint: str,
    regions: tuple[tuple[str, str, int], ...],
    incarnation: bytes,
) -> bytes:
    return _proof(key, ["sender", sender_nonce, receiver_nonce, fingerprint, regions, incarnation])


def _proof(key: str, transcript: list[object]) -> bytes:
    return hmac.digest(key.encode(), msgpack.packb(transcript), hashlib.sha256)


def refused(push: int, error: TwinpoolError) -> wire.Refused:
    """The frame that carries `error` to a sender."""
    return wire.Refused(push=push, error=type(error).__name__, reason=error.message[: wire.MAX_REASON_CHARS])


def refusal(frame: wire.Refused) -> TwinpoolError:
    """The error that a receiver put into `frame`; never one that transfers cannot have."""
    kind = errors.by_name(frame.error)
    if not issubclass(kind, TransferFailed | Incompatible | Unauthenticated):
        kind = TransferFailed
    return kind(frame.reason)
