"""What stands in for a real thing in tests: workers without a model, and a transport on which things go wrong.

Prefill and decode workers without a model, in the test's own process, that answer over real gRPC.

The "model" is a function of (prompt, choice) to the tokens of the whole answer, so that an answer put together from
several workers can be told from a wrong one. Faults are scripted: each worker takes the next `Fault` of its list for
the next request, and works well when the list is empty.

    async with Deployment(router_address) as fakes:
        prefill = await fakes.prefill("p0")
        decode = await fakes.decode("d0", step_s=0.001)
        prefill.faults.append(Fault.REFUSE)

A transport on which things go wrong: real links, wrapped at the seam between a transfer and how its bytes move.

    with injected(Faults(delay_ms=500)):
        sender = KvSender(...)  # every link that it makes, now or later, is a faulty one
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import random
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import partial
from typing import Any
from unittest.mock import patch

from kvtransfer import transports, wire
from kvtransfer.digest import row_checksum
from kvtransfer.transports import Link, Transport
from kvtransfer.transports.striped import StripedSenderLink
from service.discovery import NamedRouters
from service.registration import Registration, new_incarnation
from service.serve import Service, Serving, serve
from twinpool import __version__
from twinpool.errors import (
    ChecksumMismatch,
    Internal,
    InvalidRequest,
    Overloaded,
    PeerLost,
    TransferTimeout,
    TwinpoolError,
    Unavailable,
)
from twinpool.v1 import router_pb2, worker_pb2
from twinpool.v1.worker_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)

STOP, LENGTH = router_pb2.FINISH_REASON_STOP, router_pb2.FINISH_REASON_LENGTH
Answer = Callable[[Sequence[int], int], Sequence[int]]


class Fault(Enum):
    NONE = auto()  # this one request goes well
    # prefill
    REFUSE = auto()  # fails at once with INTERNAL
    UNAVAILABLE = auto()
    FULL = auto()  # RESOURCE_EXHAUSTED
    INVALID = auto()  # the request's own fault
    TRANSFER = auto()  # fails after the first tokens
    DIE_AFTER_COMMIT = auto()  # the rows arrive, then the call fails
    LATE_FIRST = auto()  # the rows arrive and are decoded before the first tokens are told
    HANG = auto()  # before the first tokens, until cancelled
    SLOW_TRANSFER = auto()  # after the first tokens, until cancelled
    WRONG_COUNT = auto()  # one first token too many
    DIE_IN_ANSWER = auto()  # that it generates
    BAD_FIRST = auto()  # the last choice's first token is in no vocabulary
    # decode
    REJECT = auto()
    PREEMPT = auto()  # after two tokens
    FAIL = auto()
    CROWDED = auto()  # too many wait there already
    NONSENSE = auto()  # a token that no vocabulary has, among the tokens of others
    NO_ROWS = auto()  # never reserves
    DROP_STREAM = auto()  # after two tokens, with all that is on it
    TRANSFER_FAILED = auto()  # the rows did not arrive whole


def letters(prompt: Sequence[int], choice: int) -> list[int]:
    """A long answer that differs with prompt and choice; tokens 10 to 99."""
    state = sum((i + 1) * token for i, token in enumerate(prompt)) + 7919 * choice
    answer = []
    for _ in range(400):
        state = (state * 1103515245 + 12345) % 2**31
        answer.append(10 + (state >> 8) % 90)
    return answer


@dataclass
class Fabric:
    """Stands in for the transfer: targets that decode workers gave out, and the rows that came."""

    answer: Answer = letters
    targets: dict[bytes, asyncio.Event] = field(default_factory=dict)

    def reserve(self, name: str) -> bytes:
        self.targets[name.encode()] = asyncio.Event()
        return name.encode()

    def commit(self, target: bytes) -> None:
        if target in self.targets:
            self.targets[target].set()

    def token(self, message: Any, choice: int, position: int) -> worker_pb2.SampledToken:
        """The token at `position` of the answer to what `message` (PrefillRequest or DecodeSubmit) asks for."""
        prompt, sampling = list(message.token_ids[: message.num_prompt_tokens]), message.sampling
        answer = self.answer(prompt, choice)
        delivered = list(message.token_ids[message.num_prompt_tokens :])
        assert delivered == list(answer[: len(delivered)]), "resumed with other tokens than were delivered"
        token_id = answer[position]
        token = worker_pb2.SampledToken(token_id=token_id)
        if sampling.HasField("logprobs"):
            token.logprob = -token_id / 8
            for rank in range(sampling.logprobs):
                token.top.add(token_id=token_id + rank, logprob=-rank / 8)
        if position + 1 == len(answer) or token_id in sampling.stop_token_ids:
            token.finish_reason = STOP
        elif position + 1 >= sampling.max_tokens:
            token.finish_reason = LENGTH
        return token

    def first_tokens(self, message: Any, count: int) -> worker_pb2.FirstTokens:
        position = len(message.token_ids) - message.num_prompt_tokens
        choices = range(message.first_choice, message.first_choice + count)
        first = worker_pb2.FirstTokens(
            tokens=[self.token(message, choice, position) for choice in choices], queue_ms=0.25, prefill_ms=0.5
        )
        if message.sampling.echo and message.sampling.HasField("logprobs"):
            for token_id in message.token_ids:
                first.prompt_logprobs.add(token_id=token_id, logprob=-token_id / 8)
        return first


class Worker:
    """What both kinds share: a server, a registration, a list of faults. `open` counts what it holds."""

    pool: int

    def __init__(self, name: str, fabric: Fabric, **info: Any) -> None:
        self.name = name
        self.fabric = fabric
        self.faults: list[Fault] = []
        self.probes: list[Any] = []  # requests by which routers tried the worker
        self.probe_faults: list[Fault] = []
        self.draining = False
        self.running = 0
        self.rows_free = 1000
        self._info = {"model": "fake", "fingerprint": "f", "block_size": 16, "rows_total": 1000, **info}
        self._serving: Serving | None = None
        self.registration: Registration | None = None

    @staticmethod
    def next_fault(faults: list[Fault]) -> Fault:
        return faults.pop(0) if faults else Fault.NONE

    async def start(self, routers: Sequence[str], port: int = 0) -> None:
        self._serving = await serve([self.service()], host="127.0.0.1", port=port)
        self.address = f"127.0.0.1:{self._serving.port}"
        info = worker_pb2.WorkerInfo(
            **{
                "worker_id": self.name,
                "incarnation": new_incarnation(),
                "pool": self.pool,
                "address": self.address,
                "max_context": 2048,
                "version": __version__,
                **self._info,
            }
        )
        self.registration = Registration(routers=NamedRouters(routers), info=info, load=self.load)
        await self.registration.start()

    async def stop(self) -> None:
        """Leaves and ends every call at once, as a killed process does."""
        if self.registration is not None:
            await self.registration.stop()
        if self._serving is not None:
            serving, self._serving = self._serving, None
            await serving.server.stop(None)

    def load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(running=self.running, rows_free=self.rows_free, draining=self.draining)

    def service(self) -> Service:
        raise NotImplementedError


class FakePrefill(Worker, PrefillServicer):
    pool = router_pb2.POOL_PREFILL

    def __init__(self, name: str, fabric: Fabric, *, step_s: float = 0.0, **info: Any) -> None:
        super().__init__(name, fabric, **info)
        self.step_s = step_s  # of an answer that it generates
        self.requests: list[worker_pb2.PrefillRequest] = []
        self.cached_tokens = 0

    def service(self) -> Service:
        return Service(name="twinpool.v1.Prefill", add=add_PrefillServicer_to_server, servicer=self, internal=True)

    async def Run(self, request: worker_pb2.PrefillRequest, context: Any) -> None:
        if request.probe:
            self.probes.append(request)
            await self._run(request, context, self.next_fault(self.probe_faults))
            return
        self.requests.append(request)
        self.running += 1
        try:
            await self._run(request, context, self.next_fault(self.faults))
        finally:
            self.running -= 1

    async def _run(self, request: worker_pb2.PrefillRequest, context: Any, fault: Fault) -> None:
        before: dict[Fault, TwinpoolError] = {
            Fault.REFUSE: Internal("the device is broken"),
            Fault.UNAVAILABLE: Unavailable("the worker goes away"),
            Fault.FULL: Overloaded("no room"),
            Fault.INVALID: InvalidRequest("the prompt is not to my liking", field="prompt"),
        }
        if fault in before:
            raise before[fault]
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        if fault is Fault.LATE_FIRST:
            self.fabric.commit(request.transfer_target)
            await asyncio.sleep(0.05)
        first = self._first(request, fault)
        await context.write(worker_pb2.PrefillEvent(first_tokens=first))
        if request.generate and not first.tokens[0].finish_reason:
            await self._generate(request, context, fault)
        if not request.transfer_target:
            return
        if fault is Fault.TRANSFER:
            raise ChecksumMismatch("row 3 arrived with other bytes")
        if fault is Fault.SLOW_TRANSFER:
            await asyncio.Event().wait()
        self.fabric.commit(request.transfer_target)
        if fault is Fault.DIE_AFTER_COMMIT:
            await asyncio.sleep(0.05)
            raise Unavailable("the worker goes away")
        done = worker_pb2.Transferred(bytes=4096, rows=2, transfer_ms=3.0, transfer_wait_ms=1.0)
        await context.write(worker_pb2.PrefillEvent(transferred=done))

    async def _generate(self, request: worker_pb2.PrefillRequest, context: Any, fault: Fault) -> None:
        position = len(request.token_ids) - request.num_prompt_tokens + 1
        while True:
            if fault is Fault.DIE_IN_ANSWER and position == 5:
                raise Unavailable("the worker goes away")
            await asyncio.sleep(self.step_s)
            token = self.fabric.token(request, request.first_choice, position)
            out = worker_pb2.TokensOut(choice=request.first_choice, tokens=[token])
            await context.write(worker_pb2.PrefillEvent(tokens=out))
            if token.finish_reason:
                return
            position += 1

    def _first(self, request: worker_pb2.PrefillRequest, fault: Fault) -> worker_pb2.FirstTokens:
        first = self.fabric.first_tokens(request, request.sampling.n + (fault is Fault.WRONG_COUNT))
        first.cached_tokens = self.cached_tokens
        if fault is Fault.BAD_FIRST:
            first.tokens[-1].token_id = 2**31
        return first


@dataclass
class _Generation:
    submit: worker_pb2.DecodeSubmit
    task: asyncio.Task[None] | None = None
    cancelled_choices: set[int] = field(default_factory=set)


class FakeDecode(Worker, DecodeServicer):
    """Gives a token of every running choice each `step_s`."""

    pool = router_pb2.POOL_DECODE

    def __init__(self, name: str, fabric: Fabric, *, step_s: float = 0.0, **info: Any) -> None:
        super().__init__(name, fabric, **info)
        self.step_s = step_s
        self.submits: list[worker_pb2.DecodeSubmit] = []
        self.cancels: list[worker_pb2.DecodeCancel] = []
        self.open: dict[tuple[str, int], _Generation] = {}
        self.handles: dict[tuple[str, int], int] = {}

    def service(self) -> Service:
        return Service(name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=self, internal=True)

    async def Session(self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Any) -> None:
        mine: list[_Generation] = []
        out: asyncio.Queue[worker_pb2.DecodeEvent | None] = asyncio.Queue()
        reader = asyncio.create_task(self._obey(commands, out, mine))
        reader.add_done_callback(lambda _: out.put_nowait(None))
        try:
            while (event := await out.get()) is not None:
                events = [event]
                while not out.empty() and (event := out.get_nowait()) is not None:
                    events.append(event)
                await context.write(self._message(events))
                if event is None:
                    break
        finally:
            reader.cancel()
            for generation in mine:
                if generation.task is not None:
                    generation.task.cancel()
            await asyncio.gather(reader, *(g.task for g in mine if g.task), return_exceptions=True)

    def _message(self, events: list[worker_pb2.DecodeEvent]) -> worker_pb2.DecodeEvents:
        """Tokens of which nothing else is said go into the step, as far as no event of their request stands before."""
        message = worker_pb2.DecodeEvents()
        told = set()
        for event in events:
            key, tokens = (event.request_id, event.attempt), event.tokens.tokens
            plain = all(not (token.logprob or token.top or token.finish_reason) for token in tokens)
            handle = self.handles.get(key, 0)
            if tokens and plain and handle and key not in told:
                message.step.handles.extend([handle + event.tokens.choice] * len(tokens))
                message.step.token_ids.extend(token.token_id for token in tokens)
            else:
                told.add(key)
                message.events.append(event)
        return message

    async def _obey(self, commands: AsyncIterator[worker_pb2.DecodeCommand], out: Any, mine: list[_Generation]) -> None:
        async for command in commands:
            if command.HasField("submit"):
                generation = _Generation(command.submit)
                key = (command.submit.request_id, command.submit.attempt)
                assert key not in self.open, f"submitted twice: {key}"
                probe = command.submit.probe
                (self.probes if probe else self.submits).append(command.submit)
                self.open[key], self.handles[key] = generation, command.submit.handle
                fault = self.next_fault(self.probe_faults if probe else self.faults)
                generation.task = asyncio.create_task(self._generate(generation, out, fault))
                generation.task.add_done_callback(lambda _, key=key: self.open.pop(key))
                mine.append(generation)
            else:
                cancel = command.cancel
                self.cancels.append(cancel)
                generation_ = self.open.get((cancel.request_id, cancel.attempt))
                if generation_ is None:
                    continue
                if cancel.HasField("choice"):
                    generation_.cancelled_choices.add(cancel.choice)
                elif generation_.task is not None:
                    generation_.task.cancel()

    async def _generate(self, generation: _Generation, out: Any, fault: Fault) -> None:
        submit = generation.submit

        def tell(**event: Any) -> None:
            out.put_nowait(worker_pb2.DecodeEvent(request_id=submit.request_id, attempt=submit.attempt, **event))

        def end(reason: str, error: str = "", message: str = "") -> None:
            number = worker_pb2.DecodeEnded.Reason.Value("REASON_" + reason)
            tell(ended=worker_pb2.DecodeEnded(reason=number, error=error, message=message, decode_ms=2.0))

        if fault is Fault.NO_ROWS:
            await asyncio.Event().wait()
        if fault is Fault.REJECT:
            end("REJECTED", "InvalidRequest", "prompt never fits")
            return
        if fault is Fault.FAIL:
            end("FAILED", "Internal", "the device is broken")
            return
        if fault is Fault.CROWDED:
            end("FAILED", "Overloaded", "100 requests wait")
            return
        if submit.local_prefill:
            tell(reserved=worker_pb2.Reserved())
            await asyncio.sleep(self.step_s)
            count = submit.sampling.n + (fault is Fault.WRONG_COUNT)
            tell(first_tokens=self.fabric.first_tokens(submit, count))
        else:
            target = self.fabric.reserve(f"{self.name}/{submit.request_id}/{submit.attempt}")
            try:
                tell(reserved=worker_pb2.Reserved(transfer_target=target))
                await self.fabric.targets[target].wait()
            finally:
                del self.fabric.targets[target]
        if fault is Fault.TRANSFER_FAILED:
            end("TRANSFER_FAILED", "ChecksumMismatch", "row 3 arrived with other bytes")
            return
        if fault is Fault.NONSENSE:
            token = worker_pb2.SampledToken(token_id=2**31)
            tell(tokens=worker_pb2.TokensOut(choice=submit.first_choice, tokens=[token]))
        self.running += 1
        try:
            await self._decode(generation, tell, fault)
        finally:
            self.running -= 1
        if fault is Fault.PREEMPT:
            end("PREEMPTED", "Overloaded", "no rows")
        elif fault is Fault.DROP_STREAM:
            out.put_nowait(None)
        else:
            end("FINISHED")

    async def _decode(self, generation: _Generation, tell: Callable[..., None], fault: Fault) -> None:
        submit = generation.submit
        position = len(submit.token_ids) - submit.num_prompt_tokens
        choices = [
            choice
            for choice in range(submit.first_choice, submit.first_choice + submit.sampling.n)
            if not self.fabric.token(submit, choice, position).finish_reason
        ]
        steps = 0
        while choices := [choice for choice in choices if choice not in generation.cancelled_choices]:
            if fault in (Fault.PREEMPT, Fault.DROP_STREAM) and steps == 2:
                return
            await asyncio.sleep(self.step_s)
            position, steps = position + 1, steps + 1
            tokens = {choice: self.fabric.token(submit, choice, position) for choice in choices}
            for choice, token in tokens.items():
                tell(tokens=worker_pb2.TokensOut(choice=choice, tokens=[token]))
            choices = [choice for choice, token in tokens.items() if not token.finish_reason]


class Deployment:
    """Fake workers that join `routers`; all are stopped at the end."""

    def __init__(self, *routers: str, answer: Answer = letters) -> None:
        self.routers = routers
        self.fabric = Fabric(answer)
        self.workers: list[Worker] = []

    async def __aenter__(self) -> Deployment:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def prefill(self, name: str = "p0", *, port: int = 0, **options: Any) -> FakePrefill:
        worker = FakePrefill(name, self.fabric, **options)
        await self._start(worker, port)
        return worker

    async def decode(self, name: str = "d0", *, port: int = 0, **options: Any) -> FakeDecode:
        worker = FakeDecode(name, self.fabric, **options)
        await self._start(worker, port)
        return worker

    async def _start(self, worker: Worker, port: int) -> None:
        self.workers.append(worker)
        await worker.start(self.routers, port)

    @property
    def held(self) -> list[str]:
        """What the workers still hold of requests; empty when all is given back."""
        held = [f"{worker.name} runs {worker.running}" for worker in self.workers if worker.running]
        held += [f"{w.name} has {list(w.open)}" for w in self.workers if isinstance(w, FakeDecode) and w.open]
        return held + [f"target {target!r}" for target in self.fabric.targets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to what a sender sends; 0 and "" mean: nothing of that kind. Puts are counted on each link."""

    delay_ms: float = 0  # what is sent arrives later, in order; the sender goes on as if it had left
    delay_from_region: int = 0  # only from this region on, and whatever follows
    drop: str = ""  # frames of this kind, as in "Put" or "Commit", never leave; "write": one-sided writes do not happen
    drop_every: int = 1  # only every N-th of them is lost
    break_after_rows: int = 0  # every link breaks when so many rows have left on it
    kill_after_rows: int = 0  # the sender's process ends by SIGKILL then
    corrupt_every: int = 0  # one bit of every N-th row is flipped on its way; the sender's memory is untouched
    corrupt_byte: int = -1  # of the row; -1: any
    mangle_every: int = 0  # one bit of the header of every N-th Put is flipped
    mangle_field: str = ""  # of Put; empty: any
    duplicate_every: int = 0  # every N-th Put is sent twice
    reorder_every: int = 0  # every N-th Put leaves after the frame that follows it
    fail_fraction: float = 0  # this fraction of commits carries a wrong digest
    fail_first: int = 0  # and so do the first ones of the process, on whatever links
    seed: int = 0  # makes the choices repeatable


