"""One decode worker: a single stream carries all requests of this router to it and their tokens back.

1. the first submit opens the stream; commands wait in a queue that one task writes from, so their order is kept
2. each message from the worker holds one step's tokens of many requests, those that are nothing but a token as two
   lists (wire: Step), and their other events; each goes to its request's listener
3. when the stream ends, whatever the cause, every request on it is told at once that the worker is lost
4. the next submit opens a new stream
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from router import wire
from router.wire import DecodeEnd, FirstTokens, Job, Token
from twinpool.errors import Internal, TwinpoolError, WorkerLost
from twinpool.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """What a request does with the events of its attempt. Called on the event loop; must not block."""

    def reserved(self, target: bytes) -> None: ...
    def first_tokens(self, event: FirstTokens) -> None: ...
    def tokens(self, choice: int, tokens: Sequence[Token]) -> None: ...
    def ended(self, end: DecodeEnd) -> None: ...
    def decode_lost(self, error: TwinpoolError) -> None: ...


class DecodeSession:
    def __init__(self, worker_id: str, channel: grpc.aio.Channel) -> None:
        self._worker_id = worker_id
        self._channel = channel
        self._stub = worker_pb2_grpc.DecodeStub(channel)
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand] = asyncio.Queue()
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._handles: dict[tuple[str, int], range] = {}  # of the choices of each
        self._by_handle: dict[int, tuple[Listener, int]] = {}  # with the index of the choice
        self._next_handle = 1
        self._stream: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, job: Job, timeout_s: float, listener: Listener, *, local_prefill: bool = False) -> None:
        """Asks for rows for `job`; `listener` hears of it until the end or until `cancel`. Raises WorkerLost.

        local_prefill: the worker is to compute the prompt, and nobody to send it.
        """
        if self._closed:
            raise WorkerLost(f"decode worker {self._worker_id} has left")
        if self._stream is None:
            self._commands = asyncio.Queue()  # what an ended stream left unsent died with it
            self._stream = asyncio.ensure_future(self._run(self._commands))
        key = job.request_id, job.attempt
        self._listeners[key] = listener
        indices = range(job.first_choice, job.first_choice + job.sampling.n)
        handle = self._next_handle
        self._next_handle += indices.stop
        self._handles[key] = range(handle + indices.start, handle + indices.stop)
        for index in indices:
            self._by_handle[handle + index] = (listener, index)
        self._commands.put_nowait(wire.decode_submit(job, timeout_s, local_prefill=local_prefill, handle=handle))

    def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> None:
        """Ends an attempt, or one choice of it. Idempotent; the listener of a cancelled attempt hears no more."""
        if choice is None:
            known = self._forget((request_id, attempt)) is not None
        else:
            known = (request_id, attempt) in self._listeners
        if known:
            self._commands.put_nowait(wire.decode_cancel(request_id, attempt, choice))

    async def close(self) -> None:
        """Ends the stream and the channel; requests still on it are told that the worker is lost."""
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait([self._stream])
        await self._channel.close()

    async def _run(self, commands: asyncio.Queue[worker_pb2.DecodeCommand]) -> None:
        reason = "it left"
        call = self._stub.Session()
        writer = asyncio.ensure_future(_write(call, commands))
        try:
            async for message in call:
                self._step(message.step)
                for event in message.events:
                    try:
                        self._dispatch(event)
                    except Exception as error:  # one request's events must not take the others down
                        self._condemn(event.request_id, event.attempt, error)
            reason = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait([writer])
            self._stream = None
            self._lose(WorkerLost(f"decode worker {self._worker_id} was lost: {reason}"))

    def _step(self, step: worker_pb2.Step) -> None:
        """The path of nearly every token."""
        by_handle, plain = self._by_handle, wire.plain_token
        for handle, token_id in zip(step.handles, step.token_ids, strict=False):
            found = by_handle.get(handle)
            if found is None:
                continue  # cancelled here while the token was on its way
            listener, choice = found
            try:
                listener.tokens(choice, (plain(token_id),))
            except Exception as error:
                request_id, attempt = next(key for key, each in self._handles.items() if handle in each)
                self._condemn(request_id, attempt, error)

    def _dispatch(self, event: worker_pb2.DecodeEvent) -> None:
        key = (event.request_id, event.attempt)
        listener = self._listeners.get(key)
        if listener is None:
            return  # cancelled here while the event was on its way
        kind = event.WhichOneof("event")
        if kind == "tokens":
            listener.tokens(event.tokens.choice, [wire.token(each) for each in event.tokens.tokens])
        elif kind == "reserved":
            listener.reserved(event.reserved.transfer_target)
        elif kind == "first_tokens":
            listener.first_tokens(wire.first_tokens(event.first_tokens))
        elif kind == "ended":
            self._forget(key)
            listener.ended(wire.decode_end(event.ended))

    def _forget(self, key: tuple[str, int]) -> Listener | None:
        for handle in self._handles.pop(key, ()):
            del self._by_handle[handle]
        return self._listeners.pop(key, None)

    def _condemn(self, request_id: str, attempt: int, error: Exception) -> None:
        logger.error("bad event of a decode worker", exc_info=error, extra={"worker": self._worker_id})
        listener = self._listeners.get((request_id, attempt))
        self.cancel(request_id, attempt)
        if listener is not None:
            listener.decode_lost(
                Internal(f"decode worker {self._worker_id} sent an event that cannot be read: {error!r}")
            )

    def _lose(self, error: TwinpoolError) -> None:
        listeners = list(self._listeners.values())
        for known in (self._listeners, self._handles, self._by_handle):
            known.clear()
        for listener in listeners:
            listener.decode_lost(error)


async def _write(call: Any, commands: asyncio.Queue[worker_pb2.DecodeCommand]) -> None:
    try:
        while True:
            await call.write(await commands.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the stream has ended; its reader says why
