"""The frame format, and a parser that takes nothing else."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import wire
from kvtransfer.layout import MAX_LAYOUTS, MAX_PLANES

PUT_FIELDS: list[Any] = [7, bytes(range(16)), "r1", 2, 3, struct.pack("<2I", 5, 6), struct.pack("<2Q", 8, 2**64 - 1)]

blobs = {size: st.binary(min_size=size, max_size=size) for size in (16, 32)}
u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
lease_ms = st.integers(100, 600_000)
ids = st.text(max_size=wire.MAX_REQUEST_ID_CHARS)
owners = {"push": u64, "token": blobs[16], "request_id": ids, "attempt": u32}
region_lists = st.lists(
    st.tuples(st.text(max_size=24), st.text(max_size=24), st.integers(1, 2**40), st.integers(0, MAX_LAYOUTS)),
    max_size=5,
).map(tuple)
layout_lists = st.lists(
    st.tuples(u32, u16, u16, st.lists(st.tuples(u32, st.booleans()), max_size=MAX_PLANES).map(tuple)),
    max_size=MAX_LAYOUTS,
).map(tuple)


@st.composite
def puts(draw: st.DrawFn) -> wire.Put:
    count = draw(st.integers(1, 50))
    numbers = [draw(u32) for _ in range(count)], [draw(u64) for _ in range(count)]
    return wire.Put(
        **{name: draw(strategy) for name, strategy in owners.items()},
        region=draw(u16),
        positions=wire.pack_u32(numbers[0]),
        checksums=wire.pack_u64(numbers[1]),
    )


V = wire.PROTOCOL

MESSAGES: dict[type[wire.Message], st.SearchStrategy[wire.Message]] = {
    wire.Hello: st.builds(wire.Hello, protocol=u16, nonce=blobs[16]),
    wire.Challenge: st.builds(wire.Challenge, nonce=blobs[16], proof=blobs[32]),
    wire.Identity: st.builds(
        wire.Identity,
        fingerprint=st.text(max_size=64),
        regions=region_lists,
        layouts=layout_lists,
        incarnation=blobs[16],
        lease_ms=lease_ms,
        proof=blobs[32],
    ),
    wire.Welcome: st.builds(wire.Welcome, protocol=u16, regions=region_lists, layouts=layout_lists, lease_ms=lease_ms),
    wire.Heartbeat: st.builds(wire.Heartbeat),
    wire.Memory: st.builds(
        wire.Memory,
        size=st.integers(0, 2**63 - 1),
        offsets=st.lists(u64, max_size=9).map(wire.pack_u64),
        num_rows=st.lists(u32, max_size=9).map(wire.pack_u32),
    ),
    wire.Group: st.builds(wire.Group, port=u16, name=st.text(max_size=64)),
    wire.Claim: st.builds(wire.Claim, **owners),
    wire.Granted: st.builds(
        wire.Granted,
        push=u64,
        group=st.text(max_size=24),
        rows=st.lists(u32, max_size=20).map(wire.pack_u32),
    ),
    wire.Put: puts(),
    wire.Commit: st.builds(
        wire.Commit, **owners, counts=st.lists(u32, max_size=20).map(wire.pack_u32), digest=blobs[16]
    ),
    wire.Abort: st.builds(wire.Abort, **owners, reason=st.text(max_size=100)),
    wire.Committed: st.builds(wire.Committed, push=u64),
    wire.Engine: st.builds(
        wire.Engine,
        name=st.text(max_size=wire.MAX_ENGINE_NAME_CHARS),
        metadata=st.binary(max_size=100),
        addresses=st.lists(u64, max_size=9).map(wire.pack_u64),
        num_rows=st.lists(u32, max_size=9).map(wire.pack_u32),
    ),
    wire.Leaving: st.builds(wire.Leaving),
    wire.Widen: st.builds(wire.Widen, count=st.integers(2, wire.MAX_STREAMS)),
    wire.Streams: st.builds(wire.Streams, secret=blobs[16]),
    wire.Join: st.builds(wire.Join, secret=blobs[16], index=st.integers(0, 255)),
    wire.Stripe: st.builds(wire.Stripe, put=u64),
    wire.Refused: st.builds(wire.Refused, push=u64, error=st.text(max_size=64), reason=st.text(max_size=100)),
}
messages = st.one_of(*MESSAGES.values())


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def test_no_kind_of_message_is_left_out_of_the_fuzzing() -> None:
    assert set(MESSAGES) == set(wire._KINDS.values())


def parse(data: bytes) -> tuple[wire.Message, int]:
    prefix = wire.parse_prefix(data[: wire.PREFIX_BYTES])
    header = data[wire.PREFIX_BYTES :]
    assert len(header) == prefix.header_bytes
    return wire.parse_header(prefix.kind, header), prefix.payload_bytes


def test_the_bytes_of_a_put_as_documented() -> None:
    message = wire.Put(
        push=7,
        token=bytes(range(16)),
        request_id="r1",
        attempt=2,
        region=3,
        positions=wire.pack_u32([5, 6]),
        checksums=wire.pack_u64([8, 2**64 - 1]),
    )
    header = msgpack.packb(PUT_FIELDS)
    expected = b"TPKV" + bytes([V, 5, 0, 0]) + len(header).to_bytes(4, "big") + (2000).to_bytes(8, "big") + header
    assert wire.encode(message, 2000) == expected
    assert parse(expected) == (message, 2000)


@given(messages)
def test_every_message_survives_the_wire(message: wire.Message) -> None:
    assert parse(wire.encode(message)) == (message, 0)


@given(st.lists(messages, max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere(sent: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(wire.encode(message) for message in sent)
    buffer, received = wire.FrameBuffer(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += buffer.feed(stream[:size])
        stream = stream[size:]
    assert received == sent


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_are_malformed_or_incomplete(data: bytes) -> None:
    with contextlib.suppress(wire.Malformed):
        assert wire.FrameBuffer().feed(data) == []


@settings(max_examples=300)
@given(messages, st.data())
def test_a_mutated_frame_is_malformed_or_another_valid_message(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.Malformed):
        for received in wire.FrameBuffer().feed(bytes(frame)):
            wire.encode(received)


@settings(max_examples=300)
@given(st.sampled_from(sorted(wire._KINDS)), values)
def test_headers_of_any_other_shape_are_malformed(kind: int, values: object) -> None:
    with contextlib.suppress(wire.Malformed):
        wire.encode(wire.parse_header(kind, msgpack.packb(values)))


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (b"TPKX" + bytes([V, 5, 0, 0]) + bytes(12), "not a frame"),
        (b"TPKV" + bytes([V + 1, 5, 0, 0]) + bytes(12), "not a frame"),
        (b"TPKV" + bytes([V, 5, 0, 1]) + bytes(12), "not a frame"),
        (b"TPKV" + bytes([V, 0, 0, 0]) + bytes(12), "unknown kind 0"),
        (b"TPKV" + bytes([V, 14, 0, 0]) + bytes(12), "unknown kind 14"),
        (b"TPKV" + bytes([V, 5, 0, 0]) + struct.pack("!IQ", (64 << 10) + 1, 0), "header of 65537 bytes"),
        (b"TPKV" + bytes([V, 5, 0, 0]) + struct.pack("!IQ", 10, (1 << 30) + 1), "Put with 1073741825 bytes"),
        (b"TPKV" + bytes([V, 6, 0, 0]) + struct.pack("!IQ", 10, (1 << 20) + 1), "Commit with 1048577 bytes"),
        (b"TPKV" + bytes([V, 1, 0, 0]) + struct.pack("!IQ", 10, 1), "Hello with 1 bytes"),
    ],
)
def test_prefixes_out_of_their_limits(prefix: bytes, reason: str) -> None:
    with pytest.raises(wire.Malformed, match=reason):
        wire.parse_prefix(prefix)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, -1),
        (0, 2**64 - 1.0),
        (0, True),
        (1, bytes(15)),
        (1, "0123456789abcdef"),
        (2, "r" * 129),
        (2, b"r1"),
        (3, 1 << 32),
        (4, 1 << 16),
        (5, b"123"),
        (5, b""),
        (5, bytes(4 * 513)),
        (5, bytes(4)),
        (6, bytes(8)),
        (6, bytes(17)),
        (6, [8, 9]),
        (6, None),
    ],
)
def test_put_fields_out_of_their_limits(field: int, value: object) -> None:
    fields = [*PUT_FIELDS[:field], value, *PUT_FIELDS[field + 1 :]]
    with pytest.raises(wire.Malformed, match="Put"):
        wire.parse_header(wire.Put.KIND, msgpack.packb(fields))


@pytest.mark.parametrize("header", [b"", b"\xc1", msgpack.packb(PUT_FIELDS)[:-1], msgpack.packb(PUT_FIELDS) + b"\0"])
def test_headers_that_are_not_one_msgpack_value(header: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_header(wire.Put.KIND, header)


@pytest.mark.parametrize(
    "header", [b"\x91" * 60_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_headers_that_promise_depth_or_size_cost_nothing(header: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_header(wire.Put.KIND, header)


def test_too_few_and_too_many_fields() -> None:
    for fields in (PUT_FIELDS[:-1], [*PUT_FIELDS, 0], {}, 5):
        with pytest.raises(wire.Malformed, match="7 fields"):
            wire.parse_header(wire.Put.KIND, msgpack.packb(fields))


def test_the_largest_headers_fit_into_their_limit() -> None:
    put = wire.Put(
        push=2**64 - 1,
        token=bytes(16),
        request_id="\U0001f600" * 128,
        attempt=2**32 - 1,
        region=2**16 - 1,
        positions=bytes(4 * wire.MAX_ROWS_PER_PUT),
        checksums=bytes(8 * wire.MAX_ROWS_PER_PUT),
    )
    identity = wire.Identity(
        fingerprint="f" * 256,
        regions=(("n" * 24, "g" * 24, 2**40, MAX_LAYOUTS),) * wire.MAX_REGIONS,
        layouts=((2**16, 2**12, 2**12, ((2**20, True),) * MAX_PLANES),) * MAX_LAYOUTS,
        incarnation=bytes(16),
        name="\U0001f600" * 128,
        lease_ms=600_000,
        proof=bytes(32),
    )
    welcome = wire.Welcome(protocol=1, regions=identity.regions, layouts=identity.layouts, lease_ms=1000)
    for message in (put, identity, welcome):
        assert parse(wire.encode(message)) == (message, 0)


def test_headers_add_at_most_two_percent_to_small_rows() -> None:
    row_bytes = 2 * 2 * 64 * (64 + 2)  # K and V of 64 tokens, two heads of size 64, int8 with fp16 scales
    put = wire.Put(
        push=2**32,
        token=bytes(16),
        request_id="r" * wire.MAX_REQUEST_ID_CHARS,
        attempt=1,
        region=30,
        positions=bytes(4),
        checksums=bytes(8),
    )
    assert len(wire.encode(put, row_bytes)) <= 0.02 * row_bytes
