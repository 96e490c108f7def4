"""Both pools as this router knows them: who has joined, until when its lease runs, how it fares.

The state is soft: workers report it, and it is rebuilt from their reports after a restart of the router.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from router.backlog import Backlog
from router.breaker import Breaker
from router.classifier import SHORT
from twinpool import __version__
from twinpool.errors import Incompatible, TransferFailed, TwinpoolError, Unavailable
from twinpool.prefix import PromptDigests

logger = logging.getLogger(__name__)

_LATE = 0.6  # of a lease without a report, from which on a worker is suspect

_claim_numbers = itertools.count(1)


class Pool(IntEnum):
    """The numbers are those of the public API's enum."""

    PREFILL = 1
    DECODE = 2


class WorkerState(IntEnum):
    """The numbers are those of the public API's enum."""

    READY = 1
    DRAINING = 2
    SUSPECT = 3
    JOINING = 4  # not proved yet; waits for its probe
    PROBING = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says about itself once; the fields are those of the protocol's WorkerInfo."""

    worker_id: str
    incarnation: int
    pool: Pool
    address: str
    model: str
    fingerprint: str
    version: str
    block_size: int
    max_context: int
    rows_total: int
    serves_alone: bool = False  # can compute prompts and decode


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One report; the fields are those of the protocol's WorkerLoad."""

    running: int = 0
    waiting: int = 0
    rows_free: int = 0
    tokens_per_s: float = 0.0
    waiting_tokens: int = 0
    draining: bool = False
    waiting_long_tokens: int = 0
    prefixes: frozenset[int] = frozenset()  # short digests of cached blocks


class Link(Protocol):
    """The connection to a worker: a decode session or a prefill client."""

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Claim:
    """What one request of this router takes of a worker, until `Worker.release`. Reports lag; claims do not."""

    tokens: int
    rows: int
    probe: bool
    compute_s: float = 0.0  # predicted, of a prefill worker's device
    input_class: str = SHORT
    digests: tuple[int, ...] = ()  # of the prompt's blocks, which a prefill worker will have computed before the next's
    reported: bool = False  # a report that came after the worker set the rows aside counts them already
    reserved: bool = False


