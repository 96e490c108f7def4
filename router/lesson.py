"""What one attempt teaches the predictor: what its parts took, and under which load."""

from __future__ import annotations

from router.classifier import SHORT
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
        self._decode_s = 0.0  # by the worker's own clock

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
        worker_id, option = self._pair.prefill.info.worker_id, self._pair.choice.chosen.prefill
        self._predictor.prefilled(worker_id, self._num_tokens, event.cached_tokens, took_ms / 1000)
        if event.compute_ms and option.input_class == SHORT and 0 < option.compute_s <= option.delays_s:
            waited_ms = event.queue_ms + event.prefill_ms - event.compute_ms
            self._predictor.waited_beside_long(worker_id, max(0.0, waited_ms / 1000))

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

    def decoded(self, seconds: float) -> None:
        """What the one choice of this attempt took by the worker's clock: arrivals lag where the router is busy."""
        self._decode_s = seconds

    def ended(self) -> None:
        """The attempt is over, its claims not yet released."""
        if self._count >= _LEAST_TOKENS and self._pair.decode is not None:
            requests = (self._requests_at_start + self._pair.decode.requests) / 2
            seen_s = (self._last_at - self._first_at) / self._count
            tpot_s = self._decode_s / (self._count + 1) if self._decode_s else seen_s
            self._predictor.decoded(self._pair.decode.info.worker_id, requests, tpot_s)
