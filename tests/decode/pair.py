"""A prefill and a decode worker in one process, with the real transfer between them, and what a router does with both.

Also the oracle: one engine alone, one request at a time.
"""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

import decode.worker
import prefill.worker
from decode.metrics import DecodeMetrics
from decode.request import Ended, Output, Reason, Reserved, Token
from decode.request import FirstTokens as LocalFirstTokens
from decode.request import Request as DecodeRequest
from decode.server import decode_note
from engine.batch import Batch, BatchItem
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.sampling import Sampled, SampleRow
from engine.state_pool import StatePool
from kvtransfer import KvReceiver, KvSender, SharedMemory
from kvtransfer.cache_regions import regions
from prefill.metrics import PrefillMetrics
from prefill.request import Finished, FirstTokens, Transferred
from prefill.request import Request as PrefillRequest
from prefill.scheduler import BatchLimits
from prefill.server import encode_note
from tests.fakes import Faults, injected
from twinpool.sampling import FinishReason, SamplingParams

TIMEOUT_S = 30.0
BLOCK = 16
_NUMBERS = itertools.count()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **options})


def load_engine(
    model: Path,
    *,
    rows: int = 512,
    states: int = 32,
    kv_dtype: str = "int8",
    block_size: int = BLOCK,
    **options: Any,
) -> Engine:
    """An fp32 engine whose cache holds exactly `rows` blocks, and `states` of sequences if the model has such."""
    engine = Engine.load(
        model, dtype="fp32", kv_dtype=kv_dtype, block_size=block_size, memory_bytes=1 << 20, threads=1, **options
    )
    engine.cache = KvCache(engine.cache.layout, rows, num_states=states)
    engine.blocks, engine.states = BlockPool(rows, block_size), StatePool(engine.cache)
    return engine


