"""What travels on a link: frames, each a fixed prefix, a msgpack header and, for some kinds, a raw payload.

    magic "TPKV" | version u8 | kind u8 | zero u16 | header_len u32 | payload_len u64 | header | payload   (big endian)

A header is the msgpack list of one message's fields in the order declared below. The parser trusts nothing: every
length has a limit, every field a type and a range, and anything else raises Malformed, upon which the link is closed.
Sequences of numbers (positions, checksums, counts) travel packed, little endian: a tenth of msgpack's cost.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import msgpack

from kvtransfer.digest import DIGEST_BYTES
from kvtransfer.layout import MAX_LAYOUTS, PackedLayout, is_packed_layout
from kvtransfer.lease import MAX_LEASE_MS, MIN_LEASE_MS
from kvtransfer.metrics import MAX_PEER_CHARS
from kvtransfer.region import MAX_NAME_CHARS, MAX_REGIONS

PROTOCOL = 5
MAX_HEADER_BYTES = 64 << 10
MAX_NOTE_BYTES = 1 << 20
MAX_PUT_BYTES = 1 << 30
MAX_ROWS_PER_PUT = 512
MAX_STREAMS = 16  # of one link
MAX_ROWS_PER_GRANT = 8192
MAX_REQUEST_ID_CHARS = 128
MAX_REASON_CHARS = 1000
MAX_ENGINE_NAME_CHARS = 256
MAX_METADATA_BYTES = 32 << 10
NONCE_BYTES = TOKEN_BYTES = INCARNATION_BYTES = 16
PROOF_BYTES = 32
CHECKSUM_BYTES = 8

MAGIC = b"TPKV"
_TLS_HANDSHAKE = b"\x16\x03"  # how a TLS connection begins
_PREFIX = struct.Struct("!4sBBHIQ")
PREFIX_BYTES = _PREFIX.size


class Malformed(Exception):
    """The peer does not speak this protocol; its link is closed."""


class SpeaksTls(Malformed):
    """The peer offers TLS, which this side has no certificates for."""


def _field(check: Callable[[Any], bool]) -> Any:
    return dataclasses.field(metadata={"check": check})


def _uint(bits: int) -> Any:
    return _field(lambda value: type(value) is int and 0 <= value < 1 << bits)


def _lease() -> Any:
    return _field(lambda value: type(value) is int and MIN_LEASE_MS <= value <= MAX_LEASE_MS)


def _exactly(size: int) -> Any:
    return _field(lambda value: type(value) is bytes and len(value) == size)


def _text(max_chars: int) -> Any:
    return _field(lambda value: type(value) is str and len(value) <= max_chars)


def _packed(item_bytes: int, most: int) -> Any:
    return _field(
        lambda value: type(value) is bytes and len(value) % item_bytes == 0 and len(value) <= item_bytes * most
    )


def _is_region_list(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= MAX_REGIONS
        and all(
            type(item) is tuple
            and tuple(map(type, item)) == (str, str, int, int)
            and item[2] > 0
            and 0 <= item[3] <= MAX_LAYOUTS
            for item in value
        )
    )


def _is_layout_list(value: Any) -> bool:
    return type(value) is tuple and len(value) <= MAX_LAYOUTS and all(map(is_packed_layout, value))


RegionList = tuple[tuple[str, str, int, int], ...]  # name, group, row bytes, place in the list of layouts, 0 for none
LayoutList = tuple[PackedLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Sender to receiver, first frame of a link."""

    KIND: ClassVar[int] = 1
    protocol: int = _uint(16)
    nonce: bytes = _exactly(NONCE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """Receiver to sender: proves the cluster key over both nonces and asks for the same."""

    KIND: ClassVar[int] = 2
    nonce: bytes = _exactly(NONCE_BYTES)
    proof: bytes = _exactly(PROOF_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Sender to receiver: who I am, whom I want; the proof covers every field."""

    KIND: ClassVar[int] = 3
    fingerprint: str = _text(256)
    regions: tuple[tuple[str, str, int, int], ...] = _field(_is_region_list)
    layouts: tuple[PackedLayout, ...] = _field(_is_layout_list)
    incarnation: bytes = _exactly(INCARNATION_BYTES)  # of the receiver that made the target
    name: str = _text(MAX_PEER_CHARS)  # of the sender, for people and metrics
    lease_ms: int = _lease()  # longest silence that I want either of us to be forgiven
    proof: bytes = _exactly(PROOF_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Receiver to sender: the link may be used, with rows like these."""

    KIND: ClassVar[int] = 4
    protocol: int = _uint(16)
    regions: tuple[tuple[str, str, int, int], ...] = _field(_is_region_list)
    layouts: tuple[PackedLayout, ...] = _field(_is_layout_list)
    lease_ms: int = _lease()  # what holds on this link: the shorter of what both want


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Both ways, when nothing else was sent for a while: I am alive."""

    KIND: ClassVar[int] = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Receiver to sender, after Welcome on a link over shared memory: what is where in it, for every region."""

    KIND: ClassVar[int] = 10
    size: int = _uint(63)  # bytes in all
    offsets: bytes = _packed(8, MAX_REGIONS)  # u64 each
    num_rows: bytes = _packed(4, MAX_REGIONS)  # u32 each


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Receiver to sender, after Welcome on a collective link: where the group of these two is made."""

    KIND: ClassVar[int] = 20
    port: int = _uint(16)  # of the store, on the receiver's host
    name: str = _text(64)  # what the group's keys in the store begin with; a secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Receiver to sender, after Welcome on a link whose payload a library writes: where it writes to."""

    KIND: ClassVar[int] = 21
    name: str = _text(MAX_ENGINE_NAME_CHARS)  # of the receiver's library instance
    metadata: bytes = _field(lambda value: type(value) is bytes and len(value) <= MAX_METADATA_BYTES)
    addresses: bytes = _packed(8, MAX_REGIONS)  # u64 each: of every region, in the receiver
    num_rows: bytes = _packed(4, MAX_REGIONS)  # u32 each


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Sender to receiver, last frame of a link whose payload a library writes: no write is on its way."""

    KIND: ClassVar[int] = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Widen:
    """Sender to receiver, first frame after Welcome on a TCP link that is to have several connections."""

    KIND: ClassVar[int] = 23
    count: int = _field(lambda value: type(value) is int and 2 <= value <= MAX_STREAMS)  # of them, with this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Receiver to sender, the answer: what the further connections have to show."""

    KIND: ClassVar[int] = 24
    secret: bytes = _exactly(TOKEN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Sender to receiver, first frame of a further connection: the one of this number of that link."""

    KIND: ClassVar[int] = 25
    secret: bytes = _exactly(TOKEN_BYTES)
    index: int = _uint(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Sender to receiver, on a further connection: its part of a Put; the payload is its rows and their checksums."""

    KIND: ClassVar[int] = 26
    put: int = _uint(64)  # number of the Put on the link


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Sender to receiver, first frame of a push: the reservation is mine. On a one-sided link: where do its rows go?"""

    KIND: ClassVar[int] = 11
    push: int = _uint(64)
    token: bytes = _exactly(TOKEN_BYTES)
    request_id: str = _text(MAX_REQUEST_ID_CHARS)
    attempt: int = _uint(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Receiver to sender: the push may write these rows, the next of its group, until one side ends it."""

    KIND: ClassVar[int] = 12
    push: int = _uint(64)
    group: str = _text(MAX_NAME_CHARS)
    rows: bytes = _packed(4, MAX_ROWS_PER_GRANT)  # u32 each, in order of position


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Sender to receiver: rows of one region; the payload is their bytes in the order of `positions`, then a u64 each,
    little endian: their checksums, which come last so that rows are hashed while they are sent.

    Where a link has several connections, this one carries every n-th row only, the others theirs behind a Stripe.

    On a one-sided link there is no payload: the rows are in the receiver's memory when the frame leaves. Over shared
    memory it may leave earlier, with the checksums alone as payload: each leaves when its row is in place.
    """

    KIND: ClassVar[int] = 5
    push: int = _uint(64)  # number of the push on this link; never used twice
    token: bytes = _exactly(TOKEN_BYTES)
    request_id: str = _text(MAX_REQUEST_ID_CHARS)
    attempt: int = _uint(32)
    region: int = _uint(16)
    positions: bytes = _packed(4, MAX_ROWS_PER_PUT)  # u32 each: place in the reservation, not a row id
    checksums: bytes = _packed(8, MAX_ROWS_PER_PUT)  # u64 each; empty where they are in the payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sender to receiver, after the last put: all rows are out; the payload is the note."""

    KIND: ClassVar[int] = 6
    push: int = _uint(64)
    token: bytes = _exactly(TOKEN_BYTES)
    request_id: str = _text(MAX_REQUEST_ID_CHARS)
    attempt: int = _uint(32)
    counts: bytes = _packed(4, MAX_REGIONS)  # u32 each: rows sent, for every region
    digest: bytes = _exactly(DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Sender to receiver: no more will come; on a one-sided link also the answer to Refused: no byte follows."""

    KIND: ClassVar[int] = 7
    push: int = _uint(64)
    token: bytes = _exactly(TOKEN_BYTES)
    request_id: str = _text(MAX_REQUEST_ID_CHARS)
    attempt: int = _uint(32)
    reason: str = _text(MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Receiver to sender: every row arrived and was verified; the owner of the reservation knows."""

    KIND: ClassVar[int] = 8
    push: int = _uint(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Receiver to sender: the push is over, or, with push 0, the link."""

    KIND: ClassVar[int] = 9
    push: int = _uint(64)
    error: str = _text(64)  # a class name of twinpool.errors
    reason: str = _text(MAX_REASON_CHARS)


Message = (
    Hello
    | Challenge
    | Identity
    | Welcome
    | Memory
    | Group
    | Engine
    | Heartbeat
    | Claim
    | Granted
    | Put
    | Commit
    | Abort
    | Committed
    | Refused
    | Leaving
    | Widen
    | Streams
    | Join
    | Stripe
)

_KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in get_args(Message)}
_CHECKS = {
    kind: [(field.name, field.metadata["check"]) for field in dataclasses.fields(kind)] for kind in _KINDS.values()
}
_MAX_PAYLOAD = {Put.KIND: MAX_PUT_BYTES, Stripe.KIND: MAX_PUT_BYTES, Commit.KIND: MAX_NOTE_BYTES}


@dataclass(frozen=True, slots=True)
class Frame:
    """A message as received; its payload, if any, still has to be read."""

    message: Message
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Prefix:
    kind: int
    header_bytes: int
    payload_bytes: int


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Prefix and header of `message`; the payload follows on the link."""
    header: bytes = msgpack.packb([getattr(message, name) for name, _ in _CHECKS[type(message)]])
    return _PREFIX.pack(MAGIC, PROTOCOL, message.KIND, 0, len(header), payload_bytes) + header


def parse_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    magic, version, kind, zero, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if bytes(data[:2]) == _TLS_HANDSHAKE:
        raise SpeaksTls("a TLS handshake where plain frames are spoken")
    if magic != MAGIC or version != PROTOCOL or zero != 0:
        raise Malformed(f"not a frame of protocol {PROTOCOL}")
    if kind not in _KINDS:
        raise Malformed(f"frame of unknown kind {kind}")
    if header_bytes > MAX_HEADER_BYTES:
        raise Malformed(f"header of {header_bytes} bytes, over the {MAX_HEADER_BYTES} allowed")
    if payload_bytes > _MAX_PAYLOAD.get(kind, 0):
        raise Malformed(f"{_KINDS[kind].__name__} with {payload_bytes} bytes of payload")
    return Prefix(kind, header_bytes, payload_bytes)


def parse_header(kind: int, header: bytes | bytearray | memoryview) -> Message:
    message_type = _KINDS[kind]
    try:
        values = msgpack.unpackb(header, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise Malformed(f"{message_type.__name__} header is not msgpack: {exc}") from exc
    checks = _CHECKS[message_type]
    if type(values) is not tuple or len(values) != len(checks):
        raise Malformed(f"{message_type.__name__} header does not hold its {len(checks)} fields")
    for (name, check), value in zip(checks, values, strict=True):
        if not check(value):
            raise Malformed(f"{message_type.__name__}.{name} has another type or is out of its limits")
    message = message_type(**{name: value for (name, _), value in zip(checks, values, strict=True)})
    if isinstance(message, Put):
        fitting = (0, 2 * len(message.positions))
        if not message.positions or len(message.checksums) not in fitting:
            raise Malformed("Put needs at least one position, and one checksum for each or none")
    return message


class FrameBuffer:
    """Cuts a byte stream of frames without payload (what senders receive) into messages, whatever the pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now. Raises Malformed; the stream is of no use after that."""
        self._data += data
        messages = []
        while len(self._data) >= PREFIX_BYTES:
            prefix = parse_prefix(bytes(self._data[:PREFIX_BYTES]))
            if prefix.payload_bytes:
                raise Malformed(f"{_KINDS[prefix.kind].__name__} with a payload where none belongs")
            end = PREFIX_BYTES + prefix.header_bytes
            if len(self._data) < end:
                break
            messages.append(parse_header(prefix.kind, bytes(self._data[PREFIX_BYTES:end])))
            del self._data[:end]
        return messages


def pack_u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def unpack_u32(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def pack_u64(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_u64(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)
