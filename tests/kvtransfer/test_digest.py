from __future__ import annotations

import pytest

from kvtransfer.digest import Manifest, commit_context, row_checksum


def test_row_checksum_is_xxh3_64() -> None:
    # XXH3_64bits of nothing with seed 0, from the sanity tests of https://github.com/Cyan4973/xxHash
    assert row_checksum(memoryview(b"")) == 0x2D06800538D394C2


def filled(entries: list[tuple[int, int, int]], sizes: tuple[int, ...] = (3, 3)) -> Manifest:
    manifest = Manifest(sizes)
    for region, position, checksum in entries:
        manifest.add(region, [position], [checksum])
    return manifest


BASE = [(0, 0, 11), (0, 1, 12), (1, 2, 13)]


def test_the_order_of_arrival_does_not_matter() -> None:
    assert filled(BASE).digest(b"x") == filled(BASE[::-1]).digest(b"x")


@pytest.mark.parametrize(
    "entries",
    [
        BASE[:2],
        [*BASE, (1, 1, 0)],  # present with checksum 0 is not absent
        [(0, 0, 12), (0, 1, 11), (1, 2, 13)],
        [(1, 0, 11), (1, 1, 12), (0, 2, 13)],
        [(0, 0, 11), (0, 2, 12), (1, 2, 13)],
    ],
)
def test_any_other_rows_give_another_digest(entries: list[tuple[int, int, int]]) -> None:
    assert filled(entries).digest(b"x") != filled(BASE).digest(b"x")


def test_the_context_is_covered() -> None:
    assert filled(BASE).digest(b"x") != filled(BASE).digest(b"y")
    contexts = {commit_context("r", 1, b"note"), commit_context("r", 2, b"note"), commit_context("r1", 1, b"note")}
    assert len(contexts) == 3


def test_counts_and_what_is_missing() -> None:
    manifest = filled(BASE)
    assert manifest.counts() == [2, 1]
    assert manifest.first_missing(0, 0) == 2
    assert manifest.first_missing(1, 0) == 0
    assert manifest.first_missing(1, 2) is None
    assert manifest.first_missing(1, 3) is None
    assert manifest.first_repeated(0, [2]) is None
    assert manifest.first_repeated(0, [2, 1]) == 1
    assert manifest.first_repeated(0, [2, 2]) == 2
