"""What one attempt teaches the predictor: what its parts took, and under which load."""

from __future__ import annotations

from router.placement import Pair
from router.predictor import Predictor
from router.wire import FirstTokens, Transferred

_LEAST_TOKENS = 8  # of a choice on the decode worker, from which its pace is taken


class Lesson:
    """Fed by its attempt with events as they come. Only what went well counts: failures say nothing about speed."""

    def __init__(self, pair: Pair, num_tokens: int, predictor: Predictor) -> None:
        self._pair = pair
        self._num_tokens = num_tokens
        self._predictor = predictor
        self._requests_at_start = 0
        self._paced_choice: int | None = None  # the one whose tokens are timed
        self._first_at = self._last_at = 0.0
        self._count = 0

    def reserved(self, seconds: float) -> None:
        if self._pair.decode is not None:
            self._predictor.reserved(self._pair.decode.info.worker_id, seconds)

    def prefilled(self, event: FirstTokens) -> None:
        if self._pair.is_local:
            worker = self._pair.prefill
            others = max(0, worker.requests - 1)
            self._predictor.prefilled_locally(worker.info.worker_id, self._num_tokens, others, event.prefill_ms / 1000)
            return
        took_ms = event.compute_ms or event.prefill_ms
        self._predictor.prefilled(
            self._pair.prefill.info.worker_id, self._num_tokens, event.cached_tokens, took_ms / 1000
        )

    def transferred(self, event: Transferred) -> None:
        if self._pair.decode is not None:
            ids = self._pair.prefill.info.worker_id, self._pair.decode.info.worker_id
            self._predictor.transferred(*ids, self._num_tokens, event.bytes, event.transfer_wait_ms / 1000)

    def tokens(self, choice: int, count: int, now: float) -> None:
        """Tokens of a choice came from the decode worker. The first end the transfer, and time nothing."""
        if self._paced_choice is None and self._pair.decode is not None:
            self._paced_choice, self._first_at = choice, now
            self._requests_at_start = self._pair.decode.requests
        elif choice == self._paced_choice:
            self._count += count
            self._last_at = now

    def ended(self) -> None:
        """The attempt is over, its claims not yet released."""
        if self._count >= _LEAST_TOKENS and self._pair.decode is not None:
            requests = (self._requests_at_start + self._pair.decode.requests) / 2
            tpot_s = (self._last_at - self._first_at) / self._count
            self._predictor.decoded(self._pair.decode.info.worker_id, requests, tpot_s)
