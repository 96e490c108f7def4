"""How a policy ranks the workers and pairs that have room for a request. Smaller is better; equal ones take turns.

round_robin   workers take turns, whatever they have to do
least_loaded  fewest prompt tokens to compute, fewest requests to decode
prefix        longest cached prefix first, then as least_loaded
predict       least predicted latency, as parts of the request's own targets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from router.pools import Worker
from router.predictor import Predictor

POLICIES = ("round_robin", "least_loaded", "prefix", "predict")

_MOST_TTFT_S = 10.0  # in parts of which latency counts for requests with a longer target, or none
_TPOT_WITHOUT_TARGET_S = 1.0
DIFFERENCE = 0.05  # of a target; costs closer than that are equal, and the longest unused pair wins
_CROWD = 0.01  # each request on a decode worker counts as this much more TPOT: they grow, and fits of TPOT err
_MISSED = 4.0  # how much more each part over a target counts than one under it


class Mode(Enum):
    """Which workers a placement takes."""

    SPLIT = "split"  # one of each pool
    LOCAL = "local"  # a decode worker that computes the prompt too, as predicted or configured
    AGGREGATED = "aggregated"  # one worker that does all, since there is no pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request as its placement sees it."""

    num_tokens: int  # to prefill, cached ones included
    waited_s: float  # since arrival
    ttft_s: float  # targets; 0: none
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOption:
    """A prefill worker with room, and what is predicted of it. Times in seconds."""

    worker: Worker
    cached_tokens: int
    input_class: str
    known: bool
    compute_s: float  # of its device's time
    done_s: float  # until the first token, its queue included
    delays_s: float  # that the request causes to what waits there in the other input class

    @property
    def queue_s(self) -> float:
        return self.done_s - self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOption:
    worker: Worker
    known: bool
    reserve_s: float
    tpot_s: float  # with this request in the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pair that could serve the request; where one worker does all it is both.

    `decode` is None when the first token is the whole answer, and when a prefill worker generates all of it.
    """

    prefill: PrefillOption
    decode: DecodeOption | None
    transfer_s: float
    ttft_s: float  # from arrival
    cost: tuple[float, ...]
    mode: Mode = Mode.SPLIT

    @property
    def known(self) -> bool:
        return self.prefill.known and (self.decode is None or self.decode.known)


def prefill_rank(policy: str, option: PrefillOption) -> tuple[float, ...]:
    worker = option.worker
    if policy == "round_robin":
        return ()
    if policy == "predict":
        return (round(option.done_s + option.delays_s, 3),)
    load = (float(worker.waiting_tokens),)
    return (-float(option.cached_tokens), *load) if policy == "prefix" else load


def decode_rank(policy: str, option: DecodeOption) -> tuple[float, ...]:
    if policy == "round_robin":
        return ()
    return (
        (round(option.reserve_s + _crowded_tpot_s(option), 4),)
        if policy == "predict"
        else (float(option.worker.requests),)
    )


def pair(
    policy: str,
    prefill: PrefillOption,
    decode: DecodeOption | None,
    work: Work,
    predictor: Predictor,
    mode: Mode = Mode.SPLIT,
) -> Candidate:
    """The two together, with what they cost under the policy."""
    transfer_s, reserve_s, tpot_s = 0.0, 0.0, 0.0
    if decode is not None:
        reserve_s, tpot_s = decode.reserve_s, _crowded_tpot_s(decode)
        ids = prefill.worker.info.worker_id, decode.worker.info.worker_id
        transfer_s = predictor.transfer_s(*ids, work.num_tokens) if mode is Mode.SPLIT else 0.0
    ttft_s = work.waited_s + reserve_s + prefill.done_s
    if policy == "predict":
        ttft_target_s = min(work.ttft_s or _MOST_TTFT_S, _MOST_TTFT_S)
        tpot_target_s = work.tpot_s or _TPOT_WITHOUT_TARGET_S
        parts = _parts(ttft_s + prefill.delays_s, ttft_target_s) + _parts(tpot_s, tpot_target_s)
        cost: tuple[float, ...] = (parts + transfer_s / ttft_target_s,)
    else:
        cost = (*(decode_rank(policy, decode) if decode else ()), *prefill_rank(policy, prefill))
    return Candidate(prefill=prefill, decode=decode, transfer_s=transfer_s, ttft_s=ttft_s, cost=cost, mode=mode)


def best(policy: str, candidates: Sequence[Candidate]) -> Candidate:
    """The one with the least cost; among equals the longest unused."""
    if policy != "predict":
        return min(candidates, key=lambda each: (each.cost, _last_used(each)))
    least = min(each.cost[0] for each in candidates)
    return min((each for each in candidates if each.cost[0] <= least + DIFFERENCE), key=_last_used)


def why(policy: str, chosen: Candidate, others: int) -> str:
    """In words, for the log and for `twinpool explain`."""
    among = "the only pair with room" if not others else f"of {others + 1} candidates"
    if chosen.mode is Mode.AGGREGATED:
        among = f"no pair of workers is there, so one does all; {among}"
    elif chosen.mode is Mode.LOCAL:
        among = f"a decode worker that computes the prompt itself; {among}"
    if policy == "round_robin":
        return f"{among}: its turn"
    if policy == "least_loaded":
        return f"{among}: fewest requests to decode, then fewest tokens to compute, then longest unused"
    if policy == "prefix":
        return f"{among}: {chosen.prefill.cached_tokens} tokens of the prompt cached there, then least loaded"
    known = "" if chosen.known else "; a worker is new, its speed taken from its pool"
    return f"{among}: least predicted latency against the targets, then longest unused{known}"


def _last_used(candidate: Candidate) -> tuple[int, int]:
    decode = candidate.decode.worker.last_claim if candidate.decode is not None else 0
    return decode, candidate.prefill.worker.last_claim


def _crowded_tpot_s(option: DecodeOption) -> float:
    return option.tpot_s * (1 + _CROWD * option.worker.requests)


def _parts(value_s: float, target_s: float) -> float:
    parts = value_s / target_s
    return parts + _MISSED * max(0.0, parts - 1)
