"""One try at one or more choices of a request, on one pair of workers.

1. placed      submitted to the decode worker; waits for its rows (none needed when the first token is the whole answer)
2. prefilling  Reserved came: the prompt goes to the prefill worker with the transfer target
3. decoding    first tokens came and are delivered at once; the rows follow to the decode worker, then its tokens
4. ended       every choice has its finish reason, or a worker failed; both sides are told and the claims released

Where one worker does all (policies.Mode), a decode worker answers the first tokens over its session too, and a prefill
worker goes on in its call until the answer ends.

Tokens may overtake the first token, as they come over another connection: they wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from enum import Enum

from router.choice import Choice
from router.lesson import Lesson
from router.placement import Pair
from router.pools import Registry, Worker
from router.predictor import Predictor
from router.timeline import Timeline
from router.wire import DecodeEnd, FirstTokens, Job, NextTokens, Token
from twinpool.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    Duplicate,
    Internal,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    TwinpoolError,
    UnknownModel,
    WorkerLost,
    by_name,
)

_FINAL = (InvalidRequest, UnknownModel, Duplicate, DeadlineExceeded)  # no other worker would say otherwise
_FULL_RETRY_AFTER_S = 1.0  # what a client is told when all attempts met workers without room
_LAST_WORDS_S = 1.0


class Phase(Enum):
    PLACED = "placed"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class AttemptFailed(Exception):
    """The attempt failed in a way that another pair may not; `workers` are to be avoided in the next one."""

    def __init__(self, error: TwinpoolError, workers: Sequence[Worker]) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker_ids = [worker.info.worker_id for worker in workers]


class Attempt:
    """Owns its claims on both workers, its prefill call and its place in the decode session until `run` returns."""

    def __init__(
        self,
        job: Job,
        pair: Pair,
        choices: Sequence[Choice],
        *,
        prompt: Sequence[int],
        deadline: float,
        timeline: Timeline,
        registry: Registry,
        predictor: Predictor,
        on_tokens: Callable[[Choice, int], None],
    ) -> None:
        """`on_tokens(choice, n)` is called after `choice` has taken n tokens in."""
        self._job = job
        self._pair = pair
        self._choices: Mapping[int, Choice] = {choice.index: choice for choice in choices}
        self._prompt = prompt
        self._deadline = deadline
        self._timeline = timeline
        self._registry = registry
        self._lesson = Lesson(pair, len(job.token_ids), predictor)
        self._on_tokens = on_tokens
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prefill: asyncio.Task[None] | None = None
        self._started_at = time.monotonic()
        self._early: list[Callable[[], None]] = []  # events of the decode worker that overtook the first token
        self._decoded = False  # the decode worker has sent tokens, so the rows have arrived
        self._ends_itself = False  # the decode worker has finished the last choice and is about to say so
        self._ended = asyncio.Event()
        self.cached_tokens: int | None = None  # once the first tokens have come
        self.phase = Phase.PLACED

    async def run(self) -> None:
        """Returns when every choice is finished. Raises AttemptFailed, or the error that ends the request."""
        session = self._pair.decode_session
        try:
            if session is None:
                self.reserved(b"")
            else:
                session.submit(self._job, self._remaining_s(), self, local_prefill=self._pair.is_local)
            await self._done
            await self._last_words()
        except WorkerLost as error:  # of submit
            raise AttemptFailed(error, [self._pair.decode] if self._pair.decode else []) from error
        finally:
            self.phase = Phase.ENDED
            self._lesson.ended()
            if session is not None:
                session.cancel(self._job.request_id, self._job.attempt)
            self._pair.release()
            self._has_left()
            if self._prefill is not None and not self._prefill.done():  # last: a cancel of this task may cut it short
                self._prefill.cancel()
                await asyncio.wait([self._prefill])

    async def _last_words(self) -> None:
        """Waits for the figures that both workers send about now; only ever for a moment."""
        if self._ended.is_set() and (self._prefill is None or self._prefill.done()):
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if self._ends_itself:
                    await self._ended.wait()
                if self._decoded and self._pair.decode is not None and self._prefill is not None:
                    await asyncio.wait([self._prefill])
        except TimeoutError:
            return  # the answer is whole; it is only the timeline that lacks a figure

    # What the decode worker says.

    def reserved(self, target: bytes) -> None:
        if self.phase is not Phase.PLACED:
            return
        self.phase = Phase.PREFILLING
        self._pair.reserved()
        self._lesson.reserved(time.monotonic() - self._started_at)
        if self._timeline.first_token_at is None:
            self._timeline.reserve_ms = 1000 * (time.monotonic() - self._started_at)
        if not self._pair.is_local:
            self._prefill = asyncio.ensure_future(self._run_prefill(target))

    def first_tokens(self, event: FirstTokens) -> None:
        if self.phase is Phase.PREFILLING and self._pair.is_local:
            self._first_tokens(event)

    def tokens(self, choice: int, tokens: Sequence[Token]) -> None:
        if self.phase is Phase.PREFILLING:
            self._early.append(lambda: self.tokens(choice, tokens))
        elif self.phase is Phase.DECODING and not self._done.done():
            self._decoded = True
            self._lesson.tokens(choice, len(tokens), time.monotonic())
            try:
                self._deliver(choice, tokens)
            except Internal as error:
                self.decode_lost(error)

    def ended(self, end: DecodeEnd) -> None:
        if self.phase is Phase.PREFILLING and end.reason == "FINISHED":
            self._early.append(lambda: self.ended(end))
            return
        self._ended.set()
        if end.decode_ms:
            self._timeline.decode_ms = end.decode_ms
            if len(self._choices) == 1 and not self._pair.is_local:
                self._lesson.decoded(end.decode_ms / 1000)
        if self._done.done():
            return
        decode = [self._pair.decode] if self._pair.decode is not None else []
        where = f"decode worker {decode[0].info.worker_id}" if decode else "decode worker"
        kind = by_name(end.error)
        if end.reason == "REJECTED":
            self._fail((kind if issubclass(kind, _FINAL) else InvalidRequest)(end.message), [])
        elif end.reason == "TRANSFER_FAILED":
            broken = kind if issubclass(kind, TransferFailed) else TransferFailed
            self._fail(broken(f"{where}: {end.message}"), [self._pair.prefill, *decode])
        elif end.reason == "PREEMPTED" or issubclass(kind, Overloaded):
            self._fail(Overloaded(f"{where}: {end.message}", retry_after_s=_FULL_RETRY_AFTER_S), decode)
        else:
            self._fail(Internal(f"{where} ended the request early ({end.reason}): {end.message}"), decode)

    def decode_lost(self, error: TwinpoolError) -> None:
        """The worker that decodes is gone, or nothing more that it says of this attempt can be trusted."""
        self._ended.set()
        self._fail(error, [self._pair.decode or self._pair.prefill])

    # What the prefill worker says.

    async def _run_prefill(self, target: bytes) -> None:
        pair, worker = self._pair, self._pair.prefill
        call = pair.prefill_client.run(self._job, target, self._remaining_s() + 1, generate=pair.generates)
        try:
            async with aclosing(call) as events:
                async for event in events:
                    if isinstance(event, FirstTokens):
                        self._first_tokens(event)
                    elif isinstance(event, NextTokens):
                        self.tokens(event.choice, event.tokens)
                    else:
                        self._timeline.transferred(event)
                        self._lesson.transferred(event)
            if not self._done.done() and (self.phase is Phase.PREFILLING or not target):
                raise Internal(f"prefill worker {worker.info.worker_id} ended the call without an answer")
            self._registry.succeeded(worker)
        except TwinpoolError as error:
            if not self._decoded or pair.generates:  # else the rows had arrived before the call failed
                involved = [worker]
                if isinstance(error, TransferFailed) and pair.decode is not None:
                    involved.append(pair.decode)
                self._fail(error, involved)
        except Exception as error:
            if not self._done.done():
                self._done.set_exception(error)
        finally:
            self._pair.release_prefill()
            self._has_left()

    def _first_tokens(self, event: FirstTokens) -> None:
        if self._done.done():
            return
        if len(event.tokens) != len(self._choices):
            raise Internal(f"{len(event.tokens)} first tokens for {len(self._choices)} choices")
        self.phase = Phase.DECODING
        self.cached_tokens = event.cached_tokens
        self._timeline.prefilled(event, time.monotonic())
        self._lesson.prefilled(event)
        self._pair.prefilled()
        for choice in self._choices.values():
            if choice.awaits_echo:
                choice.echo(event.prompt or [Token(token_id) for token_id in self._prompt])
        for index, token in zip(self._choices, event.tokens, strict=True):
            self._deliver(index, [token])
        early, self._early = self._early, []
        for replay in early:
            replay()

    # Both.

    def _deliver(self, index: int, tokens: Sequence[Token]) -> None:
        choice = self._choices.get(index)
        if choice is None:
            raise Internal(f"tokens came for choice {index}, which was not asked for")
        if choice.finish_reason:
            return
        taken = choice.accept(tokens)
        self._on_tokens(choice, taken)
        if not choice.finish_reason:
            return
        session = self._pair.decode_session
        if all(each.finished for each in self._choices.values()):
            if self._pair.decode is None:
                self._registry.succeeded(self._pair.prefill)
            elif self._decoded or self._pair.is_local:
                self._registry.succeeded(self._pair.decode)
                self._ends_itself = bool(tokens[taken - 1].finish_reason)
            if not self._done.done():
                self._done.set_result(None)
        elif session is not None and not tokens[taken - 1].finish_reason:  # a stop string, which the worker cannot see
            session.cancel(self._job.request_id, self._job.attempt, index)

    def _has_left(self) -> None:
        """Whoever waits may have the room; a trial that is over, whatever came of it, also lets its worker be used."""
        (self._registry.on_change if self._pair.is_trial else self._registry.on_room)()

    def _fail(self, error: TwinpoolError, workers: Sequence[Worker]) -> None:
        if self._done.done():
            return
        if isinstance(error, _FINAL):
            self._done.set_exception(error)
            return
        for worker in self._suspects(error, workers):
            self._registry.failed(worker, error)
        self._done.set_exception(AttemptFailed(error, workers))

    def _suspects(self, error: TwinpoolError, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of `workers` that `error` speaks against. The next attempt avoids them all, guilty or not."""
        if isinstance(error, Overloaded):
            return []  # a full worker is no faulty one
        if isinstance(error, ChecksumMismatch):  # found by the receiver: it is the sender, or its link, that is bad
            return [self._pair.prefill]
        return workers

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
