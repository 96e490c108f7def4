"""Rows between sides that cut their caches differently: every cell arrives where it belongs, the rest is zero."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import KvReceiver, KvSender, Plane, Region, RowLayout, SharedMemory
from kvtransfer.layout import MAX_LAYOUTS, Shape, check_mappable
from kvtransfer.region import check_regions
from kvtransfer.transports.tcp import TcpTransport
from tests.kvtransfer.peers import PATIENCE_S, Ends, named
from twinpool.errors import Incompatible, TransferFailed

PLANES = (Plane(item_bytes=3), Plane(item_bytes=5, is_shared=True), Plane(item_bytes=2))
HEADS = 4


def layout(tokens: int, first_head: int = 0, num_heads: int = HEADS, planes: Sequence[Plane] = PLANES) -> RowLayout:
    return RowLayout(tokens=tokens, first_head=first_head, num_heads=num_heads, planes=tuple(planes))


def make_regions(row: RowLayout, num_rows: int, seed: int, memory: SharedMemory | None = None) -> list[Region]:
    """Two layers "kv" and an opaque "state", random."""
    sizes = [row.row_bytes, row.row_bytes, 11]
    total = sum(sizes) * num_rows
    whole = memory.allocate(total) if memory is not None else memoryview(bytearray(total))
    whole[:] = random.Random(seed).randbytes(total)
    regions, offset = [], 0
    for number, size in enumerate(sizes):
        buffer, offset = whole[offset : offset + size * num_rows], offset + size * num_rows
        group, made_of = ("kv", row) if number < 2 else ("state", None)
        regions.append(Region(name=f"r{number}", group=group, buffer=buffer, row_bytes=size, layout=made_of))
    return regions


def cells(region: Region, rows: Sequence[int], position: int, head: int, token: int) -> bytes:
    """What a row holds for one head and token, read as the layout's definition says, byte by byte."""
    assert region.layout is not None
    lay, row, offset, found = region.layout, bytes(region.row(rows[position])), 0, b""
    for plane in lay.planes:
        heads = 1 if plane.is_shared else lay.num_heads
        own = 0 if plane.is_shared else head - lay.first_head
        begin = offset + (own * lay.tokens + token) * plane.item_bytes
        found += row[begin : begin + plane.item_bytes]
        offset += heads * lay.tokens * plane.item_bytes
    return found


