"""How long each part of a request will take on each worker, learnt from the requests that have ended.

prefill(worker)  = a + b * tokens + c * tokens * context     tokens to compute, and the mean context they attend to
local(worker)    = a + b * tokens + c * tokens * context + d * tokens * requests
                                                             the same on a decode worker, between the steps of others
transfer(pair)   = a + b * bytes                             what is left of it after the first token
tpot(worker)     = a + b * requests                          at the batch that a request would join
beside_long(worker) = a mean of the last ones               what a short prompt waits for steps that long ones fill
reserve(worker)  = what it was lately, fading                the wait for rows

A worker that nobody has told anything about yet is unknown, not fast: it is taken to be as the others of its pool, by a
second fit over all of them. What was learnt goes by worker id and so survives a restart of the worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from router.least_squares import LeastSquares

DEFAULT_TOKEN_S = 1e-3  # computing a token, before anything is known; all that matters is that it is alike for all
DEFAULT_TPOT_S = 0.03
TRUST_AFTER = 8  # observations of a worker, until which it counts as unknown; that has half the say then
FORGET_S = (
    20.0  # half-life of that say while nothing new is seen: or a worker once seen slow would never be tried again
)
MOST_KEYS = 1024  # workers and pairs remembered, those heard of last
FADE_S = 5.0  # half-life of what is known of waits for rows


class _Models:
    """One fit a key, and one over all keys for those of which too little is known."""

    def __init__(self, num_features: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: dict[Hashable, float] = {}
        self._num_features = num_features
        self._own: OrderedDict[Hashable, LeastSquares] = OrderedDict()
        self._all = LeastSquares(num_features)

    def add(self, key: Hashable, features: tuple[float, ...], value: float) -> None:
        own = self._own.pop(key, None) or LeastSquares(self._num_features)
        self._own[key] = own
        if len(self._own) > MOST_KEYS:
            forgotten, _ = self._own.popitem(last=False)
            del self._seen_at[forgotten]
        self._seen_at[key] = self._clock()
        own.add(features, value)
        self._all.add(features, value)

    def knows(self, key: Hashable) -> bool:
        own = self._own.get(key)
        return own is not None and len(own) >= TRUST_AFTER

    def predict(self, key: Hashable, features: tuple[float, ...]) -> float | None:
        """Between what was seen of this key and of all, by how much and how long ago; None while nothing is known."""
        if not self._all.known:
            return None
        own = self._own.get(key)
        if own is None or not own.known:
            return self._all.predict(features)
        recent = len(own) * float(0.5 ** ((self._clock() - self._seen_at[key]) / FORGET_S))
        say = recent**2 / (recent**2 + TRUST_AFTER**2)
        mine, others = own.predict(features), self._all.predict(features)
        return float(mine**say * others ** (1 - say))  # between ratios, as errors count by them


class Predictor:
    """All times in seconds. Owned by one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prefill = _Models(3, clock)
        self._local = _Models(4, clock)
        self._transfer = _Models(2, clock)
        self._tpot = _Models(2, clock)
        self._reserve: OrderedDict[str, tuple[float, float]] = OrderedDict()  # mean wait, and when it was noted
        self._beside_long: OrderedDict[str, float] = OrderedDict()
        self._bytes_per_token = 0.0

    def knows_prefill(self, worker_id: str) -> bool:
        return self._prefill.knows(worker_id)

    def knows_decode(self, worker_id: str) -> bool:
        return self._tpot.knows(worker_id)

    def prefill_s(self, worker_id: str, num_tokens: int, num_cached: int = 0) -> float:
        """Of the device's time, for a prompt of `num_tokens` of which `num_cached` are in the cache."""
        features = _prompt(num_tokens, num_cached)
        found = self._prefill.predict(worker_id, features)
        return (num_tokens - num_cached) * DEFAULT_TOKEN_S if found is None else found

    def beside_long_s(self, worker_id: str) -> float:
        """What a short prompt waits besides its own time while the worker computes long ones; 0: nothing is known."""
        return self._beside_long.get(worker_id, 0.0)

    def local_prefill_s(self, worker_id: str, num_tokens: int, num_requests: int) -> float:
        """Until a decode worker with `num_requests` others has computed a prompt; unknown: as prefill workers."""
        features = (*_prompt(num_tokens, 0), float(num_tokens * num_requests))
        found = self._local.predict(worker_id, features)
        return self.prefill_s(worker_id, num_tokens) if found is None else found

    def transfer_s(self, prefill_id: str, decode_id: str, num_tokens: int) -> float:
        """Rows of a prompt still on the way when its first token is there."""
        return self._transfer.predict((prefill_id, decode_id), (1.0, num_tokens * self._bytes_per_token)) or 0.0

    def tpot_s(self, worker_id: str, num_requests: float) -> float:
        """Between two tokens of a request, one of `num_requests` on the worker."""
        found = self._tpot.predict(worker_id, (1.0, num_requests))
        return DEFAULT_TPOT_S if found is None else found

    def reserve_s(self, worker_id: str) -> float:
        mean_s, noted_at = self._reserve.get(worker_id, (0.0, 0.0))
        return mean_s * float(0.5 ** ((self._clock() - noted_at) / FADE_S)) if mean_s else 0.0

    # What has been seen.

    def prefilled(self, worker_id: str, num_tokens: int, num_cached: int, seconds: float) -> None:
        self._prefill.add(worker_id, _prompt(num_tokens, num_cached), seconds)

    def waited_beside_long(self, worker_id: str, seconds: float) -> None:
        known = self._beside_long.pop(worker_id, seconds)
        self._beside_long[worker_id] = 0.9 * known + 0.1 * seconds
        if len(self._beside_long) > MOST_KEYS:
            self._beside_long.popitem(last=False)

    def prefilled_locally(self, worker_id: str, num_tokens: int, num_requests: int, seconds: float) -> None:
        self._local.add(worker_id, (*_prompt(num_tokens, 0), float(num_tokens * num_requests)), seconds)

    def transferred(self, prefill_id: str, decode_id: str, num_tokens: int, num_bytes: int, wait_s: float) -> None:
        self._transfer.add((prefill_id, decode_id), (1.0, float(num_bytes)), wait_s)
        if num_tokens and num_bytes:
            each = num_bytes / num_tokens
            self._bytes_per_token = 0.9 * self._bytes_per_token + 0.1 * each if self._bytes_per_token else each

    def decoded(self, worker_id: str, num_requests: float, tpot_s: float) -> None:
        self._tpot.add(worker_id, (1.0, num_requests), tpot_s)

    def reserved(self, worker_id: str, seconds: float) -> None:
        mean_s = 0.5 * self.reserve_s(worker_id) + 0.5 * seconds
        self._reserve.pop(worker_id, None)
        self._reserve[worker_id] = (mean_s, self._clock())
        if len(self._reserve) > MOST_KEYS:
            self._reserve.popitem(last=False)


def _prompt(num_tokens: int, num_cached: int) -> tuple[float, float, float]:
    fresh = num_tokens - num_cached
    return 1.0, float(fresh), fresh * (num_cached + fresh / 2)
