"""The served model's tokenizer and limits, from its directory: text, chats and token ids, both ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from router import chat_template
from router.detokenizer import TokenBytes
from twinpool.errors import ConfigError, InvalidRequest

MOST_CHARS = 4 << 20  # of a text that is tokenized without a limit in tokens: some seconds of one core
MOST_IDS = 4 << 20  # that are made into text at a time
_THREAD_CHARS = 4096  # longer inputs (a millisecond and more) are encoded off the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What clients are told about the model. Lengths in tokens."""

    name: str
    context_length: int
    vocab_size: int
    architecture: str

    @classmethod
    def load(cls, name: str, model_dir: Path, max_context: int = 0) -> ModelCard:
        """Reads config.json; `max_context` (0: none) replaces its own limit. Raises ConfigError on what is missing."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            card = cls(
                name=name,
                context_length=max_context or int(config["max_position_embeddings"]),
                vocab_size=int(config["vocab_size"]),
                architecture=str(config["model_type"]),
            )
            if card.vocab_size < 1 or card.context_length < 1:
                raise ValueError("vocab_size and max_position_embeddings must be at least 1")
            return card
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; check --tokenizer") from error
        except KeyError as error:
            raise ConfigError(f"{path} lacks {error}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is broken: {error}") from error


class Tokenizer:
    """Encodes and decodes for one model. Methods may be called on the event loop; long inputs go to a thread."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """Raises ConfigError when a file is missing or broken."""
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; check --tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is broken: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokens = TokenBytes(self._tokenizer, vocab_size)
        self.vocab_size = vocab_size
        self._longest_token = max(1, *map(len, self.tokens.own))  # bytes, so characters at most
        self._template = chat_template.load(model_dir)

    async def encode(self, text: str, *, special_tokens: bool = True, max_tokens: int = 0) -> list[int]:
        """Token ids of `text`, with the tokens that the tokenizer itself puts around a text unless told otherwise.

        Raises InvalidRequest, without encoding it, for a text that cannot fit in `max_tokens` (0: none given) even if
        every token were the longest of the vocabulary; without a limit, for one that would keep a thread for long.
        """
        if not max_tokens and len(text) > MOST_CHARS:
            raise InvalidRequest(
                f"input has {len(text)} characters: at most {MOST_CHARS} are tokenized at a time; send it in parts",
                field="input",
            )
        if max_tokens and len(text) > max_tokens * self._longest_token:
            raise InvalidRequest(
                f"prompt has {len(text)} characters: those are more than the {max_tokens} tokens of prompt and answer "
                "that the model's context holds",
                field="prompt",
            )
        if len(text) < _THREAD_CHARS:
            return self._encode(text, special_tokens)
        return await asyncio.to_thread(self._encode_long, text, special_tokens)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int = 0) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("chat: this model has no chat template; send text or token ids", field="chat")
        if not messages:
            raise InvalidRequest("chat.messages is empty: at least one message is needed", field="chat.messages")
        text = self._template.render(messages)
        return await self.encode(text, special_tokens=False, max_tokens=max_tokens)  # the template wrote special ones

    async def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Text of `token_ids`, as the tokenizers library decodes them at once. Raises InvalidRequest."""
        self.check(token_ids)
        if len(token_ids) < _THREAD_CHARS:
            return self._decode(token_ids, keep_special_tokens)
        return await asyncio.to_thread(self._decode, token_ids, keep_special_tokens)

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest unless every id is in the vocabulary."""
        worst = max(token_ids, default=0)
        if worst >= self.vocab_size:
            raise InvalidRequest(
                f"token_ids has {worst}: the vocabulary's ids are 0 to {self.vocab_size - 1}", field="token_ids"
            )

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _encode_long(self, text: str, special_tokens: bool) -> list[int]:
        """As `_encode`; only the library's batches let go of the interpreter, so that the event loop goes on."""
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=special_tokens)[0].ids
        return ids

    def _decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special_tokens)
        return text
