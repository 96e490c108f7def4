"""The device thread of a decode worker: one step after another, one token a sequence and step, and between two steps
a chunk of the prompts that it computes itself.

Other threads only put commands into its inbox: gRPC sessions submit and cancel, transfer threads report commits and
failures. decode/scheduler.py decides; here its batches meet the engine, and its events go to their sessions, all of a
step together. An exception in a step ends the requests of that step only.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from decode.metrics import DecodeMetrics
from decode.prompts import Chunk
from decode.request import Event, Generation, Output, Reason, Request, Sequence, Session
from decode.scheduler import Limits, Scheduler
from decode.swap import SwapArea
from engine.batch import Batch, BatchItem
from engine.engine import Engine
from engine.prompt import first_tokens, own_logprobs
from engine.sampling import Sampled, SampleRow
from kvtransfer import Commit, KvReceiver, Reservation
from kvtransfer.cache_regions import BLOCKS, STATES
from service.inbox import Inbox
from twinpool.errors import Internal, TransferFailed, Unavailable

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # longest sleep of the device thread without a command
WAITING_S = 0.05  # the same while requests wait for rows, which they may not do for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A snapshot for routers. tokens only grows."""

    running: int
    waiting: int  # for rows, or for the transfer into them
    rows_free: int
    tokens: int
    prompt_tokens: int = 0  # of prompts that are computed here, not computed yet


