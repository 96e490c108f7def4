"""Everything between a client's plain values and a running request: validation, the table of requests, their end."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from router.admission import Admission
from router.classifier import Classifier, check_priority, check_salt
from router.decisions import Decisions, log_fields
from router.metrics import RouterMetrics
from router.placement import Placement
from router.policies import Mode
from router.pools import Registry
from router.request import Ask, Request
from router.sizing import Sizing
from router.tokenizer import ModelCard, Tokenizer
from service.log import log_request
from twinpool.errors import Duplicate, InvalidRequest, TwinpoolError, Unavailable, UnknownModel
from twinpool.prefix import PromptDigests
from twinpool.sampling import SamplingParams

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[ -~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A client's request as it came. Exactly one of `text`, `messages` and `token_ids` is not None."""

    request_id: str = ""
    model: str = ""
    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingParams
    seeded: bool  # False: the client gave no seed
    sla_class: str = ""
    priority: int = 0
    deadline_ms: int = 0  # 0: none
    ttft_target_ms: float = 0.0  # 0: the class's
    tpot_target_ms: float = 0.0
    tenant: str = ""
    cache_salt: str = ""
    call_timeout_s: float | None = None  # what is left of the call's own deadline


class FrontDoor:
    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        classifier: Classifier,
        registry: Registry,
        placement: Placement,
        admission: Admission,
        metrics: RouterMetrics,
        sizing: Sizing,
        *,
        max_attempts: int,
        isolate_tenants: bool = False,
    ) -> None:
        """isolate_tenants: prompts of different tenants share no cached prefix."""
        self.card = card
        self.tokenizer = tokenizer
        self.registry = registry
        self._classifier = classifier
        self._placement = placement
        self._admission = admission
        self._metrics = metrics
        self.sizing = sizing
        self._max_attempts = max_attempts
        self._isolate_tenants = isolate_tenants
        self.decisions = Decisions()
        self._requests: dict[str, Request] = {}
        self._closing = False
        self._idle = asyncio.Event()  # no request is running
        metrics.watch(classifier.classes, admission.queued, lambda: self.running, self._count_workers)
        metrics.watch_sizes(sizing.sizes)

    @property
    def queued(self) -> int:
        """Requests that wait for workers."""
        return sum(self._admission.queued(name) for name in self._classifier.classes)

    @property
    def running(self) -> int:
        """Requests placed and not ended."""
        return len(self._requests) - self.queued

    @property
    def can_serve(self) -> bool:
        return not self._closing and self._placement.missing() is None

    @property
    def mode(self) -> Mode:
        return self._placement.mode

    @property
    def max_context(self) -> int:
        return min(self.card.context_length, self.registry.max_context(self.card.context_length))

    def check_model(self, name: str) -> None:
        """Raises UnknownModel unless `name` is the served model or empty."""
        if name not in ("", self.card.name):
            raise UnknownModel(
                f"model {name!r} is not served here; this router serves {self.card.name!r}", field="model"
            )

    @asynccontextmanager
    async def open(self, question: Question) -> AsyncIterator[Request]:
        """A running request; leaving the context ends it, on both workers. Raises what is wrong with `question`."""
        arrived_at = time.monotonic()  # the event loop's clock, which uvloop reads in whole milliseconds
        request_id = question.request_id or uuid.uuid4().hex
        try:
            ask = await self._check(question, request_id, arrived_at)
        except TwinpoolError as error:
            self._metrics.requests.labels("none", type(error).__name__).inc()
            log_request(logger, request_id=request_id[:128], outcome=type(error).__name__, error=error.message)
            raise
        request = self._requests[request_id] = Request(
            ask,
            self.tokenizer.tokens,
            admission=self._admission,
            registry=self.registry,
            placement=self._placement,
            metrics=self._metrics,
            on_decision=self.decisions.add,
            max_attempts=self._max_attempts,
        )
        self._idle.clear()
        request.start()
        try:
            yield request
        finally:
            try:
                await request.close()
            finally:
                del self._requests[request_id]
                if not self._requests:
                    self._idle.set()
                self._account(request)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until the running ones have ended, at most `timeout_s`."""
        self._closing = True
        if self._requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def _check(self, question: Question, request_id: str, arrived_at: float) -> Ask:
        if self._closing:
            raise Unavailable("this router is stopping; send the request to another one")
        self.check_model(question.model)
        sla = self._classifier.sla_class(question.sla_class, question.ttft_target_ms, question.tpot_target_ms)
        check_priority(question.priority)
        check_salt(question.cache_salt)
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest(
                f"request_id is {request_id[:140]!r}: allowed are 1 to 128 printable ASCII characters",
                field="request_id",
            )
        prompt = await self._prompt(question)
        max_context = self.max_context
        sampling = question.sampling
        sampling.validate(self.card.vocab_size, max_context, len(prompt))
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=max_context - len(prompt))
        if not question.seeded:
            sampling = replace(sampling, seed=random.getrandbits(63))
        if request_id in self._requests:  # last, as the check above may have waited
            raise Duplicate(
                f"request_id {request_id!r} is running; choose another or leave it empty", field="request_id"
            )
        deadline_s = question.deadline_ms / 1000 or sla.deadline_s
        if question.call_timeout_s is not None:
            deadline_s = min(deadline_s, question.call_timeout_s)
        salt = f"{question.tenant}\0{question.cache_salt}" if self._isolate_tenants else question.cache_salt
        digests = PromptDigests(token_ids := array("I", prompt), salt)
        num_cached = self._placement.cached_tokens(digests)
        self.sizing.arrived(sla.name, len(prompt), num_cached)
        return Ask(
            request_id=request_id,
            prompt=token_ids,
            digests=digests,
            cache_salt=salt,
            sampling=sampling,
            sla=sla,
            input_class=self._classifier.input_class(len(prompt) - num_cached),
            tenant=question.tenant,
            priority=question.priority,
            arrived_at=arrived_at,
            deadline=arrived_at + deadline_s,
        )

    async def _prompt(self, question: Question) -> Sequence[int]:
        if question.messages is not None:
            return await self.tokenizer.encode_chat(question.messages, max_tokens=self.max_context)
        if question.text:
            return await self.tokenizer.encode(question.text, max_tokens=self.max_context)
        if question.token_ids is not None:
            self.tokenizer.check(question.token_ids)
            return question.token_ids
        raise InvalidRequest("prompt is empty: send text, chat or token_ids", field="prompt")

    def _count_workers(self, pool: str, state: str) -> int:
        workers = [worker for worker in list(self.registry) if worker.info.pool.name.lower() == pool]
        return sum(worker.state.name.lower() == state for worker in workers)

    def _account(self, request: Request) -> None:
        """The one log line and the counters of a request that has ended."""
        ask, usage, timeline, metrics = request.ask, request.usage, request.timeline, self._metrics
        sla = ask.sla.name
        metrics.requests.labels(sla, request.outcome).inc()
        metrics.prompt_length.observe(usage.prompt_tokens)
        metrics.prompt_tokens.labels(sla).inc(usage.prompt_tokens)
        metrics.cached_tokens.labels(sla).inc(usage.cached_tokens)
        metrics.completion_tokens.labels(sla).inc(usage.completion_tokens)
        metrics.transfer_bytes.inc(timeline.transfer_bytes)
        if timeline.placed_at is not None:
            metrics.queue.labels(sla).observe(timeline.placed_at - timeline.arrived_at)
        if request.outcome == "finished":
            self.sizing.ended(usage.prompt_tokens, usage.completion_tokens, request.longest)
            metrics.duration.labels(sla, ask.input_class).observe((timeline.ended_at or 0.0) - timeline.arrived_at)
            if request.longest > 1:
                metrics.tpot.labels(sla, ask.input_class).observe(timeline.tpot_s(request.longest))
            if (share := timeline.transfer_wait_share()) is not None:
                metrics.transfer_wait_share.labels(sla, ask.input_class).observe(share)
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in timeline.fields(request.longest).items()
        }
        log_request(
            logger,
            request_id=ask.request_id,
            outcome=request.outcome,
            error=request.error,
            finish_reason=",".join(choice.finish_reason.name.lower() for choice in request.choices),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tenant=ask.tenant,
            **fields,
            **log_fields(request.decision),
        )
