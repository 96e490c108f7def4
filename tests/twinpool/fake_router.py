"""A router of the public API in this process, without workers: each method is a plain function that a test replaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from twinpool import errors
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server

Answers = Callable[[v1.GenerateRequest, grpc.ServicerContext], Iterator[v1.GenerateChunk]]

USAGE = v1.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2)
TIMELINE = v1.Timeline(
    queued_ms=1.0,
    reserve_ms=0.5,
    prefill_ms=20.0,
    transfer_ms=8.0,
    transfer_wait_ms=2.0,
    ttft_ms=24.0,
    tpot_ms=6.0,
    total_ms=30.0,
    transfer_bytes=4096,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    attempts=1,
    sla_class="interactive",
    input_class="short",
)


def chunk(text: str, *token_ids: int, index: int = 0, finish: int = 0) -> v1.GenerateChunk:
    delta = v1.ChoiceDelta(index=index, text=text, token_ids=token_ids, finish_reason=finish)
    return v1.GenerateChunk(request_id="req-1", choices=[delta])


def last_chunk() -> v1.GenerateChunk:
    return v1.GenerateChunk(request_id="req-1", usage=USAGE, timeline=TIMELINE)


def two_tokens(_request: v1.GenerateRequest, _context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
    yield chunk("Par", 11)
    yield chunk("is", 12, finish=v1.FINISH_REASON_STOP)
    yield last_chunk()


class FakeRouter(RouterServicer):
    """Answers "Paris" in two tokens. `answer` makes the chunks of both Generate and GenerateStream.

    `fail_with` is a list of errors: each call takes the first and fails with it, until the list is empty.
    """

    def __init__(self) -> None:
        self.requests: list[v1.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.answer: Answers = two_tokens
        self.fail_with: list[errors.TwinpoolError] = []
        self.pools = v1.GetPoolsResponse()
        self.num_pool_calls = 0
        self.cancelled = threading.Event()  # a call ended before its answer did
        self._threads = futures.ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        add_RouterServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(5)
        self._threads.shutdown(wait=False)

    def Generate(self, request: v1.GenerateRequest, context: grpc.ServicerContext) -> v1.GenerateResponse:
        response = v1.GenerateResponse(request_id="req-1", model="tiny")
        choices: dict[int, v1.Choice] = {}
        for part in self.GenerateStream(request, context):
            for delta in part.choices:
                choice = choices.setdefault(delta.index, v1.Choice(index=delta.index))
                choice.text += delta.text
                choice.token_ids.extend(delta.token_ids)
                choice.logprobs.extend(delta.logprobs)
                choice.finish_reason = delta.finish_reason
            response.usage.MergeFrom(part.usage)
            response.timeline.MergeFrom(part.timeline)
        response.choices.extend(choices.values())
        return response

    def GenerateStream(self, request: v1.GenerateRequest, context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
        self.requests.append(request)
        self._fail_if_told(context)
        finished = threading.Event()
        context.add_callback(lambda: finished.is_set() or self.cancelled.set())
        yield from self.answer(request, context)
        finished.set()

    def Tokenize(self, request: v1.TokenizeRequest, context: grpc.ServicerContext) -> v1.TokenizeResponse:
        self._fail_if_told(context)
        text = request.text or "".join(message.content for message in request.chat.messages)
        special = [] if request.no_special_tokens or request.HasField("chat") else [1]
        return v1.TokenizeResponse(token_ids=[*special, *text.encode()])

    def Detokenize(self, request: v1.DetokenizeRequest, context: grpc.ServicerContext) -> v1.DetokenizeResponse:
        kept = request.token_ids if request.keep_special_tokens else [i for i in request.token_ids if i != 1]
        return v1.DetokenizeResponse(text="".join(map(chr, kept)))

    def ListModels(self, request: v1.ListModelsRequest, context: grpc.ServicerContext) -> v1.ListModelsResponse:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        card = v1.ModelCard(name="tiny", context_length=2048, vocab_size=256, architecture="llama")
        return v1.ListModelsResponse(models=[card])

    def GetPools(self, request: v1.GetPoolsRequest, context: grpc.ServicerContext) -> v1.GetPoolsResponse:
        self._fail_if_told(context)
        self.num_pool_calls += 1
        return self.pools

    def Explain(self, request: v1.ExplainRequest, context: grpc.ServicerContext) -> v1.ExplainResponse:
        pairs = [
            v1.CandidatePair(
                prefill_worker="p1", decode_worker="d0", known=True, queue_ms=12.5, tpot_ms=21.0, cost=0.5
            ),
            v1.CandidatePair(prefill_worker="p0", decode_worker="d0", queue_ms=99.0, cost=2.0),
        ]
        decision = v1.Decision(
            request_id=request.request_id, attempt=1, policy="predict", sla_class="batch", reason="least latency"
        )
        decision.candidates.extend(pairs)
        return v1.ExplainResponse(decisions=[decision])

    def _fail_if_told(self, context: grpc.ServicerContext) -> None:
        if self.fail_with:
            fail(context, self.fail_with.pop(0))


def fail(context: Any, error: errors.TwinpoolError) -> None:
    """Ends the call as the router's error interceptor does."""
    context.set_trailing_metadata(errors.to_metadata(error))
    context.abort(error.code, error.message)


def tokens_for_ever(_request: v1.GenerateRequest, context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
    while context.is_active():
        yield chunk("a", 7)
        time.sleep(0.01)


def one_token_then_silence(_request: v1.GenerateRequest, context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
    yield chunk("a", 7)
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(30)


if __name__ == "__main__":  # a process of its own, to be frozen; prints its address and serves for ever
    lonely = FakeRouter()
    lonely.answer = one_token_then_silence
    print(lonely.address, flush=True)
    threading.Event().wait()
