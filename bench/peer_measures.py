"""What bench.peers measures of one side at a time: decode and prefill speed, a mixed load, saturation and goodput.

A side is a deployment of ours or a peer. Whoever is not measured idles, and stands still where its processes are known.
Speeds come from the times at which the client sees tokens, so both sides' whole serving path is in them.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import workload
from bench.openai_client import OpenAIClient
from bench.report import Outcome, Target, summarize
from bench.workload import Arrival, Shape
from twinpool import errors
from twinpool.client import AsyncClient

BULK = "batch"  # the class of requests whose throughput counts: no target holds them back
TARGET = Target(ttft_ms=1000, tpot_ms=50)
SHARE_IN_TARGET = 0.9
_CACHED_AT_MOST = 16  # tokens of a heading that prompts may share


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One deployment that is measured."""

    name: str
    client: AsyncClient | OpenAIClient
    ours: bool
    pids: tuple[int, ...] = ()  # to stop while others are measured
    one_at_a_time: bool = False  # it takes requests one after the other, so batches say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of the work; only tests make them smaller."""

    decode_prompt: int = 260  # 256 and a few: a prefix cache holds whole blocks, and never the last token
    decode_answer: int = 128
    prefills: tuple[tuple[int, int], ...] = ((8, 512), (1, 2048))  # prompts at once, tokens each
    short: int = 64
    long: int = 1500
    answer: int = 64


class Prompts:
    """Distinct prompts of real text, measured in tokens by a router's tokenizer. No prompt is given twice."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self._client = client
        self._seed = seed

    async def take(self, lengths: Sequence[int]) -> list[str]:
        self._seed += 1
        tokenize = partial(self._client.tokenize, special_tokens=False)
        return await workload.prompts(lengths, secrets.token_hex(4), tokenize, self._client.detokenize, self._seed)


@contextmanager
def alone(side: Side, sides: Sequence[Side]) -> Iterator[None]:
    """Stops the processes of all other sides that gave them, and lets them go on afterwards. Raises ConfigError."""
    others = [pid for other in sides if other is not side for pid in other.pids]
    try:
        for pid in others:
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError as error:
                raise errors.ConfigError(
                    f"--pause: process {pid} cannot be stopped ({error.strerror}); name processes of peers that run"
                ) from error
        yield
    finally:
        for pid in others:
            with suppress(OSError):  # it ended meanwhile
                os.kill(pid, signal.SIGCONT)


async def burst(side: Side, prompts: Sequence[str], max_tokens: int) -> list[Outcome]:
    """All prompts at once. Raises the first failure: a speed of half the work is none."""
    outcomes = [Outcome(shape="burst", sla_class=BULK, due_s=0.0) for _ in prompts]
    await workload.send_all(side.client, prompts, outcomes, max_tokens)
    check(side, outcomes, max_tokens)
    return outcomes


def check(side: Side, outcomes: Sequence[Outcome], max_tokens: int) -> None:
    """Raises what went wrong with the first request that failed or is of another length than asked for."""
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure
        if len(outcome.token_s) != max_tokens:
            raise errors.Internal(
                f"{side.name}: an answer has {len(outcome.token_s)} tokens instead of {max_tokens}: lengths must be "
                "exact to compare"
            )


def check_uncached(side: Side, outcomes: Sequence[Outcome]) -> None:
    """Raises InvalidRequest when a prefix cache helped, as far as the server reports it."""
    most = max((outcome.cached_tokens for outcome in outcomes), default=0)
    if most > _CACHED_AT_MOST:
        raise errors.InvalidRequest(
            f"{side.name}: {most} tokens of a prompt came from a prefix cache, though no prompt was sent before; start "
            "it afresh"
        )


async def warm_up(sides: Sequence[Side], prompts: Prompts, sizes: Sizes) -> None:
    """A long and a short request each, which must count as many prompt tokens on every side. Raises TwinpoolError."""
    for length in (sizes.long, sizes.short):
        taken = await prompts.take([length])
        counts: dict[str, int] = {}
        for side in sides:
            with alone(side, sides):
                (outcome,) = await burst(side, taken, 8)
            if outcome.prompt_tokens:
                counts[side.name] = outcome.prompt_tokens
        if len(set(counts.values())) > 1:
            raise errors.InvalidRequest(
                f"the same prompt has different numbers of tokens: {counts}; serve the same model with the same "
                "tokenizer everywhere"
            )


async def decode_speed(side: Side, prompts: Sequence[str], sizes: Sizes) -> float | None:
    """Tokens a second of all requests while every one of them decodes; None when they never did at the same time.

    Every prompt is sent once before, for one token, so that those with a prefix cache begin to decode together. Prefill
    is no part of this figure either way.
    """
    if len(prompts) > 1:
        await burst(side, prompts, 1)
    return steady(await burst(side, prompts, sizes.decode_answer))


def steady(outcomes: Sequence[Outcome]) -> float | None:
    """Tokens a second from when the last one has its first token until the first one has its last."""
    begin = max(outcome.token_s[0] for outcome in outcomes)
    end = min(outcome.token_s[-1] for outcome in outcomes)
    if end <= begin:
        return None
    return sum(begin < at <= end for outcome in outcomes for at in outcome.token_s) / (end - begin)


async def prefill_speed(side: Side, prompts: Sequence[str], length: int) -> float:
    """Prompt tokens a second until the last prompt has its only token."""
    outcomes = await burst(side, prompts, 1)
    check_uncached(side, outcomes)
    tokens = sum(outcome.prompt_tokens or length for outcome in outcomes)
    return tokens / max(outcome.token_s[0] for outcome in outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The mixed load: short and long prompts, which are of the classes that the router serves by default."""

    requests: int
    mix: tuple[float, float]
    sizes: Sizes
    seed: int

    def shapes(self) -> tuple[Shape, Shape]:
        return (
            Shape(name="short", weight=self.mix[0], prompt_tokens=self.sizes.short, sla_class="interactive"),
            Shape(name="long", weight=self.mix[1], prompt_tokens=self.sizes.long, sla_class=BULK),
        )

    def arrivals(self, rate: float, requests: int) -> list[Arrival]:
        return workload.arrivals(rate, requests, self.shapes(), self.seed)


