"""Makes a receiver's rows out of a sender's that are cut differently: other block sizes, more heads.

All of it is the sender's work, and what leaves is exactly what the receiver would have got from a sender like itself:

    token t of a sequence    lies in source row t // source tokens and in destination row t // destination tokens
    head h of the model      is head h - first_head of either side's planes

The pushes of a mapped link say which of *their* positions are final. A destination position can leave once every
source position that holds one of its tokens is final (`Collected.add`); then it is gathered, plane by plane, into the
link's one staging buffer (`LinkMapping.gather`), which the frame is sent from. Tokens behind the end of the sequence
become zeros.

Links whose two sides are equal know nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import Shape
from kvtransfer.region import Region
from kvtransfer.target import Span
from twinpool.errors import TransferFailed

STAGING_BYTES = 1 << 20  # gathered for one frame, or one row if that is larger

_Bytes = npt.NDArray[np.uint8]


class LinkMapping:
    """One link's. `regions`: what its frames are sent from, in the receiver's row format. The link's thread owns it."""

    def __init__(self, sources: Sequence[Region], receiver: Sequence[Shape]) -> None:
        """receiver: shapes that check_mappable has found to fit the sources."""
        size = max(STAGING_BYTES, *(shape.row_bytes for shape in receiver))
        staging = memoryview(bytearray(size))
        self.regions = [
            Region(
                name=shape.name,
                group=shape.group,
                buffer=staging[: size // shape.row_bytes * shape.row_bytes],
                row_bytes=shape.row_bytes,
                layout=shape.layout,
            )
            for shape in receiver
        ]
        self._copies = [_Copy(source, region) for source, region in zip(sources, self.regions, strict=True)]

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(copy.change for copy in self._copies if copy.change is not None))

    def collect(self, spans: Mapping[str, Span]) -> Collected:
        """For a new push."""
        return Collected([copy.cut(spans.get(copy.group, Span(first=0, size=0))) for copy in self._copies])

    def gather(self, collected: Collected, region: int, positions: Sequence[int]) -> tuple[int, ...]:
        """Makes these destination positions in the staging buffer; their rows there, in the same order."""
        copy, cut = self._copies[region], collected.cuts[region]
        for row, position in enumerate(positions):
            copy.make(row, position, cut, collected.rows[region])
        return tuple(range(len(positions)))


class Cut:
    """One push's span of one region: which tokens there are, and which positions of either side hold them."""

    def __init__(self, name: str, span: Span, source_tokens: int, tokens: int, num_tokens: int) -> None:
        """source_tokens, tokens: in one position of the sender, of the receiver; num_tokens: of the whole sequence."""
        self.name = name
        self.first = span.first
        self.source_tokens = source_tokens
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.num_sources = -(-num_tokens // source_tokens)
        self.fits = -(-num_tokens // tokens) == span.size

    def sources_of(self, position: int) -> range:
        """The source positions that hold tokens of this destination position."""
        end = min((position + 1) * self.tokens, self.num_tokens)
        return range(position * self.tokens // self.source_tokens, -(-end // self.source_tokens))

    def destinations_of(self, source: int) -> range:
        """The destination positions, as far as they are wanted, that hold tokens of this source position."""
        end = min((source + 1) * self.source_tokens, self.num_tokens)
        return range(max(self.first, source * self.source_tokens // self.tokens), -(-end // self.tokens))


class Collected:
    """One push's: which source positions are final, and in which rows they are. The link's thread owns it."""

    def __init__(self, cuts: list[Cut]) -> None:
        self.cuts = cuts
        self.rows: list[dict[int, int]] = [{} for _ in cuts]

    def add(self, region: int, positions: Sequence[int], rows: Sequence[int]) -> list[int]:
        """These source positions are final. The destination positions that are complete with them, in order.

        Raises TransferFailed for positions beyond the reservation, and for those that were added before.
        """
        cut, known = self.cuts[region], self.rows[region]
        if not cut.fits or not 0 <= min(positions) <= max(positions) < cut.num_sources:
            raise TransferFailed(
                f"positions {min(positions)} to {max(positions)} of region {cut.name!r}, of {cut.source_tokens} tokens "
                f"each, do not fit into the {cut.num_tokens} tokens that were reserved"
            )
        touched = set[int]()
        for position, row in zip(positions, rows, strict=True):
            wanted = cut.destinations_of(position)
            if not wanted:
                continue  # the receiver has all of its tokens
            if position in known:
                raise TransferFailed(f"position {position} of region {cut.name!r} was put twice")
            known[position] = row
            touched.update(wanted)
        return [each for each in sorted(touched) if all(source in known for source in cut.sources_of(each))]


class _Copy:
    """From the rows of one region into rows of the staging buffer. An opaque row is one token that is never split."""

    def __init__(self, source: Region, destination: Region) -> None:
        self.group = source.group
        self._name = source.name
        self._source_tokens = 1 if source.layout is None else source.layout.tokens
        self._tokens = 1 if destination.layout is None else destination.layout.tokens
        self._is_opaque = source.layout is None
        self.change = None if source.layout == destination.layout else f"{source.layout} become {destination.layout}"
        self._planes = list(_planes(source, destination))

    def cut(self, span: Span) -> Cut:
        num_tokens = span.size * self._tokens if self._is_opaque or not span.tokens else span.tokens
        return Cut(self._name, span, self._source_tokens, self._tokens, num_tokens)

    def make(self, row: int, position: int, cut: Cut, rows: Mapping[int, int]) -> None:
        """Row `row` of the staging buffer becomes destination position `position`."""
        begin = position * cut.tokens
        end = min(begin + cut.tokens, cut.num_tokens)
        for source in cut.sources_of(position):
            source_begin, source_row = source * cut.source_tokens, rows[source]
            low, high = max(begin, source_begin), min(end, source_begin + cut.source_tokens)
            for size, theirs, mine in self._planes:
                mine[row, :, (low - begin) * size : (high - begin) * size] = theirs[
                    source_row, :, (low - source_begin) * size : (high - source_begin) * size
                ]
        if end < begin + cut.tokens:
            for size, _, mine in self._planes:
                mine[row, :, (end - begin) * size :] = 0


def _planes(source: Region, destination: Region) -> Iterator[tuple[int, _Bytes, _Bytes]]:
    """For every plane its item bytes, and the heads that the destination wants as views of both sides' memory.

    Views: [rows, heads, tokens x item bytes].
    """
    theirs, mine = source.layout, destination.layout
    if theirs is None or mine is None:
        size = source.row_bytes
        yield size, _view(source, 0, 1, size), _view(destination, 0, 1, size)
        return
    skipped = mine.first_head - theirs.first_head
    source_offset = offset = 0
    for plane in mine.planes:
        size = plane.item_bytes
        source_heads, heads = theirs.heads_of(plane), mine.heads_of(plane)
        first = 0 if plane.is_shared else skipped
        view = _view(source, source_offset, source_heads, theirs.tokens * size)
        yield size, view[:, first : first + heads], _view(destination, offset, heads, mine.tokens * size)
        source_offset += source_heads * theirs.tokens * size
        offset += heads * mine.tokens * size


def _view(region: Region, offset: int, heads: int, head_bytes: int) -> _Bytes:
    """Part of every row: [rows, heads, head bytes]; the same memory."""
    rows = np.frombuffer(region.buffer, dtype=np.uint8).reshape(region.num_rows, region.row_bytes)
    return rows[:, offset : offset + heads * head_bytes].reshape(region.num_rows, heads, head_bytes)
