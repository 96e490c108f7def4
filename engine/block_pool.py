"""Who owns which cache block: reference counts, and a prefix cache over full blocks.

Life of a block: free -> allocated (one reference) -> perhaps published, which makes its content findable by the tokens
that led to it -> shared by later sequences (more references) -> released by all. A published block without references
keeps its content and counts as free: it is handed out only after every plain free block, least recently used first.

Block ids are row ids of every layer's region. Not thread safe: the device thread owns the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import islice

from twinpool.prefix import digests


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # never published or forgotten; the end is handed out first
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, no references; the front is evicted first
        self._block_of: dict[bytes, int] = {}  # digest of (salt, all tokens up to the block's end) -> published block
        self._digest_of: dict[int, bytes] = {}  # the inverse
        self._before: dict[bytes, bytes | None] = {}  # of a published block: the digest of the block before it

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) when fewer are free."""
        if count > self.num_free:
            return None
        block_ids = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._idle.popitem(last=False)
                digest = self._digest_of.pop(block_id)
                del self._block_of[digest], self._before[digest]
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each block, which must be allocated or published."""
        for block_id in block_ids:
            if self._references[block_id] == 0 and block_id not in self._idle:
                raise ValueError(f"block {block_id} is free: only a live block can be retained")
            self._idle.pop(block_id, None)
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block; the last one frees it. Raises ValueError for a block that has none."""
        for block_id in reversed(block_ids):  # the end of a prefix is less likely to be shared: evict it earlier
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is released twice")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id in self._digest_of:
                    self._idle[block_id] = None
                else:
                    self._free.append(block_id)

    def match_prefix(self, token_ids: Sequence[int], salt: str = "", ends: Container[bytes] | None = None) -> list[int]:
        """Published blocks that hold the longest prefix of `token_ids`, retained for the caller.

        Never covers the last token: at least one is left to compute, or there would be nothing to sample from. Blocks
        published under another salt are never found. ends: digests of blocks, if only a prefix that ends with one of
        them is of use.
        """
        found: list[tuple[bytes, int]] = []
        length = 0
        for digest in digests(token_ids, self.block_size, (len(token_ids) - 1) // self.block_size, salt):
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            found.append((digest, block_id))
            if ends is None or digest in ends:
                length = len(found)
        for digest, block_id in found[:length]:
            del self._block_of[digest]
            self._block_of[digest] = block_id  # last in `published`: used just now
        block_ids = [block_id for _, block_id in found[:length]]
        self.retain(block_ids)
        return block_ids

    def publish(self, token_ids: Sequence[int], block_ids: Sequence[int], salt: str = "") -> bytes | None:
        """Makes the full blocks of a sequence findable; the caller must hold them and have computed their content.

        block_ids[i] holds tokens i * block_size to (i + 1) * block_size of `token_ids`. Content that is already
        published stays with the block that has it. Returns the digest of the last full block.
        """
        num_full = min(len(token_ids) // self.block_size, len(block_ids))
        before: bytes | None = None
        for block_id, digest in zip(block_ids, digests(token_ids, self.block_size, num_full, salt), strict=False):
            if digest not in self._block_of and block_id not in self._digest_of:
                self._block_of[digest] = block_id
                self._digest_of[block_id] = digest
                self._before[digest] = before
            before = digest
        return before

    def digest_of(self, block_id: int) -> bytes:
        """Of a published block."""
        return self._digest_of[block_id]

    def whole(self, ends: Iterable[bytes]) -> list[bytes]:
        """Those of `ends` whose blocks are all published, from the first on: prefixes that `match_prefix` can find."""
        known: dict[bytes | None, bool] = {None: True}
        found = []
        for end in ends:
            passed: list[bytes] = []
            digest: bytes | None = end
            while digest not in known and digest in self._before:
                passed.append(digest)
                digest = self._before[digest]
            is_whole = known.get(digest, False)
            known.update(dict.fromkeys(passed, is_whole))
            if is_whole:
                found.append(end)
        return found

    def published(self, most: int) -> list[bytes]:
        """Digests of the blocks that `match_prefix` can find, those found or published last first; at most `most`."""
        return list(islice(reversed(self._block_of), most))