async def mixed(
    side: Side, arrivals: Sequence[workload.Arrival], prompts: Sequence[str], sizes: Sizes
) -> list[Outcome]:
    """One run of the load. Failures stay in the outcomes, unless nothing was answered at all."""
    outcomes = [Outcome(shape=a.shape.name, sla_class=a.shape.sla_class, due_s=a.at_s) for a in arrivals]
    await workload.send_all(side.client, prompts, outcomes, sizes.answer)
    done = [outcome for outcome in outcomes if outcome.failure is None]
    if not done and outcomes[0].failure is not None:
        raise outcomes[0].failure
    check(side, done, sizes.answer)
    check_uncached(side, done)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a mixed run that are compared."""
    whole = summarize(outcomes, dict.fromkeys(("interactive", BULK), TARGET))
    kept = ("requests", "errors", "rate_achieved_rps", "ttft_ms", "itl_ms", "goodput_rps", "output_tokens_per_s")
    good = sum(outcome.good(TARGET) for outcome in outcomes) / len(outcomes)
    return {**{name: whole[name] for name in kept}, "in_target": round(good, 3)}


async def saturation(side: Side, prompts: Prompts, load: Load) -> float:
    """Requests a second when all of them are there from the start."""
    arrivals = load.arrivals(math.inf, load.requests)
    taken = await prompts.take([arrival.shape.prompt_tokens for arrival in arrivals])
    outcomes = await mixed(side, arrivals, taken, load.sizes)
    done = [outcome for outcome in outcomes if outcome.failure is None]
    return len(done) / max(outcome.end_s for outcome in outcomes)


@dataclass(slots=True, kw_only=True)
class Search:
    """The largest rate that keeps SHARE_IN_TARGET of requests in target, halving between 0 and `most`."""

    most: float
    kept: float = 0.0

    @property
    def rate(self) -> float:
        """To try next."""
        return (self.kept + self.most) / 2

    def note(self, in_target: float) -> None:
        """What came out at `rate`."""
        if in_target >= SHARE_IN_TARGET:
            self.kept = self.rate
        else:
            self.most = self.rate


def median(values: Sequence[float | None]) -> float | None:
    """Of what was measured; None when nothing was."""
    got = [value for value in values if value is not None]
    return round(statistics.median(got), 3) if got else None
