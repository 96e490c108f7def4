"""Workers without a model that take the time of real ones: for what is measured of the router alone.

A prefill worker computes in steps of at most 256 tokens, half of each for short and half for long prompts while both
wait, as prefill/scheduler.py does; a step takes step_s + tokens / tokens_per_s. A decode worker gives every request a
token a step, and a step takes base_s + requests * each_s; a prompt that it is to compute itself goes along with them in
pieces of 32 tokens. Both sleep instead of computing. Tokens mean nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.discovery import NamedRouters
from service.registration import Registration, new_incarnation
from service.serve import Service, Serving, serve
from twinpool import __version__
from twinpool.v1 import router_pb2, worker_pb2
from twinpool.v1.worker_pb2_grpc import (
    DecodeServicer,
    PrefillServicer,
    add_DecodeServicer_to_server,
    add_PrefillServicer_to_server,
)

MODEL = "fake"
VOCAB_SIZE = 1 << 15
_BYTES = 256  # the first tokens are bytes; the others, for stamps, pairs of letters
_STAMP_S = 1e-4
_STAMPS = 32_000
MAX_CONTEXT = 4096
_BUDGET = 256  # tokens of a prefill step
_LOCAL_CHUNK = 32  # tokens that a decode worker computes beside a step
_ROWS = 100_000
_BYTES_PER_TOKEN = 12_000


TIMES_AS_FAST = 8.0  # the default speed, of one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one worker; a prefill worker has the first two, a decode worker the others.

    The defaults are an eighth of what one core of an EPYC takes with SmolLM2-135M in bf16, measured by bench.offline at
    003ec29: a prompt of 512 in 841 ms, one of 2,048 in 4 s; a decode step of 1, 8 and 32 sequences in 18, 34 and 91 ms.
    """

    step_s: float = 0.002
    tokens_per_s: float = 4800.0
    base_s: float = 0.002
    each_s: float = 0.0003


def tokenizer_folder(folder: Path) -> Path:
    """A model directory that a router can be started with: every printable character is a token, and so are pairs."""
    letters = [chr(33 + i) if i < 94 else chr(256 + i) for i in range(_BYTES)]
    tokens = letters + [letters[i // _BYTES] + letters[i % _BYTES] for i in range(_BYTES, VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    target = folder / MODEL
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT}
    (target / "config.json").write_text(json.dumps(config))
    return target


def stamp() -> int:
    """Now, by CLOCK_MONOTONIC, as a token."""
    return _BYTES + int(time.monotonic() / _STAMP_S) % _STAMPS


def since_s(token_id: int) -> float | None:
    """How long ago a token was stamped, at most 3.2 s; None when it was not."""
    if token_id < _BYTES:
        return None
    return (time.monotonic() / _STAMP_S - (token_id - _BYTES)) % _STAMPS * _STAMP_S


class _Worker:
    """A server and a registration."""

    pool: Any

    def __init__(self, name: str, speed: Speed) -> None:
        self.name = name
        self.speed = speed
        self._serving: Serving | None = None
        self._registration: Registration | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self, routers: Sequence[str]) -> None:
        self._serving = await serve([self.service()], host="127.0.0.1", port=0)
        info = worker_pb2.WorkerInfo(
            worker_id=self.name,
            incarnation=new_incarnation(),
            pool=self.pool,
            address=f"127.0.0.1:{self._serving.port}",
            model=MODEL,
            fingerprint="fake",
            version=__version__,
            block_size=64,
            max_context=MAX_CONTEXT,
            rows_total=_ROWS,
            serves_alone=self.pool == router_pb2.POOL_DECODE,
        )
        self._registration = Registration(routers=NamedRouters(routers), info=info, load=self.load)
        self._loop = asyncio.ensure_future(self.run())
        await self._registration.start()

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.stop()
        if self._loop is not None:
            self._loop.cancel()
        if self._serving is not None:
            await self._serving.server.stop(None)

    def service(self) -> Service:
        raise NotImplementedError

    def load(self) -> worker_pb2.WorkerLoad:
        raise NotImplementedError

    async def run(self) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Prompt:
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    received_at: float = 0.0
    admitted_at: float = 0.0
    compute_s: float = 0.0


