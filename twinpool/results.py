"""What the SDK answers with: plain frozen values, read from the messages of the public API.

Times are milliseconds, lengths are tokens. An enum value that this version does not know reads as "unknown".
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from twinpool import errors
from twinpool.v1 import router_pb2 as v1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float  # natural log, before temperature and filters
    text: bytes  # the token's own bytes; may be part of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float | None  # None: the first token of an echoed prompt
    top: list[TopLogprob]
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # empty unless asked for
    finish_reason: str | None  # "stop", "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message of a stream adds to one choice."""

    index: int  # of the choice, 0 to n - 1
    text: str  # whole characters; may be empty
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None  # on the choice's last chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefill worker's prefix cache
    completion_tokens: int  # over all choices, end-of-sequence tokens included

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where one request's time went, on the server's clock; router.proto says what each span covers."""

    queued_ms: float
    reserve_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_wait_ms: float
    decode_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    transfer_bytes: int
    prefill_worker: str
    decode_worker: str
    attempts: int
    sla_class: str
    input_class: str
    mode: str = ""  # "split", "local" or "aggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one request. `text`, `token_ids`, `logprobs`, `finish_reason` are those of the first choice."""

    request_id: str
    model: str
    choices: list[Choice]
    usage: Usage
    timeline: Timeline

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    context_length: int  # tokens, prompt and answer together
    vocab_size: int
    architecture: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker as the router sees it."""

    worker_id: str
    pool: str  # "prefill" or "decode"
    address: str
    state: str  # "ready", "draining", "suspect", "joining", "probing"
    running: int
    waiting: int
    rows_total: int
    rows_free: int
    tokens_per_s: float
    age_s: float
    fingerprint: str
    version: str
    reason: str = ""  # why it is not ready


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePair:
    """What the router predicted of one pair of workers; router.proto says what each figure covers."""

    prefill_worker: str
    decode_worker: str  # empty: the first token is the whole answer
    cached_tokens: int
    known: bool  # False: a worker is new, its figures are its pool's
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    reserve_ms: float
    tpot_ms: float
    ttft_ms: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One placement of one attempt: the candidates, the chosen one first, and why it won."""

    request_id: str
    attempt: int
    policy: str
    sla_class: str
    input_class: str
    tenant: str
    prompt_tokens: int
    ttft_target_ms: float
    tpot_target_ms: float
    queued_ms: float
    candidates: list[CandidatePair]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many workers a pool should have, by what arrives at this router."""

    pool: str  # "prefill" or "decode"
    current: int  # workers that have joined and do not drain
    desired: int
    load: float  # workers that the arrivals would keep busy, without anything to spare
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Both pools as one router sees them now."""

    workers: list[Worker]
    queued: int  # requests waiting in the router
    running: int  # requests placed and not ended
    sizes: list[PoolSize]  # empty from a router that knows nothing of them
    mode: str = "split"  # "aggregated" while one pool is empty and the other serves whole answers


class Answer:
    """A streamed answer as it grows; the stream that reads the messages is its only writer."""

    def __init__(self) -> None:
        self.request_id = ""  # as the router knows it; empty until its first message
        self.usage: Usage | None = None  # there when the stream has ended
        self.timeline: Timeline | None = None
        self._pending: deque[Chunk] = deque()  # read from the wire, not yet given to the caller
        self._chunks: dict[int, list[Chunk]] = {}

    @property
    def _started(self) -> bool:
        """Whether anything of the answer has come: from then on a retry would repeat it."""
        return bool(self._chunks)

    def _add(self, message: v1.GenerateChunk) -> None:
        self.request_id = message.request_id or self.request_id
        for delta in message.choices:
            chunk = Chunk(
                index=delta.index,
                text=delta.text,
                token_ids=list(delta.token_ids),
                logprobs=_logprobs(delta.logprobs),
                finish_reason=_finish_reason(delta.finish_reason),
            )
            self._chunks.setdefault(chunk.index, []).append(chunk)
            self._pending.append(chunk)
        if message.HasField("usage"):
            self.usage = _same_names(Usage, message.usage)
        if message.HasField("timeline"):
            self.timeline = _same_names(Timeline, message.timeline)

    def _check_whole(self) -> None:
        """Raises Internal when the server ended the stream as if all was well, without its last chunk."""
        unfinished = [index for index, chunks in self._chunks.items() if chunks[-1].finish_reason is None]
        if self.usage is None or not self._chunks or unfinished:
            raise errors.Internal(f"request {self.request_id}: the stream ended without its last chunk")

    def _generation(self, model: str) -> Generation:
        """The whole answer. Call it after the stream has ended well."""
        assert self.usage is not None
        return Generation(
            request_id=self.request_id,
            model=model,
            choices=[_joined(index, chunks) for index, chunks in sorted(self._chunks.items())],
            usage=self.usage,
            timeline=self.timeline or _same_names(Timeline, v1.Timeline()),
        )


def generation(message: v1.GenerateResponse) -> Generation:
    choices = [
        Choice(
            index=choice.index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            logprobs=_logprobs(choice.logprobs),
            finish_reason=_finish_reason(choice.finish_reason),
        )
        for choice in message.choices
    ]
    if not choices:
        raise errors.Internal(f"request {message.request_id}: the answer holds no choice")
    return Generation(
        request_id=message.request_id,
        model=message.model,
        choices=choices,
        usage=_same_names(Usage, message.usage),
        timeline=_same_names(Timeline, message.timeline),
    )


def models(message: v1.ListModelsResponse) -> list[Model]:
    return [_same_names(Model, card) for card in message.models]


def decisions(message: v1.ExplainResponse) -> list[Decision]:
    return [
        _same_names(Decision, each, candidates=[_same_names(CandidatePair, pair) for pair in each.candidates])
        for each in message.decisions
    ]


def pools(message: v1.GetPoolsResponse) -> Pools:
    workers = [
        _same_names(
            Worker,
            worker,
            pool=_enum_name(v1.Pool, worker.pool, "POOL_"),
            state=_enum_name(v1.WorkerState, worker.state, "WORKER_STATE_"),
        )
        for worker in message.workers
    ]
    sizes = [_same_names(PoolSize, size, pool=_enum_name(v1.Pool, size.pool, "POOL_")) for size in message.sizes]
    return Pools(
        workers=workers,
        queued=message.queued,
        running=message.running,
        sizes=sizes,
        mode=message.mode or "split",
    )


def _joined(index: int, chunks: list[Chunk]) -> Choice:
    return Choice(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        finish_reason=chunks[-1].finish_reason,
    )


def _logprobs(messages: Iterable[v1.TokenLogprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token_id=message.token_id,
            logprob=message.logprob if message.HasField("logprob") else None,
            top=[_same_names(TopLogprob, top) for top in message.top],
            text=message.text,
        )
        for message in messages
    ]


def _finish_reason(number: v1.FinishReason) -> str | None:
    return None if number == v1.FINISH_REASON_UNSPECIFIED else _enum_name(v1.FinishReason, number, "FINISH_REASON_")


def _enum_name(enum: Any, number: int, prefix: str) -> str:
    """ "decode" for POOL_DECODE."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else "unknown"


def _same_names(kind: type[T], message: Any, **values: Any) -> T:
    """A `kind` whose fields are those of the message with the same names, but for the given values."""
    names = (field.name for field in dataclasses.fields(kind) if field.name not in values)  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **values)
