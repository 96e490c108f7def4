from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.target import MAX_POSITIONS, MAX_TOKENS, Span, Target
from twinpool.errors import InvalidRequest

GOOD: list[Any] = [3, ["tcp://h:1"], bytes(16), bytes(range(16)), "r1", 3, {"kv": [2, 7, 100]}, "decode-1"]


def test_a_target_survives_its_journey() -> None:
    target = Target(
        endpoints=("tcp://h:1",),
        incarnation=bytes(16),
        token=bytes(range(16)),
        request_id="r1",
        attempt=3,
        spans={"kv": Span(first=2, size=7, tokens=100)},
        name="decode-1",
    )
    assert Target.decode(target.encode()) == target
    assert Target.decode(msgpack.packb(GOOD)) == target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 1),
        (0, 4),
        (1, [1]),
        (1, 5),
        (2, bytes(15)),
        (2, "x" * 16),
        (3, bytes(17)),
        (4, b"r1"),
        (4, "r" * 129),
        (5, -1),
        (5, 1 << 32),
        (5, "3"),
        (5, True),
        (6, []),
        (6, {"kv": [7, 2, 0]}),
        (6, {"kv": [-1, 2, 0]}),
        (6, {"kv": [0, MAX_POSITIONS + 1, 0]}),
        (6, {"kv": [0]}),
        (6, {"kv": [0, 1]}),
        (6, {"kv": [0.0, 1.0, 0]}),
        (6, {"kv": [0, 1, -1]}),
        (6, {"kv": [0, 1, 2.0]}),
        (6, {"kv": [0, 1, MAX_TOKENS + 1]}),
        (6, {1: [0, 1, 0]}),
        (7, 1),
        (7, None),
        (7, "d" * 129),
    ],
)
def test_damaged_targets_are_refused(field: int, value: object) -> None:
    fields = [*GOOD[:field], value, *GOOD[field + 1 :]]
    with pytest.raises(InvalidRequest) as caught:
        Target.decode(msgpack.packb(fields))
    assert caught.value.field == "transfer_target"


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Target.decode(data)


@given(st.data())
def test_mutated_targets_decode_or_are_refused(data: st.DataObject) -> None:
    packed = bytearray(msgpack.packb(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidRequest):
        Target.decode(bytes(packed)).encode()
