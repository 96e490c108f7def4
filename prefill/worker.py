"""The device thread of a prefill worker: computes batches, pushes rows while it computes, samples first tokens.

Other threads only put commands into its inbox; it answers through each sequence's `emit`. After the scheduler has put a
chunk into a step (prefill/scheduler.py), a request goes on here:

 1. The block that the prompt does not fill is cleared before its first tokens get there, for it travels as a whole.
    After each layer of the step, the chunk's finished rows of that layer are handed to the push, which sends them while
    the next layer computes: full blocks at once, the partly filled one at the prompt's end, and with the first chunk
    those that came from the prefix cache.
 2. After its last chunk the first token of every choice is sampled: FirstTokens, and commit of the push.
 3. The decode worker acknowledges: Transferred, Finished.
 4. Where the worker is to generate the whole answer, the sequence goes back to the scheduler with each token until the
    last.
 5. Rows are freed when the push has let go of them: after the acknowledgement, or some time after an abort.

A cancelled request leaves before the next step begins. An exception in a step ends the requests of that step only.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.batch import Batch, BatchItem
from engine.engine import Engine
from engine.prompt import first_tokens, own_logprobs
from engine.sampling import Sampled
from kvtransfer import KvSender, Push, PushResult
from prefill.metrics import PrefillMetrics
from prefill.request import Chunk, Event, Finished, FirstTokens, NextToken, Request, Sequence, Transferred
from prefill.scheduler import BatchLimits, Scheduler
from service.inbox import Inbox
from twinpool.errors import Cancelled, Internal, Overloaded, TwinpoolError, Unavailable
from twinpool.prefix import short
from twinpool.sampling import FinishReason

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # longest sleep of the device thread without a command
PINNED_POLL_S = 0.002  # the same while an aborted push still reads rows
RETRY_AFTER_S = 1.0
PREFIXES_S = 0.25
MOST_PREFIXES = 4096  # blocks that routers are told of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A snapshot for routers. computed_tokens only grows."""

    running: int
    waiting: int
    waiting_tokens: int
    rows_free: int
    computed_tokens: int
    waiting_long_tokens: int = 0
    prefixes: tuple[int, ...] = ()  # short digests of cached blocks, those used last first


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks first .. end - 1 of a sequence become final in this step and go to its push, layer by layer.

    So does its state, with the last chunk.
    """

    sequence: Sequence
    push: Push
    first: int
    end: int
    is_last: bool

    def put(self, regions: _LayerRegions) -> None:
        if self.end > self.first:
            for region in regions.blocks:
                self.push.put(region, range(self.first, self.end), self.sequence.block_ids[self.first : self.end])
        if self.is_last and self.sequence.state is not None:
            for region in regions.states:
                self.push.put(region, [0], [self.sequence.state])


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerRegions:
    """Numbers of one layer's regions: of blocks, of sequences."""

    blocks: tuple[int, ...]
    states: tuple[int, ...]


