"""Which pair of workers serves a request: the least loaded healthy one, of one fingerprint, with room for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

from router.decode_session import DecodeSession
from router.pools import Claim, Pool, Registry, Worker, WorkerState
from router.prefill_call import PrefillClient

_GROWTH_TOKENS = 64  # of answer that a placement counts on; decode workers preempt when answers grow beyond memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one attempt takes of its workers."""

    num_tokens: int  # to prefill
    num_choices: int
    max_new_tokens: int  # a choice
    avoid: Collection[str] = ()  # workers that have failed this request; taken only when there is no other

    @property
    def needs_decode(self) -> bool:
        """Whether there is anything to decode after the first token."""
        return self.max_new_tokens > 1

    def rows(self, block_size: int) -> int:
        growth = -(-min(self.max_new_tokens, _GROWTH_TOKENS) // block_size)
        return -(-self.num_tokens // block_size) + self.num_choices * growth


class Pair:
    """A prefill and a decode worker, claimed for one attempt. The owner releases both, in any order, once or more."""

    def __init__(self, prefill: Worker, decode: Worker | None, demand: Demand) -> None:
        self.prefill = prefill
        self.decode = decode
        self._prefill_claim = prefill.claim(tokens=demand.num_tokens, rows=0)
        self._decode_claim: Claim | None = None
        if decode is not None:
            self._decode_claim = decode.claim(tokens=0, rows=demand.rows(decode.info.block_size))

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

    def release_prefill(self) -> None:
        self.prefill.release(self._prefill_claim)

    def release(self) -> None:
        self.release_prefill()
        if self.decode is not None and self._decode_claim is not None:
            self.decode.release(self._decode_claim)


class Placement:
    """Chooses pairs. A worker takes as many requests as it has slots, and a decode worker as its free rows hold."""

    def __init__(self, registry: Registry, *, prefill_slots: int, decode_slots: int) -> None:
        self._registry = registry
        self._prefill_slots = prefill_slots
        self._decode_slots = decode_slots

    def missing(self) -> str | None:
        """Why no request at all can be placed, whatever room there is; None when one could."""
        prefill, decode = self._usable(Pool.PREFILL), self._usable(Pool.DECODE)
        for pool, usable in ((Pool.PREFILL, prefill), (Pool.DECODE, decode)):
            if not usable:
                name = pool.name.lower()
                joined = len(self._registry.pool(pool))
                state = f"{joined} joined, none of them ready" if joined else "none has joined"
                return f"no usable {name} worker ({state}); start one with: python -m {name} --routers ROUTER"
        if not _fingerprints(prefill) & _fingerprints(decode):
            return (
                "no prefill worker fits any decode worker: they differ in model, cache layout or version; "
                "start workers of the other pool with the same model and options"
            )
        return None

    def choose(self, demand: Demand) -> Pair | None:
        """Claims the best pair for `demand`; None when no pair has room now."""
        prefill = [w for w in self._usable(Pool.PREFILL) if len(w.claims) < self._prefill_slots]
        decode = self._usable(Pool.DECODE)
        if demand.needs_decode:
            decode = [w for w in decode if len(w.claims) < self._decode_slots and self._fits(w, demand)]
        candidates = [
            (
                min((w for w in prefill if w.info.fingerprint == fingerprint), key=lambda w: _prefill_cost(w, demand)),
                min((w for w in decode if w.info.fingerprint == fingerprint), key=lambda w: _decode_cost(w, demand)),
            )
            for fingerprint in _fingerprints(prefill) & _fingerprints(decode)
        ]
        if not candidates:
            return None
        best = min(candidates, key=lambda pair: (_decode_cost(pair[1], demand), _prefill_cost(pair[0], demand)))
        return Pair(best[0], best[1] if demand.needs_decode else None, demand)

    def _usable(self, pool: Pool) -> list[Worker]:
        return [worker for worker in self._registry.pool(pool) if worker.state is WorkerState.READY]

    @staticmethod
    def _fits(worker: Worker, demand: Demand) -> bool:
        # An idle worker is asked in any case: whether a request can ever fit is for it to say.
        return not worker.claims or demand.rows(worker.info.block_size) <= worker.rows_free


def _fingerprints(workers: Iterable[Worker]) -> set[str]:
    return {worker.info.fingerprint for worker in workers}


def _prefill_cost(worker: Worker, demand: Demand) -> tuple[bool, float, float]:
    return worker.info.worker_id in demand.avoid, worker.waiting_tokens, worker.last_claim_at


def _decode_cost(worker: Worker, demand: Demand) -> tuple[bool, float, float]:
    return worker.info.worker_id in demand.avoid, worker.requests, worker.last_claim_at
