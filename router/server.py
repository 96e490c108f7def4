"""The public API (twinpool.v1.Router): messages in, plain values to the front door, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from router.choice import Delta
from router.chunks import Chunks, ChunkStream, Write
from router.classifier import tenant_of
from router.decisions import Decision, figures
from router.front_door import FrontDoor, Question
from router.pools import Worker
from router.request import Request
from router.sizing import PoolSize
from router.tokenizer import MOST_IDS, Tokenizer
from router.wire import Token
from service.wire import sampling_from_proto
from twinpool.errors import InvalidRequest
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterServicer


class RouterServer(RouterServicer):
    def __init__(self, front_door: FrontDoor) -> None:
        self._front_door = front_door
        self._chunks = Chunks()

    async def Generate(self, message: v1.GenerateRequest, context: Any) -> v1.GenerateResponse:
        async with self._front_door.open(_question(message, context)) as request:
            deltas = await request.finish()
            logprobs = _Logprobs(request)
            return v1.GenerateResponse(
                request_id=request.ask.request_id,
                model=self._front_door.card.name,
                choices=[_choice(delta, logprobs) for delta in deltas],
                usage=_usage(request),
                timeline=_timeline(request),
            )

    async def GenerateStream(self, message: v1.GenerateRequest, context: Any) -> None:
        # Writes rather than yields: a client that goes away then cancels this very coroutine, wherever it waits.
        async with self._front_door.open(_question(message, context)) as request:
            stream = ChunkStream(self._chunks, request.take, _writer(request, context.write))
            request.listen(stream.news, stream.end)
            try:
                await stream.sent()
            finally:
                stream.close()
            await request.finish()  # raises what ended it
            await context.write(
                v1.GenerateChunk(request_id=request.ask.request_id, usage=_usage(request), timeline=_timeline(request))
            )

    async def Tokenize(self, message: v1.TokenizeRequest, context: Any) -> v1.TokenizeResponse:
        self._front_door.check_model(message.model)
        tokenizer = self._front_door.tokenizer
        if message.WhichOneof("input") == "chat":
            return v1.TokenizeResponse(token_ids=await tokenizer.encode_chat(_messages(message.chat)))
        if message.WhichOneof("input") is None:
            raise InvalidRequest("input is empty: send text or chat", field="input")
        token_ids = await tokenizer.encode(message.text, special_tokens=not message.no_special_tokens)
        return v1.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, message: v1.DetokenizeRequest, context: Any) -> v1.DetokenizeResponse:
        self._front_door.check_model(message.model)
        tokenizer: Tokenizer = self._front_door.tokenizer
        if len(message.token_ids) > MOST_IDS:
            raise InvalidRequest(
                f"token_ids has {len(message.token_ids)} ids: at most {MOST_IDS} are made into text at a time",
                field="token_ids",
            )
        text = await tokenizer.decode(list(message.token_ids), keep_special_tokens=message.keep_special_tokens)
        return v1.DetokenizeResponse(text=text)

    async def ListModels(self, message: v1.ListModelsRequest, context: Any) -> v1.ListModelsResponse:
        card = self._front_door.card
        return v1.ListModelsResponse(
            models=[
                v1.ModelCard(
                    name=card.name,
                    context_length=self._front_door.max_context,
                    vocab_size=card.vocab_size,
                    architecture=card.architecture,
                )
            ]
        )

    async def Explain(self, message: v1.ExplainRequest, context: Any) -> v1.ExplainResponse:
        decisions = self._front_door.decisions.of(message.request_id)
        return v1.ExplainResponse(decisions=[_decision(each) for each in decisions])

    async def GetPools(self, message: v1.GetPoolsRequest, context: Any) -> v1.GetPoolsResponse:
        now = asyncio.get_running_loop().time()
        workers = sorted(self._front_door.registry, key=lambda worker: (worker.info.pool, worker.info.worker_id))
        return v1.GetPoolsResponse(
            workers=[_worker_status(worker, now) for worker in workers],
            queued=self._front_door.queued,
            running=self._front_door.running,
            sizes=[_pool_size(size) for size in self._front_door.sizing.sizes.values()],
            mode=self._front_door.mode.value,
        )


def _question(message: v1.GenerateRequest, context: Any) -> Question:
    prompt = message.WhichOneof("prompt")
    return Question(
        request_id=message.request_id,
        model=message.model,
        text=message.text if prompt == "text" else None,
        messages=_messages(message.chat) if prompt == "chat" else None,
        token_ids=list(message.token_ids.ids) if prompt == "token_ids" else None,
        sampling=sampling_from_proto(message.sampling),
        seeded=message.sampling.HasField("seed"),
        sla_class=message.sla_class,
        priority=message.priority,
        deadline_ms=message.deadline_ms,
        ttft_target_ms=message.ttft_target_ms,
        tpot_target_ms=message.tpot_target_ms,
        tenant=tenant_of(message.tenant, dict(context.invocation_metadata() or ())),
        cache_salt=message.cache_salt,
        call_timeout_s=context.time_remaining(),
    )


def _messages(chat: v1.Chat) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _choice(delta: Delta, logprobs: _Logprobs) -> v1.Choice:
    return v1.Choice(
        index=delta.choice,
        text=delta.text,
        token_ids=[token.token_id for token in delta.tokens],
        logprobs=logprobs.of(delta.tokens),
        finish_reason=delta.finish_reason,  # type: ignore[arg-type]  # the enum's numbers are FinishReason's
    )


def _writer(request: Request, write: Callable[[v1.GenerateChunk], Coroutine[Any, Any, None]]) -> Write:
    chunk = v1.GenerateChunk(request_id=request.ask.request_id)
    choices, wants_logprobs = chunk.choices, request.ask.sampling.logprobs is not None

    def start(deltas: list[Delta]) -> Coroutine[Any, Any, None]:
        # One message for all chunks: `write` turns it into bytes before it waits, and the next starts after that.
        del choices[:]
        logprobs = _Logprobs(request) if wants_logprobs else None
        for delta in deltas:
            _fill(choices.add(), delta, logprobs)
        return write(chunk)

    return start


def _fill(message: v1.ChoiceDelta, delta: Delta, logprobs: _Logprobs | None) -> None:
    """On the path of every token: fields at their default are left alone."""
    index, text, tokens, finish_reason = delta
    if index:
        message.index = index
    if text:
        message.text = text
    message.token_ids.extend([token[0] for token in tokens])
    if logprobs is not None:
        message.logprobs.extend(logprobs.of(tokens) or ())
    if finish_reason:
        message.finish_reason = finish_reason  # type: ignore[assignment]  # the enum's numbers are FinishReason's


class _Logprobs:
    """The logprobs of one message. Choices that echo share the prompt's tokens: each is built once, not n times."""

    def __init__(self, request: Request) -> None:
        self._wanted = request.ask.sampling.logprobs is not None
        self._own = request.vocabulary.own
        self._built: dict[int, v1.TokenLogprob] = {}  # by id of the token, which the message's deltas keep alive

    def of(self, tokens: Sequence[Token]) -> list[v1.TokenLogprob] | None:
        return [self._built.get(id(token)) or self._build(token) for token in tokens] if self._wanted else None

    def _build(self, token: Token) -> v1.TokenLogprob:
        own = self._own
        built = self._built[id(token)] = v1.TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            text=own[token.token_id],
            top=[v1.TopLogprob(token_id=each, logprob=value, text=own[each]) for each, value in token.top],
        )
        return built


