"""A client that goes away at any moment: both workers hear of it and nothing stays held."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fakes import Deployment, Fault
from tests.router.conftest import Api, Start, eventually, held, question

PROMPT = list(range(40, 80))


@pytest.mark.parametrize("fault", [Fault.NO_ROWS, Fault.HANG, Fault.SLOW_TRANSFER, Fault.NONE])
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancel_frees_both_workers_in_every_phase(api: Api, fakes: Deployment, method: str, fault: Fault) -> None:
    prefill = await fakes.prefill()
    decode = await fakes.decode(step_s=0.01)
    await api.ready(2)
    (decode if fault is Fault.NO_ROWS else prefill).faults.append(fault)
    call = getattr(api.stub, method)(question(PROMPT, max_tokens=400), timeout=20)
    reader = asyncio.ensure_future(call if method == "Generate" else call.read())
    await eventually(lambda: prefill.running if fault is Fault.HANG else decode.open)
    await asyncio.sleep(0.03)
    call.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await eventually(lambda: not fakes.held and not held(api.router), timeout_s=1)


async def test_channel_that_closes_ends_its_requests(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.01)
    await api.ready(2)
    other = Api(api.router)
    calls = [asyncio.ensure_future(other.generate(PROMPT, max_tokens=400)) for _ in range(5)]
    await eventually(lambda: api.router.front_door.running == 5)
    await other.channel.close()
    await asyncio.gather(*calls, return_exceptions=True)
    await eventually(lambda: not fakes.held and not held(api.router), timeout_s=2)


async def test_queued_requests_leave_when_their_clients_do(start: Start) -> None:
    api = await start(decode_slots=1)
    async with Deployment(api.address) as fakes:
        await fakes.prefill()
        decode = await fakes.decode(step_s=0.01)
        await api.ready(2)
        calls = [api.stub.Generate(question(PROMPT, max_tokens=400), timeout=20) for _ in range(200)]
        await eventually(lambda: api.router.front_door.queued == 199)
        for call in calls:
            call.cancel()
        await eventually(lambda: not held(api.router) and not fakes.held, timeout_s=5)
        assert len(decode.submits) < 50  # those that were next when the one before was cancelled
        assert len((await api.generate(PROMPT, max_tokens=5)).choices[0].token_ids) == 5


async def test_random_cancels_leave_nothing_and_spoil_nobody(api: Api, fakes: Deployment) -> None:
    for name in ("0", "1"):
        await fakes.prefill("p" + name)
        await fakes.decode("d" + name, step_s=0.001)
    await api.ready(4)
    draw = random.Random(3)
    probe = (await api.generate(PROMPT, max_tokens=30)).choices[0].token_ids

    async def leave(after_s: float, n: int) -> None:
        call = api.stub.GenerateStream(question(PROMPT, max_tokens=300, n=n), timeout=20)
        reader = asyncio.ensure_future(call.read())
        await asyncio.sleep(after_s)
        for _ in range(3):
            call.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    leaving = [leave(draw.random() * 0.2, draw.randrange(1, 4)) for _ in range(100)]
    staying = [api.generate(PROMPT, max_tokens=30) for _ in range(20)]
    results = await asyncio.gather(*leaving, *staying)
    assert all(result.choices[0].token_ids == probe for result in results[100:])


async def test_slow_client_holds_up_nobody_and_loses_nothing(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode()
    await api.ready(2)
    slow = api.stream(PROMPT, max_tokens=300)
    tokens = list((await anext(slow)).choices[0].token_ids)
    assert len((await api.generate(PROMPT, max_tokens=300)).choices[0].token_ids) == 300
    async for chunk in slow:
        tokens += [token for delta in chunk.choices for token in delta.token_ids]
    assert tokens == list((await api.generate(PROMPT, max_tokens=300)).choices[0].token_ids)