def alone(engine: Engine, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """The output of one choice when the engine has nothing else to do: whole prompt at once, then token by token."""
    blocks = engine.blocks.allocate(-(-(len(prompt) + (params.max_tokens or 0)) // engine.blocks.block_size))
    states = engine.states.allocate(1)
    assert blocks is not None
    assert states is not None
    tokens, start, output = list(prompt), 0, []
    while True:
        item = BatchItem(tokens, start, blocks, *states)
        batch = Batch.build([item], engine.blocks.block_size)
        logits = engine.logits(engine.forward(batch)[-1:])
        (sampled,) = engine.sample(logits, [SampleRow(params, prompt, output, choice)])
        output.append(sampled.token_id)
        if sampled.finish_reason:
            engine.blocks.release(blocks)
            engine.states.release(states)
            return output
        start += len(tokens)
        tokens = [sampled.token_id]


@dataclass(eq=False)
class Call:
    """One request on both workers, as its router sees it. Events come from two device threads."""

    pair: Pair
    prompt: list[int]
    params: SamplingParams
    request_id: str
    attempt: int
    options: dict[str, Any]
    prefill: prefill.worker.Sequence | None = None
    first: FirstTokens | LocalFirstTokens | None = None
    transferred: Transferred | None = None
    prefill_end: Finished | None = None
    ended: Ended | None = None
    num_ended: int = 0
    outputs: dict[int, list[Sampled]] = field(default_factory=dict)
    events: queue.Queue[Any] = field(default_factory=queue.Queue)

    def deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert (output.request_id, output.attempt) == (self.request_id, self.attempt)
            self.events.put(output.event)

    def step(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Takes in one event, and does what the router does next."""
        event = self.events.get(timeout=timeout_s)
        if isinstance(event, Reserved):
            if event.target:
                self._start_prefill(event.target)
        elif isinstance(event, FirstTokens | LocalFirstTokens):
            self.first = event
            for i, token in enumerate(event.tokens):
                self.outputs.setdefault(self.options.get("first_choice", 0) + i, []).append(token)
        elif isinstance(event, Transferred):
            self.transferred = event
        elif isinstance(event, Finished):
            self.prefill_end = event
            if event.error is not None:
                self.pair.decode.cancel(self.request_id, self.attempt, None)
        elif isinstance(event, Token):
            self.outputs[event.choice].append(event.token)
        elif isinstance(event, Ended):
            self.ended = event
            self.num_ended += 1
            if self.prefill is not None and event.reason is not Reason.FINISHED:
                self.pair.prefill.cancel(self.prefill)
        return event

    @property
    def open(self) -> bool:
        """Whether a worker has not ended it yet."""
        return self.ended is None or (self.prefill is not None and self.prefill_end is None)

    def wait(self) -> Call:
        """Until both workers have ended it."""
        while self.open:
            self.step()
        return self

    def wait_for(self, kind: type) -> Call:
        """Until an event of this kind has come, or the end."""
        while self.open and not isinstance(self.step(), kind):
            pass
        return self

    def cancel(self) -> None:
        self.pair.decode.cancel(self.request_id, self.attempt, None)
        if self.prefill is not None:
            self.pair.prefill.cancel(self.prefill)

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token.token_id for token in self.outputs[choice]]

    def finish_reason(self, choice: int = 0) -> FinishReason:
        return self.outputs[choice][-1].finish_reason

    def _start_prefill(self, target: bytes) -> None:
        options = {
            name: value for name, value in self.options.items() if name in ("first_choice", "priority", "cache_salt")
        }
        request = PrefillRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            token_ids=self.prompt,
            num_prompt_tokens=self.options.get("num_prompt_tokens", len(self.prompt)),
            sampling=self.params,
            input_class="short" if len(self.prompt) < 256 else "long",
            target=target,
            timeout_s=TIMEOUT_S,
            **options,
        )
        self.prefill = self.pair.prefill.submit(request, self.events.put)


class Pair:
    def __init__(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        *,
        token_budget: int = 512,
        max_batch: int = 64,
        swap_rows: int = 512,
        max_waiting: int = 256,
        prefill_chunk: int = 256,
        faults: Faults | None = None,
        transport: str = "tcp",
    ) -> None:
        self.memory = SharedMemory()
        if transport == "shm":  # its cache has to lie where the sender can reach it
            cache = decode_engine.cache
            decode_engine.cache = KvCache(
                cache.layout, cache.num_rows, num_states=cache.num_states, allocate=self.memory.allocate
            )
            decode_engine.states = StatePool(decode_engine.cache)
        self.prefill_engine, self.decode_engine = prefill_engine, decode_engine
        self.registry = CollectorRegistry()
        prefill_metrics, decode_metrics = PrefillMetrics(self.registry), DecodeMetrics(self.registry)
        self.receiver = KvReceiver(
            regions(decode_engine.cache),
            fingerprint=decode_engine.fingerprint,
            transport=transport,
            memory=self.memory,
            metrics=decode_metrics.transfers,
        )
        self.receiver.start()
        with injected(faults):
            self.sender = KvSender(
                regions(prefill_engine.cache),
                fingerprint=prefill_engine.fingerprint,
                transport=transport,
                metrics=prefill_metrics.transfers,
            )
        self.prefill = prefill.worker.Worker(
            prefill_engine,
            self.sender,
            BatchLimits(token_budget=token_budget, prompts={"short": 32, "long": 8}),
            prefill_metrics,
            encode_note=encode_note,
        )
        self.decode = decode.worker.Worker(
            decode_engine,
            self.receiver,
            decode_metrics,
            decode_note=decode_note,
            swap_bytes=swap_rows * decode_engine.cache.layout.block_bytes,
            max_batch=max_batch,
            max_waiting=max_waiting,
            prefill_chunk=prefill_chunk,
        )
        self.prefill.start()
        self.decode.start()

    def call(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str = "", attempt: int = 1, **options: Any
    ) -> Call:
        """Submits to the decode worker; `wait` or `step` takes it on from there."""
        request_id = request_id or f"request-{next(_NUMBERS)}"
        call = Call(self, list(prompt), params, request_id, attempt, options)
        request = DecodeRequest(
            request_id=request_id,
            attempt=attempt,
            token_ids=list(prompt),
            sampling=params,
            **{"num_prompt_tokens": len(prompt), "timeout_s": TIMEOUT_S, **_without_salt(options)},
        )
        self.decode.submit(request, call)
        return call

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any) -> list[Call]:
        """All at the same time."""
        return self.wait_for_all([self.call(prompt, params, **options) for prompt in prompts])

    def wait_for_all(self, calls: list[Call]) -> list[Call]:
        """Takes in the events of all of them as they come."""
        pending = list(calls)
        while pending:
            for call in pending:
                while not call.events.empty():
                    call.step()
            pending = [
                call
                for call in pending
                if call.ended is None or (call.prefill is not None and call.prefill_end is None)
            ]
            time.sleep(0.0005)
        return calls

    def sample(self, name: str, **labels: str) -> float:
        """Sum of a metric over the labels not given."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def assert_baseline(self) -> None:
        end = time.monotonic() + 10
        while (held := self._held()) and time.monotonic() < end:
            time.sleep(0.005)
        assert not held

    def _held(self) -> dict[str, float]:
        found = {
            "prefill rows": self.prefill_engine.blocks.num_blocks - self.prefill_engine.blocks.num_free,
            "decode rows": self.decode_engine.blocks.num_blocks - self.decode_engine.blocks.num_free,
            "prefill states": self.prefill_engine.states.num_rows - self.prefill_engine.states.num_free,
            "decode states": self.decode_engine.states.num_rows - self.decode_engine.states.num_free,
            "reservations": self.receiver.num_reservations,
            "prefill requests": self.prefill.num_open,
            "decode requests": self.decode.num_open,
            "swap rows": self.sample("twinpool_decode_swap_rows_used"),
            "reserved": self.sample("twinpool_decode_reservations"),
            "states used": self.sample("twinpool_decode_states_used") + self.sample("twinpool_prefill_states_used"),
            "rows used": self.sample("twinpool_decode_rows_used") + self.sample("twinpool_prefill_rows_used"),
        }
        return {name: value for name, value in found.items() if value}

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.sender.close()
        self.receiver.close()
        self.memory.close()


def cancel_at_random(calls: Sequence[Call], draw: random.Random, strays: float = 0.0) -> None:
    """Follows all of them to their ends, and cancels each after some of its events, if it has not ended before.

    strays: how often, in a round, any one of them is cancelled beside, whatever it has come to.
    """
    todo = {call: draw.randrange(0, 30) for call in calls}
    while todo:
        for call, events_left in list(todo.items()):
            if not call.open:
                del todo[call]
            elif not call.events.empty():
                call.step()
                todo[call] = events_left - 1
            if events_left == 0:
                call.cancel()
        if draw.random() < strays:
            draw.choice(calls).cancel()
        time.sleep(0.0002)


def _without_salt(options: dict[str, Any]) -> dict[str, Any]:
    """Of the prefill worker's request only."""
    return {name: value for name, value in options.items() if name != "cache_salt"}


@contextmanager
def open_pair(prefill_engine: Engine, decode_engine: Engine, **options: Any) -> Iterator[Pair]:
    """Fails unless everything is free at the end."""
    pair = Pair(prefill_engine, decode_engine, **options)
    try:
        yield pair
        pair.assert_baseline()
        assert pair.prefill.alive
        assert pair.decode.alive
    finally:
        pair.close()
