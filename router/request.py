"""One request from arrival to its one end: queued, then one or more attempts, then finished, an error or cancelled.

A failed attempt leaves its choices with the tokens that the client already has. They are attempted again as what
they are now, a longer prompt: all together as long as nothing was delivered, else each choice on its own.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.admission import Admission
from router.attempt import Attempt, AttemptFailed
from router.choice import Choice, Delta
from router.classifier import SlaClass
from router.decisions import Decision
from router.detokenizer import TokenBytes
from router.metrics import RouterMetrics
from router.placement import Demand, Pair, Placement
from router.pools import Registry
from router.timeline import Timeline
from router.wire import Job
from twinpool.errors import DeadlineExceeded, Overloaded, PoolEmpty, TransferFailed, TwinpoolError, WorkerLost
from twinpool.prefix import PromptDigests
from twinpool.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be done: validated, tokenized and classified. `sampling` has its seed and max_tokens set."""

    request_id: str
    prompt: array[int]  # four bytes a token: thousands of these may wait
    digests: PromptDigests
    cache_salt: str
    sampling: SamplingParams
    sla: SlaClass  # with the request's own targets
    input_class: str  # by what no cache held when it came
    tenant: str
    priority: int
    arrived_at: float  # seconds on the event loop's clock, as the deadline
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Request:
    """Runs from `start` to `close`; `listen` and `finish` are the two ways to its answer."""

    def __init__(
        self,
        ask: Ask,
        vocabulary: TokenBytes,
        *,
        admission: Admission,
        registry: Registry,
        placement: Placement,
        metrics: RouterMetrics,
        on_decision: Callable[[Decision], None],
        max_attempts: int,
    ) -> None:
        self.ask = ask
        self.vocabulary = vocabulary
        self.choices = [Choice(index, ask.sampling, vocabulary) for index in range(ask.sampling.n)]
        self.timeline = Timeline(ask.arrived_at, ask.sla.name, ask.input_class)
        self.outcome = ""  # "finished", "cancelled" or the class of the error; empty until `close`
        self.error = ""  # its message
        self.decision: Decision | None = None  # the last placement
        self._admission = admission
        self._registry = registry
        self._metrics = metrics
        self._placement = placement
        self._on_decision = on_decision
        self._max_attempts = max_attempts
        self._cached_tokens: int | None = None  # of the first prefill, the one that saw the bare prompt
        self._avoid: set[str] = set()
        self._last_token_at: list[float | None] = [None] * ask.sampling.n
        self._gaps = metrics.gaps(ask.sla.name)
        self._on_news: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def listen(self, on_tokens: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Calls `on_tokens` when there is something to `take`, at once if there is already, and `on_end` once."""
        assert self._task is not None, "not started"
        self._on_news = on_tokens
        on_tokens()
        self._task.add_done_callback(lambda _: on_end())

    def take(self) -> list[Delta]:
        """What is new since the last call, of every choice."""
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    async def finish(self) -> list[Delta]:
        """The whole answer at once, one delta per choice. Raises the error that ended the request."""
        assert self._task is not None, "not started"
        await asyncio.shield(self._task)  # `close` is what cancels it
        return self.take()

    async def close(self) -> None:
        """Cancels what still runs, on both workers, and settles the outcome. Idempotent."""
        task = self._task
        if task is None or self.outcome:
            return
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        self.timeline.ended_at = time.monotonic()
        if task.cancelled():
            late = self.timeline.ended_at >= self.ask.deadline  # gRPC's own deadline was faster than ours
            self.outcome = DeadlineExceeded.__name__ if late else "cancelled"
        else:
            error = task.exception()
            self.outcome = type(error).__name__ if error is not None else "finished"
            self.error = str(error) if error is not None else ""

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.ask.prompt),
            cached_tokens=min(self._cached_tokens or 0, len(self.ask.prompt)),
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self.choices)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout_at(self.ask.deadline):
                await self._serve(self.choices, [])
        except TimeoutError:
            raise DeadlineExceeded(
                f"request {self.ask.request_id} ran into its deadline after "
                f"{time.monotonic() - self.ask.arrived_at:.3g} s, {self._progress()}"
            ) from None

    async def _serve(
        self, choices: Sequence[Choice], failures: Sequence[TwinpoolError], *, admitted: bool = False
    ) -> None:
        """Attempts `choices` until they are finished; `failures` are those of the attempts made at them before."""
        while choices:
            try:
                pair = await self._place(choices, resumption=admitted or bool(failures))
                if pair.generates and len(choices) > 1:
                    pair.release()
                    self._registry.on_change()
                    await self._serve_each(choices, failures)
                    return
                await self._attempt(pair, choices)
            except AttemptFailed as failure:
                failures = [*failures, failure.error]
                self._avoid.update(failure.worker_ids)
                if len(failures) >= self._max_attempts:
                    raise _exhausted(failures, "no more are allowed") from failure
                self._metrics.retries.labels(type(failure.error).__name__).inc()
                if isinstance(failure.error, TransferFailed):
                    self._metrics.transfer_retries.labels(type(failure.error).__name__).inc()
            except PoolEmpty as empty:
                if not failures:
                    raise
                raise _exhausted(failures, empty.message) from empty
            choices = [choice for choice in choices if not choice.finished]
            if len(choices) > 1 and any(choice.token_ids for choice in choices):
                await self._serve_each(choices, failures)
                return

    async def _serve_each(self, choices: Sequence[Choice], failures: Sequence[TwinpoolError]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._serve([choice], failures, admitted=True))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _place(self, choices: Sequence[Choice], *, resumption: bool) -> Pair:
        ask = self.ask
        return await self._admission.place(
            self._demand(choices),
            ask.sla,
            priority=ask.priority,
            deadline=ask.deadline,
            resumption=resumption,
            tenant=ask.tenant,
            input_class=ask.input_class,
        )

    async def _attempt(self, pair: Pair, choices: Sequence[Choice]) -> None:
        """Releases `pair` at its end."""
        ask, timeline = self.ask, self.timeline
        timeline.attempts += 1
        timeline.placed_at = timeline.placed_at or time.monotonic()
        timeline.prefill_worker = pair.prefill.info.worker_id
        decode = pair.prefill if pair.generates else pair.decode
        timeline.decode_worker = decode.info.worker_id if decode is not None else ""
        timeline.mode = pair.mode.value
        self._metrics.attempts.labels(pair.mode.value).inc()
        self._remember(pair, len(ask.prompt) + len(choices[0].token_ids))
        attempt = Attempt(
            self._job(choices, timeline.attempts, pair.input_class),
            pair,
            choices,
            prompt=ask.prompt,
            deadline=ask.deadline,
            timeline=timeline,
            registry=self._registry,
            predictor=self._placement.predictor,
            on_tokens=self._on_tokens,
        )
        try:
            await attempt.run()
        finally:
            if self._cached_tokens is None:
                self._cached_tokens = attempt.cached_tokens

    def _demand(self, choices: Sequence[Choice]) -> Demand:
        ask, delivered = self.ask, len(choices[0].token_ids)
        sampling = ask.sampling
        max_new_tokens = (sampling.max_tokens or 1) - delivered
        return Demand(
            num_tokens=len(ask.prompt) + delivered,
            num_choices=len(choices),
            max_new_tokens=max_new_tokens,
            least_new_tokens=max_new_tokens if _never_stops(sampling) else max(1, sampling.min_tokens - delivered),
            avoid=frozenset(self._avoid),
            digests=ask.digests,
            arrived_at=ask.arrived_at,
            ttft_s=ask.sla.ttft_ms / 1000,
            tpot_s=ask.sla.tpot_ms / 1000,
        )

    def _remember(self, pair: Pair, num_tokens: int) -> None:
        ask, timeline = self.ask, self.timeline
        self.decision = Decision(
            request_id=ask.request_id,
            attempt=timeline.attempts,
            sla_class=ask.sla.name,
            input_class=pair.input_class,
            tenant=ask.tenant,
            prompt_tokens=num_tokens,
            ttft_target_ms=ask.sla.ttft_ms,
            tpot_target_ms=ask.sla.tpot_ms,
            queued_ms=1000 * (time.monotonic() - ask.arrived_at),
            choice=pair.choice,
        )
        self._on_decision(self.decision)

    def _job(self, choices: Sequence[Choice], attempt: int, input_class: str) -> Job:
        ask, first, sampling = self.ask, choices[0], self.ask.sampling
        if (len(choices), first.awaits_echo) != (sampling.n, sampling.echo):
            sampling = replace(sampling, n=len(choices), echo=first.awaits_echo)
        return Job(
            request_id=ask.request_id,
            attempt=attempt,
            token_ids=(*ask.prompt, *first.token_ids),
            num_prompt_tokens=len(ask.prompt),
            sampling=sampling,
            first_choice=first.index,
            input_class=input_class,
            sla_class=ask.sla.name,
            priority=ask.priority,
            class_priority=ask.sla.priority,
            tpot_target_ms=ask.sla.tpot_ms,
            max_batch=ask.sla.max_batch,
            cache_salt=ask.cache_salt,
        )

    def _on_tokens(self, choice: Choice, count: int) -> None:
        now, ask = time.monotonic(), self.ask
        last = self._last_token_at[choice.index]
        if last is not None:
            self._gaps.add((now - last) / count, count)
        elif self.timeline.last_token_at is None:
            self._metrics.ttft.labels(ask.sla.name, ask.input_class).observe(now - ask.arrived_at)
        self._last_token_at[choice.index] = self.timeline.last_token_at = now
        if self._on_news is not None:
            self._on_news()

    def _progress(self) -> str:
        if self.timeline.placed_at is None:
            return f"in the queue of SLA class {self.ask.sla.name!r}; send it when less is queued, or give it more time"
        if self.timeline.first_token_at is None:
            return "before its first token"
        return f"{self.longest} tokens into its answer"


def _never_stops(sampling: SamplingParams) -> bool:
    """Whether nothing but max_tokens ends the answer."""
    return sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids


def _exhausted(failures: Sequence[TwinpoolError], why: str) -> TwinpoolError:
    """What the client gets when attempts have failed and none can follow."""
    last = failures[-1]
    message = f"{last.message} ({len(failures)} attempts failed; {why}); send the request again"
    if isinstance(last, Overloaded):
        return Overloaded(message, retry_after_s=last.retry_after_s or 1.0)
    return (TransferFailed if isinstance(last, TransferFailed) else WorkerLost)(message)
