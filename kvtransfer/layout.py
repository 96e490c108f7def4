"""What a row is made of, so that two processes which cut their caches differently can still exchange rows.

A row with a layout holds a block of `tokens` tokens of a sequence, as planes side by side. A plane holds `item_bytes`
for each head and token, head-major: [num_heads, tokens, item_bytes]; a shared plane (latents) has one head of its own,
which is never split. Rows without a layout are opaque: both sides must have the same.

A receiver's row can be made from a sender's when both consist of the same planes and the sender has every head that
the receiver wants; how many tokens a row holds may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.errors import Incompatible

MAX_LAYOUTS = 8  # different ones in one process
MAX_PLANES = 8
MAX_BLOCK_TOKENS = 1 << 16
MAX_HEADS = 1 << 12
MAX_ITEM_BYTES = 1 << 20
MAX_MAPPED_ROW_BYTES = 64 << 20  # one such row is gathered at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    item_bytes: int  # for one head and token
    is_shared: bool = False  # one head that belongs to all


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Raises ValueError for numbers out of their limits."""

    tokens: int  # of a block
    num_heads: int
    first_head: int = 0  # of all heads of the model, the first that is here
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if not (
            1 <= self.tokens <= MAX_BLOCK_TOKENS
            and self.num_heads >= 1
            and 0 <= self.first_head <= MAX_HEADS - self.num_heads
            and 1 <= len(self.planes) <= MAX_PLANES
            and all(1 <= plane.item_bytes <= MAX_ITEM_BYTES for plane in self.planes)
        ):
            raise ValueError(f"a row layout out of its limits: {self}")

    @property
    def end_head(self) -> int:
        return self.first_head + self.num_heads

    def heads_of(self, plane: Plane) -> int:
        return 1 if plane.is_shared else self.num_heads

    @property
    def row_bytes(self) -> int:
        return sum(self.heads_of(plane) * plane.item_bytes for plane in self.planes) * self.tokens

    def __str__(self) -> str:
        planes = " + ".join(f"{plane.item_bytes}{' shared' if plane.is_shared else ''}" for plane in self.planes)
        return f"{self.tokens} tokens x heads {self.first_head} to {self.end_head - 1} x {planes} bytes"

    def pack(self) -> PackedLayout:
        planes = tuple((plane.item_bytes, plane.is_shared) for plane in self.planes)
        return (self.tokens, self.first_head, self.num_heads, planes)

    @classmethod
    def unpack(cls, packed: PackedLayout) -> RowLayout:
        """Raises ValueError like the constructor."""
        tokens, first_head, num_heads, planes = packed
        return cls(
            tokens=tokens,
            first_head=first_head,
            num_heads=num_heads,
            planes=tuple(Plane(item_bytes=item_bytes, is_shared=is_shared) for item_bytes, is_shared in planes),
        )


PackedLayout = tuple[int, int, int, tuple[tuple[int, bool], ...]]  # as it travels


def is_packed_layout(value: Any) -> bool:
    """Whether `value`, which may be anything, has the types of one; the numbers are for `unpack` to check."""
    return (
        type(value) is tuple
        and tuple(map(type, value)) == (int, int, int, tuple)
        and len(value[3]) <= MAX_PLANES
        and all(type(plane) is tuple and tuple(map(type, plane)) == (int, bool) for plane in value[3])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A region without its memory: all that the other side may know of it."""

    name: str
    group: str
    row_bytes: int
    layout: RowLayout | None

    def __str__(self) -> str:
        rows = f"opaque rows of {self.row_bytes} bytes" if self.layout is None else f"rows of {self.layout}"
        return f"{self.name!r} in group {self.group!r}: {rows}"


def check_mappable(receiver: Sequence[Shape], sender: Sequence[Shape]) -> None:
    """Raises Incompatible, with what to change, when the sender's rows cannot be made into the receiver's."""
    if len(receiver) != len(sender):
        raise Incompatible(f"the receiver has {len(receiver)} cache regions, the sender {len(sender)}")
    opaque_groups = {shape.group for shape in receiver if shape.layout is None}
    for index, (mine, theirs) in enumerate(zip(receiver, sender, strict=True)):
        problem = _difference(mine, theirs, mine.group in opaque_groups)
        if problem:
            raise Incompatible(f"cache region {index} is {mine} at the receiver, {theirs} at the sender: {problem}")


def _difference(receiver: Shape, sender: Shape, in_opaque_group: bool) -> str | None:
    """What has to be changed before the one can be made from the other."""
    if receiver == sender:
        return None
    if (receiver.name, receiver.group) != (sender.name, sender.group):
        return "names and groups must be the same; serve the same model with the same version"
    mine, theirs = receiver.layout, sender.layout
    if mine is None or theirs is None:
        return "opaque rows must be equal; serve the same model with the same options, the block size among them"
    if mine.planes != theirs.planes:
        return "the bytes of a token must be the same; set the same KV dtype and serve the same model"
    if not theirs.first_head <= mine.first_head <= mine.end_head <= theirs.end_head:
        return (
            f"the sender lacks heads that the receiver wants; let each sender hold heads {mine.first_head} to "
            f"{mine.end_head - 1}: the tensor-parallel size of prefill must not exceed that of decode"
        )
    if mine.tokens != theirs.tokens and in_opaque_group:
        return "a group with opaque rows cannot be divided anew; set the same block size on both sides"
    if mine.row_bytes > MAX_MAPPED_ROW_BYTES:
        return f"rows over {MAX_MAPPED_ROW_BYTES} bytes are not mapped; set the same block size on both sides"
    return None
