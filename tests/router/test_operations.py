"""What operators see of a router: health, metrics, log lines, its end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.router import Router
from tests.fakes import Deployment, Fault
from tests.router.conftest import Api, eventually
from twinpool import errors
from twinpool.v1 import worker_pb2
from twinpool.v1.router_pb2 import POOL_DECODE
from twinpool.v1.worker_pb2_grpc import RegistryStub

PROMPT = list(range(40, 80))
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(api: Api, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(api.channel)  # type: ignore[no-untyped-call]
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_tells_living_from_serving(api: Api, fakes: Deployment) -> None:
    router = "twinpool.v1.Router"

    async def is_serving() -> bool:
        return await health(api, router) == SERVING

    async def is_not_serving() -> bool:
        return await health(api, router) == NOT_SERVING

    await eventually(is_not_serving)
    assert await health(api, "") == SERVING
    await fakes.prefill()
    decode = await fakes.decode("d-other", fingerprint="other")
    await api.ready(2)
    assert await is_not_serving()  # two pools, but no pair
    await fakes.decode()
    await eventually(is_serving)
    decode = fakes.workers[-1]
    decode.draining = True
    await eventually(is_not_serving)


def samples(figures: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(figures).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_and_one_log_line_for_each_request(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures = CollectorRegistry()
    config = RouterConfig(tokenizer=str(model_dir), port=0, heartbeat_ms=50, lease_ms=1000)
    router = Router(config, RouterMetrics(figures))
    await router.start()
    api = Api(router)
    caplog.set_level(logging.INFO)
    async with Deployment(api.address) as fakes:
        prefill = await fakes.prefill()
        await fakes.decode(step_s=0.001)
        await api.ready(2)
        prefill.cached_tokens = 16
        await api.generate(PROMPT, max_tokens=5, request_id="good")
        prefill.faults.append(Fault.REFUSE)
        await api.generate(PROMPT, max_tokens=5, request_id="retried", sla_class="batch")
        with pytest.raises(errors.InvalidRequest):
            await api.generate("", request_id="bad")
        call = api.stream(PROMPT, max_tokens=400, request_id="left")
        await anext(call)
        await call.aclose()
        await eventually(lambda: not router.front_door.running)

        def value(name: str, **labels: str) -> float:
            return samples(figures)["twinpool_router_" + name, frozenset(labels.items())]

        assert value("requests_total", sla_class="interactive", outcome="finished") == 1
        assert value("requests_total", sla_class="batch", outcome="finished") == 1
        assert value("requests_total", sla_class="interactive", outcome="cancelled") == 1
        assert value("requests_total", sla_class="none", outcome="InvalidRequest") == 1
        assert value("retries_total", error="Internal") == 1
        assert value("ttft_seconds_count", sla_class="interactive", input_class="short") == 2
        assert value("itl_seconds_count", sla_class="batch") == 4
        assert value("tpot_seconds_count", sla_class="batch", input_class="short") == 1
        assert value("completion_tokens_total", sla_class="batch") == 5
        assert value("cached_tokens_total", sla_class="batch") == 16
        assert value("transfer_bytes_total") >= 8192
        assert value("workers", pool="prefill", state="ready") == 1
        assert value("queued", sla_class="interactive") == value("running") == 0
    lines = {line.request_id: vars(line) for line in caplog.records if line.message == "request"}
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "good": "finished",
        "retried": "finished",
        "bad": "InvalidRequest",
        "left": "cancelled",
    }
    good = lines["good"]
    assert (good["prefill_worker"], good["decode_worker"], good["attempts"]) == ("p0", "d0", 1)
    assert (good["prompt_tokens"], good["completion_tokens"], good["finish_reason"]) == (40, 5, "length")
    assert 0 < good["ttft_ms"] <= good["total_ms"]
    assert lines["retried"]["attempts"] == 2
    assert "prompt is empty" in lines["bad"]["error"]
    await api.channel.close()
    await router.stop(0)


async def test_stop_lets_running_requests_end_and_refuses_new_ones(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.005)
    await api.ready(2)
    running = [asyncio.ensure_future(api.generate(PROMPT, max_tokens=60)) for _ in range(3)]
    await eventually(lambda: api.router.front_door.running == 3)
    stopping = asyncio.ensure_future(api.router.stop(20))
    await asyncio.sleep(0.02)
    with pytest.raises(errors.Unavailable, match="stopping"):
        await api.generate(PROMPT, max_tokens=2)
    assert [len(result.choices[0].token_ids) for result in await asyncio.gather(*running)] == [60] * 3
    await stopping


async def test_stop_cancels_what_does_not_end_in_time(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.05)
    await api.ready(2)
    running = asyncio.ensure_future(api.generate(PROMPT, max_tokens=400))
    await eventually(lambda: api.router.front_door.running == 1)
    await api.router.stop(0.05)
    with pytest.raises(errors.TwinpoolError):
        await running
    assert api.router.front_door.running == 0


async def test_a_worker_that_is_refused_is_in_the_log_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    def stranger(model: str) -> worker_pb2.WorkerReport:
        info = worker_pb2.WorkerInfo(worker_id="d9", pool=POOL_DECODE, address="127.0.0.1:1", model=model)
        return worker_pb2.WorkerReport(info=info)

    stub = RegistryStub(api.channel)
    for model in ("other", "other", "another"):
        with pytest.raises(grpc.aio.AioRpcError, match="serves model"):
            await stub.Join(iter([stranger(model)])).read()
    told = [record for record in caplog.records if record.message == "worker refused"]
    assert [("'other'" in record.reason, "'another'" in record.reason) for record in told] == [
        (True, False),
        (False, True),
    ]
    assert {record.worker for record in told} == {"d9"}
