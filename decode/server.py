"""The gRPC face of a decode worker: one stream a router, commands up, each step's events of all its requests down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError

from decode.request import Ended, FirstTokens, Output, Request, Reserved, Token
from decode.worker import Worker
from engine.sampling import Sampled
from service.rate import Rate
from service.wire import sampling_from_proto, token_to_proto
from twinpool.errors import TransferFailed
from twinpool.sampling import FinishReason
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.worker_pb2_grpc import DecodeServicer

logger = logging.getLogger(__name__)


Handles = dict[tuple[str, int], int]  # by request id and attempt; 0: the router gave none


class RouterSession:
    """The events for one router. What piles up while it reads slowly goes out as one message.

    Nothing bounds the pile but the tokens of what runs: a router that does not read at all is cut off by keepalive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[Output] = []
        self._changed = asyncio.Event()
        self._closed = False

    def deliver(self, outputs: list[Output]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._add, outputs)
        except RuntimeError:
            logger.debug("the event loop is closed", extra={"dropped": len(outputs)})

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def take(self) -> list[Output]:
        """All events there are, once there are some; none when the session is closed."""
        await self._changed.wait()
        self._changed.clear()
        outputs, self._outputs = self._outputs, []
        return [] if self._closed else outputs

    def _add(self, outputs: list[Output]) -> None:
        self._outputs += outputs
        self._changed.set()


class DecodeServer(DecodeServicer):
    def __init__(self, worker: Worker, *, reserve_timeout_s: float) -> None:
        """reserve_timeout_s: for submits that bring none."""
        self._worker = worker
        self._reserve_timeout_s = reserve_timeout_s
        self._rate = Rate()
        self.draining = False

    async def Session(self, commands: AsyncIterable[pb.DecodeCommand], context: Any) -> AsyncIterator[pb.DecodeEvents]:
        session = RouterSession(asyncio.get_running_loop())
        handles: Handles = {}
        reader = asyncio.create_task(self._obey(commands, session, handles))
        reader.add_done_callback(lambda _: session.close())
        try:
            while outputs := await session.take():
                yield _message(outputs, handles)
        finally:
            self._worker.end_session(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _obey(self, commands: AsyncIterable[pb.DecodeCommand], session: RouterSession, handles: Handles) -> None:
        async for command in commands:
            if command.HasField("submit"):
                handles[command.submit.request_id, command.submit.attempt] = command.submit.handle
                self._worker.submit(self._request(command.submit), session)
            elif command.HasField("cancel"):
                cancel = command.cancel
                choice = cancel.choice if cancel.HasField("choice") else None
                self._worker.cancel(cancel.request_id, cancel.attempt, choice)

    def _request(self, message: pb.DecodeSubmit) -> Request:
        return Request(
            request_id=message.request_id,
            attempt=message.attempt,
            token_ids=list(message.token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=sampling_from_proto(message.sampling),
            first_choice=message.first_choice,
            priority=message.priority,
            timeout_s=message.timeout_ms / 1000 or self._reserve_timeout_s,
            tpot_target_s=message.tpot_target_ms / 1000,
            sla_class=message.sla_class,
            max_batch=message.max_batch,
            local_prefill=message.local_prefill,
        )

    def load(self) -> pb.WorkerLoad:
        """What routers are told at every heartbeat."""
        load = self._worker.load
        return pb.WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            rows_free=load.rows_free,
            tokens_per_s=self._rate.update(load.tokens),
            waiting_tokens=load.prompt_tokens,
            draining=self.draining,
        )


def decode_note(note: bytes) -> list[Sampled]:
    """The first token of each choice. Raises TransferFailed when the note is not one."""
    try:
        tokens = pb.FirstTokens.FromString(note).tokens
        return [Sampled(token.token_id, finish_reason=FinishReason(token.finish_reason)) for token in tokens]
    except (DecodeError, ValueError) as error:
        raise TransferFailed("the first tokens that came with the commit cannot be read") from error


def _token(token: Sampled) -> pb.SampledToken:
    return token_to_proto(token.token_id, token.logprob, token.top, token.finish_reason)


def _message(outputs: list[Output], handles: Handles) -> pb.DecodeEvents:
    """Tokens of which there is nothing else to say go into the step, which routers read before the events."""
    message = pb.DecodeEvents()
    step, told = message.step, set()
    for output in outputs:
        key, event = (output.request_id, output.attempt), output.event
        handle = handles.get(key, 0)
        if handle and isinstance(event, Token) and _is_plain(event.token) and key not in told:
            step.handles.append(handle + event.choice)
            step.token_ids.append(event.token.token_id)
            continue
        told.add(key)
        if isinstance(event, Ended):
            handles.pop(key, None)
        message.events.append(_event(output))
    return message


def _is_plain(token: Sampled) -> bool:
    return token.logprob is None and not token.top and not token.finish_reason


def _event(output: Output) -> pb.DecodeEvent:
    message = pb.DecodeEvent(request_id=output.request_id, attempt=output.attempt)
    event = output.event
    if isinstance(event, Reserved):
        message.reserved.transfer_target = event.target
    elif isinstance(event, Token):
        message.tokens.CopyFrom(pb.TokensOut(choice=event.choice, tokens=[_token(event.token)]))
    elif isinstance(event, FirstTokens):
        message.first_tokens.CopyFrom(
            pb.FirstTokens(
                tokens=[_token(token) for token in event.tokens],
                queue_ms=event.queue_ms,
                prefill_ms=event.prefill_ms,
                compute_ms=event.compute_ms,
                prompt_logprobs=[_token(token) for token in event.prompt_logprobs],
            )
        )
    else:
        message.ended.reason = event.reason.value  # type: ignore[assignment]  # the enum's numbers are Reason's
        message.ended.decode_ms = event.decode_ms
        if event.error is not None:
            message.ended.error, message.ended.message = type(event.error).__name__, event.error.message
    return message
