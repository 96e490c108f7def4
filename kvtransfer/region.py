"""Registered memory: a region is one preallocated array of equal rows, and a row is the unit that travels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from kvtransfer.layout import MAX_LAYOUTS, RowLayout, Shape

MAX_REGIONS = 1024
MAX_NAME_CHARS = 24  # so that the list of all regions fits into one header


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """`len(buffer) / row_bytes` rows of `row_bytes` bytes each, side by side.

    buffer: writable, C-contiguous, of any item type and shape; kept as flat bytes. It must outlive the region.
    group: regions of one group share row ids: what owns row 7 of one owns row 7 of all.
    layout: what a row is made of, for peers that cut their caches differently; None: rows are opaque.
    Raises ValueError when the buffer cannot serve.
    """

    name: str
    group: str
    buffer: memoryview
    row_bytes: int
    layout: RowLayout | None = None

    def __post_init__(self) -> None:
        if self.buffer.readonly or not self.buffer.c_contiguous:
            raise ValueError(f"region {self.name!r} needs a writable, C-contiguous buffer")
        if self.row_bytes < 1 or self.buffer.nbytes % self.row_bytes:
            raise ValueError(
                f"region {self.name!r}: {self.buffer.nbytes} bytes are not a whole number of {self.row_bytes}-byte rows"
            )
        if self.layout is not None and self.layout.row_bytes != self.row_bytes:
            raise ValueError(
                f"region {self.name!r}: a row of {self.layout} has {self.layout.row_bytes} bytes, not {self.row_bytes}"
            )
        object.__setattr__(self, "buffer", self.buffer.cast("B"))

    @property
    def shape(self) -> Shape:
        return Shape(name=self.name, group=self.group, row_bytes=self.row_bytes, layout=self.layout)

    @property
    def num_rows(self) -> int:
        return len(self.buffer) // self.row_bytes

    def row(self, row: int) -> memoryview:
        return self.buffer[row * self.row_bytes : (row + 1) * self.row_bytes]

    def rows(self, rows: Sequence[int]) -> RowViews:
        """Those rows, which must exist."""
        return RowViews(self, rows)


class RowViews(Sequence[memoryview]):
    """Some rows of a region. Native calls need their addresses only, which costs a tenth of making the views."""

    def __init__(self, region: Region, rows: Sequence[int]) -> None:
        self.row_bytes = region.row_bytes
        self._region = region
        self._rows = rows
        self._addresses: list[int] | None = None

    def addresses(self) -> list[int]:
        """Of their first bytes; found once."""
        if self._addresses is None:
            begin = ctypes.addressof(ctypes.c_char.from_buffer(self._region.buffer))
            self._addresses = [begin + self.row_bytes * row for row in self._rows]
        return self._addresses

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> RowViews: ...

    def __getitem__(self, index: int | slice) -> memoryview | RowViews:
        if isinstance(index, slice):
            return RowViews(self._region, self._rows[index])
        return self._region.row(self._rows[index])


def check_regions(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of one process, or ValueError where they contradict each other."""
    if not 0 < len(regions) <= MAX_REGIONS:
        raise ValueError(f"{len(regions)} regions; 1 to {MAX_REGIONS} can be transferred")
    if len({region.layout for region in regions}) > MAX_LAYOUTS:
        raise ValueError(f"the regions have more than {MAX_LAYOUTS} row layouts")
    rows_of_group: dict[str, Region] = {}
    tokens_of_group: dict[str, int] = {}
    names: set[str] = set()
    for region in regions:
        if max(len(region.name), len(region.group)) > MAX_NAME_CHARS:
            raise ValueError(f"region {region.name!r}: names and groups have at most {MAX_NAME_CHARS} characters")
        if region.name in names:
            raise ValueError(f"two regions are called {region.name!r}")
        names.add(region.name)
        peer = rows_of_group.setdefault(region.group, region)
        if peer.num_rows != region.num_rows:
            raise ValueError(
                f"regions {peer.name!r} and {region.name!r} share group {region.group!r} "
                f"but hold {peer.num_rows} and {region.num_rows} rows"
            )
        tokens = None if region.layout is None else region.layout.tokens
        if tokens is not None and tokens_of_group.setdefault(region.group, tokens) != tokens:
            raise ValueError(
                f"region {region.name!r} has {tokens} tokens a row, others of group {region.group!r} "
                f"{tokens_of_group[region.group]}"
            )
    return tuple(regions)