def transfer(
    transport: str,
    theirs: RowLayout,
    mine: RowLayout,
    *,
    num_tokens: int,
    first: int,
    cuts: Sequence[int],
    seed: int,
) -> None:
    rng = random.Random(seed)
    num_source, num_rows = -(-num_tokens // theirs.tokens), -(-num_tokens // mine.tokens)
    source_rows, rows = rng.sample(range(40), num_source), rng.sample(range(40), num_rows)
    memory = SharedMemory()
    source, destination = make_regions(theirs, 40, seed), make_regions(mine, 40, seed + 1, memory)
    before = [bytes(region.buffer) for region in destination]
    name, options = named(transport)
    receiver = KvReceiver(destination, fingerprint="f", transport=name, options=options, memory=memory)
    receiver.start()
    sender = KvSender(source, fingerprint="f", transport=name, options=options)
    try:
        ends, result = Ends(), Ends()
        reservation = receiver.reserve(
            request_id="r", attempt=1, rows={"kv": rows, "state": [7]}, timeout_s=60, on_commit=ends, on_failed=ends,
            expected_from={"kv": first}, tokens={"kv": num_tokens},
        )  # fmt: skip
        push = sender.open(reservation.target, request_id="r", attempt=1, timeout_s=60)
        edges = [0, *sorted(cut % (num_source + 1) for cut in cuts), num_source]
        for begin, end in itertools.pairwise(edges):
            for layer in (1, 0):
                push.put(layer, range(begin, end), source_rows[begin:end])
        push.put(2, [0], [9])
        push.commit(b"", result)
        assert result.wait().error is None
        assert ends.wait().rows == 2 * (num_rows - first) + 1  # every position once
        assert push.closed.wait(PATIENCE_S)
    finally:
        sender.close()
        receiver.close()
        memory.close()
    assert bytes(destination[2].row(7)) == bytes(source[2].row(9))
    for number in range(2):
        for row in range(40):
            position = rows.index(row) if row in rows else -1
            if position < first:
                size = mine.row_bytes
                assert bytes(destination[number].row(row)) == before[number][row * size : (row + 1) * size]
                continue
            for token in range(position * mine.tokens, (position + 1) * mine.tokens):
                for head in range(mine.first_head, mine.end_head):
                    here = cells(destination[number], rows, position, head, token % mine.tokens)
                    if token < num_tokens:
                        there = token // theirs.tokens, head, token % theirs.tokens
                        assert here == cells(source[number], source_rows, *there)
                    elif theirs != mine:  # equal sides send whole rows as they are
                        assert here == bytes(len(here))


over = pytest.mark.parametrize("way", ["tcp", "shm", "tls"])  # the others refuse mapped links
heads = st.integers(0, HEADS - 1).flatmap(lambda f: st.tuples(st.just(f), st.integers(1, HEADS - f)))


@over
@settings(max_examples=40)
@given(
    theirs=st.integers(1, 9),
    mine=st.integers(1, 9),
    wanted=heads,
    num_tokens=st.integers(1, 40),
    skip=st.floats(0, 1),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 1000),
)
def test_every_cell_arrives_once_and_the_rest_is_zero_or_untouched(
    way: str, theirs: int, mine: int, wanted: tuple[int, int], num_tokens: int, skip: float, cuts: list[int],
    seed: int,
) -> None:  # fmt: skip
    first = int(skip * -(-num_tokens // mine))
    transfer(way, layout(theirs), layout(mine, *wanted), num_tokens=num_tokens, first=first, cuts=cuts, seed=seed)


@over
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((0, 4), (0, 4)), ((0, 4), (0, 2)), ((0, 4), (2, 2)), ((0, 2), (0, 2)), ((2, 2), (2, 2))],
)
def test_tensor_parallel_ranks_get_their_heads(
    way: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:  # T2: 1x1, 1x2 (both ranks), 2x2 (rank by rank)
    transfer(way, layout(4, *prefill), layout(8, *decode), num_tokens=21, first=0, cuts=[2], seed=3)


def shape(row: RowLayout | None, *, name: str = "r0", group: str = "kv", row_bytes: int = 0) -> Shape:
    return Shape(name=name, group=group, row_bytes=row_bytes or (row.row_bytes if row else 7), layout=row)


@pytest.mark.parametrize(
    ("receiver", "sender", "reason"),
    [
        ([shape(layout(4))], [shape(layout(4, 0, 2))], "lacks heads.*hold heads 0 to 3"),
        ([shape(layout(4, 0, 2))], [shape(layout(4, 2, 2))], "lacks heads.*tensor-parallel"),
        ([shape(layout(4))], [shape(layout(4, planes=PLANES[:2]))], "same KV dtype"),
        ([shape(layout(4))], [shape(layout(4, planes=PLANES[::-1]))], "same KV dtype"),
        ([shape(layout(4))], [shape(None)], "opaque rows must be equal"),
        ([shape(None, row_bytes=7)], [shape(None, row_bytes=8)], "opaque rows of 7 bytes at the receiver"),
        ([shape(layout(4))], [shape(layout(4), group="other")], "names and groups"),
        ([shape(layout(4)), shape(None, name="x")], [shape(layout(8)), shape(None, name="x")], "divided anew"),
        ([shape(layout(4))], [], "1 cache regions, the sender 0"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_both_layouts(
    receiver: list[Shape], sender: list[Shape], reason: str
) -> None:
    with pytest.raises(Incompatible, match=reason):
        check_mappable(receiver, sender)


@pytest.mark.parametrize(("positions", "problem"), [([0, 0], "put twice"), ([3], "do not fit into the 21 tokens")])
def test_a_mapped_push_that_puts_too_much_fails(positions: list[int], problem: str) -> None:
    receiver = KvReceiver(make_regions(layout(4), 10, 1), fingerprint="f", transport="tcp")
    receiver.start()
    sender = KvSender(make_regions(layout(8), 10, 2), fingerprint="f", transport="tcp")
    try:
        reservation = receiver.reserve(
            request_id="r", attempt=1, rows={"kv": [1, 2, 3, 4, 5, 6]}, timeout_s=60, on_commit=Ends(),
            on_failed=Ends(), tokens={"kv": 21},
        )  # fmt: skip
        push = sender.open(reservation.target, request_id="r", attempt=1, timeout_s=60)
        for position in positions:
            push.put(0, [position], [position])
        assert push.closed.wait(PATIENCE_S)
        assert isinstance(push.error, TransferFailed)
        assert problem in push.error.message
        reservation.release()
        with pytest.raises(ValueError, match="21 tokens do not take 1 rows"):
            receiver.reserve(
                request_id="r", attempt=2, rows={"kv": [1]}, timeout_s=60, on_commit=Ends(), on_failed=Ends(),
                tokens={"kv": 21},
            )  # fmt: skip
    finally:
        sender.close()
        receiver.close()


def test_a_transport_that_sends_registered_memory_only_refuses_to_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpTransport, "caps", replace(TcpTransport.caps, any_source=False))
    receiver = KvReceiver(make_regions(layout(4), 10, 1), fingerprint="f", transport="tcp")
    receiver.start()
    sender = KvSender(make_regions(layout(8), 10, 2), fingerprint="f", transport="tcp")
    try:
        reservation = receiver.reserve(
            request_id="r", attempt=1, rows={"kv": [1]}, timeout_s=60, on_commit=Ends(), on_failed=Ends()
        )
        push = sender.open(reservation.target, request_id="r", attempt=1, timeout_s=60)
        assert push.closed.wait(PATIENCE_S)
        assert type(push.error) is Incompatible
        assert "'tcp' sends from the cache memory only" in push.error.message
        reservation.release()
    finally:
        sender.close()
        receiver.close()


def test_regions_whose_layouts_contradict_them() -> None:
    buffer = memoryview(bytearray(layout(4).row_bytes * 8))
    with pytest.raises(ValueError, match="a row of 4 tokens"):
        Region(name="a", group="kv", buffer=buffer, row_bytes=8, layout=layout(4))
    four = Region(name="a", group="kv", buffer=buffer, row_bytes=layout(4).row_bytes, layout=layout(4))
    half = memoryview(bytearray(layout(2).row_bytes * 8))
    two = Region(name="b", group="kv", buffer=half, row_bytes=layout(2).row_bytes, layout=layout(2))
    with pytest.raises(ValueError, match="'b' has 2 tokens a row, others of group 'kv' 4"):
        check_regions([four, two])
    with pytest.raises(ValueError, match="out of its limits"):
        layout(0)
    many = [
        Region(name=str(n), group=str(n), buffer=memoryview(bytearray(n)), row_bytes=n,
               layout=RowLayout(tokens=n, num_heads=1, planes=(Plane(item_bytes=1),)))
        for n in range(1, MAX_LAYOUTS + 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="row layouts"):
        check_regions(many)


def test_receivers_that_fit_go_on_when_one_that_does_not_joins() -> None:  # C9
    sender = KvSender(make_regions(layout(8), 10, 2), fingerprint="f", transport="tcp")
    receivers = []
    try:
        for number, row in enumerate((layout(8), layout(4), layout(8, planes=PLANES[:2]), layout(8), layout(4))):
            receiver = KvReceiver(make_regions(row, 10, 1), fingerprint="f", transport="tcp")
            receivers.append(receiver)
            receiver.start()
            rows = [1, 2, 3, 4][: -(-16 // row.tokens)]
            reservation = receiver.reserve(
                request_id="r", attempt=1, rows={"kv": rows, "state": [0]}, timeout_s=60, on_commit=Ends(),
                on_failed=Ends(), tokens={"kv": 16},
            )  # fmt: skip
            push = sender.open(reservation.target, request_id="r", attempt=1, timeout_s=60)
            for layer in range(2):
                push.put(layer, [0, 1], [5, 6])
            push.put(2, [0], [1])
            ends = Ends()
            push.commit(b"", ends)
            error = ends.wait().error
            assert isinstance(error, Incompatible) if number == 2 else error is None
            reservation.release()
    finally:
        sender.close()
        for receiver in receivers:
            receiver.close()
