"""Decode.Session over real gRPC; the prompts come from a real prefill worker through the real transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.request import Reason
from decode.server import DecodeServer, decode_note
from engine.engine import Engine
from prefill.request import Event, FirstTokens
from prefill.request import Request as PrefillRequest
from service.serve import Service, channel, serve
from service.wire import sampling_to_proto
from tests.decode.pair import Pair, alone, greedy
from tests.decode.test_split_pools import prompt_of
from twinpool.errors import TransferFailed
from twinpool.sampling import FinishReason, SamplingParams
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.worker_pb2_grpc import DecodeStub, add_DecodeServicer_to_server

WAIT_S = 20.0


class Router:
    """One stream to the decode worker, and the prefill calls that go with it."""

    def __init__(self, pair: Pair, stub: Any) -> None:
        self.pair = pair
        self.call = stub.Session()
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.handles: dict[int, str] = {}
        self.in_steps: dict[str, int] = {}  # tokens that came without an event
        self.ended: dict[str, pb.DecodeEnded] = {}
        self.most_requests_in_a_message = 0

    async def submit(self, name: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        self.prompts[name] = (prompt, params)
        fields = {"request_id": name, "attempt": 1, "num_prompt_tokens": len(prompt), "timeout_ms": 20_000, **fields}
        self.handles[fields.get("handle", 0)] = name
        submit = pb.DecodeSubmit(token_ids=prompt, sampling=sampling_to_proto(params), **fields)
        await self.call.write(pb.DecodeCommand(submit=submit))

    async def cancel(self, name: str, **fields: Any) -> None:
        await self.call.write(pb.DecodeCommand(cancel=pb.DecodeCancel(request_id=name, attempt=1, **fields)))

    async def read(self) -> list[pb.DecodeEvent]:
        """One message; Reserved starts the prefill."""
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        self.most_requests_in_a_message = max(
            self.most_requests_in_a_message, len({event.request_id for event in message.events})
        )
        for handle, token_id in zip(message.step.handles, message.step.token_ids, strict=True):
            name = self.handles[handle]
            self.in_steps[name] = self.in_steps.get(name, 0) + 1
            self.tokens.setdefault(name, []).append(token_id)
        for event in message.events:
            kind, name = event.WhichOneof("event"), event.request_id
            if kind == "reserved":
                self._prefill(name, event.reserved.transfer_target)
            elif kind == "tokens":
                self.tokens.setdefault(name, []).extend(token.token_id for token in event.tokens.tokens)
            else:
                assert name not in self.ended
                self.ended[name] = event.ended
        return list(message.events)

    async def read_until_ended(self, *names: str) -> None:
        while not set(names) <= set(self.ended):
            await self.read()

    def _prefill(self, name: str, target: bytes) -> None:
        prompt, params = self.prompts[name]

        def emit(event: Event) -> None:
            if isinstance(event, FirstTokens):
                self.tokens.setdefault(name, []).insert(0, event.tokens[0].token_id)

        self.pair.prefill.submit(
            PrefillRequest(
                request_id=name,
                attempt=1,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=params,
                input_class="short",
                target=target,
            ),
            emit,
        )


@pytest.fixture
async def connect(engine: Callable[..., Engine]) -> AsyncIterator[Callable[[], Router]]:
    """connect() -> a router with a stream of its own. Everything must be free at the end."""
    pair = Pair(engine(), engine(rows=100))
    server = DecodeServer(pair.decode, reserve_timeout_s=20)
    service = Service(name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=server)
    serving = await serve([service], host="127.0.0.1", port=0)
    async with channel(f"127.0.0.1:{serving.port}") as to_worker:
        yield lambda: Router(pair, DecodeStub(to_worker))
    await asyncio.to_thread(pair.assert_baseline)
    await serving.stop(grace_s=0)
    pair.close()


async def test_tokens_with_nothing_else_to_say_travel_as_two_numbers(
    connect: Callable[[], Router], oracle: Engine
) -> None:
    router = connect()
    await router.submit("plain", prompt_of(20), greedy(12), handle=100)
    await router.submit("logprobs", prompt_of(21), replace(greedy(12), logprobs=1), handle=200)
    await router.submit("no-handle", prompt_of(22), greedy(12))
    await router.read_until_ended("plain", "logprobs", "no-handle")
    for name, (prompt, params) in router.prompts.items():
        assert router.tokens[name] == alone(oracle, prompt, params), name
    assert router.in_steps == {"plain": 10}  # of 12, without the first, which came with the prompt, and the last


async def test_one_stream_carries_many_requests(connect: Callable[[], Router], oracle: Engine) -> None:
    router = connect()
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        await router.submit(name, prompt_of(20 + number), greedy(30))
    await router.read_until_ended(*names)
    for number, name in enumerate(names):
        assert router.tokens[name] == alone(oracle, prompt_of(20 + number), greedy(30))
        assert router.ended[name].reason == Reason.FINISHED
        assert router.ended[name].decode_ms > 0
    assert router.most_requests_in_a_message > 1


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_end_of_the_stream_cancels_what_it_carried_and_nothing_else(
    connect: Callable[[], Router], oracle: Engine, how: str
) -> None:
    leaving, staying = connect(), connect()
    await leaving.submit("running", prompt_of(20), greedy(900))
    await staying.submit("other", prompt_of(30), greedy(60))
    while not leaving.tokens:
        await leaving.read()
    await leaving.submit("reserved", prompt_of(10), greedy(5))
    if how == "cancel":
        leaving.call.cancel()
    else:
        await leaving.call.done_writing()
    await staying.read_until_ended("other")
    assert staying.tokens["other"] == alone(oracle, prompt_of(30), greedy(60))
    await asyncio.to_thread(staying.pair.assert_baseline)


async def test_cancel_by_command(connect: Callable[[], Router]) -> None:
    router = connect()
    await router.cancel("unknown")
    await router.call.write(pb.DecodeCommand())  # a command of a newer router
    await router.submit("a", prompt_of(20), greedy(900))
    while not router.tokens:
        await router.read()
    for _ in range(3):
        await router.cancel("a")
    await router.read_until_ended("a")
    assert router.ended["a"].reason == Reason.CANCELLED
    assert router.ended["a"].error == ""
    await router.submit("b", prompt_of(20), greedy(900, n=2))
    await router.cancel("b", choice=0)
    await router.cancel("b", choice=1)
    await router.read_until_ended("b")
    assert router.ended["b"].reason == Reason.FINISHED


async def test_wrong_submit_is_rejected_and_the_stream_lives(connect: Callable[[], Router], oracle: Engine) -> None:
    router = connect()
    await router.submit("vocabulary", [11, 5000], greedy(5))
    await router.submit("too long", [11] * 2047, greedy(1))
    await router.submit("empty", [], greedy(5))
    await router.submit("sampling", [11], greedy(5, temperature=-1.0))
    await router.submit("good", prompt_of(20), greedy(5))
    await router.read_until_ended("vocabulary", "too long", "empty", "sampling", "good")
    for name in ("vocabulary", "too long", "empty", "sampling"):
        assert router.ended[name].reason == Reason.REJECTED
        assert router.ended[name].error == "InvalidRequest"
        assert router.ended[name].message
    assert router.tokens["good"] == alone(oracle, prompt_of(20), greedy(5))


def test_note_that_is_none_is_a_failed_transfer() -> None:
    for note in (b"\xff\xff", pb.FirstTokens(tokens=[pb.SampledToken(finish_reason=9)]).SerializeToString()):  # type: ignore[arg-type]
        with pytest.raises(TransferFailed):
            decode_note(note)


@given(st.binary(max_size=200))
def test_random_notes_are_tokens_or_a_failed_transfer(note: bytes) -> None:
    try:
        tokens = decode_note(note)
    except TransferFailed:
        return
    assert all(isinstance(token.finish_reason, FinishReason) and 0 <= token.token_id < 2**32 for token in tokens)