def _usage(request: Request) -> v1.Usage:
    usage = request.usage
    return v1.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _timeline(request: Request) -> v1.Timeline:
    fields: dict[str, Any] = request.timeline.fields(request.longest)
    return v1.Timeline(**fields)


def _decision(decision: Decision) -> v1.Decision:
    choice = decision.choice
    return v1.Decision(
        request_id=decision.request_id,
        attempt=decision.attempt,
        policy=choice.policy,
        sla_class=decision.sla_class,
        input_class=decision.input_class,
        tenant=decision.tenant,
        prompt_tokens=decision.prompt_tokens,
        ttft_target_ms=decision.ttft_target_ms,
        tpot_target_ms=decision.tpot_target_ms,
        queued_ms=decision.queued_ms,
        candidates=[v1.CandidatePair(**figures(each)) for each in choice.candidates],
        reason=choice.reason,
    )


def _pool_size(size: PoolSize) -> v1.PoolSize:
    return v1.PoolSize(
        pool=size.pool,  # type: ignore[arg-type]  # the enum's numbers are Pool's
        current=size.current,
        desired=size.desired,
        load=size.load,
        reason=size.reason,
    )


def _worker_status(worker: Worker, now: float) -> v1.WorkerStatus:
    load = worker.load
    return v1.WorkerStatus(
        worker_id=worker.info.worker_id,
        pool=worker.info.pool,  # type: ignore[arg-type]  # the enum's numbers are Pool's
        address=worker.info.address,
        state=worker.state,  # type: ignore[arg-type]  # the enum's numbers are WorkerState's
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        rows_total=worker.info.rows_total,
        rows_free=load.rows_free if load else 0,
        tokens_per_s=load.tokens_per_s if load else 0.0,
        age_s=now - worker.joined_at,
        fingerprint=worker.info.fingerprint,
        version=worker.info.version,
        reason=worker.reason,
    )
