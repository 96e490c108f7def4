"""Bad requests: each ends in a typed error that names the field, before any worker hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from router.tokenizer import MOST_IDS
from tests.fakes import Deployment, FakeDecode, FakePrefill
from tests.router.conftest import Api, Start, eventually, question, typed
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

PROMPT = list(range(40, 80))


@pytest.mark.parametrize(
    ("prompt", "fields", "field", "said"),
    [
        ("", {}, "prompt", "empty"),
        ([], {}, "prompt", "empty"),
        ([1] * 512, {}, "prompt", "512 tokens"),
        ([1] * 9000, {}, "prompt", "at most 511"),
        ([1, 264], {}, "token_ids", "0 to 263"),
        ("hi", {"temperature": -1.0}, "sampling.temperature", "-1"),
        ("hi", {"temperature": float("nan")}, "sampling.temperature", "nan"),
        ("hi", {"top_p": 0.0}, "sampling.top_p", "over 0"),
        ("hi", {"min_p": 1.5}, "sampling.min_p", "1.5"),
        ("hi", {"top_k": -1}, "sampling.top_k", "-1"),
        ("hi", {"repetition_penalty": 0.0}, "sampling.repetition_penalty", "0"),
        ("hi", {"presence_penalty": 3.0}, "sampling.presence_penalty", "at most 2"),
        ("hi", {"n": 0}, "sampling.n", "at least 1"),
        ("hi", {"n": 17}, "sampling.n", "17"),
        ("hi", {"max_tokens": 0}, "sampling.max_tokens", "at least 1"),
        ("hi", {"max_tokens": 511}, "sampling.max_tokens", "at most 510"),
        ("hi", {"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens", "9"),
        ("hi", {"logprobs": 21}, "sampling.logprobs", "21"),
        ("hi", {"stop": [""]}, "sampling.stop", "empty"),
        ("hi", {"stop": ["x"] * 17}, "sampling.stop", "17"),
        ("hi", {"stop_token_ids": [264]}, "sampling.stop_token_ids", "264"),
        ("hi", {"sla_class": "platinum"}, "sla_class", "interactive, batch"),
        ("hi", {"request_id": "a\nb"}, "request_id", "printable ASCII"),
        ("hi", {"request_id": "x" * 129}, "request_id", "128"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bad_request_names_the_field(
    api: Api, method: str, prompt: Any, fields: dict[str, Any], field: str, said: str
) -> None:
    call = getattr(api.stub, method)(question(prompt, **fields), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if method == "Generate" else call.read())
    error = typed(caught.value)
    assert isinstance(error, errors.InvalidRequest)
    assert (error.field, said in error.message) == (field, True), error.message


async def test_no_prompt_at_all(api: Api) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        await api.call("Generate", v1.GenerateRequest())
    assert caught.value.field == "prompt"


async def test_chat_without_messages(api: Api) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        await api.call("Generate", v1.GenerateRequest(chat=v1.Chat()))
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Generate", v1.GenerateRequest(text="hi", model="gpt-9")),
        ("Tokenize", v1.TokenizeRequest(text="hi", model="gpt-9")),
        ("Detokenize", v1.DetokenizeRequest(token_ids=[1], model="gpt-9")),
    ],
)
async def test_unknown_model_is_named(api: Api, method: str, message: Any) -> None:
    with pytest.raises(errors.UnknownModel, match="gpt-9"):
        await api.call(method, message)


async def test_tokenize_needs_an_input(api: Api) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        await api.call("Tokenize", v1.TokenizeRequest())
    assert caught.value.field == "input"


async def test_more_ids_than_a_text_is_made_of(api: Api) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"{MOST_IDS + 1} ids") as caught:
        await api.call("Detokenize", v1.DetokenizeRequest(token_ids=bytes(MOST_IDS + 1)))
    assert caught.value.field == "token_ids"


async def test_text_that_is_not_utf8_is_an_invalid_request(api: Api) -> None:
    call = api.channel.unary_unary("/twinpool.v1.Router/Generate", request_serializer=lambda raw: raw)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\x1a\x04h\xffi!", timeout=10)  # field 3, text
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await api.call("Tokenize", v1.TokenizeRequest(text="ok"))).token_ids


async def test_fields_of_a_newer_client_are_ignored(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode()
    await api.ready(2)
    message = question(PROMPT, max_tokens=2).SerializeToString() + b"\xfa\x3f\x03new"  # field 1023
    call = api.channel.unary_unary(
        "/twinpool.v1.Router/Generate",
        request_serializer=lambda raw: raw,
        response_deserializer=v1.GenerateResponse.FromString,
    )
    assert len((await call(message, timeout=10)).choices[0].token_ids) == 2


async def test_request_id_in_use_is_refused_and_free_again_afterwards(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.01)
    await api.ready(2)
    stream = api.stream(PROMPT, max_tokens=100, request_id="mine")
    await anext(stream)
    with pytest.raises(errors.Duplicate, match="mine"):
        await api.generate(PROMPT, max_tokens=2, request_id="mine")
    await stream.aclose()
    await eventually(lambda: not api.router.front_door.running)
    assert (await api.generate(PROMPT, max_tokens=2, request_id="mine")).request_id == "mine"


async def test_full_queue_refuses_with_retry_after(start: Start) -> None:
    api = await start(decode_slots=1, sla_classes=("interactive:queue=2",))
    async with Deployment(api.address) as fakes:
        await fakes.prefill()
        await fakes.decode(step_s=0.005)
        await api.ready(2)
        calls = [asyncio.ensure_future(api.generate(PROMPT, max_tokens=30)) for _ in range(8)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, errors.Overloaded)]
        assert len(refused) == 5
        assert all(error.retry_after_s is not None and error.retry_after_s > 0 for error in refused)
        assert all(isinstance(result, v1.GenerateResponse) for result in results if result not in refused)


@pytest.mark.parametrize("by", ["deadline_ms", "call"])
@pytest.mark.parametrize("where", ["queue", "answer"])
async def test_deadline_ends_the_request_wherever_it_is(start: Start, by: str, where: str) -> None:
    api = await start(decode_slots=1)
    async with Deployment(api.address) as fakes:
        prefill = await fakes.prefill()
        decode = await fakes.decode(step_s=0.02)
        await api.ready(2)
        holder = api.stream(PROMPT, max_tokens=200) if where == "queue" else None
        if holder is not None:
            await anext(holder)
        limits = (200, 20.0) if by == "deadline_ms" else (0, 0.2)
        message = question(PROMPT, max_tokens=200, deadline_ms=limits[0])
        with pytest.raises(errors.DeadlineExceeded):
            await api.call("Generate", message, timeout_s=limits[1])
        if holder is not None:
            await eventually(lambda: api.router.front_door.running == 1)
            await holder.aclose()
        await eventually(lambda: not fakes.held)
        assert len(prefill.requests) == len(decode.submits) == 1


async def test_deadline_message_says_where_the_time_went(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.02)
    await api.ready(2)
    with pytest.raises(errors.DeadlineExceeded, match="tokens into its answer"):
        await api.generate(PROMPT, max_tokens=200, deadline_ms=200)


async def test_call_without_the_cluster_key_may_ask_but_not_join(start: Start) -> None:
    api = await start(cluster_key="secret")
    async with Deployment(api.address) as fakes:
        await fakes.prefill()
        assert isinstance(fakes.workers[0], FakePrefill)
        await asyncio.sleep(0.2)
        assert not list(api.router.registry)
    assert (await api.call("Tokenize", v1.TokenizeRequest(text="ok"))).token_ids


async def test_prompt_longer_than_any_worker_holds_is_refused(api: Api, fakes: Deployment) -> None:
    await fakes.prefill(max_context=100)
    decode = await fakes.decode(max_context=200)
    await api.ready(2)
    assert isinstance(decode, FakeDecode)
    with pytest.raises(errors.InvalidRequest, match="at most 99"):
        await api.generate([7] * 100)
    assert (await api.generate([7] * 99)).usage.completion_tokens == 1
