"""Every error that crosses a process boundary or reaches a user, as one tree.

    TwinpoolError
    ├── InvalidRequest          INVALID_ARGUMENT      a field is wrong; `field` names it
    ├── UnknownModel            NOT_FOUND
    ├── UnknownRequest          NOT_FOUND             no such request is remembered
    ├── UnknownWorker           NOT_FOUND             no such worker has joined
    ├── Unauthenticated         UNAUTHENTICATED
    ├── Duplicate               ALREADY_EXISTS        the request id is in use
    ├── Overloaded              RESOURCE_EXHAUSTED    retryable, `retry_after_s` says when
    ├── DeadlineExceeded        DEADLINE_EXCEEDED
    ├── Cancelled               CANCELLED
    ├── Incompatible            FAILED_PRECONDITION   peers of other model, layout or version
    ├── Unavailable             UNAVAILABLE           retryable
    │   ├── PoolEmpty
    │   ├── WorkerLost
    │   └── TransferFailed
    │       ├── PeerLost
    │       ├── ChecksumMismatch
    │       ├── ReservationGone   unknown, used, expired or fenced
    │       └── TransferTimeout
    ├── ConfigError             (start-up only: the process exits with status 2)
    └── Internal                INTERNAL

A server maps these to a gRPC status plus trailing metadata (`to_metadata`); the client maps them back (`from_status`).
Messages say what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc

KIND_KEY = "twinpool-error"
FIELD_KEY = "twinpool-field"
RETRY_AFTER_KEY = "twinpool-retry-after-ms"


class TwinpoolError(Exception):
    """Root of the tree. `code` is the gRPC status it travels as; `retryable`: the same request may work later."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    retryable: bool = False

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(TwinpoolError):
    """The request cannot be served as it is; `field` names what to change."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class UnknownModel(TwinpoolError):
    code = grpc.StatusCode.NOT_FOUND


class UnknownRequest(TwinpoolError):
    """Nothing is remembered of a request id."""

    code = grpc.StatusCode.NOT_FOUND


class UnknownWorker(TwinpoolError):
    """No worker of this id has joined the router."""

    code = grpc.StatusCode.NOT_FOUND


class Unauthenticated(TwinpoolError):
    code = grpc.StatusCode.UNAUTHENTICATED


class Duplicate(TwinpoolError):
    code = grpc.StatusCode.ALREADY_EXISTS


class Overloaded(TwinpoolError):
    """A bounded queue is full; nothing was reserved. `retry_after_s` is the router's estimate."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class DeadlineExceeded(TwinpoolError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(TwinpoolError):
    code = grpc.StatusCode.CANCELLED


class Incompatible(TwinpoolError):
    """Two processes that cannot work together: other weights, cache layout, dtype or version."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(TwinpoolError):
    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class PoolEmpty(Unavailable):
    """No usable worker in the pool that the message names."""


class WorkerLost(Unavailable):
    """A worker died or stopped answering, and the allowed attempts are used up."""


class TransferFailed(Unavailable):
    """KV rows did not arrive whole and in time. Raised by kvtransfer; the router re-prefills before clients see it."""


class PeerLost(TransferFailed):
    """The connection to the peer broke or could not be made."""


class ChecksumMismatch(TransferFailed):
    """Rows arrived with other bytes than were sent."""


class ReservationGone(TransferFailed):
    """The reservation is unknown, used, expired or fenced; its rows may belong to somebody else by now."""


class TransferTimeout(TransferFailed):
    """The deadline of a transfer passed before the peer acknowledged it."""


class ConfigError(TwinpoolError):
    """Start-up cannot go on: bad option, missing model, port in use, too little memory. Exit status 2."""


class Internal(TwinpoolError):
    code = grpc.StatusCode.INTERNAL


def _tree(root: type[TwinpoolError]) -> Iterable[type[TwinpoolError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def by_name(name: str) -> type[TwinpoolError]:
    """The class called `name`, or TwinpoolError when a newer peer sends one that this version does not know."""
    return next((kind for kind in _tree(TwinpoolError) if kind.__name__ == name), TwinpoolError)


def to_metadata(error: TwinpoolError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that carries the class, field and retry-after of `error`."""
    pairs = [(KIND_KEY, type(error).__name__)]
    if error.field is not None:
        pairs.append((FIELD_KEY, error.field))
    if error.retry_after_s is not None:
        pairs.append((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))))
    return tuple(pairs)


def from_status(
    code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]] | None = None
) -> TwinpoolError:
    """The error behind a gRPC status: by the class name in the metadata, else the first class with that code."""
    pairs = {key: value if isinstance(value, str) else value.decode(errors="replace") for key, value in metadata or ()}
    if KIND_KEY in pairs:
        kind = by_name(pairs[KIND_KEY])
    else:
        kind = next((k for k in _tree(TwinpoolError) if k.code is code), TwinpoolError)
    retry_after_ms = pairs.get(RETRY_AFTER_KEY, "")
    error = kind(
        details,
        field=pairs.get(FIELD_KEY),
        retry_after_s=int(retry_after_ms) / 1000 if retry_after_ms.isascii() and retry_after_ms.isdigit() else None,
    )
    if error.code is not code:  # a class newer than this client, or a raw status from a proxy
        error.code = code
    return error
