"""What the online benchmark sends, when, and how: Poisson arrivals of short and long prompts of real, distinct text.

The text is Python's own reference documentation, which every Python installation carries (`pydoc_data.topics`). Prompts
are windows of it that overlap only when all of it is used up, each behind a heading that no other prompt of this or an
earlier run has, so that a prefix cache never helps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from bench.openai_client import OpenAIClient
from bench.report import Outcome
from twinpool import errors
from twinpool.client import AsyncClient

Tokenize = Callable[[str], Awaitable[Sequence[int]]]
Detokenize = Callable[[Sequence[int]], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of request in the mix."""

    name: str  # "short" or "long"
    weight: float  # its share is weight / sum of weights
    prompt_tokens: int
    sla_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float  # after the start of the run
    shape: Shape


def parse_mix(text: str) -> tuple[float, float]:
    """`"70:30"` -> weights of short and long prompts. Raises ValueError on anything else."""
    weights = [float(part) for part in text.split(":")]
    if len(weights) != 2 or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"mix {text!r}: write SHORT:LONG, two weights of which one is over 0, as 70:30")
    return weights[0], weights[1]


def arrivals(rate: float, requests: int, shapes: Sequence[Shape], seed: int) -> list[Arrival]:
    """`requests` arrivals of a Poisson process of `rate` a second, in order of time; exact shares in random order."""
    draw = random.Random(seed)
    total = sum(shape.weight for shape in shapes)
    kinds: list[Shape] = []
    for shape in shapes[:-1]:
        kinds += [shape] * round(requests * shape.weight / total)
    kinds += [shapes[-1]] * (requests - len(kinds))
    draw.shuffle(kinds)
    planned, at_s = [], 0.0
    for shape in kinds:
        planned.append(Arrival(at_s=at_s, shape=shape))
        at_s += draw.expovariate(rate)
    return planned


async def prompts(lengths: Sequence[int], run: str, tokenize: Tokenize, detokenize: Detokenize, seed: int) -> list[str]:
    """One text of about lengths[i] tokens for each i (a token or two off where the window's edge splits a word)."""
    ids: list[int] = []
    for name in sorted(topics):
        ids += await tokenize(topics[name])
        if len(ids) > 2 * sum(lengths) + max(lengths):
            break
    starts = list(range(0, max(1, len(ids) - max(lengths)), max(lengths)))
    random.Random(seed).shuffle(starts)
    texts = []
    for i, length in enumerate(lengths):
        heading = f"Passage {run}-{i}.\n"
        room = max(1, length - len(await tokenize(heading)))
        start = starts[i % len(starts)]
        texts.append(heading + await detokenize(ids[start : start + room]))
    return texts


async def send(
    client: AsyncClient | OpenAIClient, prompt: str | list[int], outcome: Outcome, max_tokens: int, start: float
) -> None:
    """Sends one request when it is due and fills in its outcome. `start` is the run's, on time.perf_counter."""
    await asyncio.sleep(start + outcome.due_s - time.perf_counter())
    outcome.sent_s = time.perf_counter() - start
    try:
        async with client.stream(
            prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, sla_class=outcome.sla_class
        ) as stream:
            async for chunk in stream:
                outcome.token_s += [time.perf_counter() - start] * len(chunk.token_ids)
            if stream.usage is not None:
                outcome.prompt_tokens = stream.usage.prompt_tokens
                outcome.cached_tokens = stream.usage.cached_tokens
    except errors.TwinpoolError as error:
        outcome.error, outcome.failure = type(error).__name__, error
    outcome.end_s = time.perf_counter() - start


async def send_all(
    client: AsyncClient | OpenAIClient,
    prompts: Sequence[str | list[int]],
    outcomes: Sequence[Outcome],
    max_tokens: int,
) -> None:
    """Sends every prompt when its outcome is due, from 0.1 s after now on, and returns when all have ended."""
    start = time.perf_counter() + 0.1
    async with asyncio.TaskGroup() as tasks:
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            tasks.create_task(send(client, prompt, outcome, max_tokens, start))
