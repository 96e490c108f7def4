"""A worker is used once a generation has passed through it, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from router.prober import ANSWER_TOKENS, MOST_AT_ONCE
from router.router import ROUTER
from tests.fakes import Deployment, Fault
from tests.router.conftest import Api, Start, eventually
from tests.router.test_failures import PROMPT, answer
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

SERVING = health_pb2.HealthCheckResponse.SERVING


async def statuses(api: Api) -> dict[str, tuple[str, str]]:
    """State and reason of every worker."""
    pools = await api.call("GetPools", v1.GetPoolsRequest())
    names = v1.WorkerState.Name
    return {w.worker_id: (names(w.state).removeprefix("WORKER_STATE_"), w.reason) for w in pools.workers}


async def state_of(api: Api, worker: str) -> str:
    return (await statuses(api)).get(worker, ("", ""))[0]


async def health(api: Api) -> Any:
    async with grpc.aio.insecure_channel(api.address) as channel:
        return (await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=ROUTER))).status


@pytest.fixture
async def probing(start: Start) -> Api:
    return await start(probe_timeout=5.0, when_pool_empty="fail")


async def test_a_generation_passes_through_both_and_then_they_are_ready(probing: Api) -> None:
    async with Deployment(probing.address) as fakes:
        prefill = await fakes.prefill()
        await eventually(lambda: list(probing.router.registry))
        assert await statuses(probing) == {
            "p0": ("JOINING", "no decode worker fits it: a generation has to pass through both")
        }
        assert await health(probing) != SERVING
        decode = await fakes.decode()
        await probing.ready(2)
        await eventually(lambda: probing.router.front_door.can_serve)
        await eventually(lambda: len(prefill.probes) == len(decode.probes) == 1)
        (prompt,), (submit,) = prefill.probes, decode.probes
        assert prompt.transfer_target
        assert prompt.request_id == submit.request_id
        assert submit.sampling.max_tokens == ANSWER_TOKENS
        await asyncio.sleep(0.1)
        assert await health(probing) == SERVING
        assert len(prefill.probes) == 1  # once is enough
        assert list((await probing.generate(PROMPT, max_tokens=9)).choices[0].token_ids) == answer(PROMPT, 9)
        assert set((await statuses(probing)).values()) == {("READY", "")}


async def test_nothing_is_learnt_from_probes_and_no_request_counts_them(probing: Api) -> None:
    async with Deployment(probing.address) as fakes:
        await fakes.prefill()
        await fakes.decode()
        await probing.ready(2)
        figures, placement = probing.router._figures, probing.router.front_door._placement
        assert figures.probes.labels("passed")._value.get() == 1
        assert not [s for family in figures.requests.collect() for s in family.samples]
        assert placement.predictor._prefill.predict("p0", (1.0, 1.0, 1.0)) is None
        assert not any(worker.claims for worker in probing.router.registry)


async def test_worker_that_fails_its_probe_is_not_used_says_why_and_is_tried_again(probing: Api) -> None:
    async with Deployment(probing.address) as fakes:
        await fakes.prefill()
        await fakes.decode()
        await probing.ready(2)
        bad = await fakes.decode("bad")
        bad.probe_faults += [Fault.TRANSFER_FAILED] * 2
        bad.registration.report_now()  # type: ignore[union-attr]

        async def says_why() -> bool:
            state, reason = (await statuses(probing)).get("bad", ("", ""))
            return state == "JOINING" and "its probe with p0 failed: row 3 arrived with other bytes" in reason

        await eventually(says_why)
        for _ in range(4):
            assert (await probing.generate(PROMPT, max_tokens=3)).timeline.decode_worker == "d0"
        await eventually(lambda: not bad.probe_faults)
        await probing.ready(3)
        assert len(bad.probes) == 3


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.BAD_FIRST, Fault.WRONG_COUNT, Fault.TRANSFER])
async def test_prefill_worker_that_answers_wrong_is_not_used(probing: Api, fault: Fault) -> None:
    async with Deployment(probing.address) as fakes:
        prefill = await fakes.prefill()
        prefill.probe_faults += [fault] * 100
        await fakes.decode()
        await eventually(lambda: len(prefill.probe_faults) < 99)
        assert "READY" not in {state for state, _ in (await statuses(probing)).values()}
        with pytest.raises(errors.PoolEmpty, match="its probe with"):
            await probing.generate(PROMPT, max_tokens=3)


async def test_probe_is_bounded_in_time_and_another_partner_is_tried(start: Start) -> None:
    api = await start(probe_timeout=0.3)
    async with Deployment(api.address) as fakes:
        frozen = await fakes.prefill("frozen")
        frozen.probe_faults += [Fault.NONE, *[Fault.HANG] * 100]
        await fakes.decode("d0")
        await api.ready(2)
        await fakes.prefill("p1")
        await api.ready(3)
        late = await fakes.decode("late")
        await api.ready(4)
        assert len(late.probes) <= 2
        await eventually(lambda: not late.open)


async def test_request_waits_for_a_probe_rather_than_being_refused(start: Start) -> None:
    api = await start(probe_timeout=5.0, pool_wait=0.05, when_pool_empty="fail")
    async with Deployment(api.address) as fakes:
        slow = await fakes.decode(step_s=0.15)  # a probe takes longer than pool_wait
        await fakes.prefill()
        await eventually(lambda: slow.probes)
        result = await api.generate(PROMPT, max_tokens=3)
        assert list(result.choices[0].token_ids) == answer(PROMPT, 3)


async def test_many_workers_are_not_probed_all_at_once(probing: Api) -> None:
    async with Deployment(probing.address) as fakes:
        most = 0
        for i in range(10):
            await fakes.prefill(f"p{i}")
            await fakes.decode(f"d{i}", step_s=0.01)

        async def all_ready() -> bool:
            nonlocal most
            most = max(most, len(probing.router._prober._running))
            return {state for state, _ in (await statuses(probing)).values()} == {"READY"}

        await eventually(all_ready)
        assert most <= MOST_AT_ONCE
        assert sum(len(worker.probes) for worker in fakes.workers) <= 40


async def test_where_one_pool_serves_alone_it_is_probed_alone_and_its_partner_with_it(start: Start) -> None:
    api = await start(probe_timeout=5.0)
    async with Deployment(api.address) as fakes:
        prefill = await fakes.prefill(serves_alone=True)
        await api.ready(1)
        assert prefill.probes[0].generate
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "aggregated"
        decode = await fakes.decode(serves_alone=True)
        await api.ready(2)
        assert not decode.probes[0].local_prefill
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "split"
        await prefill.stop()
        await eventually(lambda: len(list(api.router.registry)) == 1)
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "aggregated"
        again = await fakes.prefill(serves_alone=True)
        await api.ready(2)
        assert again.probes[0].transfer_target


async def test_every_router_probes_for_itself(start: Start) -> None:
    first, second = await start(probe_timeout=5.0), await start(probe_timeout=5.0)
    async with Deployment(first.address, second.address) as fakes:
        prefill, decode = await fakes.prefill(), await fakes.decode()
        await first.ready(2)
        await second.ready(2)
        assert len({probe.request_id for probe in prefill.probes}) == len(decode.probes) == 2


async def test_router_that_stops_in_a_probe_leaves_nothing(start: Start) -> None:
    api = await start(probe_timeout=5.0)
    async with Deployment(api.address) as fakes:
        prefill, decode = await fakes.prefill(), await fakes.decode()
        prefill.probe_faults.append(Fault.HANG)
        await eventually(lambda: prefill.probes)
        assert await state_of(api, "p0") == "PROBING"
        await api.router.stop(0)
        await eventually(lambda: not decode.open and not fakes.fabric.targets)


async def test_a_worker_that_fits_nobody_is_no_ready_one_beside_a_pair_and_says_why(start: Start) -> None:  # R4, R8
    api = await start(probe_timeout=5.0)
    async with Deployment(api.address) as fakes:
        prefill = await fakes.prefill()
        await fakes.decode()
        await api.ready(2)
        stranger = await fakes.decode("stranger", fingerprint="of a newer version", serves_alone=True)

        async def says_why() -> bool:
            state, reason = (await statuses(api)).get("stranger", ("", ""))
            return state == "JOINING" and "no prefill worker fits it" in reason and "differ in model" in reason

        await eventually(says_why)
        assert not stranger.probes
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "split"
        assert await says_why()
        await prefill.stop()  # no pair is left, and it serves alone
        await eventually(lambda: stranger.probes)
        await api.ready(2)
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.mode == "aggregated"
        await fakes.prefill("newer", fingerprint="of a newer version")
        await api.ready(3)
        assert (await api.generate(PROMPT, max_tokens=9)).timeline.decode_worker == "stranger"
