"""Names for cached prefixes, that workers and routers compute alike: one chained digest a block of tokens.

The digest of block i covers the salt and all tokens from the start to the block's end, so that equal digests mean
equal prefixes. Workers report in short form those of the blocks at whose end they can go on; a router looks for the
last of a prompt's that is there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

_DIGEST_BYTES = 16


def digests(token_ids: Sequence[int], block_size: int, num_blocks: int, salt: str = "") -> Iterator[bytes]:
    """Of the first `num_blocks` blocks, 16 bytes each; all of them must be full."""
    digest = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for i in range(num_blocks):
        tokens = array("q", token_ids[i * block_size : (i + 1) * block_size])
        digest = hashlib.blake2b(digest + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
        yield digest


def short(digest: bytes) -> int:
    """What is reported of a digest: 64 bits. Two prefixes that agree in them only cost a wrong guess of the router."""
    return int.from_bytes(digest[:8], "little")


class PromptDigests:
    """The short digests of one prompt, by block size, computed when first asked for."""

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._of: dict[int, tuple[int, ...]] = {}

    def of(self, block_size: int) -> tuple[int, ...]:
        """Of the blocks that a cache could serve: the last token is always left to compute."""
        found = self._of.get(block_size)
        if found is None:
            num_blocks = (len(self._token_ids) - 1) // block_size
            found = tuple(short(each) for each in digests(self._token_ids, block_size, num_blocks, self._salt))
            self._of[block_size] = found
        return found
