"""Which pair of workers serves a request: the best by the policy, of one fingerprint, with room for it.

1. Workers that are ready, have slots (and rows) left, and have not had more than their share while they are new.
2. Those that have failed this request only when there is no other.
3. Under `predict`, a prefill worker that has enough to do for now is left alone: what waits in the router can still go
   to whichever worker is free first, and in the order of its queue.
4. The best few of each pool are combined; the pair with the least cost by the policy wins, the longest unused among
   equals.
5. Short prompts may do without the prefill pool: a decode worker computes them, where that is configured or predicted
   to be better, the delay of its running requests included.
6. While a pool has nobody (or no two workers fit), those of the other one serve whole answers, if they can and may.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from router.classifier import LONG, SHORT, Classifier
from router.decode_session import DecodeSession
from router.policies import (
    DIFFERENCE,
    Candidate,
    DecodeOption,
    Mode,
    PrefillOption,
    Work,
    best,
    decode_rank,
    pair,
    prefill_rank,
    why,
)
from router.pools import Claim, Pool, Registry, Worker, WorkerState
from router.predictor import Predictor
from router.prefill_call import PrefillClient
from router.slow_start import SlowStart
from twinpool.prefix import PromptDigests

_GROWTH_TOKENS = 64  # of answer that a placement counts on; decode workers preempt when answers grow beyond memory
_BEST = 4  # of each pool that are combined; also bounds what a decision remembers
_TYPICAL_PROMPT = {SHORT: 128, LONG: 1024}  # tokens
_NO_DIGESTS = PromptDigests(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one attempt takes of its workers."""

    num_tokens: int  # to prefill
    num_choices: int
    max_new_tokens: int  # a choice
    avoid: Collection[str] = ()  # workers that have failed this request; taken only when there is no other
    digests: PromptDigests = field(default=_NO_DIGESTS, repr=False)
    least_new_tokens: int = 1  # a choice; it may end before max_new_tokens, but not before these
    arrived_at: float | None = None  # on the registry's clock
    ttft_s: float = 0.0  # targets; 0: none
    tpot_s: float = 0.0

    @property
    def needs_decode(self) -> bool:
        """Whether there is anything to decode after the first token."""
        return self.max_new_tokens > 1

    def rows(self, block_size: int) -> int:
        growth = -(-min(self.max_new_tokens, _GROWTH_TOKENS) // block_size)
        return -(-self.num_tokens // block_size) + self.num_choices * growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a placement came about: the candidates, the chosen one first, and why it won."""

    policy: str
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is predicted of a request were it placed now, all rooms free; None: of nobody in a pool is the speed known.

    Times in seconds.
    """

    compute_s: float  # of one device, for the prompt alone, taken over the ready workers
    first_s: float | None  # until the first token
    tpot_s: float | None  # between later ones


class Wait(Enum):
    """Why a request cannot be placed now."""

    FOR_ROOM = "every worker of a pool has all the requests or rows that it can hold"
    FOR_TIME = "every prefill worker has enough to do for now"


class Pair:
    """A prefill and a decode worker, claimed for one attempt. The owner releases both, in any order, once or more.

    Where a decode worker does all it is both; where a prefill worker does, there is no decode worker.
    """

    def __init__(self, choice: Choice, demand: Demand) -> None:
        chosen = choice.chosen
        self.choice = choice
        self.prefill = chosen.prefill.worker
        self.decode = chosen.decode.worker if chosen.decode is not None else None
        self.input_class = chosen.prefill.input_class
        self.mode = chosen.mode
        self._prefill_claim = self.prefill.claim(
            tokens=demand.num_tokens - chosen.prefill.cached_tokens,
            rows=demand.rows(self.prefill.info.block_size) if self.is_local else 0,
            compute_s=chosen.prefill.compute_s,
            input_class=self.input_class,
            digests=() if self.is_local else demand.digests.of(self.prefill.info.block_size),
        )
        self._decode_claim: Claim | None = None
        if self.is_local:
            self._decode_claim = self._prefill_claim
        elif self.decode is not None:
            self._decode_claim = self.decode.claim(tokens=0, rows=demand.rows(self.decode.info.block_size))

    @property
    def is_trial(self) -> bool:
        """Whether it tries a worker whose breaker was open."""
        return self._prefill_claim.probe or (self._decode_claim is not None and self._decode_claim.probe)

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt."""
        return self.prefill is self.decode

    @property
    def generates(self) -> bool:
        """Whether the prefill worker generates the whole answer; one choice only."""
        return self.mode is Mode.AGGREGATED and self.decode is None

    @property
    def prefill_client(self) -> PrefillClient:
        return cast(PrefillClient, self.prefill.link)

    @property
    def decode_session(self) -> DecodeSession | None:
        return cast(DecodeSession, self.decode.link) if self.decode is not None else None

    def reserved(self) -> None:
        """The decode worker has set the rows aside: its next report counts them."""
        if self._decode_claim is not None:
            self._decode_claim.reserved = True

    def prefilled(self) -> None:
        """The first tokens are there."""
        self.prefill.computed(self._prefill_claim)

    def release_prefill(self) -> None:
        self.prefill.release(self._prefill_claim)

    def release(self) -> None:
        self.release_prefill()
        if self.decode is not None and self._decode_claim is not None:
            self.decode.release(self._decode_claim)


class Placement:
    """Chooses pairs. A worker takes as many requests as it has slots, and a decode worker as its free rows hold."""

    def __init__(
        self,
        registry: Registry,
        classifier: Classifier,
        *,
        prefill_slots: int,
        decode_slots: int,
        policy: str = "predict",
        lookahead_s: float = 1.0,
        local_below: int | None = 0,
        aggregate: bool = False,
    ) -> None:
        """lookahead_s: under `predict`, how much work of an input class a prefill worker is given in advance.

        local_below: prompts with fewer tokens that no cache holds are computed by decode workers; None: where that is
        predicted to be better. aggregate: while a pool is empty, the other one serves whole answers.
        """
        self._registry = registry
        self._classifier = classifier
        self._prefill_slots = prefill_slots
        self._decode_slots = decode_slots
        self._lookahead_s = lookahead_s
        self._local_below = local_below
        self._aggregate = aggregate
        self.policy = policy
        self.predictor = Predictor(registry.clock)
        self._slow_start = SlowStart(registry.clock)

    def missing(self) -> str | None:
        """Why no request at all can be placed, whatever room there is; None when one could."""
        prefill, decode = self._usable(Pool.PREFILL), self._usable(Pool.DECODE)
        if self._alone(prefill, decode):
            return None
        for pool, usable in ((Pool.PREFILL, prefill), (Pool.DECODE, decode)):
            if not usable:
                name = pool.name.lower()
                joined = len(self._registry.pool(pool))
                state = f"{joined} joined, none of them ready" if joined else "none has joined"
                if reason := next((each.reason for each in self._registry.pool(pool) if each.reason), ""):
                    state += f": {reason}"
                return f"no usable {name} worker ({state}); start one with: python -m {name} --routers ROUTER"
        if not _fingerprints(prefill) & _fingerprints(decode):
            return (
                "no prefill worker fits any decode worker: they differ in model, cache layout or version; "
                "start workers of the other pool with the same model and options"
            )
        return None

    @property
    def may_come(self) -> bool:
        """Whether a worker is being probed."""
        return any(worker.state is WorkerState.PROBING for worker in self._registry)

    def cached_tokens(self, digests: PromptDigests) -> int:
        """Most tokens of a prompt that any ready prefill worker has in its cache."""
        return max((worker.cached_tokens(digests) for worker in self._usable(Pool.PREFILL)), default=0)

    @property
    def mode(self) -> Mode:
        """AGGREGATED while one pool is empty and the other serves whole answers."""
        alone = self._alone(self._usable(Pool.PREFILL), self._usable(Pool.DECODE))
        return Mode.AGGREGATED if alone else Mode.SPLIT

    def choose(self, demand: Demand) -> Pair | Wait:
        """Claims the best pair for `demand`, or says what it has to wait for."""
        prefill, decode = self._usable(Pool.PREFILL), self._usable(Pool.DECODE)
        if alone := self._alone(prefill, decode):
            found = self._alone_candidates(alone, demand)
        else:
            found = self._split_candidates(prefill, decode, demand)
            found = self._local_candidates(prefill, decode, demand, found) or found
        if isinstance(found, Wait):
            return found
        least = min(_num_avoided(each, demand) for each in found)
        chosen = best(self.policy, [each for each in found if _num_avoided(each, demand) == least])
        others = sorted((each for each in found if each is not chosen), key=lambda each: each.cost)
        choice = Choice(policy=self.policy, candidates=(chosen, *others), reason=why(self.policy, chosen, len(others)))
        taken = Pair(choice, demand)
        for worker in {taken.prefill, taken.decode or taken.prefill}:
            self._slow_start.placed(worker)
        return taken

    def outlook(self, demand: Demand) -> Outlook:
        prefill = list(self._prefill_options(self._usable(Pool.PREFILL), demand))
        decode = self._decode_options(self._usable(Pool.DECODE))
        return Outlook(
            compute_s=_mean([option.compute_s for option in prefill]),
            first_s=min((option.done_s for option in prefill if option.known), default=None),
            tpot_s=min((option.tpot_s for option in decode if option.known), default=None),
        )

    @property
    def num_prefill(self) -> int:
        return len(self._usable(Pool.PREFILL))

    def _alone(self, prefill: list[Worker], decode: list[Worker]) -> list[Worker]:
        """Workers of one pool that serve whole answers, because no two fit: mostly as the other pool has nobody."""
        if not self._aggregate or _fingerprints(prefill) & _fingerprints(decode):
            return []
        able = ([worker for worker in pool if worker.info.serves_alone] for pool in (decode, prefill))
        return next(filter(None, able), [])

    def _alone_candidates(self, workers: list[Worker], demand: Demand) -> list[Candidate] | Wait:
        if workers[0].info.pool is Pool.DECODE:
            return list(self._on_decode(workers, demand, Mode.AGGREGATED)) or Wait.FOR_ROOM
        workers = [worker for worker in workers if len(worker.claims) < self._prefill_slots]
        if not workers:
            return Wait.FOR_ROOM
        options = self._prefills(workers, demand)
        work = self._work(demand)
        found = [pair(self.policy, each, None, work, self.predictor, Mode.AGGREGATED) for each in options]
        return found or Wait.FOR_TIME

    def _split_candidates(
        self, prefill: list[Worker], decode: list[Worker], demand: Demand, *, in_advance: bool = False
    ) -> list[Candidate] | Wait:
        """in_advance: also those that have enough to do for now."""
        prefill = [w for w in prefill if len(w.claims) < self._prefill_slots]
        if demand.needs_decode:
            decode = [w for w in decode if self._has_room(w, demand)]
        common = _fingerprints(prefill) & _fingerprints(decode)
        prefill = [w for w in prefill if w.info.fingerprint in common]
        decode = [w for w in decode if w.info.fingerprint in common]
        if not prefill or not decode:
            return Wait.FOR_ROOM
        decode = self._slow_start.allowed(decode, self._registry.pool(Pool.DECODE)) or decode
        prefills = self._prefills(prefill, demand, in_advance=in_advance)
        decodes: list[DecodeOption | None] = [None]
        if demand.needs_decode:
            decodes = list(self._best(list(self._decode_options(decode)), demand))
        work = self._work(demand)
        found = [
            pair(self.policy, first, second, work, self.predictor)
            for first in prefills
            for second in decodes
            if second is None or second.worker.info.fingerprint == first.worker.info.fingerprint
        ]
        return found or Wait.FOR_TIME

    def _local_candidates(
        self, prefill: list[Worker], decode: list[Worker], demand: Demand, split: list[Candidate] | Wait
    ) -> list[Candidate]:
        """Decode workers that should compute the prompt of `demand` themselves, rather than one of `split`."""
        if self._local_below == 0 or not demand.needs_decode or not prefill:
            return []
        decode = [worker for worker in decode if worker.info.serves_alone]
        if self._local_below is not None:
            cached = max(worker.cached_tokens(demand.digests) for worker in prefill)
            if demand.num_tokens - cached >= self._local_below:
                return []
            local = list(self._on_decode(decode, demand, Mode.LOCAL))
        else:
            rivals = self._split_candidates(prefill, decode, demand, in_advance=True)
            least = min((each.cost[0] for each in rivals), default=None) if isinstance(rivals, list) else None
            local = [
                each
                for each in self._on_decode(decode, demand, Mode.LOCAL)
                if least is None or each.cost[0] + DIFFERENCE < least
            ]
        most = min((_num_avoided(each, demand) for each in split), default=0) if isinstance(split, list) else 2
        return [each for each in local if _num_avoided(each, demand) <= most]

    def _on_decode(self, workers: list[Worker], demand: Demand, mode: Mode) -> Iterator[Candidate]:
        """Decode workers with room that compute the prompt themselves."""
        workers = [worker for worker in workers if self._has_room(worker, demand)]
        workers = self._slow_start.allowed(workers, self._registry.pool(Pool.DECODE)) or workers
        work = self._work(demand)
        for option in self._best(list(self._decode_options(workers)), demand):
            worker, tokens = option.worker, demand.num_tokens
            self._take_report(worker)
            alone_s = self.predictor.local_prefill_s(worker.info.worker_id, tokens, 0)
            shared_s = self.predictor.local_prefill_s(worker.info.worker_id, tokens, worker.requests)
            first = PrefillOption(
                worker=worker,
                cached_tokens=0,
                input_class=self._classifier.input_class(tokens),
                known=option.known,
                compute_s=alone_s,
                done_s=worker.backlog.total + shared_s,
                delays_s=alone_s * worker.requests,  # each of its requests waits for all chunks
            )
            yield pair(self.policy, first, option, work, self.predictor, mode)

    def _prefills(self, workers: list[Worker], demand: Demand, *, in_advance: bool = False) -> list[PrefillOption]:
        workers = self._slow_start.allowed(workers, self._registry.pool(Pool.PREFILL)) or workers
        options: list[PrefillOption] = self._best(list(self._prefill_options(workers, demand)), demand)
        if self.policy == "predict" and not in_advance:
            options = [option for option in options if self._has_time(option)]
        return options

    def _work(self, demand: Demand) -> Work:
        waited_s = 0.0 if demand.arrived_at is None else self._registry.clock() - demand.arrived_at
        return Work(num_tokens=demand.num_tokens, waited_s=waited_s, ttft_s=demand.ttft_s, tpot_s=demand.tpot_s)

    def _best(self, options: list, demand: Demand) -> list:  # type: ignore[type-arg]  # of either kind of option
        """The few of each fingerprint that can come first in a pair."""
        kept: dict[str, int] = {}
        found = []
        for option in sorted(options, key=lambda each: _worker_order(self.policy, each, demand)):
            fingerprint = option.worker.info.fingerprint
            kept[fingerprint] = kept.get(fingerprint, 0) + 1
            if kept[fingerprint] <= _BEST:
                found.append(option)
        return found

    def _prefill_options(self, workers: list[Worker], demand: Demand) -> Iterator[PrefillOption]:
        known = {w: self.predictor.knows_prefill(w.info.worker_id) for w in workers}
        typical_s = _mean([w.backlog.total for w in workers if known[w]])
        for worker in workers:
            self._take_report(worker)
            cached = worker.cached_tokens(demand.digests)
            input_class = self._classifier.input_class(demand.num_tokens - cached)
            compute_s = self.predictor.prefill_s(worker.info.worker_id, demand.num_tokens, cached)
            beside_long_s = self.predictor.beside_long_s(worker.info.worker_id)
            done_s = worker.backlog.until_done(input_class, compute_s, beside_long_s)
            if not known[worker]:  # what it has to do is unknown as well: no less than the others
                done_s = max(done_s, typical_s + compute_s)
            yield PrefillOption(
                worker=worker,
                cached_tokens=cached,
                input_class=input_class,
                known=known[worker],
                compute_s=compute_s,
                done_s=done_s,
                delays_s=min(compute_s, worker.backlog.of(LONG if input_class == SHORT else SHORT)),
            )

    def _decode_options(self, workers: list[Worker]) -> Iterator[DecodeOption]:
        known = {w: self.predictor.knows_decode(w.info.worker_id) for w in workers}
        typical = _mean([float(w.requests) for w in workers if known[w]])
        for worker in workers:
            requests = worker.requests if known[worker] else max(float(worker.requests), typical)
            yield DecodeOption(
                worker=worker,
                known=known[worker],
                reserve_s=self.predictor.reserve_s(worker.info.worker_id),
                tpot_s=self.predictor.tpot_s(worker.info.worker_id, requests + 1),
            )

    def _take_report(self, worker: Worker) -> None:
        """Puts what a worker has reported, in tokens, into its backlog, in seconds."""
        if worker.load is None or not worker.load_is_new:
            return
        worker.load_is_new = False
        waiting, long = worker.load.waiting_tokens, worker.load.waiting_long_tokens
        for name, tokens in ((SHORT, waiting - long), (LONG, long)):
            typical = min(
                tokens, _TYPICAL_PROMPT[name]
            )  # several prompts, whose attention does not add up to one long one's
            seconds = self.predictor.prefill_s(worker.info.worker_id, typical) * tokens / typical if tokens else 0.0
            worker.backlog.reported({name: seconds})

    def _has_time(self, option: PrefillOption) -> bool:
        backlog_s = option.worker.backlog.of(option.input_class)
        return backlog_s <= self._lookahead_s or not option.worker.claims

    def _usable(self, pool: Pool) -> list[Worker]:
        """The ready ones; of a fingerprint without any, the least suspect: better a doubtful one than a refusal."""
        members = self._registry.pool(pool)
        usable = [worker for worker in members if worker.state is WorkerState.READY]
        if len(usable) == len(members):
            return usable
        ready = _fingerprints(usable)
        doubtful: dict[str, tuple[float, Worker]] = {}
        for worker in members:
            fingerprint, suspicion = worker.info.fingerprint, worker.suspicion
            if fingerprint not in ready and suspicion is not None:
                known = doubtful.get(fingerprint)
                if known is None or suspicion < known[0]:
                    doubtful[fingerprint] = suspicion, worker
        return usable + [worker for _, worker in doubtful.values()]

    def _has_room(self, worker: Worker, demand: Demand) -> bool:
        """Of a decode worker."""
        if not worker.claims:  # it is asked in any case: whether a request can ever fit is for it to say
            return True
        return len(worker.claims) < self._decode_slots and demand.rows(worker.info.block_size) <= worker.rows_free


def _fingerprints(workers: Iterable[Worker]) -> set[str]:
    return {worker.info.fingerprint for worker in workers}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _worker_order(policy: str, option: PrefillOption | DecodeOption, demand: Demand) -> tuple[float, ...]:
    rank = prefill_rank(policy, option) if isinstance(option, PrefillOption) else decode_rank(policy, option)
    return (option.worker.info.worker_id in demand.avoid, *rank, option.worker.last_claim)


def _num_avoided(candidate: Candidate, demand: Demand) -> int:
    workers = [candidate.prefill.worker, *([candidate.decode.worker] if candidate.decode is not None else [])]
    return sum(worker.info.worker_id in demand.avoid for worker in workers)
