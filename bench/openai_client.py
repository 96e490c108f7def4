"""Streamed completions of an OpenAI-compatible server, behind the few methods of the SDK that a load needs.

Only what such servers share is asked for: POST {url}/completions with `stream` and, of the widespread extensions,
`ignore_eos`, `min_tokens`, `return_token_ids` and `stream_options.include_usage`. What a server wants besides is
given as `body`, whose nulls remove a field. Failures are the SDK's exceptions and name the peer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from twinpool import errors
from twinpool.results import Usage

UNKNOWN_TOKEN = -1  # stands for each token whose id the server does not tell
_EVENT = b"data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one event adds to the answer."""

    token_ids: list[int]


class OpenAIClient:
    """One server; entered before use. `model` may be empty: the first that it serves."""

    def __init__(
        self, name: str, url: str, *, model: str = "", body: Mapping[str, Any] | None = None, timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.model = model
        self._body = dict(body or {})
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=self._timeout_s)
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def connect(self) -> None:
        """Asks for the models that are served, and takes the first unless one was named. Raises TwinpoolError."""
        async with self._exchange("GET", "/models") as response:
            try:
                served = [str(each["id"]) for each in (await response.json())["data"]]
            except (ValueError, KeyError, TypeError, aiohttp.ContentTypeError) as error:
                raise errors.Internal(
                    f"peer {self.name}: {self.url}/models is no list of models ({error!r}): is this the address of an "
                    "OpenAI-compatible API, up to /v1?"
                ) from error
        if not served or self.model not in ("", *served):
            raise errors.UnknownModel(
                f"peer {self.name}: {self.url} serves {', '.join(served) or 'no model'}, not {self.model or 'one'}; "
                "start it with the model, or correct --peer-model"
            )
        self.model = self.model or served[0]

    @asynccontextmanager
    async def stream(
        self, prompt: str | list[int], *, max_tokens: int, temperature: float, ignore_eos: bool, sla_class: str = ""
    ) -> AsyncIterator[CompletionStream]:
        """An answer of exactly `max_tokens`. Classes are ours alone: `sla_class` is not sent."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "min_tokens": max_tokens if ignore_eos else 0,
            "ignore_eos": ignore_eos,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self._body,
        }
        sent = {key: value for key, value in body.items() if value is not None}
        async with self._exchange("POST", "/completions", sent) as response:
            yield CompletionStream(self.name, response.content, max_tokens)

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200; every other one, and whatever breaks while it is read, is one of our errors."""
        if self._session is None:
            raise errors.Internal(f"peer {self.name}: the client was not entered")
        where = f"peer {self.name}: {self.url}"
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    raise _http_error(self.name, where, response.status, (await response.text())[:500])
                yield response
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"{where} took over {self._timeout_s:g} s; raise --timeout") from error
        except aiohttp.InvalidURL as error:
            raise errors.ConfigError(f"{where} is no address; write it as http://127.0.0.1:8001/v1") from error
        except aiohttp.ClientConnectorError as error:
            raise errors.Unavailable(
                f"{where} cannot be reached ({error.os_error}); start the server, or correct --peer"
            ) from error
        except aiohttp.ClientError as error:
            raise errors.Unavailable(f"{where} broke off ({error!r}); its log should say why") from error


class CompletionStream:
    """`async for` gives pieces; `usage` is there when it has ended, unless the server reports none."""

    def __init__(self, name: str, lines: AsyncIterable[bytes], max_tokens: int) -> None:
        self.usage: Usage | None = None
        self._name = name
        self._lines = lines
        self._max_tokens = max_tokens
        self._finish_reason = ""

    async def __aiter__(self) -> AsyncIterator[Piece]:
        count = 0
        async for line in self._lines:
            if not line.startswith(_EVENT):
                continue
            data = line[len(_EVENT) :].strip()
            if data == b"[DONE]":
                break
            event = self._parse(data)
            token_ids = self._token_ids(event)
            count += len(token_ids)
            if token_ids:
                yield Piece(token_ids=token_ids)
        length = self._length(count)
        if length != self._max_tokens:
            raise errors.Internal(
                f"peer {self._name}: {length} tokens instead of {self._max_tokens} (finish reason "
                f"{self._finish_reason or 'none'}): lengths must be exact to compare; if the server has another "
                "name for ignore_eos, give it with --peer-body"
            )
        if length > count:  # several tokens in one event, without their ids
            yield Piece(token_ids=[UNKNOWN_TOKEN] * (length - count))

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise errors.Internal(f"peer {self._name}: an event is not JSON: {data[:200]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            raise errors.Internal(f"peer {self._name}: failed while it answered: {data[:500].decode()}")
        return event

    def _token_ids(self, event: Mapping[str, Any]) -> list[int]:
        usage = event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self.usage = Usage(
                prompt_tokens=int(usage["prompt_tokens"]),
                cached_tokens=int(details.get("cached_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        choices = event.get("choices") or []
        if not choices:
            return []
        self._finish_reason = choices[0].get("finish_reason") or self._finish_reason
        token_ids = choices[0].get("token_ids")
        if token_ids is not None:
            return [int(each) for each in token_ids]
        return [UNKNOWN_TOKEN] if choices[0].get("text") else []

    def _length(self, count: int) -> int:
        """Tokens of the answer. Some servers hold back unfinished characters, so events alone are not proof."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return self._max_tokens if self._finish_reason == "length" else count


def _http_error(name: str, where: str, status: int, text: str) -> errors.TwinpoolError:
    said = f"{where} answered with HTTP status {status}: {text}"
    if status in (429, 503):
        return errors.Overloaded(f"{said}; lower the load, or give the server longer queues")
    if status in (401, 403):
        return errors.Unauthenticated(f"{said}; start the server without keys")
    if 400 <= status < 500:
        return errors.InvalidRequest(
            f"{said}; a field that it does not know goes with --peer-body {name}='{{\"FIELD\": null}}'"
        )
    return errors.Internal(f"{said}; its log should say why")
