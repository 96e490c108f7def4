"""Which requests hold rows, and which sequences take part in the next step.

Life of a request here:

 1. `submit` refuses what is malformed, can never fit, is a duplicate or older than what runs; a newer attempt ends an
    older one of the same choices. The rest waits: higher priority first, then in order of arrival.
 2. `tick` admits from the head of that queue: rows for the whole prompt and the first growth of every choice are set
    aside and Reserved tells where to push. Nobody is admitted while a sequence is swapped out.
 3. `commit`: the rows are here, and the first tokens. Choices share the prompt's full blocks; each gets its own copy of
    the partial one. Where the router wants the prompt computed here, there is no target: `next_chunks` and `computed`
    bring it to its end between the steps of those that run, and `first_tokens` goes on with `commit`.
 4. `next_batch` takes the sequences whose next token is due first, as many as the strictest TPOT target among all that
    run allows, and gives each the block it grows into. When rows run out, the least senior sequence (lowest priority,
    then latest) is swapped out; `tick` brings the most senior back first. When the swap area is full too, its request
    ends as PREEMPTED: the router prefills it again with the tokens it has.
 5. `advance` takes the step's tokens; a sequence gives its rows back with its last token.
 6. `_end` is the only way out, from any phase: every row is free before Ended is emitted, exactly once. Only rows that
    a sender might still write into (it is frozen, or hangs) wait in quarantine until `fenced`.

A plain class without threads or clocks; the device thread owns it. rows.py knows who holds which rows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from decode.metrics import DecodeMetrics
from decode.pace import Pace
from decode.prompts import Chunk, Prompts
from decode.request import (
    RELAXED_TPOT_S,
    Ended,
    Event,
    FirstTokens,
    Generation,
    Phase,
    Reason,
    Request,
    Reserved,
    Sequence,
    Session,
    Token,
)
from decode.rows import Rows
from decode.swap import SwapArea
from engine.block_pool import BlockPool
from engine.sampling import Sampled
from engine.state_pool import StatePool
from kvtransfer import Reservation
from twinpool.errors import Duplicate, InvalidRequest, Overloaded, TransferFailed, TwinpoolError
from twinpool.sampling import FinishReason

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_batch: int  # sequences in a step, and sequences that hold rows
    max_waiting: int  # requests that wait for rows
    vocab_size: int
    max_context: int  # tokens of prompt and answer that this worker's cache and model hold
    prefill_chunk: int = 256  # prompt tokens computed between two steps


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        states: StatePool,
        swap: SwapArea,
        *,
        reserve: Callable[[Generation, list[int], float], Reservation],
        emit: Callable[[Generation, Event], None],
        metrics: DecodeMetrics,
    ) -> None:
        """reserve(generation, block ids of the prompt, timeout in s) makes them, and the state of the first choice, a
        target or raises TwinpoolError."""
        self._limits = limits
        self._rows = Rows(blocks, states, swap, evict=self._evict, metrics=metrics)
        self._reserve = reserve
        self._emit = emit
        self._metrics = metrics
        self._num_submitted = 0
        self._live: dict[str, list[Generation]] = {}  # by request id: waiting, reserved and running ones
        self._waiting: list[tuple[tuple[int, int], Generation]] = []  # ordered by (-priority, arrival)
        self._prompts = Prompts()
        self.pace = Pace()

    # What happens to requests

    def submit(self, request: Request, session: Session, now: float) -> None:
        self._num_submitted += 1
        generation = Generation(request, session, received_at=now, number=self._num_submitted)
        self._metrics.requests.labels(request.sla_class).inc()
        try:
            self._check(request)
        except (InvalidRequest, Duplicate) as error:
            self._end(generation, Reason.REJECTED, error)
            return
        for older in self._overlapping(request):
            self._end(older, Reason.CANCELLED)
        if len(self._waiting) >= self._limits.max_waiting:
            message = f"{len(self._waiting)} requests wait for rows of this decode worker, the most allowed"
            self._end(generation, Reason.FAILED, Overloaded(message, retry_after_s=RETRY_AFTER_S))
            return
        self._live.setdefault(request.request_id, []).append(generation)
        insort(self._waiting, ((-request.priority, generation.number), generation))  # numbers differ: no tie

    def commit(self, generation: Generation, first: Items[Sampled], now: float) -> None:
        """The prompt's rows have arrived whole, with the first token of every choice."""
        if generation.phase not in (Phase.RESERVED, Phase.PREFILLING):
            return
        wanted = generation.request.sampling.n
        if len(first) != wanted or any(token.token_id >= self._limits.vocab_size for token in first):
            message = f"{len(first)} first tokens came for {wanted} choices, or one is not in the vocabulary"
            self._end(generation, Reason.TRANSFER_FAILED, TransferFailed(message))
            return
        if generation.phase is Phase.RESERVED:
            self._metrics.reserved_seconds.observe(now - generation.reserved_at)
        generation.phase, generation.committed_at = Phase.RUNNING, now
        generation.last_token_at = now
        request, num_prompt = generation.request, generation.request.num_prompt_tokens
        # A choice alone always fits: it ends where the cache does, if not before. Its last token needs no room.
        room = self._rows.num_tokens - num_prompt + 1
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens or room, room))
        generation.sequences = [
            Sequence(
                generation,
                choice,
                sampling,
                prompt_token_ids=request.token_ids[:num_prompt],
                output_token_ids=[*request.token_ids[num_prompt:], token.token_id],
                last_token_at=now,
            )
            for choice, token in zip(request.choices, first, strict=True)
            if token.finish_reason is FinishReason.NONE and choice not in generation.cancelled_choices
        ]
        self._rows.deal(generation)
        self._end_if_finished(generation)

    def computed(self, chunks: Items[Chunk], seconds: float) -> None:
        """One step of `seconds` has filled these rows."""
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        self._prompts.pace.observe(num_tokens, seconds)
        self._metrics.local_prefill_tokens.inc(num_tokens)
        for chunk in chunks:
            chunk.generation.compute_s += seconds * (chunk.end - chunk.start) / num_tokens
            self._prompts.computed(chunk)

    def first_tokens(self, generation: Generation, tokens: list[Sampled], now: float) -> None:
        """Sampled from a prompt whose last chunk was computed here."""
        queue_s, prefill_s = generation.reserved_at - generation.received_at, now - generation.reserved_at
        self._metrics.local_prefill_seconds.observe(prefill_s)
        self._emit(
            generation,
            FirstTokens(
                tokens=tokens,
                queue_ms=queue_s * 1000,
                prefill_ms=prefill_s * 1000,
                compute_ms=generation.compute_s * 1000,
                prompt_logprobs=generation.prompt_logprobs,
            ),
        )
        self.commit(generation, tokens, now)

    def transfer_failed(self, generation: Generation, error: TransferFailed) -> None:
        if generation.phase is Phase.RESERVED:
            self._end(generation, Reason.TRANSFER_FAILED, error)

    def fenced(self, generation: Generation) -> None:
        """The request ended while a sender might still write into its rows; it does not any more."""
        self._rows.free(generation)

    def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> None:
        """Ends the request, or one of its choices. Unknown ones are ignored."""
        for generation in list(self._live.get(request_id, ())):
            if generation.request.attempt != attempt:
                continue
            if choice is None:
                self._end(generation, Reason.CANCELLED)
                continue
            generation.cancelled_choices.add(choice)
            for sequence in [each for each in generation.sequences if each.choice == choice]:
                self._rows.drop(sequence)
            self._end_if_finished(generation)

    def end_session(self, session: Session) -> None:
        """The router's stream is gone: ends all that it carried."""
        for generation in self._all_live():
            if generation.session is session:
                self._end(generation, Reason.CANCELLED)

    def fail(self, generations: Items[Generation], error: TwinpoolError) -> None:
        """The step that held something of these requests went wrong."""
        for generation in generations:
            self._end(generation, Reason.FAILED, error)

    def end_all(self, reason: Reason, error: TwinpoolError | None = None) -> None:
        for generation in self._all_live():
            self._end(generation, reason, error)

    # What a step does

    def tick(self, now: float) -> None:
        """Before every step: drops who waited too long, brings swapped out sequences back, admits new requests."""
        for _, generation in [entry for entry in self._waiting if entry[1].deadline <= now]:
            message = f"no rows of this decode worker were free in {generation.request.timeout_s:g} s"
            self._end(generation, Reason.FAILED, Overloaded(message, retry_after_s=RETRY_AFTER_S))
        self._rows.restore()
        while self._waiting and not self._rows.swapped and self._admit(self._waiting[0][1], now):
            pass

    def next_batch(self) -> list[Sequence]:
        """The sequences of the next step; each holds the row that its last token goes to."""
        limit = self._batch_limit()
        self._metrics.batch_limit.set(limit)
        batch: list[Sequence] = []
        for sequence in sorted(self._rows.running, key=lambda each: each.token_due_at):
            if len(batch) == limit:
                break
            if sequence.block_ids and self._rows.grow(sequence):
                batch.append(sequence)
        return [
            sequence for sequence in batch if sequence.block_ids
        ]  # a later one may have taken an earlier one's rows

    def next_chunks(self) -> list[Chunk]:
        """Parts of the prompts that are computed here, as much as those that run can wait for."""
        most = self._limits.prefill_chunk
        if self._rows.running:
            strictest_s = min(each.generation.request.tpot_target_s or RELAXED_TPOT_S for each in self._rows.running)
            left_s = strictest_s - self.pace.predict(min(len(self._rows.running), self._batch_limit()))
            most = self._prompts.pace.limit(left_s, most)
        return self._prompts.next_chunks(most)

    def advance(self, sequences: Items[Sequence], sampled: Items[Sampled], now: float) -> None:
        """The step gave each of these sequences its next token."""
        for sequence, token in zip(sequences, sampled, strict=True):
            generation = sequence.generation
            metrics = self._metrics.of_class(generation.request.sla_class)
            metrics.tokens.inc()
            metrics.itl_seconds.observe(now - sequence.last_token_at)
            sequence.output_token_ids.append(token.token_id)
            sequence.last_token_at = generation.last_token_at = now
            self._emit(generation, Token(sequence.choice, token))
            if token.finish_reason is not FinishReason.NONE:
                self._rows.drop(sequence)
                self._end_if_finished(generation)

    # What others may know

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_reserved(self) -> int:
        return sum(generation.phase is Phase.RESERVED for generation in self._all_live())

    @property
    def num_prefilling(self) -> int:
        """Requests whose prompts are computed here now."""
        return sum(generation.phase is Phase.PREFILLING for generation in self._all_live())

    @property
    def num_prompt_tokens(self) -> int:
        """Of those, tokens not computed yet."""
        return self._prompts.num_tokens

    @property
    def num_running(self) -> int:
        """Requests, not sequences."""
        return sum(generation.phase is Phase.RUNNING for generation in self._all_live())

    @property
    def num_swapped(self) -> int:
        """Sequences, not requests."""
        return len(self._rows.swapped)

    # Admission

    def _check(self, request: Request) -> None:
        """Raises InvalidRequest or Duplicate for what must not be retried elsewhere as it is."""
        request.validate(self._limits.vocab_size, self._limits.max_context)
        self._rows.check(request)
        for other in self._overlapping(request):
            if other.request.attempt >= request.attempt:
                raise Duplicate(
                    f"attempt {request.attempt} of request {request.request_id!r} comes after attempt "
                    f"{other.request.attempt} of the same choices",
                    field="request_id",
                )

    def _overlapping(self, request: Request) -> list[Generation]:
        """Live attempts of the same request that answer one of the same choices."""
        return [
            other
            for other in self._live.get(request.request_id, ())
            if set(other.request.choices) & set(request.choices)
        ]

    def _admit(self, generation: Generation, now: float) -> bool:
        """Sets rows aside for the head of the queue; False when it has to wait for them."""
        request = generation.request
        holders = len(self._rows.running) + sum(
            other.request.sampling.n for other in self._all_live() if other.phase in (Phase.RESERVED, Phase.PREFILLING)
        )
        if holders and holders + request.sampling.n > self._limits.max_batch:
            return False
        if not self._rows.first(generation):
            return False
        target = b""
        if request.local_prefill:
            generation.phase = Phase.PREFILLING
            self._prompts.add(generation)
        else:
            try:
                prompt_block_ids = generation.block_ids[: self._rows.num_prompt_blocks(request)]
                generation.reservation = self._reserve(generation, prompt_block_ids, generation.deadline - now)
            except TwinpoolError as error:
                self._end(generation, Reason.FAILED, error)
                return True
            generation.phase, target = Phase.RESERVED, generation.reservation.target
        self._waiting.pop(0)
        generation.reserved_at = now
        self._metrics.queue_seconds.labels(request.sla_class).observe(now - generation.received_at)
        self._emit(generation, Reserved(target))
        return True

    def _batch_limit(self) -> int:
        requests = [each.generation.request for each in self._rows.running]
        strictest = min((each.tpot_target_s for each in requests if each.tpot_target_s > 0), default=0.0)
        ceiling = min((each.max_batch for each in requests if each.max_batch > 0), default=self._limits.max_batch)
        return self.pace.limit(strictest, min(ceiling, self._limits.max_batch))

    # Ends

    def _end_if_finished(self, generation: Generation) -> None:
        if generation.phase is Phase.RUNNING:
            finished = not generation.sequences
        else:
            finished = generation.cancelled_choices.issuperset(generation.request.choices)
        if finished:
            self._end(generation, Reason.FINISHED)

    def _end(self, generation: Generation, reason: Reason, error: TwinpoolError | None = None) -> None:
        if generation.phase is Phase.ENDED:
            return
        if generation.phase is Phase.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[1] is not generation]
        fenced = True
        if generation.phase is Phase.RESERVED and generation.reservation is not None:
            fenced = generation.reservation.release()
        elif generation.phase is Phase.PREFILLING:
            self._prompts.remove(generation)
        generation.phase = Phase.ENDED
        if fenced:  # no byte lands in its rows any more
            self._rows.free(generation)
        self._forget(generation)
        decode_s = generation.last_token_at - generation.committed_at
        if generation.committed_at:
            self._metrics.request_seconds.labels(generation.request.sla_class).observe(decode_s)
        self._metrics.ended.labels(reason.name.lower()).inc()
        self._emit(generation, Ended(reason, error, decode_s * 1000))

    def _evict(self, generation: Generation) -> None:
        message = "the cache and the swap area of this decode worker are full: raise --memory or --swap"
        self._end(generation, Reason.PREEMPTED, Overloaded(message, retry_after_s=RETRY_AFTER_S))

    def _forget(self, generation: Generation) -> None:
        attempts = self._live.get(generation.request.request_id, [])
        if generation in attempts:
            attempts.remove(generation)
            if not attempts:
                del self._live[generation.request.request_id]

    def _all_live(self) -> list[Generation]:
        return [generation for attempts in self._live.values() for generation in attempts]
