"""Readiness: a worker gets users' requests once a real generation of this router's has passed through it.

1. A worker that has joined and reported is probed with a partner of the other pool and of its fingerprint: a prompt of
   a few tokens, its rows transferred, a few tokens decoded. That proves both. A partner that is proved comes first.
2. Where there is no partner it waits for one, and says so. Where one pool may serve whole answers (--when-pool-empty),
   and as long as no pair does, it is probed alone instead; the partner that joins later is then probed with it.
3. A probe that fails, or takes too long, is repeated after a pause that doubles, with another partner if there is one.

Each router probes for itself, since what counts is what passes from here: another router, or the worker, cannot know
whether this one reaches it. Only a few probes run at a time. Nothing is learnt from them and no request counts them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

from router.classifier import PRIORITY_LIMIT, SHORT
from router.decode_session import DecodeSession
from router.metrics import RouterMetrics
from router.pools import Pool, Registry, Worker, WorkerState
from router.prefill_call import PrefillClient
from router.wire import DecodeEnd, FirstTokens, Job, NextTokens, Token
from twinpool.errors import DeadlineExceeded, Internal, TwinpoolError, by_name
from twinpool.sampling import SamplingParams

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 8
ANSWER_TOKENS = 3  # one of the prefill worker, two of the decode worker
MOST_AT_ONCE = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0


@dataclass(slots=True)
class _Trial:
    """What has been tried with a worker that is not proved."""

    failures: int = 0
    not_before: float = 0.0
    last_partner: Worker | None = None


class _Heard:
    """What the decode worker says of a probe: the Listener of its session."""

    def __init__(self) -> None:
        self.target: bytes | None = None
        self.token_ids: list[int] = []
        self.finished = False
        self._error: TwinpoolError | None = None
        self._changed = asyncio.Event()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Raises what ended the probe before."""
        while not happened():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def reserved(self, target: bytes) -> None:
        self.target = target
        self._changed.set()

    def first_tokens(self, event: FirstTokens) -> None:
        self.tokens(0, event.tokens)

    def tokens(self, choice: int, tokens: Sequence[Token]) -> None:
        self.token_ids += [token.token_id for token in tokens]

    def ended(self, end: DecodeEnd) -> None:
        self.finished = end.reason == "FINISHED"
        if not self.finished:
            self._error = by_name(end.error)(end.message or end.reason)
        self._changed.set()

    def decode_lost(self, error: TwinpoolError) -> None:
        self._error = error
        self._changed.set()


