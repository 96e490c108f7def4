"""Prefill.Run over real gRPC, with the real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from kvtransfer import KvSender
from kvtransfer.cache_regions import regions
from prefill.metrics import PrefillMetrics
from prefill.scheduler import BatchLimits
from prefill.server import PrefillServer, encode_note
from prefill.worker import Worker
from service.serve import Service, channel, serve
from service.wire import sampling_to_proto
from tests.decode.pair import alone, greedy, load_engine
from twinpool.errors import InvalidRequest, Overloaded, TwinpoolError, from_status
from twinpool.sampling import SamplingParams
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.worker_pb2_grpc import PrefillStub, add_PrefillServicer_to_server


class Served:
    """A prefill worker behind its server. `hold` stops it at the start of its next step."""

    def __init__(self, model: Path) -> None:
        self.oracle = load_engine(model)
        self.engine = load_engine(model)
        self.registry = CollectorRegistry()
        self.sender = KvSender(regions(self.engine.cache), fingerprint=self.engine.fingerprint)
        self.worker = Worker(
            self.engine,
            self.sender,
            BatchLimits(token_budget=64, prompts={"short": 32, "long": 8}),
            PrefillMetrics(self.registry),
            encode_note=encode_note,
            max_requests=12,
        )
        self.server = PrefillServer(self.worker, request_timeout_s=20)
        self.go, self.held = threading.Event(), threading.Event()
        self.go.set()
        forward = self.engine.forward

        def gated(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.go.is_set():
                self.held.set()
                assert self.go.wait(20)
            return forward(*args, **kwargs)

        self.engine.forward = gated  # type: ignore[method-assign]
        self.stub: Any = None

    async def hold(self, *calls: Any) -> None:
        """Returns when the worker stands in a step and has all other calls in its queue."""
        while not self.held.is_set() or self.worker.num_open < len(calls):
            await asyncio.sleep(0.005)

    async def baseline(self) -> None:
        end = time.monotonic() + 5
        while self.worker.num_open or self.engine.blocks.num_free < self.engine.blocks.num_blocks:
            assert time.monotonic() < end, f"{self.worker.num_open} requests are still open"
            await asyncio.sleep(0.005)


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Served]:
    served = Served(model)
    served.worker.start()
    service = Service(name="twinpool.v1.Prefill", add=add_PrefillServicer_to_server, servicer=served.server)
    serving = await serve([service], host="127.0.0.1", port=0)
    async with channel(f"127.0.0.1:{serving.port}") as to_worker:
        served.stub = PrefillStub(to_worker)
        yield served
        served.go.set()
        await served.baseline()
    await serving.stop(grace_s=0)
    served.worker.close()
    served.sender.close()


def request(prompt: list[int], params: SamplingParams, **fields: Any) -> pb.PrefillRequest:
    fields = {"input_class": "short", "request_id": "r", "attempt": 1, "num_prompt_tokens": len(prompt), **fields}
    return pb.PrefillRequest(token_ids=prompt, sampling=sampling_to_proto(params), **fields)


async def events_of(call: Any) -> list[pb.PrefillEvent]:
    try:
        return [event async for event in call]
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code(), error.details() or "", error.trailing_metadata()) from error


async def test_first_token_without_a_target(served: Served) -> None:
    prompt = list(range(10, 50))
    (event,) = await events_of(served.stub.Run(request(prompt, greedy(1, logprobs=2))))
    first = event.first_tokens
    assert [token.token_id for token in first.tokens] == alone(served.oracle, prompt, greedy(1))
    assert first.tokens[0].finish_reason == 2  # FINISH_REASON_LENGTH
    assert first.tokens[0].top[0].token_id == first.tokens[0].token_id
    assert first.tokens[0].top[0].logprob == first.tokens[0].logprob < 0
    assert first.prefill_ms > 0


async def test_every_choice_draws_its_own_token(served: Served) -> None:
    params = SamplingParams(temperature=1.5, n=4, seed=9, max_tokens=1, ignore_eos=True)
    prompt = list(range(10, 50))
    (event,) = await events_of(served.stub.Run(request(prompt, params)))
    expected = [alone(served.oracle, prompt, params, choice)[0] for choice in range(4)]
    assert [token.token_id for token in event.first_tokens.tokens] == expected


@pytest.mark.parametrize(
    ("prompt", "params", "fields", "wrong"),
    [
        ([5000], greedy(2), {}, "token_ids"),
        ([], greedy(2), {}, "num_prompt_tokens"),
        ([1, 2], greedy(2), {"num_prompt_tokens": 3}, "num_prompt_tokens"),
        ([11] * 2048, greedy(2), {}, "prompt"),
        ([11], greedy(2, top_p=0.0), {}, "sampling.top_p"),
        ([11], greedy(2), {"input_class": "huge"}, "input_class"),
        ([11], greedy(2), {"transfer_target": b"no target"}, "transfer_target"),
    ],
)
async def test_wrong_field_is_named(
    served: Served, prompt: list[int], params: SamplingParams, fields: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await events_of(served.stub.Run(request(prompt, params, **fields)))
    assert caught.value.field == wrong


async def test_cancelled_calls_in_the_queue_do_not_delay_the_next(served: Served) -> None:  # L10
    served.go.clear()
    long = [served.stub.Run(request([11 + i] * 600, greedy(1), input_class="long")) for i in range(10)]
    await served.hold(*long)
    for call in long:
        call.cancel()
    short = asyncio.ensure_future(events_of(served.stub.Run(request([50, 60, 70], greedy(1)))))
    await asyncio.sleep(0.05)
    served.go.set()
    await short
    assert served.registry.get_sample_value("twinpool_prefill_batch_prompts_count") == 2  # the held step, and its own


async def test_cancel_during_a_step_frees_the_rows(served: Served) -> None:
    served.go.clear()
    call = served.stub.Run(request([11] * 600, greedy(1), input_class="long"))
    await served.hold(call)
    call.cancel()
    await asyncio.sleep(0.05)
    served.go.set()
    await served.baseline()
    assert served.registry.get_sample_value("twinpool_prefill_ended_total", {"outcome": "cancelled"}) == 1


async def test_full_worker_refuses_at_once(served: Served) -> None:
    served.go.clear()
    calls = [served.stub.Run(request([11, 12 + i], greedy(1))) for i in range(12)]
    await served.hold(*calls)
    with pytest.raises(Overloaded) as caught:
        await events_of(served.stub.Run(request([11], greedy(1))))
    assert caught.value.retry_after_s is not None
    served.go.set()
    for call in calls:
        assert len(await events_of(call)) == 1


async def test_call_ends_at_its_deadline_and_frees_all(served: Served) -> None:
    served.go.clear()
    call = served.stub.Run(request([11] * 40, greedy(1)), timeout=0.2)
    with pytest.raises(TwinpoolError) as caught:
        await events_of(call)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    served.go.set()


async def test_load_tells_what_waits(served: Served) -> None:
    assert served.server.load().rows_free == 512
    served.go.clear()
    calls = [served.stub.Run(request([11 + i] * 300, greedy(1), input_class="long")) for i in range(3)]
    await served.hold(*calls)
    served.go.set()
    for call in calls:
        await events_of(call)
    await served.baseline()
    async with asyncio.timeout(5):
        while (load := served.server.load()).running:  # told after the step
            await asyncio.sleep(0.005)
    assert (load.waiting, load.waiting_tokens, load.rows_free, load.draining) == (0, 0, 512, False)
