"""One prefill worker: a call per prompt, which answers first tokens and then that the rows have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc

from router import wire
from router.wire import FirstTokens, Job, NextTokens, Transferred
from twinpool.errors import Unavailable, WorkerLost, from_status
from twinpool.v1 import worker_pb2_grpc


class PrefillClient:
    def __init__(self, worker_id: str, channel: grpc.aio.Channel) -> None:
        self._worker_id = worker_id
        self._channel = channel
        self._stub = worker_pb2_grpc.PrefillStub(channel)

    async def run(
        self, job: Job, target: bytes, timeout_s: float, *, generate: bool = False
    ) -> AsyncGenerator[FirstTokens | Transferred | NextTokens, None]:
        """Computes `job` and pushes its rows to `target`. Closing the iterator cancels the call.

        generate: there is no target; the worker goes on until the answer ends.

        Raises the worker's own error, or WorkerLost when the worker is gone.
        """
        call = self._stub.Run(wire.prefill_request(job, target, generate=generate), timeout=timeout_s)
        try:
            async for event in call:
                kind = event.WhichOneof("event")
                if kind == "first_tokens":
                    yield wire.first_tokens(event.first_tokens)
                elif kind == "transferred":
                    yield wire.transferred(event.transferred)
                elif kind == "tokens":
                    yield wire.next_tokens(event.tokens)
        except grpc.aio.AioRpcError as failure:
            error = from_status(failure.code(), failure.details() or "", failure.trailing_metadata())
            if type(error) is Unavailable:  # a bare status: gRPC itself could not reach the worker
                error = WorkerLost(f"prefill worker {self._worker_id} was lost: {error.message}")
            raise error from failure
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # not this task but the channel under the call was closed: the worker has left the pool
            raise WorkerLost(f"prefill worker {self._worker_id} has left") from cancelled
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the channel and every call on it."""
        await self._channel.close()
