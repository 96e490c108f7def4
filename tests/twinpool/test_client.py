"""The SDK against a router in this process: what is sent, what comes back, how it fails, retries and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import grpc
import pytest

from tests.twinpool.fake_router import (
    FakeRouter,
    chunk,
    fail,
    last_chunk,
    one_token_then_silence,
    tokens_for_ever,
)
from twinpool import Client, errors
from twinpool.options import SamplingOptions
from twinpool.sampling import SamplingParams
from twinpool.v1 import router_pb2 as v1

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.address, timeout_s=20) as client:
        yield client


# what is sent


def test_sampling_options_are_those_of_the_public_api() -> None:
    fields = {field.name for field in v1.Sampling.DESCRIPTOR.fields}
    assert set(get_type_hints(SamplingOptions)) == fields
    assert set(SamplingParams.__dataclass_fields__) == fields


def test_every_option_reaches_the_router(router: FakeRouter, client: Client) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 2**63,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "logprobs": 0,
        "n": 2,
        "echo": True,
    }
    client.generate("hi", **sampling, model="m", request_id="r", sla_class="batch", priority=-3, deadline_s=7.0)
    request = router.requests[0]
    assert {field.name for field, _ in request.sampling.ListFields()} == set(sampling)
    for name, value in sampling.items():
        sent = getattr(request.sampling, name)
        assert (list(sent) if isinstance(value, list) else sent) == value
    assert (request.model, request.request_id, request.sla_class, request.priority) == ("m", "r", "batch", -3)
    assert 0 < request.deadline_ms <= 7000


def test_absent_options_are_left_to_the_server(router: FakeRouter, client: Client) -> None:
    client.generate("hi", temperature=0)
    request = router.requests[0]
    assert [field.name for field, _ in request.sampling.ListFields()] == ["temperature"]
    assert request.deadline_ms == 0


def test_a_prompt_is_text_token_ids_or_a_conversation(router: FakeRouter, client: Client) -> None:
    client.generate("hi")
    client.generate([5, 6])
    client.generate([])
    client.generate(QUESTION)
    client.chat(QUESTION)
    client.chat("What is the capital of France?")
    kinds = [request.WhichOneof("prompt") for request in router.requests]
    assert kinds == ["text", "token_ids", "token_ids", "chat", "chat", "chat"]
    assert list(router.requests[1].token_ids.ids) == [5, 6]
    assert router.requests[3].chat == router.requests[5].chat
    assert router.requests[5].chat.messages[0].role == "user"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("caf\udce9", {}, "prompt"),  # bytes of a command line that are no UTF-8
        (b"bytes", {}, "prompt"),
        ({"role": "user"}, {}, "prompt"),
        (42, {}, "prompt"),
        ([1, -1], {}, "token_ids"),
        ([1, 2**32], {}, "token_ids"),
        ([1, "x"], {}, "token_ids"),
        ([1.5], {}, "token_ids"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": 3}], {}, "messages"),
        ("hi", {"temperature": "hot"}, "temperature"),
        ("hi", {"max_tokens": 2**40}, "max_tokens"),
        ("hi", {"seed": -1}, "seed"),
        ("hi", {"stop": [3]}, "stop"),
        ("hi", {"stop_token_ids": [-2]}, "stop_token_ids"),
        ("hi", {"deadline_s": 0}, "deadline_s"),
        ("hi", {"deadline_s": float("nan")}, "deadline_s"),
        ("hi", {"priority": "high"}, "priority"),
    ],
)
def test_what_cannot_be_sent_names_the_field(
    router: FakeRouter, client: Client, prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=field) as caught:
        client.generate(prompt, **options)
    assert caught.value.field == field
    assert router.requests == []


def test_a_misspelt_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("hi", temprature=1.0)  # type: ignore[call-arg]


def test_one_stop_string_is_not_taken_for_its_letters(router: FakeRouter, client: Client) -> None:
    client.generate("hi", stop="END")
    assert list(router.requests[0].sampling.stop) == ["END"]


def test_metadata_goes_with_every_call(router: FakeRouter) -> None:
    with Client(router.address, metadata=[("x-tenant", "blue")]) as client:
        client.models()
    assert router.metadata[0]["x-tenant"] == "blue"


# what comes back


def test_generation_holds_the_first_choice_usage_and_timeline(client: Client) -> None:
    answer = client.generate("hi")
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Paris", [11, 12], "stop")
    assert (answer.request_id, answer.model) == ("req-1", "tiny")
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.total_tokens) == (3, 1, 5)
    assert (answer.timeline.ttft_ms, answer.timeline.decode_worker) == (24.0, "decode-0")


def test_stream_gives_chunks_then_usage_and_timeline(client: Client) -> None:
    with client.stream("hi") as stream:
        chunks = list(stream)
    assert [part.text for part in chunks] == ["Par", "is"]
    assert [part.token_ids for part in chunks] == [[11], [12]]
    assert [part.finish_reason for part in chunks] == [None, "stop"]
    assert stream.request_id == "req-1"
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 2
    assert stream.timeline is not None
    assert stream.timeline.transfer_bytes == 4096
    assert list(stream) == []


def test_read_returns_the_whole_answer_after_some_of_it_was_seen(client: Client) -> None:
    stream = client.stream("hi")
    next(stream)
    assert stream.read().text == "Paris"
    assert client.stream("hi").read().choices == client.generate("hi").choices


def test_choices_of_one_prompt_are_told_apart(router: FakeRouter, client: Client) -> None:
    def three(_request: Any, _context: Any) -> Iterator[v1.GenerateChunk]:
        message = v1.GenerateChunk(request_id="req-1")
        for index in (2, 0, 1):
            message.choices.add(index=index, text=f"<{index}>", token_ids=[index], finish_reason=2)
        yield message
        yield last_chunk()

    router.answer = three
    assert [part.index for part in client.stream("hi", n=3)] == [2, 0, 1]
    choices = client.stream("hi", n=3).read().choices
    assert [(choice.index, choice.text) for choice in choices] == [(0, "<0>"), (1, "<1>"), (2, "<2>")]
    assert choices[0].finish_reason == "length"


def test_logprobs_keep_bytes_and_absence(router: FakeRouter, client: Client) -> None:
    def echoed(_request: Any, _context: Any) -> Iterator[v1.GenerateChunk]:
        message = chunk("é", 5, 6, finish=v1.FINISH_REASON_STOP)
        message.choices[0].logprobs.add(token_id=5, text=b"\xc3")
        top = [v1.TopLogprob(token_id=6, logprob=-0.5, text=b"\xa9")]
        message.choices[0].logprobs.add(token_id=6, logprob=-0.5, top=top, text=b"\xa9")
        yield message
        yield last_chunk()

    router.answer = echoed
    first, second = client.generate("hi", logprobs=1, echo=True).logprobs
    assert (first.logprob, first.text, first.top) == (None, b"\xc3", [])
    assert (second.logprob, second.top[0].text) == (-0.5, b"\xa9")


def test_the_smaller_calls(router: FakeRouter, client: Client) -> None:
    assert client.tokenize("ab") == [1, 97, 98]
    assert client.tokenize("ab", special_tokens=False) == [97, 98]
    assert client.tokenize([{"role": "user", "content": "ab"}]) == [97, 98]
    assert client.detokenize([1, 97, 98]) == "ab"
    assert client.detokenize([1, 97], special_tokens=True) == "\x01a"
    (model,) = client.models()
    assert (model.name, model.context_length, model.architecture) == ("tiny", 2048, "llama")
    worker = v1.WorkerStatus(worker_id="p", pool=v1.POOL_PREFILL, state=v1.WORKER_STATE_DRAINING, rows_free=7)
    router.pools = v1.GetPoolsResponse(workers=[worker], queued=3, running=2)
    pools = client.pools()
    assert (pools.queued, pools.running) == (3, 2)
    assert (pools.workers[0].pool, pools.workers[0].state, pools.workers[0].rows_free) == ("prefill", "draining", 7)


def test_values_of_a_newer_router_are_unknown_not_errors(router: FakeRouter, client: Client) -> None:
    worker = v1.WorkerStatus.FromString(
        v1.WorkerStatus(worker_id="p").SerializeToString() + b"\x10\x63\x20\x63" + b"\xfa\x3f\x03new"
    )  # pool = 99, state = 99, field 1023 = "new"
    router.pools = v1.GetPoolsResponse(workers=[worker])
    assert (client.pools().workers[0].pool, client.pools().workers[0].state) == ("unknown", "unknown")


def test_fields_of_a_newer_client_do_not_break_the_router(router: FakeRouter) -> None:
    raw = v1.GenerateRequest(text="hi").SerializeToString() + b"\xfa\x3f\x03new"
    with grpc.insecure_channel(router.address) as channel:
        call = channel.unary_unary("/twinpool.v1.Router/Generate", None, v1.GenerateResponse.FromString)
        assert call(raw, timeout=10).choices[0].text == "Paris"


# how it fails


def _tree(root: type[errors.TwinpoolError]) -> Iterator[type[errors.TwinpoolError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


SENT = [kind for kind in _tree(errors.TwinpoolError) if kind is not errors.ConfigError]


@pytest.mark.parametrize("kind", SENT)
def test_every_error_comes_back_as_itself(
    router: FakeRouter, kind: type[errors.TwinpoolError], open_router: Callable[[], FakeRouter]
) -> None:
    sent = kind("what is wrong", field="prompt", retry_after_s=1.5)
    with Client(router.address, retries=0) as client:
        for call in (lambda: client.generate("hi"), lambda: client.stream("hi").read(), client.pools):
            router.fail_with = [sent]
            with pytest.raises(errors.TwinpoolError) as caught:
                call()
            error = caught.value
            assert type(error) is kind
            assert (error.message, error.field, error.retry_after_s) == ("what is wrong", "prompt", 1.5)
            assert error.code is kind.code


def test_an_error_class_of_a_newer_router_keeps_its_code(router: FakeRouter, client: Client) -> None:
    def newer(_request: Any, context: Any) -> Iterator[v1.GenerateChunk]:
        context.set_trailing_metadata([(errors.KIND_KEY, "FromTheFuture"), ("other-bin", b"\xff\xfe")])
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        yield last_chunk()

    router.answer = newer
    with pytest.raises(errors.TwinpoolError, match="no") as caught:
        client.generate("hi")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_no_router_says_where_and_what_to_do(dead_address: str) -> None:
    with Client(dead_address, retries=0) as client:
        with pytest.raises(errors.Unavailable, match=rf"{dead_address}.*refused.*twinpool up"):
            client.generate("hi")


def test_a_router_that_knows_no_such_method_is_a_typed_error() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client, pytest.raises(errors.TwinpoolError) as caught:
        client.generate("hi")
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    server.stop(0).wait(5)


def test_a_stream_that_ends_without_its_last_chunk_is_an_error(router: FakeRouter, client: Client) -> None:
    router.answer = lambda _request, _context: iter([chunk("Par", 11)])
    stream = client.stream("hi")
    assert next(stream).text == "Par"
    with pytest.raises(errors.Internal, match="last chunk"):
        next(stream)
    assert list(stream) == []


def test_a_deadline_ends_a_call_that_hangs(router: FakeRouter, client: Client) -> None:
    router.answer = one_token_then_silence
    with pytest.raises(errors.DeadlineExceeded, match="deadline_s"):
        client.generate("hi", deadline_s=0.3)
    assert router.cancelled.wait(5)
    with pytest.raises(errors.DeadlineExceeded):
        list(client.stream("hi", deadline_s=0.3))


def test_the_clients_timeout_holds_when_the_request_has_no_deadline(router: FakeRouter) -> None:
    router.answer = one_token_then_silence
    with Client(router.address, timeout_s=0.3) as client, pytest.raises(errors.DeadlineExceeded, match="timeout_s"):
        client.generate("hi")


def test_a_closed_client_refuses_calls(router: FakeRouter) -> None:
    client = Client(router.address)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def test_the_environment_says_where_the_router_is(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_ROUTERS", router.address)
    with Client() as client:
        assert client.models()[0].name == "tiny"
    monkeypatch.delenv("TWINPOOL_ROUTERS")
    assert Client()._routers.addresses == ["127.0.0.1:7070"]


@pytest.mark.parametrize("address", ["", "  ,", "http://host:1", "host:port", "host:99999", ":7070", []])
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(errors.ConfigError):
        Client(address)


# retry and failover


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", [errors.Unavailable, errors.PoolEmpty, errors.Overloaded])
def test_what_is_safe_is_tried_again(
    router: FakeRouter, client: Client, kind: type[errors.TwinpoolError], streaming: bool
) -> None:
    router.fail_with = [kind("not now"), kind("not now")]
    answer = client.stream("hi").read() if streaming else client.generate("hi")
    assert answer.text == "Paris"
    assert len(router.requests) == 3


def test_retries_are_counted(router: FakeRouter) -> None:
    router.fail_with = [errors.Unavailable("not now")] * 5
    with Client(router.address, retries=1) as client, pytest.raises(errors.Unavailable):
        client.generate("hi")
    assert len(router.requests) == 2


@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.Internal, errors.Duplicate, errors.DeadlineExceeded])
def test_what_would_fail_again_is_not_retried(
    router: FakeRouter, client: Client, kind: type[errors.TwinpoolError]
) -> None:
    router.fail_with = [kind("no")] * 3
    with pytest.raises(kind):
        client.generate("hi")
    assert len(router.requests) == 1


def test_nothing_is_retried_once_a_token_was_delivered(router: FakeRouter, client: Client) -> None:
    def breaks(_request: Any, context: Any) -> Iterator[v1.GenerateChunk]:
        yield chunk("Par", 11)
        fail(context, errors.WorkerLost("gone"))

    router.answer = breaks
    stream = client.stream("hi")
    assert next(stream).text == "Par"
    with pytest.raises(errors.WorkerLost):
        next(stream)
    assert len(router.requests) == 1
    assert list(stream) == []


def test_the_routers_retry_after_is_kept(router: FakeRouter, client: Client) -> None:
    router.fail_with = [errors.Overloaded("full", retry_after_s=0.4)]
    start = time.monotonic()
    assert client.generate("hi").text == "Paris"
    assert time.monotonic() - start >= 0.4


def test_a_wait_past_the_deadline_is_not_begun(router: FakeRouter, client: Client) -> None:
    router.fail_with = [errors.Overloaded("full", retry_after_s=60)]
    with pytest.raises(errors.Overloaded, match="full"):
        client.generate("hi", deadline_s=5)
    assert len(router.requests) == 1


def test_a_retry_gets_what_is_left_of_the_deadline(router: FakeRouter, client: Client) -> None:
    router.fail_with = [errors.Overloaded("full", retry_after_s=0.2)]
    client.generate("hi", deadline_s=5)
    first, second = (request.deadline_ms for request in router.requests)
    assert second <= first - 200


def test_the_next_router_is_used_and_kept(open_router: Callable[[], FakeRouter], dead_address: str) -> None:
    alive = open_router()
    for address in ([dead_address, alive.address], f"{dead_address}, {alive.address}"):
        with Client(address, retries=0) as client:
            assert client.generate("hi").text == "Paris"
            assert client.stream("hi").read().text == "Paris"
            assert client._routers.preferred == 1


def test_a_router_that_goes_away_is_left_and_found_again(open_router: Callable[[], FakeRouter]) -> None:
    first, second = open_router(), open_router()
    with Client([first.address, second.address], timeout_s=20) as client:
        assert client.generate("hi").text == "Paris"
        first.close()
        assert client.generate("hi").text == "Paris"
        assert (len(first.requests), len(second.requests)) == (1, 1)


def test_a_full_router_is_not_a_reason_to_ask_the_next(open_router: Callable[[], FakeRouter]) -> None:
    first, second = open_router(), open_router()
    first.fail_with = [errors.Overloaded("full", retry_after_s=0.01)]
    with Client([first.address, second.address]) as client:
        client.generate("hi")
    assert (len(first.requests), len(second.requests)) == (2, 0)


# cancel


@pytest.mark.parametrize("leave", ["close", "with", "break", "client", "garbage"])
def test_leaving_a_stream_cancels_on_the_server(router: FakeRouter, leave: str) -> None:
    router.answer = tokens_for_ever
    client = Client(router.address)
    stream = client.stream("hi")
    next(stream)
    if leave == "close":
        stream.close()
        stream.close()
    elif leave == "with":
        with pytest.raises(KeyError), stream:
            raise KeyError
    elif leave == "break":
        with stream:
            for _ in stream:
                break
    elif leave == "client":
        client.close()
    else:
        del stream
    assert router.cancelled.wait(5)
    client.close()


def test_closing_from_another_thread_ends_the_iteration(router: FakeRouter, client: Client) -> None:
    router.answer = one_token_then_silence
    stream = client.stream("hi")
    next(stream)
    timer = threading.Timer(0.1, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()
    assert router.cancelled.wait(5)


def test_closing_while_a_retry_is_waited_for_ends_the_iteration(router: FakeRouter, client: Client) -> None:
    router.fail_with = [errors.Overloaded("full", retry_after_s=15)]
    stream = client.stream("hi")
    timer = threading.Timer(0.1, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()
    assert len(router.requests) == 1


def test_closing_after_the_end_is_harmless(client: Client) -> None:
    stream = client.stream("hi")
    assert len(list(stream)) == 2
    stream.close()
    assert stream.read().text == "Paris"


def test_one_client_serves_many_threads(router: FakeRouter, client: Client) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: client.generate(f"hi {i}").text, range(64)))
    assert answers == ["Paris"] * 64