class Worker:
    """Owns the engine from `start` on. Everything public may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        sender: KvSender,
        limits: BatchLimits,
        metrics: PrefillMetrics,
        *,
        encode_note: Callable[[FirstTokens], bytes],
        max_requests: int = 1024,
    ) -> None:
        """encode_note: what travels with the commit to the decode worker; max_requests: accepted at a time."""
        self._engine = engine
        self._sender = sender
        self._scheduler = Scheduler(limits, engine.blocks, engine.states)
        cache = engine.cache
        self._regions = [
            _LayerRegions(blocks=cache.numbers(layer, "block"), states=cache.numbers(layer, "sequence"))
            for layer in range(cache.layout.num_layers)
        ]
        self._metrics = metrics
        self._encode_note = encode_note
        self.max_context = min(engine.config.max_context, engine.blocks.num_blocks * engine.blocks.block_size)
        self._max_requests = max_requests
        self._inbox = Inbox()
        self._open: set[Sequence] = set()  # accepted, rows not yet freed
        self._transferring: set[Sequence] = set()  # committed, not acknowledged
        self._pinned: list[Sequence] = []  # ended; the push may still read their rows
        self._computed_tokens = 0
        self._num_preempted = 0  # as counted
        self._prefixes: tuple[int, ...] = ()
        self._prefixes_at = float("-inf")
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._load = self._snapshot()
        metrics.rows_total.set(engine.blocks.num_blocks)
        metrics.states_total.set(engine.states.num_rows)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Cancels what is left and ends the thread. Idempotent."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests accepted whose rows are not free yet."""
        return len(self._open)

    @property
    def load(self) -> Load:
        return self._load

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Sequence:
        """Accepts a request. `emit` gets its events on the device thread, exactly one Finished last.

        Raises InvalidRequest, or Overloaded when too many are open.
        """
        request.validate(self._engine.config.vocab_size, self._engine.config.max_context)
        self._scheduler.check(request)
        if request.generate:  # the answer ends where the cache does, if not before; its last token needs no room
            room = self.max_context - request.num_prompt_tokens + 1
            sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens or room, room))
            request = replace(request, sampling=sampling)
        if len(self._open) >= self._max_requests:
            raise Overloaded(
                f"this prefill worker has {len(self._open)} requests and takes no more than {self._max_requests}",
                retry_after_s=RETRY_AFTER_S,
            )
        sequence = Sequence(request, emit, received_at=time.monotonic())
        self._open.add(sequence)
        self._metrics.requests.labels(request.input_class).inc()
        try:
            self._open_push(sequence)
        except TwinpoolError as error:  # a target that is not one
            self._inbox.put(partial(self._end, sequence, error))
        else:
            self._inbox.put(partial(self._add, sequence))
        return sequence

    def _open_push(self, sequence: Sequence) -> None:
        """Claims the decode worker's rows at once: while the request waits here the link's lease keeps them."""
        request = sequence.request
        if request.target:
            sequence.push = self._sender.open(
                request.target, request_id=request.request_id, attempt=request.attempt, timeout_s=request.timeout_s
            )

    def cancel(self, sequence: Sequence) -> None:
        """Frees everything a request holds before the next step begins. Idempotent, and harmless after its end."""
        if sequence in self._open:
            self._inbox.put(partial(self._end, sequence, Cancelled("the call was cancelled")))

    # Everything below runs on the device thread.

    def _run(self) -> None:
        try:
            busy = False
            while not self._stopping:
                self._inbox.run(wait_s=0.0 if busy else PINNED_POLL_S if self._pinned else IDLE_S)
                self._free_unpinned()
                self._end_failed()
                chunks = self._scheduler.next_batch(time.monotonic())
                busy = bool(chunks)
                if chunks:
                    self._step(chunks)
                self._report()
        except BaseException:
            logger.exception("the device thread died; this worker is of no more use")
            raise

    def _stop(self) -> None:
        self._stopping = True
        for sequence in list(self._open):
            self._end(sequence, Unavailable("the worker stops"))

    def _add(self, sequence: Sequence) -> None:
        if not sequence.ended:
            self._scheduler.add(sequence)

    def _step(self, chunks: list[Chunk]) -> None:
        begin = time.monotonic()
        try:
            first_tokens = self._compute(chunks)
            self._share_time(chunks, time.monotonic() - begin)
            self._metrics.step_seconds.observe(time.monotonic() - begin)
            self._metrics.batch_prompts.observe(len(chunks))
            self._metrics.batch_tokens.observe(sum(chunk.end - chunk.start for chunk in chunks))
            for sequence, tokens in first_tokens:
                self._deliver(sequence, tokens)
        except Exception as error:
            error_id = secrets.token_hex(4)
            logger.exception("prefill step failed", extra={"error_id": error_id, "prompts": len(chunks)})
            failure = Internal(f"prefill step failed ({error}); the worker's log has the details under {error_id}")
            for chunk in chunks:
                self._end(chunk.sequence, failure)

    def _end_failed(self) -> None:
        """Ends prompts that need not go on, or begin, because their push has failed; also those still in the queue."""
        for sequence in list(self._open):
            push = sequence.push
            if push is not None and push.error is not None and sequence not in self._transferring:
                self._end(sequence, push.error)

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Sequence, list[Sampled]]]:
        """Runs the step; the first tokens of the prompts that are complete with it."""
        items = [BatchItem(each.token_ids, each.start, each.sequence.block_ids, each.sequence.state) for each in chunks]
        batch = Batch.build(items, self._engine.blocks.block_size)
        self._clear_tails(chunks)
        finals = [self._final_rows(chunk, chunk.sequence.push) for chunk in chunks if chunk.sequence.push is not None]

        def on_layer(layer: int) -> None:
            for rows in finals:
                rows.put(self._regions[layer])

        hidden = self._engine.forward(batch, on_layer)
        for rows in finals:
            rows.sequence.num_put = rows.end
        for i, chunk in enumerate(chunks):
            self._scheduler.computed(chunk)
            self._computed_tokens += chunk.end - chunk.start
            if chunk.sequence.wants_prompt_logprobs:
                own = hidden[batch.query_start[i] : batch.query_start[i + 1]]
                found = own_logprobs(self._engine, chunk.sequence.prompt, chunk.start, chunk.end, own)
                chunk.sequence.prompt_logprobs += found
        self._metrics.computed_tokens.inc(batch.num_tokens)
        last = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        if not last:
            return []
        return self._sample([chunks[i].sequence for i in last], hidden[batch.last_token_rows[last]])

    @staticmethod
    def _share_time(chunks: list[Chunk], seconds: float) -> None:
        """Notes for each prompt what the step cost on its behalf."""
        per_token_s = seconds / sum(chunk.end - chunk.start for chunk in chunks)
        for chunk in chunks:
            chunk.sequence.compute_s += per_token_s * (chunk.end - chunk.start)

    def _clear_tails(self, chunks: list[Chunk]) -> None:
        """Blocks travel whole, but the last one of a prompt is filled in part: what another request left behind in it
        must not go along. States are cleared, or copied as a whole, when they are handed out.
        """
        size = self._engine.blocks.block_size
        cleared = []
        for chunk in chunks:
            last = chunk.sequence.num_tokens // size  # of the prompt's blocks, if it is filled in part
            if chunk.sequence.push is not None and chunk.start <= last * size < chunk.end:
                cleared.append(chunk.sequence.block_ids[last])
        if cleared:
            self._engine.cache.clear("block", cleared)

    def _final_rows(self, chunk: Chunk, push: Push) -> _Rows:
        num_blocks = len(chunk.sequence.block_ids)
        end = num_blocks if chunk.is_last else chunk.end // self._engine.blocks.block_size
        return _Rows(chunk.sequence, push, chunk.sequence.num_put, end, chunk.is_last)

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor) -> list[tuple[Sequence, list[Sampled]]]:
        """hidden: [sequences, hidden], the last token of each prompt."""
        begin = time.monotonic()
        sampled = first_tokens(self._engine, [sequence.prompt for sequence in sequences], hidden)
        now = time.monotonic()
        if not all(sequence.output for sequence in sequences):
            self._metrics.sample_seconds.observe(now - begin)
        for sequence in sequences:
            sequence.sampled_at = now
        return list(zip(sequences, sampled, strict=True))

    def _deliver(self, sequence: Sequence, tokens: list[Sampled]) -> None:
        request, name = sequence.request, sequence.request.input_class
        if sequence.output:
            sequence.emit(NextToken(request.first_choice, tokens[0]))
            self._generate(sequence, tokens[0])
            return
        queue_s, prefill_s = sequence.admitted_at - sequence.received_at, sequence.sampled_at - sequence.admitted_at
        first = FirstTokens(
            tokens=tokens,
            cached_tokens=min(sequence.num_cached, request.num_prompt_tokens),
            queue_ms=queue_s * 1000,
            prefill_ms=prefill_s * 1000,
            prompt_logprobs=sequence.prompt_logprobs,
            compute_ms=sequence.compute_s * 1000,
        )
        if (
            sequence.push is not None and not request.generate
        ):  # before anything else: this is what the decode worker waits for
            self._transferring.add(sequence)
            note = self._encode_note(first)
            sequence.push.commit(note, lambda result: self._inbox.put(partial(self._acknowledged, sequence, result)))
        sequence.emit(first)
        self._metrics.queue_seconds.labels(name).observe(queue_s)
        self._metrics.prefill_seconds.labels(name).observe(prefill_s)
        self._metrics.prompt_tokens.labels(name).inc(len(request.token_ids))
        self._metrics.cached_tokens.labels(name).inc(sequence.num_cached)
        if request.generate:
            self._generate(sequence, tokens[0])
            return
        if sequence.push is None:
            self._end(sequence)

    def _generate(self, sequence: Sequence, token: Sampled) -> None:
        self._metrics.generated_tokens.inc()
        if token.finish_reason is not FinishReason.NONE:
            self._end(sequence)
            return
        sequence.output.append(token.token_id)
        self._scheduler.generate(sequence)

    def _acknowledged(self, sequence: Sequence, result: PushResult) -> None:
        if sequence.ended:
            return
        if result.error is not None:
            self._end(sequence, result.error)
            return
        wait_s = result.done_at - sequence.sampled_at
        self._metrics.transfers.waited(result.transport, result.peer, wait_s)
        sequence.emit(
            Transferred(
                bytes=result.bytes,
                rows=result.rows,
                transfer_ms=result.seconds * 1000,
                transfer_wait_ms=wait_s * 1000,
            )
        )
        self._end(sequence)

    def _end(self, sequence: Sequence, error: TwinpoolError | None = None) -> None:
        """The one way out. Rows that a push may still read are freed when it has let go."""
        if sequence.ended:
            return
        sequence.ended = True
        self._scheduler.remove(sequence)
        self._transferring.discard(sequence)
        outcome = "ok" if error is None else "cancelled" if isinstance(error, Cancelled) else type(error).__name__
        self._metrics.ended.labels(outcome).inc()
        if sequence.push is not None:
            if error is not None:
                sequence.push.abort(error.message)
            self._pinned.append(sequence)
            self._free_unpinned()
        else:
            self._free(sequence)
        sequence.emit(Finished(error))

    def _free_unpinned(self) -> None:
        pinned, self._pinned = self._pinned, []
        for sequence in pinned:
            if sequence.push is None or sequence.push.closed.is_set():
                self._free(sequence)
            else:
                self._pinned.append(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._scheduler.free(sequence)
        self._open.discard(sequence)

    def _snapshot(self) -> Load:
        running = self._scheduler.num_running + len(self._transferring) + len(self._pinned)
        return Load(
            running=running,
            waiting=len(self._open) - running,
            waiting_tokens=self._scheduler.num_waiting_tokens,
            rows_free=self._engine.blocks.num_free if self._engine.states.has_room(1) else 0,
            computed_tokens=self._computed_tokens,
            waiting_long_tokens=self._scheduler.num_waiting_tokens_of("long"),
            prefixes=self._known_prefixes(),
        )

    def _known_prefixes(self) -> tuple[int, ...]:
        """As of PREFIXES_S ago at most: routers hear of them once a heartbeat, and there may be thousands."""
        now = time.monotonic()
        if now - self._prefixes_at > PREFIXES_S:
            blocks, states = self._engine.blocks, self._engine.states
            usable = blocks.whole(states.published()) if states.exists else blocks.published(MOST_PREFIXES)
            self._prefixes = tuple(map(short, usable[:MOST_PREFIXES]))
            self._prefixes_at = now
        return self._prefixes

    def _report(self) -> None:
        load = self._load = self._snapshot()
        self._metrics.running.set(load.running)
        self._metrics.waiting.set(load.waiting)
        self._metrics.generating.set(self._scheduler.num_generating)
        self._metrics.preemptions.inc(self._scheduler.num_preempted - self._num_preempted)
        self._num_preempted = self._scheduler.num_preempted
        blocks, states = self._engine.blocks, self._engine.states
        self._metrics.rows_used.set(blocks.num_blocks - blocks.num_free)
        self._metrics.states_used.set(states.num_rows - states.num_free)
        self._metrics.snapshots.set(states.num_snapshots)
