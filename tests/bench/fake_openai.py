"""An OpenAI-compatible server in this process: streams as many tokens as asked for, at a steady pace."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Self

from aiohttp import web

MODEL = "tiny"


class FakeOpenAI:
    """Serves on a thread of its own inside a `with`. What it answers with can be changed; `bodies` are its requests.

    merge: tokens an event, one as a rule; with more and without ids, only usage or the finish reason tell the length.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.gap_s = 0.001  # between tokens, and before the first
        self.merge = 1
        self.short_by = 0  # tokens that an answer lacks
        self.with_ids = True
        self.with_usage = True
        self.status = 200
        self.error_event = False
        self.cached_tokens = 0
        self.extra_prompt_tokens = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.error_event:
            await self._send(response, {"error": {"message": "out of memory"}})
            return response
        total = body["max_tokens"] - self.short_by
        for first in range(0, total, self.merge):
            await asyncio.sleep(self.gap_s)
            count = min(self.merge, total - first)
            last = first + count == total
            choice: dict[str, Any] = {"text": "a" * count, "finish_reason": "length" if last else None}
            if self.with_ids and body.get("return_token_ids"):
                choice["token_ids"] = [7] * count
            await self._send(response, {"choices": [choice]})
        if self.with_usage and body.get("stream_options", {}).get("include_usage"):
            await self._send(response, {"choices": [], "usage": self._usage(body, total)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _usage(self, body: dict[str, Any], total: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(body["prompt"].encode()) + self.extra_prompt_tokens,
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
