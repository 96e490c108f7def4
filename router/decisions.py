"""Why requests of late went where they went, for `twinpool explain` and for their log lines."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from router.placement import Choice
from router.policies import Candidate, Mode
from twinpool.errors import UnknownRequest

MOST_REQUESTS = 1000
_LOGGED = 4  # candidates in a log line


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One placement of one attempt."""

    request_id: str
    attempt: int
    sla_class: str
    input_class: str
    tenant: str
    prompt_tokens: int
    ttft_target_ms: float
    tpot_target_ms: float
    queued_ms: float
    choice: Choice


class Decisions:
    """Those of the last requests, by request id."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[Decision]] = OrderedDict()

    def add(self, decision: Decision) -> None:
        own = self._of.pop(decision.request_id, [])
        own = own if decision.attempt > 1 else []  # an id may be used again
        self._of[decision.request_id] = [*own, decision]
        if len(self._of) > MOST_REQUESTS:
            self._of.popitem(last=False)

    def of(self, request_id: str) -> list[Decision]:
        """Raises UnknownRequest when nothing is remembered."""
        found = self._of.get(request_id)
        if found is None:
            raise UnknownRequest(
                f"no placement of request {request_id[:128]!r} is remembered: this router keeps the last "
                f"{MOST_REQUESTS} requests that it placed; ask the router that served it",
                field="request_id",
            )
        return found


def figures(candidate: Candidate) -> dict[str, Any]:
    """The fields of the public CandidatePair message."""
    prefill, decode = candidate.prefill, candidate.decode
    return {
        "prefill_worker": prefill.worker.info.worker_id,
        "decode_worker": _decodes(candidate),
        "cached_tokens": prefill.cached_tokens,
        "known": candidate.known,
        "queue_ms": 1000 * prefill.queue_s,
        "prefill_ms": 1000 * prefill.compute_s,
        "transfer_ms": 1000 * candidate.transfer_s,
        "reserve_ms": 1000 * decode.reserve_s if decode is not None else 0.0,
        "tpot_ms": 1000 * decode.tpot_s if decode is not None else 0.0,
        "ttft_ms": 1000 * candidate.ttft_s,
        "cost": candidate.cost[0] if candidate.cost else 0.0,
    }


def log_fields(decision: Decision | None) -> dict[str, Any]:
    """What the request's log line says of its last placement."""
    if decision is None:
        return {}
    choice = decision.choice
    candidates = [
        {key: round(value, 3) if isinstance(value, float) else value for key, value in figures(each).items()}
        for each in choice.candidates[:_LOGGED]
    ]
    return {"policy": choice.policy, "reason": choice.reason, "candidates": candidates}


def _decodes(candidate: Candidate) -> str:
    if candidate.decode is not None:
        return candidate.decode.worker.info.worker_id
    return candidate.prefill.worker.info.worker_id if candidate.mode is Mode.AGGREGATED else ""
