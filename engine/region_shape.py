"""What a cache consists of: regions, each an array of equal rows, for what the layers of a model remember.

A region has a row for every block of tokens, or one for every sequence: what does not grow with a sequence (windows,
sums that are not whole yet), and what a step may overwrite. Block b of a sequence lies in the same row of every region
of blocks, and a sequence's state in the same row of every region of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Per = Literal["block", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """What the row of a block is made of: planes side by side, each head-major [heads, tokens, item_bytes]."""

    tokens: int
    num_heads: int
    item_bytes: tuple[int, ...]  # of each plane, for one head and token
    is_shared: bool  # every plane has one head of its own, which belongs to all


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionShape:
    """One region without its memory. parts: None where a row can only be taken as a whole."""

    name: str  # unique; at most 24 characters, which is what fits into a transfer's handshake
    layer: int
    per: Per
    row_bytes: int
    parts: BlockParts | None = None


def row_bytes(regions: Iterable[RegionShape], per: Per) -> int:
    """What one block, or one sequence, takes over all layers."""
    return sum(each.row_bytes for each in regions if each.per == per)
