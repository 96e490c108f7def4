from __future__ import annotations

from array import array

import pytest

from kvtransfer import Region
from kvtransfer.region import MAX_REGIONS, check_regions
from tests.kvtransfer.peers import make_regions


def region(num_bytes: int = 40, row_bytes: int = 10, name: str = "a", group: str = "kv") -> Region:
    return Region(name=name, group=group, buffer=memoryview(bytearray(range(num_bytes))), row_bytes=row_bytes)


def test_rows_are_views_of_the_buffer() -> None:
    one = region()
    assert one.num_rows == 4
    assert bytes(one.row(2)) == bytes(range(20, 30))
    one.row(2)[0] = 99
    assert one.buffer[20] == 99


def test_buffers_of_any_item_type_and_shape_are_bytes() -> None:
    floats = array("d", [0.0] * 8)
    assert Region(name="a", group="kv", buffer=memoryview(floats), row_bytes=16).num_rows == 4
    square = memoryview(bytearray(64)).cast("B", (8, 8))
    assert Region(name="a", group="kv", buffer=square, row_bytes=8).num_rows == 8


@pytest.mark.parametrize(
    ("buffer", "row_bytes"),
    [
        (memoryview(b"12345678"), 4),
        (memoryview(bytearray(16))[::2], 4),
        (memoryview(bytearray(10)), 4),
        (memoryview(bytearray(8)), 0),
    ],
)
def test_buffers_that_cannot_serve(buffer: memoryview, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="region 'a'"):
        Region(name="a", group="kv", buffer=buffer, row_bytes=row_bytes)


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        ([], "0 regions"),
        ([region(), region()], "two regions are called 'a'"),
        ([region(), region(20, name="b")], "'a' and 'b' share group 'kv' but hold 4 and 2 rows"),
        ([region(name="n" * 25)], "at most 24 characters"),
        (make_regions(0, num_layers=MAX_REGIONS + 1, num_rows=1, row_bytes=1), "1025 regions"),
    ],
)
def test_regions_that_contradict_each_other(regions: list[Region], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_regions(regions)


def test_groups_may_have_different_numbers_of_rows() -> None:
    assert len(check_regions([region(), region(20, name="b", group="state")])) == 2
