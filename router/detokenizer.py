"""Text from tokens, one at a time: whole characters only, and in the end the text that decoding all at once gives.

A vocabulary is turned into bytes once (`TokenBytes`); a `Detokenizer` then feeds the bytes of one answer through an
incremental UTF-8 decoder, at a fraction of a microsecond a token, independent of the answer's length. Both kinds of
tokenizer that decoder models use are known: byte-level (GPT-2's table of 256 printable characters) and metaspace
("▁" is a space, "<0xE2>" a byte; SentencePiece). Bytes that are no UTF-8 become U+FFFD, as in the tokenizers library;
only an ill-formed run of "<0x..>" tokens differs: the library drops the well-formed characters in it too, which a
stream has shown by then.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from twinpool.errors import ConfigError

_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """Bytes of every token of a vocabulary.

    `own[id]` are the token's own bytes (logprobs show them); `shown[id]` what it adds to a text: nothing for special
    tokens. `strips_start` says that the tokenizer adds a space before a text, which decoding takes away again.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        """Raises ConfigError when the tokenizer's decoder is of a kind that is not known."""
        steps = list(_decoder_steps(json.loads(tokenizer.to_str())["decoder"]))
        kinds = [step["type"] for step in steps]
        added: Mapping[int, tokenizers.AddedToken] = tokenizer.get_added_tokens_decoder()
        if "ByteLevel" in kinds:
            to_bytes, self.strips_start = _from_byte_level, False
        elif "Metaspace" in kinds or "ByteFallback" in kinds:
            to_bytes, self.strips_start = _from_metaspace, _strips_start(steps)
        else:
            raise ConfigError(
                f"tokenizer.json has a decoder of kind {'+'.join(kinds) or 'none'}; known are ByteLevel, Metaspace and "
                "ByteFallback"
            )
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self.own = [b""] * size  # ids that a padded vocabulary has and the tokenizer lacks stay empty
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            self.own[token_id] = token.encode() if token_id in added else to_bytes(token)
        self.shown = list(self.own)
        for token_id, special in added.items():
            if special.special:
                self.shown[token_id] = b""
        self._texts: dict[int, str | None] = {}

    def text(self, token_id: int) -> str | None:
        """What the token adds to a text that ends with a whole character; None when its bytes are not whole ones."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.shown[token_id].decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text


class Detokenizer:
    """The text of one answer. `at_start`: nothing precedes it (an echoed prompt), as opposed to following a prompt."""

    def __init__(self, tokens: TokenBytes, *, at_start: bool = False) -> None:
        self._tokens = tokens
        self._decoder = _utf8("replace")
        self._pending = False  # part of a character
        self._strip = at_start and tokens.strips_start

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; may be none."""
        if not self._pending and not self._strip:
            text = self._tokens.text(token_id)
            if text is not None:
                return text
        piece = self._tokens.shown[token_id]
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """U+FFFD for what was left of an unfinished character, if any. No push may follow."""
        return self._decoder.decode(b"", True)


def _decoder_steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _strips_start(steps: list[dict[str, Any]]) -> bool:
    return any(
        (step["type"] == "Strip" and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _byte_level_table() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_table()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not in the table's alphabet: the library takes such a token as it is
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