class Worker:
    """One worker that has joined. Written by the registry, by placement (claims) and by attempts (how calls ended)."""

    def __init__(self, info: WorkerInfo, link: Any, clock: Callable[[], float]) -> None:
        self.info = info
        self.link = link  # DecodeSession or PrefillClient, by pool
        self.load: WorkerLoad | None = None  # unknown until the first report, which is not the same as idle
        self.load_is_new = False  # until placement has put it into the backlog
        self.connected = True  # its Join stream is open
        self.stream: object = None  # the one that counts, of possibly several; the registry's server writes it
        self.lease_ends = 0.0
        self.lease_s = 0.0
        self.joined_at = clock()
        self.last_claim = 0  # grows with every claim on any worker
        self.claims: set[Claim] = set()
        self.breaker = Breaker(clock)
        self.proved = True  # a generation has passed through it; the registry and the prober write these three
        self.probing = False
        self.waits_for = ""  # why it is not proved
        self.fault = ""  # the last one that was counted
        self.backlog = Backlog(clock)
        self._clock = clock

    @property
    def state(self) -> WorkerState:
        if self.load is not None and self.load.draining:
            return WorkerState.DRAINING
        if not self.proved:
            return WorkerState.PROBING if self.probing else WorkerState.JOINING
        usable = self.connected and self.load is not None and self.breaker.allows and not self.late
        return WorkerState.READY if usable else WorkerState.SUSPECT

    @property
    def late(self) -> bool:
        """Whether more than one report is overdue: it may be frozen, though its lease still runs."""
        return self.lease_ends - self._clock() < (1 - _LATE) * self.lease_s

    @property
    def reason(self) -> str:
        """Why it is not used, for those who look; empty where the state says all."""
        if self.state is WorkerState.SUSPECT:
            if not self.connected or self.load is None:
                return "its stream is broken" if not self.connected else "it has not reported yet"
            return self.fault if not self.breaker.allows else "its report is overdue"
        return self.waits_for if self.state is WorkerState.JOINING else ""

    @property
    def suspicion(self) -> float | None:
        """How much speaks against a worker that would be there to answer; None for one that is not, or is leaving."""
        if not self.connected or not self.proved or self.load is None or self.load.draining:
            return None
        suspicion = self.breaker.suspicion
        return None if suspicion is None else suspicion + self.late

    @property
    def rows_free(self) -> int:
        """Rows that a new request could take: the last report less what it cannot know of yet."""
        free = self.load.rows_free if self.load is not None else 0
        return free - sum(claim.rows for claim in self.claims if not claim.reported)

    @property
    def requests(self) -> int:
        """Requests it has: this router's, or all that it reported, whichever is more."""
        reported = self.load.running + self.load.waiting if self.load is not None else 0
        return max(len(self.claims), reported)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens it has to compute: this router's, or all that it reported, whichever is more."""
        reported = self.load.waiting_tokens if self.load is not None else 0
        return max(sum(claim.tokens for claim in self.claims), reported)

    def cached_tokens(self, digests: PromptDigests) -> int:
        """Tokens of a prompt that its cache holds, by its last report, or will hold after what it has claimed."""
        if self.load is None or not (self.load.prefixes or self.claims):
            return 0
        wanted = digests.of(self.info.block_size)
        best = _common(wanted, self.load.prefixes)
        for claim in self.claims:
            if claim.digests and wanted and claim.digests[0] == wanted[0]:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(wanted, claim.digests, strict=False))
                best = max(best, sum(1 for _ in same))
        return best * self.info.block_size

    def claim(
        self,
        *,
        tokens: int,
        rows: int,
        compute_s: float = 0.0,
        input_class: str = SHORT,
        digests: tuple[int, ...] = (),
    ) -> Claim:
        claim = Claim(
            tokens=tokens,
            rows=rows,
            probe=self.breaker.begin(),
            compute_s=compute_s,
            input_class=input_class,
            digests=digests,
        )
        self.claims.add(claim)
        self.backlog.claim(input_class, compute_s)
        self.last_claim = next(_claim_numbers)
        return claim

    def computed(self, claim: Claim) -> None:
        """The prompt is: what is left to do is to send its rows. Idempotent."""
        self.backlog.release(claim.input_class, claim.compute_s)
        claim.compute_s = 0.0

    def release(self, claim: Claim) -> None:
        """Idempotent."""
        if claim in self.claims:
            self.claims.remove(claim)
            self.computed(claim)
            if claim.probe:
                self.breaker.end_probe()

    def reported(self, load: WorkerLoad) -> None:
        self.load = load
        self.load_is_new = True
        for claim in self.claims:
            claim.reported = claim.reserved

    def failed(self, error: TwinpoolError) -> None:
        """Counts a fault of this worker; the connection to it is gone when the error is a plain Unavailable."""
        lost = isinstance(error, Unavailable) and not isinstance(error, TransferFailed)
        self.breaker.failed(connection_lost=lost)
        self.fault = error.message


