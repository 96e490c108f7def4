"""One worker does all: short prompts computed by decode workers, and whole answers while a pool is empty."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from router.placement import Pair, Placement, Wait
from router.policies import Mode
from router.pools import Registry, WorkerLoad
from tests.fakes import Deployment, FakeDecode, FakePrefill, Fault
from tests.router.conftest import Api, Start, eventually
from tests.router.test_failures import PROMPT, answer, collect
from tests.router.test_placement import demand, placement
from tests.router.workers import join, registry
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

ALONE = {"serves_alone": True}


async def two(api: Api, fakes: Deployment) -> tuple[FakePrefill, FakeDecode]:
    prefill, decode = await fakes.prefill(**ALONE), await fakes.decode(**ALONE)
    await api.ready(2)
    return prefill, decode


# Local prefill.


async def test_short_prompts_go_to_the_decode_worker_alone(start: Start) -> None:
    api = await start(local_prefill_below="20")
    async with Deployment(api.address) as fakes:
        prefill, decode = await two(api, fakes)
        short = await api.generate(PROMPT[:19], max_tokens=9, n=2)
        assert [list(choice.token_ids) for choice in short.choices] == [answer(PROMPT[:19], 9, i) for i in range(2)]
        assert (short.timeline.mode, short.timeline.attempts) == ("local", 1)
        assert short.timeline.prefill_worker == short.timeline.decode_worker == "d0"
        assert not prefill.requests
        assert decode.submits[0].local_prefill
        assert short.timeline.prefill_ms == 0.5
        longer = await api.generate(PROMPT[:20], max_tokens=9)
        assert (longer.timeline.mode, longer.timeline.prefill_worker) == ("split", "p0")
        one = await api.generate(PROMPT[:19], max_tokens=1)  # nothing to decode
        assert (one.timeline.mode, one.timeline.decode_worker) == ("split", "")


async def test_stop_strings_echo_and_logprobs_hold_in_it(start: Start) -> None:
    api = await start(local_prefill_below="100")
    async with Deployment(api.address) as fakes:
        await two(api, fakes)
        text = bytes(answer(PROMPT, 40)).decode()
        stop = text[5:7]
        result = await api.generate(PROMPT, max_tokens=40, stop=[stop], echo=True, logprobs=1)
        assert result.timeline.mode == "local"
        assert result.choices[0].text == bytes(PROMPT).decode() + text[: text.index(stop)]
        assert [each.token_id for each in result.choices[0].logprobs][: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("fault", [Fault.DROP_STREAM, Fault.PREEMPT, Fault.FAIL, Fault.WRONG_COUNT, Fault.NONSENSE])
async def test_failed_local_prefill_or_answer_resumes_without_gap_or_repeat(start: Start, fault: Fault) -> None:
    api = await start(local_prefill_below="100")
    async with Deployment(api.address) as fakes:
        _, decode = await two(api, fakes)
        await fakes.decode("d1", **ALONE)
        await api.ready(3)
        for worker in (decode, fakes.workers[-1]):
            worker.faults.append(fault)
        fakes.workers[-1].faults.clear()
        results = [await collect(api, PROMPT, max_tokens=12, logprobs=1) for _ in range(2)]
        for choices, timeline in results:
            tokens, logprobs, finish = choices[0]
            assert tokens == logprobs == answer(PROMPT, 12)
            assert finish == [v1.FINISH_REASON_LENGTH]
            assert timeline.mode == "local"
        assert sum(timeline.attempts > 1 for _, timeline in results) == 1


async def test_workers_that_cannot_are_not_asked(start: Start) -> None:
    api = await start(local_prefill_below="100")
    async with Deployment(api.address) as fakes:
        await fakes.prefill()
        await fakes.decode()
        await api.ready(2)
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "split"


def seen(chooser: Placement, *, local_token_s: float = 0.001, prefill_token_s: float = 0.001) -> None:
    """What was learnt of p0 and d0."""
    predictor = chooser.predictor
    for tokens in (10, 20, 40, 80, 160) * 3:
        predictor.prefilled("p0", tokens, 0, prefill_token_s * tokens)
        predictor.prefilled_locally("d0", tokens, 0, local_token_s * tokens)
        predictor.transferred("p0", "d0", tokens, 1000 * tokens, 0.001)
    for requests in (1, 2, 4) * 3:
        predictor.decoded("d0", requests, 0.01 + 0.001 * requests)


def mode(pair: Pair | Wait) -> Mode:
    assert isinstance(pair, Pair)
    pair.release()
    return pair.mode


async def auto() -> tuple[Registry, Placement]:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", serves_alone=True)
    chooser = placement(pools, policy="predict", local_below=None)
    seen(chooser)
    return pools, chooser


ASKED = {"num_tokens": 100, "ttft_s": 1.0, "tpot_s": 0.1}


async def test_auto_keeps_to_the_pools_while_they_are_no_slower() -> None:
    _, chooser = await auto()
    assert mode(chooser.choose(demand(**ASKED))) is Mode.SPLIT


async def test_auto_goes_local_past_a_busy_prefill_pool() -> None:
    pools, chooser = await auto()
    (prefill,) = [worker for worker in pools if worker.info.worker_id == "p0"]
    pools.report(prefill, WorkerLoad(rows_free=100, waiting_tokens=2000, waiting_long_tokens=2000))
    assert mode(chooser.choose(demand(**ASKED))) is Mode.LOCAL


async def test_auto_counts_what_the_running_requests_lose() -> None:
    pools, chooser = await auto()
    prefill, decode = list(pools)
    pools.report(prefill, WorkerLoad(rows_free=100, waiting_tokens=600))
    assert mode(chooser.choose(demand(**ASKED))) is Mode.LOCAL
    pools.report(decode, WorkerLoad(rows_free=100, running=10))  # each would wait 0.1 s
    assert mode(chooser.choose(demand(**ASKED))) is Mode.SPLIT


# A pool is empty.


async def test_prompt_and_answer_by_a_decode_worker_while_no_prefill_worker_is_there(
    api: Api, fakes: Deployment
) -> None:
    await fakes.decode(**ALONE)
    await api.ready(1)
    for max_tokens in (1, 9):
        result = await api.generate(PROMPT, max_tokens=max_tokens, n=2)
        assert [list(each.token_ids) for each in result.choices] == [answer(PROMPT, max_tokens, i) for i in range(2)]
        assert (result.timeline.mode, result.timeline.prefill_worker) == ("aggregated", "d0")
    assert (await api.call("GetPools", v1.GetPoolsRequest())).mode == "aggregated"
    (decision,) = (await api.call("Explain", v1.ExplainRequest(request_id=result.request_id))).decisions
    assert "no pair of workers is there" in decision.reason
    await fakes.prefill()
    await api.ready(2)
    assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "split"
    assert (await api.call("GetPools", v1.GetPoolsRequest())).mode == "split"


@pytest.mark.parametrize("n", [1, 3])
async def test_whole_answers_by_a_prefill_worker_while_no_decode_worker_is_there(
    api: Api, fakes: Deployment, n: int
) -> None:
    prefill = await fakes.prefill(**ALONE)
    await api.ready(1)
    for max_tokens in (1, 9):
        result = await api.generate(PROMPT, max_tokens=max_tokens, n=n)
        assert [list(each.token_ids) for each in result.choices] == [answer(PROMPT, max_tokens, i) for i in range(n)]
        assert (result.timeline.mode, result.timeline.decode_worker) == ("aggregated", "p0")
        assert result.usage.completion_tokens == n * max_tokens
    assert all(request.generate and request.sampling.n == 1 for request in prefill.requests)
    assert len(prefill.requests) == 2 * n
    await fakes.decode()
    await api.ready(2)
    result = await api.generate(PROMPT, max_tokens=9, n=n)
    assert (result.timeline.mode, result.timeline.attempts) == ("split", 1)


async def test_stop_string_ends_the_call_of_a_prefill_worker_that_generates(api: Api, fakes: Deployment) -> None:
    prefill = await fakes.prefill(step_s=0.002, **ALONE)
    await api.ready(1)
    text = bytes(answer(PROMPT, 40)).decode()
    result = await api.generate(PROMPT, max_tokens=400, stop=[text[5:7]], echo=True)
    assert result.choices[0].text == bytes(PROMPT).decode() + text[: text.index(text[5:7])]
    await eventually(lambda: not prefill.running)


async def test_prefill_worker_lost_in_the_answer_is_resumed_on_another(api: Api, fakes: Deployment) -> None:
    for name in ("p0", "p1"):
        worker = await fakes.prefill(name, **ALONE)
    worker.faults.append(Fault.DIE_IN_ANSWER)
    await api.ready(2)
    results = [await collect(api, PROMPT, max_tokens=12, logprobs=1) for _ in range(2)]
    for choices, _ in results:
        assert choices[0][0] == choices[0][1] == answer(PROMPT, 12)
    assert sorted(timeline.attempts for _, timeline in results) == [1, 2]


async def test_answer_goes_on_alone_when_the_last_decode_worker_dies_in_it(api: Api, fakes: Deployment) -> None:
    await fakes.prefill(**ALONE)
    decode = await fakes.decode(step_s=0.005)
    await api.ready(2)
    tokens: list[int] = []
    async with aclosing(api.stream(PROMPT, max_tokens=60)) as stream:
        while len(tokens) < 10:
            tokens += (await anext(stream)).choices[0].token_ids
        await decode.stop()
        async for chunk in stream:
            tokens += [token for delta in chunk.choices for token in delta.token_ids]
            timeline = chunk.timeline
    assert tokens == answer(PROMPT, 60)
    assert (timeline.mode, timeline.attempts, timeline.decode_worker) == ("aggregated", 2, "p0")


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_cancel_frees_the_worker_that_does_all(api: Api, fakes: Deployment, pool: str) -> None:
    await (fakes.prefill(step_s=0.005, **ALONE) if pool == "prefill" else fakes.decode(step_s=0.005, **ALONE))
    await api.ready(1)
    async with aclosing(api.stream(PROMPT, max_tokens=400)) as stream:
        for _ in range(3):
            await anext(stream)
    await eventually(lambda: not fakes.held, seen=lambda: fakes.held)


async def test_a_worker_that_fits_nobody_does_not_stop_a_lone_pool(api: Api, fakes: Deployment) -> None:
    await fakes.prefill(**ALONE)
    await fakes.decode("stranger", fingerprint="other")
    await api.ready(2)
    assert (await api.generate(PROMPT, max_tokens=9)).timeline.decode_worker == "p0"
    await fakes.decode("able", fingerprint="other", **ALONE)
    await api.ready(3)
    assert (await api.generate(PROMPT, max_tokens=9)).timeline.decode_worker == "able"


async def test_fail_names_the_empty_pool_at_once(start: Start) -> None:
    api = await start(when_pool_empty="fail", pool_wait=0.1)
    async with Deployment(api.address) as fakes:
        await fakes.prefill(**ALONE)
        await api.ready(1)
        with pytest.raises(errors.PoolEmpty, match="no usable decode worker"):
            await api.generate(PROMPT, max_tokens=9)


async def test_slots_bound_what_a_lone_pool_takes(start: Start) -> None:
    api = await start(decode_slots=2)
    async with Deployment(api.address) as fakes:
        decode = await fakes.decode(step_s=0.005, **ALONE)
        await api.ready(1)
        calls = [asyncio.ensure_future(api.generate(PROMPT, max_tokens=100)) for _ in range(6)]
        await eventually(lambda: api.router.front_door.queued == 4)
        assert len(decode.submits) <= 2
        for result in await asyncio.gather(*calls):
            assert list(result.choices[0].token_ids) == answer(PROMPT, 100)


async def test_metrics_tell_how_requests_were_served(api: Api, fakes: Deployment) -> None:
    await fakes.prefill(**ALONE)
    await api.ready(1)
    await api.generate(PROMPT, max_tokens=9)
    figures = api.router._figures
    assert figures.attempts.labels("aggregated")._value.get() == 1
    await eventually(lambda: figures.aggregating._value.get() == 1)
    await fakes.decode()
    await eventually(lambda: figures.aggregating._value.get() == 0)