@contextmanager
def injected(faults: Faults | None) -> Iterator[None]:
    """Whoever makes a transport in here connects over faulty links from then on; None changes nothing."""
    create = transports.create
    with patch.object(transports, "create", create if faults is None else lambda *how: _Faulty(create(*how), faults)):
        yield


class _Faulty:
    """A transport whose outgoing links are faulty."""

    def __init__(self, transport: Transport, faults: Faults) -> None:
        self._transport = transport
        self._faults = faults
        self._commits = itertools.count(1)  # of all links

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def connect(self, endpoint: str, *, deadline: float) -> FaultyLink:
        return FaultyLink(self._transport.connect(endpoint, deadline=deadline), self._faults, self._commits)


class FaultyLink:
    """Damages, delays, repeats, reorders or loses what is sent; what is received passes untouched."""

    def __init__(self, link: Link, faults: Faults, commits: Iterator[int] | None = None) -> None:
        self._link = link
        self._faults = faults
        self._commits = commits or itertools.count(1)
        self._random = random.Random(faults.seed or None)
        self._num_rows = self._num_puts = self._num_droppable = 0
        self._held: tuple[wire.Message, Sequence[memoryview]] | None = None  # leaves after the next frame
        self._frames: deque[tuple[wire.Message, Sequence[memoryview]]] = deque()  # still to be begun
        self._sending = False
        self._late: queue.SimpleQueue[tuple[float, Callable[[], object]] | None] = queue.SimpleQueue()
        self._delaying = False
        self._stop = threading.Event()
        self._later = threading.Thread(target=self._send_late, name=f"kv-delay {link.peer}", daemon=True)
        if faults.delay_ms:
            self._later.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        frames = list(self._changed(message, payload))
        region = message.region if isinstance(message, wire.Put) else 0
        if not self._is_late(region):
            self._frames.extend(frames)
            return
        for frame in frames:
            self._put_off(partial(self._send_within, *frame))

    def start_rows(
        self, message: wire.Put, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> list[int]:
        if self._link.one_sided:
            checksums = self.write(message.region, there, rows, deadline=deadline)
            self.start(replace(message, checksums=wire.pack_u64(checksums)))
            return checksums
        checksums = [row_checksum(row) for row in rows]
        self.start(message, [*self._damaged(len(rows), rows), memoryview(wire.pack_u64(checksums))])
        return checksums

    def advance(self) -> bool:
        while self._sending or self._frames:
            if not self._sending:
                message, payload = self._frames.popleft()
                self._link.start(message, _without_stripes(self._link, message, payload))
                self._sending = True
            if not self._link.advance():
                return False
            self._sending = False
        return True

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        late, lost = self._is_late(region), self._loses("write")
        if not late and not lost and not self._faults.corrupt_every:
            self._count(len(rows))
            return self._link.write(region, rows, sources, deadline=deadline)
        checksums = [row_checksum(source) for source in sources]
        arriving = [self._damaged(1, [memoryview(bytearray(source))])[0] for source in sources]
        if late and not lost:
            self._put_off(lambda: self._link.write(region, rows, arriving, deadline=_later()))
        elif not lost:
            self._link.write(region, rows, arriving, deadline=deadline)
        return checksums

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        if not self._loses(type(message).__name__):
            self._link.send(message, payload, deadline=deadline)

    def close(self) -> None:
        self._stop.set()
        self._late.put(None)
        self._link.cut()
        if self._later.is_alive():
            self._later.join()
        self._link.close()

    def _changed(
        self, message: wire.Message, payload: Sequence[memoryview]
    ) -> Iterator[tuple[wire.Message, Sequence[memoryview]]]:
        faults = self._faults
        if isinstance(message, wire.Put):
            self._num_puts += 1
            if _is_nth(self._num_puts, faults.mangle_every):
                if faults.mangle_field == "checksums" and payload:  # they stand behind the rows
                    payload = [*payload[:-1], memoryview(self._flipped(payload[-1]))]
                else:
                    message = self._mangled(message)
            if _is_nth(self._num_puts, faults.reorder_every):
                self._held = (message, payload)
                return
        elif isinstance(message, wire.Commit) and (
            next(self._commits) <= faults.fail_first or self._random.random() < faults.fail_fraction
        ):
            message = replace(message, digest=bytes(len(message.digest)))
        if not self._loses(type(message).__name__):
            yield message, payload
            if isinstance(message, wire.Put) and _is_nth(self._num_puts, faults.duplicate_every):
                yield message, payload
        if self._held is not None:
            held, self._held = self._held, None
            yield held

    def _loses(self, kind: str) -> bool:
        if kind != self._faults.drop:
            return False
        self._num_droppable += 1
        return _is_nth(self._num_droppable, self._faults.drop_every)

    def _damaged(self, num_rows: int, payload: Sequence[memoryview]) -> Sequence[memoryview]:
        before = self._num_rows
        self._count(num_rows)
        if not self._faults.corrupt_every:
            return payload
        rows = bytearray(b"".join(payload))
        row_bytes = len(rows) // num_rows
        for row in range(num_rows):
            if _is_nth(before + row + 1, self._faults.corrupt_every):
                byte = self._faults.corrupt_byte
                byte = self._random.randrange(row_bytes) if byte < 0 else byte
                rows[row * row_bytes + byte] ^= 1 << self._random.randrange(8)
        return [memoryview(rows)]

    def _count(self, num_rows: int) -> None:
        self._num_rows += num_rows
        if 0 < self._faults.kill_after_rows < self._num_rows:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < self._faults.break_after_rows < self._num_rows:
            self._link.cut()
            raise PeerLost(f"injected: the link breaks after {self._faults.break_after_rows} rows")

    def _mangled(self, put: wire.Put) -> wire.Put:
        """Another value of one field, that differs in one bit and is well formed."""
        filled = [each.name for each in fields(put) if getattr(put, each.name) != b""]
        name = self._faults.mangle_field or self._random.choice(filled)
        value = getattr(put, name)
        if isinstance(value, int):
            bits = 16 if name == "region" else 32
            return replace(put, **{name: value ^ 1 << self._random.randrange(bits)})
        data = self._flipped(value.encode() if isinstance(value, str) else value)
        return replace(put, **{name: data.decode() if isinstance(value, str) else data})

    def _flipped(self, data: bytes | memoryview) -> bytes:
        """With the lowest bit of one byte turned over."""
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1
        return bytes(changed)

    def _is_late(self, region: int) -> bool:
        """Whether something is delayed. Once one thing is, all that follows stays behind it."""
        if self._faults.delay_ms and region >= self._faults.delay_from_region:
            self._delaying = True
        return self._delaying

    def _put_off(self, act: Callable[[], object]) -> None:
        self._late.put((time.monotonic() + self._faults.delay_ms / 1000, act))

    def _send_within(self, message: wire.Message, payload: Sequence[memoryview]) -> None:
        self._link.send(message, _without_stripes(self._link, message, payload), deadline=_later())

    def _send_late(self) -> None:
        while (item := self._late.get()) is not None:
            due, act = item
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            try:
                act()
            except (PeerLost, TransferTimeout, wire.Malformed):
                self._link.cut()  # its owner learns from the reading side
                return


def _without_stripes(link: Link, message: wire.Message, payload: Sequence[memoryview]) -> Sequence[memoryview]:
    """Sends what of a Put's payload goes over other connections of a link that has several; returns the rest."""
    if not isinstance(message, wire.Put) or not isinstance(link, StripedSenderLink):
        return payload
    link._num_puts += 1
    num_rows, whole, size = len(message.positions) // 4, b"".join(payload), wire.CHECKSUM_BYTES
    row_bytes = len(whole) // num_rows - size
    rows = [whole[begin : begin + row_bytes] for begin in range(0, num_rows * row_bytes, row_bytes)]
    sums = [whole[begin : begin + size] for begin in range(num_rows * row_bytes, len(whole), size)]
    count = len(link._lanes) + 1
    parts = [[*rows[index::count], *sums[index::count]] for index in range(min(count, num_rows))]
    stripes = [memoryview(b"".join(part)) for part in parts]
    for lane, stripe in zip(link._lanes, stripes[1:], strict=False):
        lane.begin(partial(lane.stream.send, wire.Stripe(put=link._num_puts), [stripe], deadline=_later()))
    return stripes[:1]


def _is_nth(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def _later() -> float:
    return time.monotonic() + 30.0
