"""The opaque bytes that a decode worker hands out for one request: where to push its rows, and the right to do so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kvtransfer import wire
from kvtransfer.metrics import MAX_PEER_CHARS
from twinpool.errors import InvalidRequest

MAX_TARGET_BYTES = 16 << 10
MAX_POSITIONS = 1 << 18  # rows of one group in one reservation
MAX_TOKENS = 1 << 31  # of one sequence
_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions of one group that a push fills: `first` to `size` - 1; the receiver holds what is below.

    tokens: of the sequence, which need not fill the last position; 0: they do. Senders of other block sizes need it.
    """

    first: int
    size: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reservation as its sender sees it. The token is a secret: whoever holds it may fill the reservation, once."""

    endpoints: tuple[str, ...]  # the receiver's, best first; a sender takes the first whose transport it has
    incarnation: bytes  # of the receiver's process
    token: bytes = field(repr=False)
    request_id: str
    attempt: int
    spans: Mapping[str, Span]
    name: str = ""  # what the receiver calls itself, for people and metrics

    def encode(self) -> bytes:
        spans = {group: [span.first, span.size, span.tokens] for group, span in self.spans.items()}
        packed: bytes = msgpack.packb(
            [_VERSION, self.endpoints, self.incarnation, self.token, self.request_id, self.attempt, spans, self.name]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Target:
        """Raises InvalidRequest when `data` is not a target that this version understands."""
        if len(data) > MAX_TARGET_BYTES:
            raise InvalidRequest(
                f"transfer target of {len(data)} bytes, over {MAX_TARGET_BYTES}", field="transfer_target"
            )
        try:
            fields: Any = msgpack.unpackb(data, use_list=False, strict_map_key=True)
            version, endpoints, incarnation, token, request_id, attempt, spans, name = fields
            target = cls(
                endpoints=tuple(endpoints),
                incarnation=incarnation,
                token=token,
                request_id=request_id,
                attempt=attempt,
                spans={
                    group: Span(first=first, size=size, tokens=tokens) for group, (first, size, tokens) in spans.items()
                },
                name=name,
            )
        except (ValueError, TypeError, AttributeError, RecursionError, msgpack.UnpackException) as exc:
            raise InvalidRequest("the transfer target cannot be read", field="transfer_target") from exc
        if version != _VERSION or not target._is_well_formed():
            raise InvalidRequest("the transfer target is of another version or damaged", field="transfer_target")
        return target

    def _is_well_formed(self) -> bool:
        return (
            all(type(endpoint) is str for endpoint in self.endpoints)
            and type(self.incarnation) is bytes
            and len(self.incarnation) == wire.INCARNATION_BYTES
            and type(self.token) is bytes
            and len(self.token) == wire.TOKEN_BYTES
            and type(self.request_id) is str
            and len(self.request_id) <= wire.MAX_REQUEST_ID_CHARS
            and type(self.name) is str
            and len(self.name) <= MAX_PEER_CHARS
            and type(self.attempt) is int
            and 0 <= self.attempt < 1 << 32
            and all(
                type(group) is str
                and type(span.first) is int
                and type(span.size) is int
                and 0 <= span.first <= span.size <= MAX_POSITIONS
                and type(span.tokens) is int
                and 0 <= span.tokens <= MAX_TOKENS
                for group, span in self.spans.items()
            )
        )
