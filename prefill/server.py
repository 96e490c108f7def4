"""The gRPC face of a prefill worker: messages in, messages out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.sampling import Sampled
from prefill.request import Event, Finished, FirstTokens, NextToken, Request, Transferred
from prefill.worker import Worker
from service.rate import Rate
from service.wire import sampling_from_proto, token_to_proto
from twinpool.errors import DeadlineExceeded
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.worker_pb2_grpc import PrefillServicer

logger = logging.getLogger(__name__)


class PrefillServer(PrefillServicer):
    def __init__(self, worker: Worker, *, request_timeout_s: float) -> None:
        """request_timeout_s: for calls that bring no deadline."""
        self._worker = worker
        self._request_timeout_s = request_timeout_s
        self._rate = Rate()
        self.draining = False

    async def Run(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillEvent]:
        loop = asyncio.get_running_loop()
        remaining = context.time_remaining()
        timeout_s = self._request_timeout_s if remaining is None else remaining
        end = loop.time() + timeout_s
        events: asyncio.Queue[Event] = asyncio.Queue()
        sequence = self._worker.submit(_request(request, timeout_s), _poster(loop, events.put_nowait))
        try:
            while True:
                event = await asyncio.wait_for(events.get(), end - loop.time())
                if isinstance(event, Finished):
                    if event.error is not None:
                        raise event.error
                    return
                yield _message(event)
        except TimeoutError as error:
            raise DeadlineExceeded(f"prefill of {request.request_id} took more than {timeout_s:.1f} s") from error
        finally:
            self._worker.cancel(sequence)

    def load(self) -> pb.WorkerLoad:
        """What routers are told at every heartbeat."""
        load = self._worker.load
        return pb.WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            rows_free=load.rows_free,
            tokens_per_s=self._rate.update(load.computed_tokens),
            waiting_tokens=load.waiting_tokens,
            draining=self.draining,
            waiting_long_tokens=load.waiting_long_tokens,
            prefix_digests=load.prefixes,
        )


def encode_note(first: FirstTokens) -> bytes:
    """What the decode worker gets with the last row; logprobs are only for the router."""
    tokens = [token_to_proto(token.token_id, None, None, token.finish_reason) for token in first.tokens]
    return pb.FirstTokens(tokens=tokens).SerializeToString()


def _poster(loop: asyncio.AbstractEventLoop, put: Callable[[Event], None]) -> Callable[[Event], None]:
    """Hands events of the device thread to the event loop, or to nobody once the loop is closed."""

    def post(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(put, event)
        except RuntimeError:
            logger.debug("the event loop is closed", extra={"dropped": type(event).__name__})

    return post


def _request(message: pb.PrefillRequest, timeout_s: float) -> Request:
    return Request(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        input_class=message.input_class,
        target=message.transfer_target,
        first_choice=message.first_choice,
        priority=message.priority,
        timeout_s=timeout_s,
        cache_salt=message.cache_salt,
        generate=message.generate,
    )


def _token(token: Sampled) -> pb.SampledToken:
    return token_to_proto(token.token_id, token.logprob, token.top, token.finish_reason)


def _message(event: FirstTokens | Transferred | NextToken) -> pb.PrefillEvent:
    if isinstance(event, NextToken):
        return pb.PrefillEvent(tokens=pb.TokensOut(choice=event.choice, tokens=[_token(event.token)]))
    if isinstance(event, Transferred):
        return pb.PrefillEvent(
            transferred=pb.Transferred(
                bytes=event.bytes,
                rows=event.rows,
                transfer_ms=event.transfer_ms,
                transfer_wait_ms=event.transfer_wait_ms,
            )
        )
    return pb.PrefillEvent(
        first_tokens=pb.FirstTokens(
            tokens=[_token(token) for token in event.tokens],
            cached_tokens=event.cached_tokens,
            queue_ms=event.queue_ms,
            prefill_ms=event.prefill_ms,
            compute_ms=event.compute_ms,
            prompt_logprobs=[_token(token) for token in event.prompt_logprobs],
        )
    )
