"""Where one request's time went. Written by its request and attempts; read once, when it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from router.wire import FirstTokens, Transferred


@dataclass(slots=True)
class Timeline:
    """Instants are seconds on the event loop's clock; the figures of the prefill are those of the attempt that
    delivered the first token, those of the transfer of the last one that succeeded."""

    arrived_at: float
    sla_class: str
    input_class: str
    placed_at: float | None = None  # the first time
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    reserve_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_wait_ms: float = 0.0
    transfer_bytes: int = 0  # over all attempts
    decode_ms: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    mode: str = ""  # of the last attempt

    def prefilled(self, event: FirstTokens, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self.prefill_queue_ms = event.queue_ms
            self.prefill_ms = event.prefill_ms

    def transferred(self, event: Transferred) -> None:
        self.transfer_ms = event.transfer_ms
        self.transfer_wait_ms = event.transfer_wait_ms
        self.transfer_bytes += event.bytes

    def ttft_s(self) -> float:
        return (self.first_token_at or self.arrived_at) - self.arrived_at

    def transfer_wait_share(self) -> float | None:
        """The wait for the transfer, of the time until decoding could go on; None where they belong to two attempts."""
        if self.attempts != 1 or not self.transfer_ms or self.first_token_at is None:
            return None
        wait_s = self.transfer_wait_ms / 1000
        return wait_s / (self.ttft_s() + wait_s)

    def tpot_s(self, num_tokens: int) -> float:
        """Mean time between the tokens of an answer of `num_tokens`; 0 with fewer than two."""
        if num_tokens < 2 or self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (num_tokens - 1)

    def _decode_ms_seen_here(self) -> float:
        """For answers that ended before the decode worker told its own figure (a stop string)."""
        if self.first_token_at is None or self.last_token_at is None:
            return 0.0
        return max(0.0, 1000 * (self.last_token_at - self.first_token_at) - self.transfer_wait_ms)

    def fields(self, num_tokens: int) -> dict[str, float | int | str]:
        """The fields of the public Timeline message; `num_tokens` are those of the longest choice."""
        end = self.last_token_at or self.ended_at or self.arrived_at
        return {
            "queued_ms": 1000 * ((self.placed_at or end) - self.arrived_at),
            "reserve_ms": self.reserve_ms,
            "prefill_queue_ms": self.prefill_queue_ms,
            "prefill_ms": self.prefill_ms,
            "transfer_ms": self.transfer_ms,
            "transfer_wait_ms": self.transfer_wait_ms,
            "ttft_ms": 1000 * self.ttft_s(),
            "tpot_ms": 1000 * self.tpot_s(num_tokens),
            "decode_ms": self.decode_ms or self._decode_ms_seen_here(),
            "total_ms": 1000 * (end - self.arrived_at),
            "transfer_bytes": self.transfer_bytes,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "attempts": self.attempts,
            "sla_class": self.sla_class,
            "input_class": self.input_class,
            "mode": self.mode,
        }