class Registry:
    """The workers of both pools.

    `on_change` is called after anything that may change who can be used, `on_room` when a request has left a worker and
    nothing else has changed. Either may let a waiting request start.
    """

    def __init__(
        self, model: str, connect: Callable[[WorkerInfo], Link], *, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._connect = connect
        self._lease_s = lease_s
        self.clock = clock  # seconds
        self._workers: dict[str, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._pauses: dict[Worker, asyncio.TimerHandle] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: self.on_change()
        self.proves = False  # workers are not used until a generation has passed through them (prober.py)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def pool(self, pool: Pool) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.info.pool is pool]

    def max_context(self, model_limit: int) -> int:
        """Most tokens of prompt and answer that any pair of workers can hold; `model_limit` while there is none."""
        return min((worker.info.max_context for worker in self if worker.info.max_context), default=model_limit)

    def join(self, info: WorkerInfo) -> Worker:
        """A worker opens its stream. Raises Incompatible, with the reason, when it cannot belong here."""
        self._check(info)
        known = self._workers.get(info.worker_id)
        if known is not None and known.info.incarnation > info.incarnation:
            raise Incompatible(
                f"worker {info.worker_id} of incarnation {info.incarnation} was replaced by {known.info.incarnation}; "
                "two processes share this worker id"
            )
        if known is not None and known.info == info:
            known.connected = True  # the same process again, after its stream broke
        else:
            if known is not None:
                self._forget(known, "a new incarnation has joined")
            known = self._workers[info.worker_id] = Worker(info, self._connect(info), self.clock)
            known.proved = not self.proves
            logger.info("worker joined", extra={"worker": info.worker_id, "pool": info.pool.name.lower()})
        self._renew(known)
        self.on_change()
        return known

    def report(self, worker: Worker, load: WorkerLoad) -> None:
        """A heartbeat. Raises Unavailable when the lease ended before it came: the worker has to join again."""
        if self._workers.get(worker.info.worker_id) is not worker:
            raise Unavailable(f"the lease of worker {worker.info.worker_id} has ended; join again")
        worker.reported(load)
        self._renew(worker)
        self.on_change()

    def left(self, worker: Worker) -> None:
        """Its stream ended. A drained worker is done; any other has the rest of its lease to come back."""
        worker.connected = False
        drained = worker.load is not None and worker.load.draining and not worker.claims
        if drained and self._workers.get(worker.info.worker_id) is worker:
            self._forget(worker, "drained")
        self.on_change()

    def failed(self, worker: Worker, error: TwinpoolError) -> None:
        """A call to `worker` failed by its fault; when it may be tried again, whoever waits is told."""
        was_open = worker.breaker.pause_s > 0
        worker.failed(error)
        if (pending := self._pauses.pop(worker, None)) is not None:
            pending.cancel()
        if worker.breaker.pause_s and self._workers.get(worker.info.worker_id) is worker:
            loop = asyncio.get_running_loop()
            self._pauses[worker] = loop.call_later(worker.breaker.pause_s + 0.001, self._pause_over, worker)
            if not was_open:  # once a pause, not for every request that the fault ended
                pause_s = round(worker.breaker.pause_s, 3)
                fields = {"worker": worker.info.worker_id, "pause_s": pause_s, "reason": error.message}
                logger.warning("worker suspect", extra=fields)
        self.on_change()

    def succeeded(self, worker: Worker) -> None:
        """A call to `worker` went well; if it was suspect, it is no more."""
        was_suspect = worker.breaker.suspicion != 0
        worker.breaker.succeeded()
        if was_suspect:
            self.on_change()

    def expire(self, late_s: float = 0.0) -> None:
        """Forgets workers whose lease is over; called a few times per lease.

        late_s: how much later than planned this call comes. Then this process stood still, with reports unread in
        its sockets: the leases run longer by as much.
        """
        now = self.clock()
        for worker in self:
            worker.lease_ends += late_s
        for worker in [worker for worker in self if worker.lease_ends <= now]:
            self._forget(worker, f"no report for {self._lease_s:g} s")
        self.on_change()

    async def close(self) -> None:
        for worker in list(self):
            self._forget(worker, "the router stops")
        await asyncio.gather(*self._closing)

    def _renew(self, worker: Worker) -> None:
        worker.lease_s = self._lease_s
        worker.lease_ends = self.clock() + self._lease_s

    def _check(self, info: WorkerInfo) -> None:
        if not info.worker_id or not info.address:
            raise Incompatible("worker_id and address must be set")
        if info.model != self._model:
            raise Incompatible(
                f"worker {info.worker_id} serves model {info.model!r}, this router {self._model!r}; "
                "start the worker with --model-name, or join another router"
            )
        if _release(info.version) != _release(__version__):
            raise Incompatible(
                f"worker {info.worker_id} runs twinpool {info.version!r}, this router {__version__}: versions "
                f"{_release(__version__)}.* go together; upgrade one of the two"
            )
        if not info.fingerprint or info.block_size < 1 or info.rows_total < 1:
            raise Incompatible(f"worker {info.worker_id} lacks fingerprint, block_size or rows_total")

    def _pause_over(self, worker: Worker) -> None:
        self._pauses.pop(worker, None)
        self.on_change()

    def _forget(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.info.worker_id]
        if (pending := self._pauses.pop(worker, None)) is not None:
            pending.cancel()
        logger.info("worker left", extra={"worker": worker.info.worker_id, "reason": reason})
        task = asyncio.ensure_future(_close(worker.link.close(), worker.info.worker_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _release(version: str) -> str:
    """What versions have in common that speak one protocol: semver.org, where before 1.0 each minor may differ."""
    major, _, rest = version.partition(".")
    return major if major != "0" else f"0.{rest.partition('.')[0]}"


def _common(wanted: tuple[int, ...], held: frozenset[int]) -> int:
    """How many of `wanted` the last one that is held stands for: it covers all before it."""
    if held.isdisjoint(wanted):
        return 0
    return next(number for number in range(len(wanted), 0, -1) if wanted[number - 1] in held)


async def _close(closing: Awaitable[None], worker_id: str) -> None:
    try:
        await closing
    except Exception:
        logger.exception("closing a connection failed", extra={"worker": worker_id})
