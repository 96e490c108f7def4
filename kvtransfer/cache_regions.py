"""A cache as both ends of a transfer see it: what has a row a block is one group, what has one a sequence another.

The prefill worker that sends and the decode worker that receives describe their caches here, so that names, groups and
layouts are the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from kvtransfer.layout import Plane, RowLayout
from kvtransfer.region import Region

BLOCKS, STATES = "kv", "state"  # groups
_GROUPS = {"block": BLOCKS, "sequence": STATES}


class Parts(Protocol):
    """What a row of a block is made of: planes, each [heads, tokens, bytes of an item]."""

    @property
    def tokens(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def item_bytes(self) -> tuple[int, ...]: ...
    @property
    def is_shared(self) -> bool: ...


class CacheRegion(Protocol):
    """One region without its memory. parts: None where a row can only be taken as a whole."""

    @property
    def name(self) -> str: ...
    @property
    def per(self) -> Literal["block", "sequence"]: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def parts(self) -> Parts | None: ...


class Cache(Protocol):
    """`memory[i]` is that of `regions[i]`."""

    @property
    def regions(self) -> Sequence[CacheRegion]: ...
    @property
    def memory(self) -> Sequence[memoryview]: ...


def regions(cache: Cache) -> list[Region]:
    """All of the cache, in its order."""
    return [
        Region(
            name=each.name,
            group=_GROUPS[each.per],
            buffer=buffer,
            row_bytes=each.row_bytes,
            layout=None if each.parts is None else _row_layout(each.parts),
        )
        for each, buffer in zip(cache.regions, cache.memory, strict=True)
    ]


def _row_layout(parts: Parts) -> RowLayout:
    planes = tuple(Plane(item_bytes=size, is_shared=parts.is_shared) for size in parts.item_bytes)
    return RowLayout(tokens=parts.tokens, num_heads=parts.num_heads, planes=planes)