class Worker:
    """Owns the engine from `start` on. Everything public may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        receiver: KvReceiver,
        metrics: DecodeMetrics,
        *,
        decode_note: Callable[[bytes], list[Sampled]],
        swap_bytes: int,
        max_batch: int,
        max_waiting: int,
        prefill_chunk: int = 256,
    ) -> None:
        """decode_note: the first token of each choice, from what the prefill worker sent with its commit; it raises
        TransferFailed for what it cannot read."""
        self._engine = engine
        self._receiver = receiver
        self._metrics = metrics
        self._decode_note = decode_note
        self._swap = SwapArea(engine.cache, swap_bytes // engine.cache.layout.block_bytes)
        blocks = engine.blocks
        self.max_context = min(engine.config.max_context, blocks.num_blocks * blocks.block_size)
        self._scheduler = Scheduler(
            Limits(
                max_batch=max_batch,
                max_waiting=max_waiting,
                vocab_size=engine.config.vocab_size,
                max_context=self.max_context,
                prefill_chunk=prefill_chunk,
            ),
            blocks,
            engine.states,
            self._swap,
            reserve=self._reserve,
            emit=self._emit,
            metrics=metrics,
        )
        self._inbox = Inbox()
        self._outbox: dict[int, tuple[Session, list[Output]]] = {}  # by id of the session; emptied after every step
        self._num_tokens = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._load = self._snapshot()
        metrics.rows_total.set(blocks.num_blocks)
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
    def load(self) -> Load:
        return self._load

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended, as of the last step."""
        return self._load.running + self._load.waiting

    def submit(self, request: Request, session: Session) -> None:
        """Its events go to `session`; the last one, Ended, comes whatever happens."""
        self._inbox.put(lambda: self._scheduler.submit(request, session, time.monotonic()))

    def cancel(self, request_id: str, attempt: int, choice: int | None) -> None:
        """Frees what the request, or its one choice, holds before the next step begins. Idempotent."""
        self._inbox.put(partial(self._scheduler.cancel, request_id, attempt, choice))

    def end_session(self, session: Session) -> None:
        """Cancels all that the session submitted; its events go nowhere any more."""
        self._inbox.put(partial(self._scheduler.end_session, session))

    # Everything below runs on the device thread.

    def _run(self) -> None:
        try:
            busy = False
            while not self._stopping:
                self._inbox.run(wait_s=0.0 if busy else WAITING_S if self._scheduler.num_waiting else IDLE_S)
                self._scheduler.tick(time.monotonic())
                sequences = self._scheduler.next_batch()
                self._flush()  # reservations need not wait for the step
                if sequences:
                    self._step(sequences)
                    self._report()
                    self._flush()
                chunks = self._scheduler.next_chunks()
                if chunks:
                    self._prefill(chunks)
                busy = bool(sequences or chunks)
                self._report()
                self._flush()
        except BaseException:
            logger.exception("the device thread died; this worker is of no more use")
            raise

    def _stop(self) -> None:
        self._stopping = True
        self._scheduler.end_all(Reason.FAILED, Unavailable("the worker stops"))
        self._flush()

    def _step(self, sequences: list[Sequence]) -> None:
        begin = time.monotonic()
        self._note_starts(sequences, begin)
        try:
            sampled = self._compute(sequences)
        except Exception as error:
            self._fail([each.generation for each in sequences], error)
            return
        now = time.monotonic()
        self._scheduler.pace.observe(len(sequences), now - begin)
        self._metrics.step_seconds.observe(now - begin)
        self._metrics.batch_sequences.observe(len(sequences))
        self._num_tokens += len(sequences)
        self._scheduler.advance(sequences, sampled, now)

    def _note_starts(self, sequences: Items[Sequence], now: float) -> None:
        for generation in (each.generation for each in sequences):
            if generation.arrived_at:
                self._metrics.start_seconds.observe(now - generation.arrived_at)
                generation.arrived_at = 0.0

    def _compute(self, sequences: Items[Sequence]) -> list[Sampled]:
        items = [
            BatchItem(each.output_token_ids[-1:], each.num_tokens - 1, each.block_ids, each.state) for each in sequences
        ]
        rows = [
            SampleRow(each.sampling, each.prompt_token_ids, each.output_token_ids, each.choice) for each in sequences
        ]
        return self._engine.decode(items, rows)

    def _prefill(self, chunks: list[Chunk]) -> None:
        begin = time.monotonic()
        try:
            items = [
                BatchItem(each.token_ids, each.start, each.generation.block_ids, each.generation.state)
                for each in chunks
            ]
            batch = Batch.build(items, self._engine.blocks.block_size)
            hidden = self._engine.forward(batch)
            for i, chunk in enumerate(chunks):
                if (prompt := chunk.generation.request.prompt).wants_logprobs:
                    own = hidden[batch.query_start[i] : batch.query_start[i + 1]]
                    chunk.generation.prompt_logprobs += own_logprobs(self._engine, prompt, chunk.start, chunk.end, own)
            last = [i for i, chunk in enumerate(chunks) if chunk.is_last]
            ready = [chunks[i].generation for i in last]
            prompts = [each.request.prompt for each in ready]
            sampled = first_tokens(self._engine, prompts, hidden[batch.last_token_rows[last]]) if last else []
        except Exception as error:
            self._fail([each.generation for each in chunks], error)
            return
        now = time.monotonic()
        self._scheduler.computed(chunks, now - begin)
        for generation, tokens in zip(ready, sampled, strict=True):
            self._scheduler.first_tokens(generation, tokens, now)

    def _fail(self, generations: list[Generation], error: Exception) -> None:
        error_id = secrets.token_hex(4)
        logger.exception("decode step failed", extra={"error_id": error_id, "sequences": len(generations)})
        message = f"decode step failed ({error}); the worker's log has the details under {error_id}"
        self._scheduler.fail(generations, Internal(message))

    def _reserve(self, generation: Generation, block_ids: list[int], timeout_s: float) -> Reservation:
        """Makes the prompt's rows a transfer target; what becomes of it comes back through the inbox."""
        request, regions = generation.request, self._engine.cache.regions
        rows = {BLOCKS: block_ids}
        if generation.state is not None:
            rows[STATES] = [generation.state]
        is_cut = any(each.parts for each in regions)  # rows of blocks that can be made from a sender's of another size
        return self._receiver.reserve(
            request_id=request.request_id,
            attempt=request.attempt,
            rows=rows,
            tokens={BLOCKS: len(request.token_ids)} if is_cut else None,
            timeout_s=timeout_s,
            on_commit=lambda commit: self._inbox.put(partial(self._committed, generation, commit, time.monotonic())),
            on_failed=lambda error: self._inbox.put(partial(self._scheduler.transfer_failed, generation, error)),
            on_fenced=lambda: self._inbox.put(partial(self._scheduler.fenced, generation)),
        )

    def _committed(self, generation: Generation, commit: Commit, arrived_at: float) -> None:
        generation.arrived_at = arrived_at
        try:
            first = self._decode_note(commit.note)
        except TransferFailed as error:
            self._scheduler.transfer_failed(generation, error)
            return
        self._scheduler.commit(generation, first, time.monotonic())

    def _emit(self, generation: Generation, event: Event) -> None:
        session, request = generation.session, generation.request
        _, outputs = self._outbox.setdefault(id(session), (session, []))
        outputs.append(Output(request.request_id, request.attempt, event))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for session, outputs in outbox.values():
            session.deliver(outputs)

    def _snapshot(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + scheduler.num_reserved + scheduler.num_prefilling,
            rows_free=self._engine.blocks.num_free if self._engine.states.has_room(1) else 0,
            tokens=self._num_tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
        )

    def _report(self) -> None:
        """Gauges and the load that routers see; before a step's tokens go out, so that nobody sees an older state."""
        scheduler, metrics = self._scheduler, self._metrics
        load = self._load = self._snapshot()
        metrics.running.set(load.running)
        metrics.waiting.set(scheduler.num_waiting)
        metrics.reservations.set(scheduler.num_reserved)
        metrics.prefilling.set(scheduler.num_prefilling)
        metrics.swapped.set(scheduler.num_swapped)
        blocks, states = self._engine.blocks, self._engine.states
        metrics.rows_used.set(blocks.num_blocks - blocks.num_free)
        metrics.states_used.set(states.num_rows - states.num_free)
        metrics.swap_rows_used.set(self._swap.num_rows - self._swap.num_free)