class Prober:
    """`look` starts what can start; call it after anything that may matter. Owned by one event loop."""

    def __init__(
        self, registry: Registry, metrics: RouterMetrics, *, vocab_size: int, timeout_s: float, alone: bool
    ) -> None:
        """timeout_s: of one probe; alone: workers without a partner may serve whole answers."""
        self._registry = registry
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._alone = alone
        self._trials: WeakKeyDictionary[Worker, _Trial] = WeakKeyDictionary()
        self._running: set[asyncio.Task[None]] = set()
        self._look_again: asyncio.TimerHandle | None = None

    def look(self) -> None:
        now = self._registry.clock()
        next_s: float | None = None
        for worker in self._registry:
            if worker.proved or worker.probing or not _can_be_asked(worker):
                continue
            trial = self._trials.setdefault(worker, _Trial())
            if trial.not_before > now:
                next_s = min(next_s or LONGEST_PAUSE_S, trial.not_before - now)
            elif len(self._running) < MOST_AT_ONCE:
                self._begin(worker, trial)
            else:
                worker.waits_for = "other probes run"
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = None
        if next_s is not None:
            self._look_again = asyncio.get_running_loop().call_later(next_s + 0.001, self.look)

    async def close(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _begin(self, worker: Worker, trial: _Trial) -> None:
        name = _other(worker).name.lower()
        partners = [
            each
            for each in self._registry.pool(_other(worker))
            if each.info.fingerprint == worker.info.fingerprint and _can_be_asked(each)
        ]
        free = [each for each in partners if not each.probing or each.proved]
        if partners and not free:
            worker.waits_for = f"every {name} worker that fits it is being probed"
        elif not partners and not (self._alone and worker.info.serves_alone and not self._has_pair()):
            reason = f"no {name} worker fits it: a generation has to pass through both"
            if self._registry.pool(_other(worker)):
                reason += "; those that have joined differ in model, cache layout or version"
                if worker.waits_for != reason:
                    logger.warning("worker fits nobody", extra={"worker": worker.info.worker_id, "reason": reason})
            worker.waits_for = reason
        else:
            partner = min(free, key=lambda each: _order(each, trial)) if free else None
            trial.last_partner = partner
            task = asyncio.ensure_future(self._probe(worker, partner))
            for each in (worker, partner):
                if each is not None and not each.proved:
                    each.probing, each.waits_for = True, ""
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _has_pair(self) -> bool:
        """Whether split serving is there, so that nobody has to serve alone."""
        prefill, decode = (
            {each.info.fingerprint for each in self._registry.pool(pool) if each.proved and _can_be_asked(each)}
            for pool in (Pool.PREFILL, Pool.DECODE)
        )
        return bool(prefill & decode)

    async def _probe(self, worker: Worker, partner: Worker | None) -> None:
        begun_at = self._registry.clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                token_ids = await self._generate(worker, partner)
            if len(token_ids) != ANSWER_TOKENS or max(token_ids) >= self._vocab_size:
                raise Internal(f"{ANSWER_TOKENS} tokens were asked for, and {token_ids[:8]} came")
        except TimeoutError:
            self._failed(worker, partner, DeadlineExceeded(f"it took more than {self._timeout_s:g} s"))
        except TwinpoolError as error:
            self._failed(worker, partner, error)
        except Exception as error:  # it is tried again after a pause all the same
            logger.exception("probe broke", extra={"worker": worker.info.worker_id})
            self._failed(worker, partner, Internal(f"{error!r}"))
        else:
            self._passed(worker, partner, self._registry.clock() - begun_at)
        finally:
            for each in (worker, partner):
                if each is not None:
                    each.probing = False
            asyncio.get_running_loop().call_soon(self._registry.on_change)  # when this task counts no more

    def _passed(self, worker: Worker, partner: Worker | None, seconds: float) -> None:
        self._metrics.probes.labels("passed").inc()
        for each, other in ((worker, partner), (partner, worker)):
            if each is not None and not each.proved:
                each.proved = True
                extra = {"worker": each.info.worker_id, "partner": _name(other), "probe_ms": round(1000 * seconds, 1)}
                logger.info("worker ready", extra=extra)

    def _failed(self, worker: Worker, partner: Worker | None, error: TwinpoolError) -> None:
        """Nobody can tell which of the two it was, unless one is proved: either is tried again, later."""
        self._metrics.probes.labels(type(error).__name__).inc()
        for each, other in ((worker, partner), (partner, worker)):
            if each is None or each.proved:
                continue
            trial = self._trials.setdefault(each, _Trial())
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**trial.failures) * random.uniform(0.8, 1.2)
            trial.failures += 1
            trial.not_before = self._registry.clock() + pause_s
            each.waits_for = f"its probe with {_name(other)} failed: {error.message}"
            extra = {"worker": each.info.worker_id, "partner": _name(other), "reason": error.message}
            logger.warning("probe failed", extra={**extra, "pause_s": round(pause_s, 3)})

    async def _generate(self, worker: Worker, partner: Worker | None) -> list[int]:
        """The answer's tokens. Raises what stood in the way."""
        job = Job(
            request_id=f"probe-{uuid.uuid4().hex}",
            attempt=1,
            token_ids=[i % self._vocab_size for i in range(1, PROMPT_TOKENS + 1)],
            num_prompt_tokens=PROMPT_TOKENS,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=ANSWER_TOKENS, ignore_eos=True),
            first_choice=0,
            input_class=SHORT,
            sla_class="probe",
            priority=PRIORITY_LIMIT,
            class_priority=PRIORITY_LIMIT,
            tpot_target_ms=0.0,
            probe=True,
        )
        prefill, decode = (worker, partner) if worker.info.pool is Pool.PREFILL else (partner, worker)
        if decode is None:
            assert prefill is not None
            return await self._prefill(prefill, job, b"", generate=True)
        heard, session = _Heard(), cast(DecodeSession, decode.link)
        session.submit(job, self._timeout_s, heard, local_prefill=prefill is None)
        try:
            await heard.until(lambda: heard.target is not None)
            first = await self._prefill(prefill, job, heard.target or b"") if prefill is not None else []
            await heard.until(lambda: heard.finished)
            return first + heard.token_ids
        finally:
            session.cancel(job.request_id, job.attempt)

    async def _prefill(self, worker: Worker, job: Job, target: bytes, *, generate: bool = False) -> list[int]:
        client = cast(PrefillClient, worker.link)
        token_ids: list[int] = []
        async with aclosing(client.run(job, target, self._timeout_s, generate=generate)) as events:
            async for event in events:
                if isinstance(event, FirstTokens | NextTokens):
                    token_ids += [token.token_id for token in event.tokens]
        return token_ids


def _other(worker: Worker) -> Pool:
    return Pool.DECODE if worker.info.pool is Pool.PREFILL else Pool.PREFILL


def _name(partner: Worker | None) -> str:
    return partner.info.worker_id if partner is not None else "nobody"


def _can_be_asked(worker: Worker) -> bool:
    return worker.connected and worker.load is not None and not worker.load.draining


def _order(partner: Worker, trial: _Trial) -> tuple[bool, bool, int]:
    """Proved and ready ones first, the one that was tried last after the others, then whoever has least to do."""
    return partner.state is not WorkerState.READY, partner is trial.last_partner, partner.requests
