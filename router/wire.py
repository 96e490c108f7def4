"""The router's plain values, and how they travel to and from workers (worker.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.classifier import PRIORITY_LIMIT
from router.pools import Pool, WorkerInfo, WorkerLoad
from service.wire import sampling_to_proto
from twinpool.errors import Incompatible
from twinpool.sampling import FinishReason, SamplingParams
from twinpool.v1 import router_pb2, worker_pb2


class Token(NamedTuple):
    """One sampled token. `logprob` and `top` (id and logprob of the likeliest) are filled when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason = FinishReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt, as both workers are told about it. `token_ids`: the prompt and the tokens delivered after it."""

    request_id: str
    attempt: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    first_choice: int
    input_class: str
    sla_class: str
    priority: int  # among the requests of its class
    class_priority: int
    tpot_target_ms: float
    max_batch: int = 0
    cache_salt: str = ""
    probe: bool = False  # a test of the workers, no user's request

    @property
    def seniority(self) -> int:
        """Whose rows a decode worker takes away last: by class, then by the request's own priority."""
        return (2 * PRIORITY_LIMIT + 1) * self.class_priority + self.priority


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """The prefill worker's answer: one token per choice. `prompt`: logprobs of the prompt's tokens, with echo."""

    tokens: tuple[Token, ...]
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    prompt: tuple[Token, ...]
    compute_ms: float = 0.0  # of the device, for this prompt alone; 0: the worker does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The rows are with the decode worker."""

    bytes: int
    transfer_ms: float
    transfer_wait_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokens:
    """Tokens of an answer that the prefill worker generates."""

    choice: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEnd:
    """How the decode worker ended one attempt; the reasons are those of the protocol's DecodeEnded."""

    reason: str  # "FINISHED", "CANCELLED", "REJECTED", "TRANSFER_FAILED", "PREEMPTED", "FAILED"
    error: str
    message: str
    decode_ms: float


MOST_PREFIXES = 4096  # of a worker's report that are read

_NONE = FinishReason.NONE
_FINISH = {int(reason): reason for reason in FinishReason}


def token(message: worker_pb2.SampledToken) -> Token:
    return Token(
        message.token_id,
        message.logprob,
        tuple((top.token_id, top.logprob) for top in message.top) if message.top else (),
        _FINISH.get(message.finish_reason, _NONE),
    )


def plain_token(token_id: int) -> Token:
    """A token of which nothing else is known. On the path of every token, hence past NamedTuple's own constructor."""
    return tuple.__new__(Token, (token_id, None, (), _NONE))


def sampling_message(sampling: SamplingParams) -> router_pb2.Sampling:
    """All but the stop strings, which are the router's business."""
    return sampling_to_proto(replace(sampling, stop=()) if sampling.stop else sampling)


def prefill_request(job: Job, transfer_target: bytes, *, generate: bool = False) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        request_id=job.request_id,
        attempt=job.attempt,
        token_ids=job.token_ids,
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=sampling_message(job.sampling),
        input_class=job.input_class,
        sla_class=job.sla_class,
        transfer_target=transfer_target,
        first_choice=job.first_choice,
        priority=job.priority,
        cache_salt=job.cache_salt,
        generate=generate,
        probe=job.probe,
    )


def decode_submit(
    job: Job, timeout_s: float, *, local_prefill: bool = False, handle: int = 0
) -> worker_pb2.DecodeCommand:
    return worker_pb2.DecodeCommand(
        submit=worker_pb2.DecodeSubmit(
            request_id=job.request_id,
            attempt=job.attempt,
            token_ids=job.token_ids,
            num_prompt_tokens=job.num_prompt_tokens,
            sampling=sampling_message(job.sampling),
            first_choice=job.first_choice,
            timeout_ms=min(2**32 - 1, max(1, int(timeout_s * 1000))),
            tpot_target_ms=job.tpot_target_ms,
            sla_class=job.sla_class,
            priority=job.seniority,
            max_batch=job.max_batch,
            local_prefill=local_prefill,
            probe=job.probe,
            handle=handle,
        )
    )


def decode_cancel(request_id: str, attempt: int, choice: int | None) -> worker_pb2.DecodeCommand:
    return worker_pb2.DecodeCommand(
        cancel=worker_pb2.DecodeCancel(request_id=request_id, attempt=attempt, choice=choice)
    )


def first_tokens(message: worker_pb2.FirstTokens) -> FirstTokens:
    return FirstTokens(
        tokens=tuple(map(token, message.tokens)),
        cached_tokens=message.cached_tokens,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        compute_ms=message.compute_ms,
        # the first token of a prompt has nothing before it that could predict it
        prompt=tuple(token(each) if at else Token(each.token_id) for at, each in enumerate(message.prompt_logprobs)),
    )


def transferred(message: worker_pb2.Transferred) -> Transferred:
    return Transferred(bytes=message.bytes, transfer_ms=message.transfer_ms, transfer_wait_ms=message.transfer_wait_ms)


def next_tokens(message: worker_pb2.TokensOut) -> NextTokens:
    return NextTokens(choice=message.choice, tokens=tuple(map(token, message.tokens)))


def decode_end(message: worker_pb2.DecodeEnded) -> DecodeEnd:
    try:
        reason = worker_pb2.DecodeEnded.Reason.Name(message.reason).removeprefix("REASON_")
    except ValueError:  # of a newer worker
        reason = "FAILED"
    return DecodeEnd(reason=reason, error=message.error, message=message.message, decode_ms=message.decode_ms)


def worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Raises Incompatible for a pool that this router does not know."""
    try:
        pool = Pool(message.pool)
    except ValueError:
        raise Incompatible(f"worker {message.worker_id} belongs to pool {message.pool}; known are 1 and 2") from None
    return WorkerInfo(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        pool=pool,
        address=message.address,
        model=message.model,
        fingerprint=message.fingerprint,
        version=message.version,
        block_size=message.block_size,
        max_context=message.max_context,
        rows_total=message.rows_total,
        serves_alone=message.serves_alone,
    )


def worker_load(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        running=message.running,
        waiting=message.waiting,
        rows_free=message.rows_free,
        tokens_per_s=message.tokens_per_s,
        waiting_tokens=message.waiting_tokens,
        draining=message.draining,
        waiting_long_tokens=min(message.waiting_long_tokens, message.waiting_tokens),
        prefixes=frozenset(message.prefix_digests[:MOST_PREFIXES]),
    )
