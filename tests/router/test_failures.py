"""Workers fail in every way that they can; the client sees a whole answer or one typed error; nothing is held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from tests.fakes import Deployment, FakeDecode, FakePrefill, Fault, letters
from tests.router.conftest import Api, Start, eventually
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

PROMPT = list(range(40, 80))


def answer(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    return letters(prompt, choice)[:count]


async def two_and_two(api: Api, fakes: Deployment, step_s: float = 0.0) -> None:
    for name in ("0", "1"):
        await fakes.prefill("p" + name)
        await fakes.decode("d" + name, step_s=step_s)
    await api.ready(4)


def prefills(fakes: Deployment) -> list[FakePrefill]:
    return [worker for worker in fakes.workers if isinstance(worker, FakePrefill)]


def decodes(fakes: Deployment) -> list[FakeDecode]:
    return [worker for worker in fakes.workers if isinstance(worker, FakeDecode)]


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.UNAVAILABLE, Fault.FULL, Fault.WRONG_COUNT])
async def test_failed_prefill_is_retried_on_the_other_worker(api: Api, fakes: Deployment, fault: Fault) -> None:
    await two_and_two(api, fakes)
    for worker in prefills(fakes):
        worker.faults.append(fault)
    for worker in prefills(fakes)[1:]:
        worker.faults.clear()
    results = [await api.generate(PROMPT, max_tokens=9) for _ in range(4)]
    assert all(list(result.choices[0].token_ids) == answer(PROMPT, 9) for result in results)
    assert {result.timeline.attempts for result in results} == {1, 2}
    retried = next(result for result in results if result.timeline.attempts == 2)
    assert retried.timeline.prefill_worker == "p1"
    attempts = [submit.attempt for decode in decodes(fakes) for submit in decode.submits]
    assert sorted(attempts) == [1, 1, 1, 1, 2]  # the failed attempt's reservation is fenced by a new number


@pytest.mark.parametrize("fault", [Fault.TRANSFER, Fault.DIE_AFTER_COMMIT, Fault.BAD_FIRST])
async def test_prefill_that_fails_after_the_first_token_leaves_no_gap(
    api: Api, fakes: Deployment, fault: Fault
) -> None:
    await two_and_two(api, fakes)
    for worker in prefills(fakes):
        worker.faults.append(fault)
    choices, _ = await collect(api, PROMPT, max_tokens=9, n=2)
    assert [choices[index][0] for index in range(2)] == [answer(PROMPT, 9, index) for index in range(2)]


async def test_rows_that_arrived_before_the_prefill_worker_died_are_used(api: Api, fakes: Deployment) -> None:
    prefill = await fakes.prefill()
    decode = await fakes.decode()
    await api.ready(2)
    prefill.faults.append(Fault.DIE_AFTER_COMMIT)
    result = await api.generate(PROMPT, max_tokens=9)
    assert list(result.choices[0].token_ids) == answer(PROMPT, 9)
    assert result.timeline.attempts == len(decode.submits) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault.DROP_STREAM, Fault.PREEMPT, Fault.FAIL, Fault.TRANSFER_FAILED, Fault.CROWDED, Fault.NONSENSE],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_failed_decode_resumes_without_gap_or_repeat(api: Api, fakes: Deployment, fault: Fault, n: int) -> None:
    await two_and_two(api, fakes)
    for worker in decodes(fakes):
        worker.faults.append(fault)
    decodes(fakes)[1].faults.clear()
    results = [await collect(api, PROMPT, max_tokens=12, n=n, logprobs=1) for _ in range(2)]
    for choices, timeline in results:
        for index in range(n):
            tokens, logprobs, finish = choices[index]
            assert tokens == logprobs == answer(PROMPT, 12, index)
            assert finish == [v1.FINISH_REASON_LENGTH]
        assert timeline.decode_worker in ("d0", "d1")
    assert sum(timeline.attempts > 1 for _, timeline in results) == 1


async def collect(api: Api, prompt: list[int], **fields: object) -> tuple[dict[int, tuple], v1.Timeline]:
    """Per choice: its tokens, the tokens that its logprobs name, its finish reasons. And the timeline."""
    choices: dict[int, tuple[list[int], list[int], list[int]]] = {}
    timeline = v1.Timeline()
    async for chunk in api.stream(prompt, **fields):
        for delta in chunk.choices:
            tokens, logprobs, finish = choices.setdefault(delta.index, ([], [], []))
            tokens += delta.token_ids
            logprobs += [entry.token_id for entry in delta.logprobs]
            finish += [delta.finish_reason] if delta.finish_reason else []
        timeline = chunk.timeline
    return choices, timeline


async def test_resumption_tells_workers_where_the_prompt_ends(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes)
    for worker in decodes(fakes):
        worker.faults.append(Fault.DROP_STREAM)
    decodes(fakes)[0].faults.append(Fault.NONE)
    result = await api.generate(PROMPT, max_tokens=12, n=2, seed=5, min_tokens=3)
    assert [list(choice.token_ids) for choice in result.choices] == [answer(PROMPT, 12, i) for i in range(2)]
    resumed = [request for worker in prefills(fakes) for request in worker.requests if request.attempt > 1]
    for request in resumed:
        assert request.num_prompt_tokens == len(PROMPT)
        assert list(request.token_ids[: len(PROMPT)]) == PROMPT
        assert request.sampling.n == 1
        assert (request.sampling.seed, request.sampling.min_tokens, request.sampling.max_tokens) == (5, 3, 12)
    assert {request.first_choice for request in resumed} == {0, 1}
    assert len({request.attempt for request in resumed}) == len(resumed)


async def test_stop_string_is_found_across_a_change_of_workers(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes)
    for worker in decodes(fakes):
        worker.faults.append(Fault.DROP_STREAM)
    text = bytes(answer(PROMPT, 40)).decode()
    stop = text[2:4]  # its first character comes from the lost worker, its second from the next
    result = await api.generate(PROMPT, max_tokens=40, stop=[stop])
    assert result.choices[0].text == text[: text.index(stop)]
    assert result.choices[0].finish_reason == v1.FINISH_REASON_STOP


async def test_echo_is_not_repeated_by_a_resumption(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes)
    for worker in decodes(fakes):
        worker.faults.append(Fault.DROP_STREAM)
    result = await api.generate(PROMPT, max_tokens=9, echo=True, logprobs=0)
    assert list(result.choices[0].token_ids) == PROMPT + answer(PROMPT, 9)
    assert len(result.choices[0].logprobs) == 49
    assert [r.sampling.echo for w in prefills(fakes) for r in w.requests if r.attempt > 1] == [False] * (
        result.timeline.attempts - 1
    )


@pytest.mark.parametrize(
    ("fault", "kind"), [(Fault.TRANSFER, errors.TransferFailed), (Fault.REFUSE, errors.WorkerLost)]
)
async def test_attempts_are_limited(start: Start, fault: Fault, kind: type[errors.TwinpoolError]) -> None:
    api = await start(max_attempts=3)
    async with Deployment(api.address) as fakes:
        await two_and_two(api, fakes)
        for worker in prefills(fakes):
            worker.faults += [fault] * 9
        with pytest.raises(kind, match="3 attempts") as caught:
            await api.generate(PROMPT, max_tokens=9)
        assert caught.value.code.name == "UNAVAILABLE"
        assert sum(len(worker.requests) for worker in prefills(fakes)) == 3
        await eventually(lambda: not fakes.held)


async def test_workers_without_room_are_not_held_to_be_faulty(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    decode = await fakes.decode()
    await api.ready(2)
    decode.faults += [Fault.CROWDED] * 3
    with pytest.raises(errors.Overloaded) as caught:
        await api.generate(PROMPT, max_tokens=9)
    assert caught.value.retry_after_s is not None
    await api.ready(2)
    assert (await api.generate(PROMPT, max_tokens=9)).timeline.attempts == 1


@pytest.mark.parametrize("worker", ["prefill", "decode"])
async def test_refusal_of_the_request_itself_is_not_retried(api: Api, fakes: Deployment, worker: str) -> None:
    await two_and_two(api, fakes)
    for each in fakes.workers:
        each.faults += [Fault.INVALID if worker == "prefill" else Fault.NONE] * isinstance(each, FakePrefill)
        each.faults += [Fault.REJECT if worker == "decode" else Fault.NONE] * isinstance(each, FakeDecode)
    with pytest.raises(errors.InvalidRequest):
        await api.generate(PROMPT, max_tokens=9)
    assert sum(len(decode.submits) for decode in decodes(fakes)) == 1


async def test_killed_decode_worker_is_noticed_and_avoided(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes, step_s=0.005)
    tokens: list[int] = []
    async with aclosing(api.stream(PROMPT, max_tokens=60)) as stream:
        while len(tokens) < 10:
            tokens += (await anext(stream)).choices[0].token_ids
        victim = next(worker for worker in decodes(fakes) if worker.open)
        await victim.stop()
        async for chunk in stream:
            tokens += [token for delta in chunk.choices for token in delta.token_ids]
            timeline = chunk.timeline
    assert tokens == answer(PROMPT, 60)
    assert timeline.attempts == 2
    assert timeline.decode_worker != victim.name
    for _ in range(20):
        result = await api.generate(PROMPT, max_tokens=3)
        assert result.timeline.decode_worker != victim.name
        assert result.timeline.attempts == 1


async def test_killed_decode_worker_with_nobody_left_is_an_error(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    decode = await fakes.decode(step_s=0.005)
    await api.ready(2)
    async with aclosing(api.stream(PROMPT, max_tokens=400)) as stream:
        for _ in range(5):
            await anext(stream)
        await decode.stop()
        with pytest.raises(errors.WorkerLost):
            await rest(stream)


async def rest(stream: AsyncIterator[v1.GenerateChunk]) -> None:
    async for _ in stream:
        pass


async def test_frozen_worker_is_given_up_with_its_lease(start: Start) -> None:
    api = await start(heartbeat_ms=50, lease_ms=300)
    async with Deployment(api.address) as fakes:
        await fakes.prefill("p0")
        frozen = await fakes.decode("frozen")
        await api.ready(2)
        frozen.faults.append(Fault.NO_ROWS)
        request = asyncio.ensure_future(api.generate(PROMPT, max_tokens=9))
        await eventually(lambda: frozen.submits)
        await fakes.decode("d1")
        assert frozen.registration is not None
        await frozen.registration.stop()  # no more reports; its server still takes what it is sent
        result = await request
        assert list(result.choices[0].token_ids) == answer(PROMPT, 9)
        assert (result.timeline.decode_worker, result.timeline.attempts) == ("d1", 2)


async def test_hanging_prefill_is_given_up_with_its_lease(start: Start) -> None:
    api = await start(heartbeat_ms=50, lease_ms=300)
    async with Deployment(api.address) as fakes:
        frozen = await fakes.prefill("frozen")
        decode = await fakes.decode("d0")
        await api.ready(2)
        frozen.faults.append(Fault.HANG)
        request = asyncio.ensure_future(api.generate(PROMPT, max_tokens=9))
        await eventually(lambda: frozen.requests)
        await fakes.prefill("p1")
        assert frozen.registration is not None
        await frozen.registration.stop()
        result = await request
        assert list(result.choices[0].token_ids) == answer(PROMPT, 9)
        assert (result.timeline.prefill_worker, result.timeline.attempts) == ("p1", 2)
        assert [submit.attempt for submit in decode.submits] == [1, 2]


async def test_worker_that_fails_all_calls_is_left_alone_and_heals(api: Api, fakes: Deployment) -> None:
    prefill = await fakes.prefill()
    decode = await fakes.decode()
    await api.ready(2)
    prefill.faults += [Fault.REFUSE] * 5
    with pytest.raises(errors.Unavailable):  # three faults in a row: the breaker opens
        await api.generate(PROMPT, max_tokens=9)
    await eventually(lambda: not decode.open)
    assert len(prefill.requests) == 3

    async def answers() -> bool:
        try:
            return bool(await api.generate(PROMPT, max_tokens=3))
        except errors.Unavailable:
            return False

    await eventually(answers)
    assert (await api.generate(PROMPT, max_tokens=9)).timeline.attempts == 1


async def test_worker_of_a_new_incarnation_replaces_the_old_one(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    old = await fakes.decode("d0", step_s=0.01)
    await api.ready(2)
    async with aclosing(api.stream(PROMPT, max_tokens=100)) as stream:
        tokens = list((await anext(stream)).choices[0].token_ids)
        await fakes.decode("d0")  # the same worker id, a later start
        async for chunk in stream:
            tokens += [token for delta in chunk.choices for token in delta.token_ids]
            timeline = chunk.timeline
    assert tokens == answer(PROMPT, 100)
    assert timeline.attempts == 2
    assert len(old.submits) == 1


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_empty_pool_is_named_after_a_short_wait(api: Api, fakes: Deployment, pool: str) -> None:
    if pool == "prefill":
        await fakes.decode()
    else:
        await fakes.prefill()
    await api.ready(1)
    with pytest.raises(errors.PoolEmpty, match=f"no usable {pool} worker"):
        await api.generate(PROMPT, max_tokens=9)


async def test_request_waits_through_a_restart(start: Start) -> None:
    api = await start(pool_wait=10.0)
    async with Deployment(api.address) as fakes:
        await fakes.prefill()
        request = asyncio.ensure_future(api.generate(PROMPT, max_tokens=9))
        await asyncio.sleep(0.05)
        await fakes.decode()
        assert list((await request).choices[0].token_ids) == answer(PROMPT, 9)


async def test_workers_of_different_fingerprints_are_never_paired(api: Api, fakes: Deployment) -> None:
    await fakes.prefill("p-new", fingerprint="new")
    await fakes.decode("d-old", fingerprint="old")
    await api.ready(2)
    with pytest.raises(errors.PoolEmpty, match="no prefill worker fits any decode worker"):
        await api.generate(PROMPT, max_tokens=9)
    await fakes.decode("d-new", fingerprint="new")
    await fakes.prefill("p-old", fingerprint="old")
    await api.ready(4)
    for result in await asyncio.gather(*(api.generate(PROMPT, max_tokens=9) for _ in range(20))):
        assert result.timeline.prefill_worker[2:] == result.timeline.decode_worker[2:]


async def test_draining_worker_gets_nothing_new_and_finishes_what_it_has(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes, step_s=0.005)
    old = decodes(fakes)[0]
    running = [asyncio.ensure_future(api.generate(PROMPT, max_tokens=60)) for _ in range(4)]
    await eventually(lambda: old.open)
    old.draining = True
    assert old.registration is not None
    old.registration.report_now()
    await api.ready(3)
    before = len(old.submits)
    for _ in range(5):
        assert (await api.generate(PROMPT, max_tokens=3)).timeline.decode_worker == "d1"
    assert len(old.submits) == before
    for result in await asyncio.gather(*running):
        assert list(result.choices[0].token_ids) == answer(PROMPT, 60)
        assert result.timeline.attempts == 1


async def test_worker_of_another_model_is_refused_with_the_reason(
    api: Api, fakes: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    await fakes.prefill("stranger", model="other")
    await eventually(lambda: any("serves model 'other'" in str(vars(record)) for record in caplog.records))
    assert not list(api.router.registry)


async def test_rolling_restart_of_every_worker_fails_no_request(api: Api, fakes: Deployment) -> None:
    await two_and_two(api, fakes, step_s=0.001)
    done = asyncio.Event()

    async def load(seed: int) -> None:
        draw = random.Random(seed)
        while not done.is_set():
            prompt, n = [draw.randrange(256) for _ in range(20)], draw.randrange(1, 3)
            result = await api.generate(prompt, max_tokens=20, n=n)
            assert [list(c.token_ids) for c in result.choices] == [answer(prompt, 20, i) for i in range(n)]

    clients = [asyncio.ensure_future(load(seed)) for seed in range(8)]
    for old in list(fakes.workers):
        fakes.workers.remove(old)
        await old.stop()
        await (fakes.prefill(old.name) if isinstance(old, FakePrefill) else fakes.decode(old.name, step_s=0.001))
        await api.ready(4)
        await asyncio.sleep(0.1)
    done.set()
    await asyncio.gather(*clients)


async def test_a_receiver_that_refuses_corrupt_rows_is_not_to_blame(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    decode = await fakes.decode()
    await api.ready(2)
    decode.faults += [Fault.TRANSFER_FAILED] * 3  # with ChecksumMismatch
    with pytest.raises(errors.TransferFailed):
        await api.generate(PROMPT, max_tokens=9)
    suspicions = {worker.info.worker_id: worker.suspicion for worker in api.router.registry}
    assert suspicions == {"p0": 1.0, "d0": 0.0}
    assert list((await api.generate(PROMPT, max_tokens=9)).choices[0].token_ids) == answer(PROMPT, 9)