class FakePrefill(_Worker, PrefillServicer):
    pool = router_pb2.POOL_PREFILL

    def __init__(self, name: str, speed: Speed) -> None:
        super().__init__(name, speed)
        self._waiting: dict[str, deque[_Prompt]] = {"short": deque(), "long": deque()}
        self._changed = asyncio.Event()

    def service(self) -> Service:
        return Service(name="twinpool.v1.Prefill", add=add_PrefillServicer_to_server, servicer=self, internal=True)

    def load(self) -> worker_pb2.WorkerLoad:
        tokens = {name: sum(prompt.left for prompt in queue) for name, queue in self._waiting.items()}
        return worker_pb2.WorkerLoad(
            running=sum(map(len, self._waiting.values())),
            rows_free=_ROWS,
            waiting_tokens=sum(tokens.values()),
            waiting_long_tokens=tokens["long"],
        )

    async def Run(self, request: worker_pb2.PrefillRequest, context: Any) -> AsyncIterator[worker_pb2.PrefillEvent]:
        loop = asyncio.get_running_loop()
        prompt = _Prompt(len(request.token_ids), received_at=loop.time())
        queue = self._waiting[request.input_class]
        queue.append(prompt)
        self._changed.set()
        try:
            await prompt.done.wait()
        finally:
            if not prompt.done.is_set():
                queue.remove(prompt)
        first = worker_pb2.FirstTokens(
            tokens=[worker_pb2.SampledToken(token_id=65)] * request.sampling.n,
            queue_ms=1000 * (prompt.admitted_at - prompt.received_at),
            prefill_ms=1000 * (loop.time() - prompt.admitted_at),
            compute_ms=1000 * prompt.compute_s,
        )
        yield worker_pb2.PrefillEvent(first_tokens=first)
        if request.transfer_target:
            FakeDecode.arrived(request.transfer_target)
            size = len(request.token_ids) * _BYTES_PER_TOKEN
            yield worker_pb2.PrefillEvent(transferred=worker_pb2.Transferred(bytes=size, rows=1, transfer_ms=1))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            step = self._step(loop.time())
            tokens = sum(step.values())
            if not tokens:
                self._changed.clear()
                await self._changed.wait()
                continue
            seconds = self.speed.step_s + tokens / self.speed.tokens_per_s
            await asyncio.sleep(seconds)
            for prompt, count in step.items():
                prompt.compute_s += seconds * count / tokens
                prompt.left -= count
            for queue in self._waiting.values():
                for prompt in [each for each in queue if not each.left]:
                    queue.remove(prompt)
                    prompt.done.set()

    def _step(self, now: float) -> dict[_Prompt, int]:
        active = [queue for queue in self._waiting.values() if queue]
        step: dict[_Prompt, int] = {}
        left = _BUDGET
        for share in (_BUDGET // max(1, len(active)), _BUDGET):  # an even part each, then what the other did not need
            for queue in active:
                room = min(share, left)
                for prompt in queue:
                    count = min(room, prompt.left - step.get(prompt, 0))
                    if count > 0:
                        prompt.admitted_at = prompt.admitted_at or now
                        step[prompt] = step.get(prompt, 0) + count
                        room -= count
                        left -= count
        return step


@dataclass(slots=True, eq=False)
class _Answer:
    submit: worker_pb2.DecodeSubmit
    out: asyncio.Queue[worker_pb2.DecodeEvents]
    left: int
    prompt_left: int = 0  # to compute here
    received_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # 0: its rows are not there yet

    @property
    def started(self) -> bool:
        return self.started_at > 0

    @property
    def wants_logprobs(self) -> bool:
        return self.submit.sampling.HasField("logprobs")


class FakeDecode(_Worker, DecodeServicer):
    """Transfers take no time: the prefill worker, in the same process, says when rows are there."""

    pool = router_pb2.POOL_DECODE
    _targets: ClassVar[dict[bytes, tuple[FakeDecode, _Answer]]] = {}  # of all workers of the process

    def __init__(self, name: str, speed: Speed, *, stamped: bool = False) -> None:
        """stamped: tokens tell the time of their step (`since_s`)."""
        super().__init__(name, speed)
        self._stamped = stamped
        self._answers: dict[tuple[str, int], _Answer] = {}
        self._running: list[_Answer] = []
        self._local: deque[_Answer] = deque()  # whose prompts are to be computed here
        self._changed = asyncio.Event()

    @classmethod
    def arrived(cls, target: bytes) -> None:
        found = cls._targets.pop(target, None)
        if found is not None:
            worker, answer = found
            worker._start(answer)

    def _start(self, answer: _Answer) -> None:
        answer.started_at = time.monotonic()
        self._running.append(answer)
        self._changed.set()

    def service(self) -> Service:
        return Service(name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=self, internal=True)

    def load(self) -> worker_pb2.WorkerLoad:
        waiting = len(self._answers) - len(self._running)
        return worker_pb2.WorkerLoad(running=len(self._running), waiting=waiting, rows_free=_ROWS)

    async def Session(
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[worker_pb2.DecodeEvents]:
        out: asyncio.Queue[worker_pb2.DecodeEvents] = asyncio.Queue()
        reader = asyncio.ensure_future(self._obey(commands, out))
        try:
            while True:
                message = await out.get()
                while not out.empty():
                    message.MergeFrom(out.get_nowait())
                yield message
        finally:
            reader.cancel()
            for key in [key for key, answer in self._answers.items() if answer.out is out]:
                self._drop(key)

    async def _obey(self, commands: AsyncIterator[worker_pb2.DecodeCommand], out: Any) -> None:
        async for command in commands:
            if command.HasField("cancel"):
                self._drop((command.cancel.request_id, command.cancel.attempt))
                continue
            submit = command.submit
            target = f"{self.name}/{submit.request_id}/{submit.attempt}".encode()
            answer = _Answer(submit, out, submit.sampling.max_tokens - 1)
            self._answers[submit.request_id, submit.attempt] = answer
            if submit.local_prefill:
                answer.prompt_left = len(submit.token_ids)
                self._local.append(answer)
                self._changed.set()
                target = b""
            else:
                self._targets[target] = (self, answer)
            reserved = _event(answer, reserved=worker_pb2.Reserved(transfer_target=target))
            out.put_nowait(worker_pb2.DecodeEvents(events=[reserved]))

    def _drop(self, key: tuple[str, int]) -> None:
        answer = self._answers.pop(key, None)
        if answer is None:
            return
        if answer.started:
            self._running.remove(answer)
        elif answer in self._local:
            self._local.remove(answer)
        else:
            self._targets.pop(f"{self.name}/{key[0]}/{key[1]}".encode(), None)

    async def run(self) -> None:
        token = worker_pb2.SampledToken(token_id=66)
        last = worker_pb2.SampledToken(token_id=67, finish_reason=router_pb2.FINISH_REASON_LENGTH)
        ended = worker_pb2.DecodeEnded(reason=worker_pb2.DecodeEnded.REASON_FINISHED)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._running and not self._local:
                self._changed.clear()
                await self._changed.wait()
                due = loop.time()
            prompt = self._local[0] if self._local else None
            chunk = min(_LOCAL_CHUNK, prompt.prompt_left) if prompt is not None else 0
            seconds = self.speed.base_s + len(self._running) * self.speed.each_s + chunk / self.speed.tokens_per_s
            due = max(due, loop.time() - 0.1) + seconds
            running = list(self._running)  # who comes during the step is in the next
            await asyncio.sleep(due - loop.time())
            if self._stamped:
                token.token_id = last.token_id = stamp()
            messages: dict[Any, worker_pb2.DecodeEvents] = {}
            for answer in running:
                if answer not in self._running:
                    continue  # cancelled
                answer.left -= 1
                message = messages.setdefault(answer.out, worker_pb2.DecodeEvents())
                if answer.left > 0 and not answer.wants_logprobs:
                    message.step.handles.append(answer.submit.handle)
                    message.step.token_ids.append(token.token_id)
                    continue
                sent = token if answer.left > 0 else last
                message.events.append(_event(answer, tokens=worker_pb2.TokensOut(tokens=[sent])))
                if answer.left <= 0:
                    ended.decode_ms = 1000 * (time.monotonic() - answer.started_at)
                    message.events.append(_event(answer, ended=ended))
                    self._running.remove(answer)
                    del self._answers[answer.submit.request_id, answer.submit.attempt]
            if prompt is not None and prompt in self._local:
                self._computed(prompt, chunk)
            for out, message in messages.items():
                out.put_nowait(message)

    def _computed(self, prompt: _Answer, tokens: int) -> None:
        prompt.prompt_left -= tokens
        if prompt.prompt_left:
            return
        self._local.remove(prompt)
        first = worker_pb2.FirstTokens(
            tokens=[worker_pb2.SampledToken(token_id=65)] * prompt.submit.sampling.n,
            prefill_ms=1000 * (time.monotonic() - prompt.received_at),
        )
        prompt.out.put_nowait(worker_pb2.DecodeEvents(events=[_event(prompt, first_tokens=first)]))
        if prompt.left:
            self._start(prompt)


def _event(answer: _Answer, **what: Any) -> worker_pb2.DecodeEvent:
    return worker_pb2.DecodeEvent(request_id=answer.submit.request_id, attempt=answer.submit.attempt, **what)
