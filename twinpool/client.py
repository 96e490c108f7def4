"""The SDK: `Client`, and `AsyncClient` with the same methods awaited.

    with Client("127.0.0.1:7070") as client:
        print(client.chat("What is the capital of France?", max_tokens=50).text)
        with client.stream("Once upon a time", max_tokens=50, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.usage, stream.timeline)

Every generating call takes the options of `twinpool.options.RequestOptions` by keyword, every client those of
`twinpool.calls.ConnectionOptions`. Failures are the exceptions of `twinpool.errors`. Leaving the `with` of a stream, or
`close()`, cancels the request on the server; so does cancelling the task of an async call.
Clients are safe to share between threads (AsyncClient: between tasks of one event loop).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Self, Unpack

import grpc

from twinpool import options as requests
from twinpool import results
from twinpool.calls import ConnectionOptions, Routers
from twinpool.options import Conversation, Prompt, RequestOptions
from twinpool.results import Answer, Chunk, Decision, Generation, Model, Pools
from twinpool.v1 import router_pb2 as v1


class Client:
    """A connection to one router, or to several of which any will do.

    `address` is HOST:PORT, several separated by commas, or a list: the next is used when one cannot be reached. Without
    one it is TWINPOOL_ROUTERS from the environment, else 127.0.0.1:7070.
    """

    def __init__(self, address: str | Sequence[str] | None = None, **options: Unpack[ConnectionOptions]) -> None:
        self._routers = Routers(address, grpc, **options)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """The whole answer to text, token ids or a conversation."""
        message = self._call("Generate", requests.generate_request(prompt, options), options.get("deadline_s"))
        return results.generation(message)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """The answer as it is made. The request is on its way when this returns."""
        return Stream(self._routers, requests.generate_request(prompt, options), options.get("deadline_s"))

    def chat(self, messages: str | Conversation, **options: Unpack[RequestOptions]) -> Generation:
        """The answer to a conversation, rendered by the model's own chat template; a string is one user message."""
        return self.generate(requests.conversation(messages), **options)

    def stream_chat(self, messages: str | Conversation, **options: Unpack[RequestOptions]) -> Stream:
        """`chat`, streamed."""
        return self.stream(requests.conversation(messages), **options)

    def tokenize(self, prompt: str | Conversation, *, model: str = "", special_tokens: bool = True) -> list[int]:
        """Token ids of a text or of a conversation. `special_tokens` adds those the tokenizer puts around a text."""
        message = self._call("Tokenize", requests.tokenize_request(prompt, model, special_tokens))
        return list(message.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", special_tokens: bool = False) -> str:
        """The text of token ids; `special_tokens` keeps the likes of <|im_end|>."""
        message = self._call("Detokenize", requests.detokenize_request(token_ids, model, special_tokens))
        return str(message.text)

    def models(self) -> list[Model]:
        return results.models(self._call("ListModels", v1.ListModelsRequest()))

    def pools(self) -> Pools:
        """Both pools as the router sees them now."""
        return results.pools(self._call("GetPools", v1.GetPoolsRequest()))

    def explain(self, request_id: str) -> list[Decision]:
        """Why a request of late went to the workers it went to, one decision an attempt. Raises UnknownRequest."""
        return results.decisions(self._call("Explain", v1.ExplainRequest(request_id=request_id)))

    def close(self) -> None:
        """Cancels what is still running and closes the connections. Idempotent."""
        for channel in self._routers.detach():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        attempts = self._routers.attempts(deadline_s)
        while True:
            try:
                answer = attempts.start(method, request)
            except grpc.RpcError as failure:
                time.sleep(attempts.failed(failure))
            else:
                attempts.answered()
                return answer


class Stream(Answer):
    """An answer on its way: iterate for chunks. `usage` and `timeline` are there when it has ended."""

    def __init__(self, routers: Routers, request: v1.GenerateRequest, deadline_s: float | None) -> None:
        super().__init__()
        self._request = request
        self._attempts = routers.attempts(deadline_s)
        self._ended = threading.Event()  # set by the last message, by a failure and by close()
        self._call = self._attempts.start("GenerateStream", request)

    def read(self) -> Generation:
        """Reads on to the end; the whole answer, chunks already seen included."""
        for _ in self:
            pass
        return self._generation(self._request.model)

    def close(self) -> None:
        """Cancels the request on the server if it still runs. Idempotent; iteration then ends without an error."""
        self._ended.set()
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._pending:
            if self._ended.is_set():
                raise StopIteration
            self._receive()
        return self._pending.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _receive(self) -> None:
        """Takes in one message, or ends the stream, or starts the request again where that is safe."""
        try:
            self._add(next(self._call))
            self._attempts.answered()
        except StopIteration:
            self._ended.set()
            self._check_whole()
        except grpc.RpcError as failure:
            if not self._ended.is_set():  # else close() in another thread cancelled it
                self._start_again(failure)

    def _start_again(self, failure: grpc.RpcError) -> None:
        try:
            wait_s = self._attempts.failed(failure, final=self._started)
        except BaseException:
            self._ended.set()
            raise
        if not self._ended.wait(wait_s):
            self._call = self._attempts.start("GenerateStream", self._request)
            if self._ended.is_set():  # closed meanwhile: that close() cancelled the old call
                self._call.cancel()


class AsyncClient:
    """`Client` for asyncio: the same arguments and methods. `stream` returns an AsyncStream without being awaited."""

    def __init__(self, address: str | Sequence[str] | None = None, **options: Unpack[ConnectionOptions]) -> None:
        self._routers = Routers(address, grpc.aio, **options)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """The whole answer to text, token ids or a conversation. Cancelling the task cancels it on the server."""
        message = await self._call("Generate", requests.generate_request(prompt, options), options.get("deadline_s"))
        return results.generation(message)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncStream:
        """The answer as it is made."""
        return AsyncStream(self._routers, requests.generate_request(prompt, options), options.get("deadline_s"))

    async def chat(self, messages: str | Conversation, **options: Unpack[RequestOptions]) -> Generation:
        """The answer to a conversation, rendered by the model's own chat template; a string is one user message."""
        return await self.generate(requests.conversation(messages), **options)

    def stream_chat(self, messages: str | Conversation, **options: Unpack[RequestOptions]) -> AsyncStream:
        """`chat`, streamed."""
        return self.stream(requests.conversation(messages), **options)

    async def tokenize(self, prompt: str | Conversation, *, model: str = "", special_tokens: bool = True) -> list[int]:
        """Token ids of a text or of a conversation. `special_tokens` adds those the tokenizer puts around a text."""
        message = await self._call("Tokenize", requests.tokenize_request(prompt, model, special_tokens))
        return list(message.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", special_tokens: bool = False) -> str:
        """The text of token ids; `special_tokens` keeps the likes of <|im_end|>."""
        message = await self._call("Detokenize", requests.detokenize_request(token_ids, model, special_tokens))
        return str(message.text)

    async def models(self) -> list[Model]:
        return results.models(await self._call("ListModels", v1.ListModelsRequest()))

    async def pools(self) -> Pools:
        """Both pools as the router sees them now."""
        return results.pools(await self._call("GetPools", v1.GetPoolsRequest()))

    async def explain(self, request_id: str) -> list[Decision]:
        """Why a request of late went to the workers it went to, one decision an attempt. Raises UnknownRequest."""
        return results.decisions(await self._call("Explain", v1.ExplainRequest(request_id=request_id)))

    async def close(self) -> None:
        """Cancels what is still running and closes the connections. Idempotent."""
        for channel in self._routers.detach():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        attempts = self._routers.attempts(deadline_s)
        while True:
            try:
                answer = await attempts.start(method, request)
            except grpc.RpcError as failure:
                await asyncio.sleep(attempts.failed(failure))
            else:
                attempts.answered()
                return answer


class AsyncStream(Answer):
    """An answer on its way: `async for` gives chunks. `usage` and `timeline` are there when it has ended."""

    def __init__(self, routers: Routers, request: v1.GenerateRequest, deadline_s: float | None) -> None:
        super().__init__()
        self._request = request
        self._attempts = routers.attempts(deadline_s)
        self._ended = False  # set by the last message, by a failure and by close()
        self._call = self._attempts.start("GenerateStream", request)

    async def read(self) -> Generation:
        """Reads on to the end; the whole answer, chunks already seen included."""
        async for _ in self:
            pass
        return self._generation(self._request.model)

    async def close(self) -> None:
        """Cancels the request on the server if it still runs. Idempotent; iteration then ends without an error."""
        self._ended = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            await self._receive()
        return self._pending.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _receive(self) -> None:
        """Takes in one message, or ends the stream, or starts the request again where that is safe."""
        try:
            message = await self._call.read()
            self._attempts.answered()
            if message is not grpc.aio.EOF:
                self._add(message)
                return
            self._ended = True
            self._check_whole()
        except grpc.RpcError as failure:
            await self._start_again(failure)
        except asyncio.CancelledError:
            if _task_is_cancelled() or not self._ended:  # else close() in another task cancelled the call
                await self.close()
                raise

    async def _start_again(self, failure: grpc.RpcError) -> None:
        try:
            await asyncio.sleep(self._attempts.failed(failure, final=self._started))
        except BaseException:
            self._ended = True
            raise
        if not self._ended:
            self._call = self._attempts.start("GenerateStream", self._request)


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
