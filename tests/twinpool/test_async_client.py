"""AsyncClient against a router in this process: what differs from the sync client is awaiting and cancelling."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tests.twinpool.fake_router import FakeRouter, chunk, fail, one_token_then_silence, tokens_for_ever
from twinpool import AsyncClient, Client, errors
from twinpool.v1 import router_pb2 as v1


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in public:
        ours, theirs = inspect.signature(getattr(Client, name)), inspect.signature(getattr(AsyncClient, name))
        assert ours.parameters == theirs.parameters


async def test_async_generate_stream_and_the_smaller_calls(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        assert (await client.generate("hi")).text == "Paris"
        assert (await client.chat("hi")).token_ids == [11, 12]
        async with client.stream_chat("hi") as stream:
            assert [part.text async for part in stream] == ["Par", "is"]
        assert stream.usage is not None
        assert (await client.stream("hi").read()).finish_reason == "stop"
        assert await client.tokenize("ab") == [1, 97, 98]
        assert await client.detokenize([97]) == "a"
        assert (await client.models())[0].name == "tiny"
        assert (await client.pools()).workers == []


async def test_async_errors_retries_and_failover(router: FakeRouter, dead_address: str) -> None:
    async with AsyncClient([dead_address, router.address]) as client:
        router.fail_with = [errors.Overloaded("full", retry_after_s=0.01)]
        assert (await client.generate("hi")).text == "Paris"
        router.fail_with = [errors.Overloaded("full", retry_after_s=0.01)]
        assert (await client.stream("hi").read()).text == "Paris"
        router.fail_with = [errors.InvalidRequest("bad", field="top_p")]
        with pytest.raises(errors.InvalidRequest) as caught:
            await client.stream("hi").read()
        assert caught.value.field == "top_p"


async def test_async_stream_is_not_retried_after_a_token(router: FakeRouter) -> None:
    def breaks(_request: Any, context: Any) -> Iterator[v1.GenerateChunk]:
        yield chunk("Par", 11)
        fail(context, errors.WorkerLost("gone"))

    router.answer = breaks
    async with AsyncClient(router.address) as client:
        stream = client.stream("hi")
        assert (await anext(stream)).text == "Par"
        with pytest.raises(errors.WorkerLost):
            await anext(stream)
        assert [part async for part in stream] == []
    assert len(router.requests) == 1


@pytest.mark.parametrize("leave", ["close", "with", "task", "unary", "client"])
async def test_async_leaving_cancels_on_the_server(router: FakeRouter, leave: str) -> None:
    router.answer = tokens_for_ever
    client = AsyncClient(router.address)
    if leave == "unary":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate("hi"), 0.3)
    else:
        stream = client.stream("hi")
        await anext(stream)
        if leave == "close":
            await stream.close()
            await stream.close()
        elif leave == "with":
            async with stream:
                pass
        elif leave == "client":
            await client.close()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.read(), 0.3)
    assert await asyncio.to_thread(router.cancelled.wait, 5)
    await client.close()


async def test_async_closing_from_another_task_ends_the_iteration(router: FakeRouter) -> None:
    router.answer = one_token_then_silence
    async with AsyncClient(router.address) as client:
        stream = client.stream("hi")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(stream.close()))
        assert [part async for part in stream] == []


async def test_async_deadline(router: FakeRouter) -> None:
    router.answer = one_token_then_silence
    async with AsyncClient(router.address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("hi", deadline_s=0.3)
        with pytest.raises(errors.DeadlineExceeded):
            await client.stream("hi", deadline_s=0.3).read()
