"""The load of chaos.py: a catalogue of questions with known answers, asked in every way a client can, and judged.

1. `catalogue` makes questions of all kinds from a seed and asks each once, alone: those are the right answers.
2. Each client (`ask_on`) draws a question and a way to ask it, again and again: whole, streamed, given up midway, with
   a deadline that may be too short; under either SLA class, with or without a prefix of its own.
3. Whatever comes back is held against the answer of the lone run, the part before a cancel or a deadline as well.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import workload
from twinpool import errors
from twinpool.client import AsyncClient
from twinpool.results import Choice, Generation

CLASSES = ("interactive", "batch")
WAYS = ("whole", "whole", "stream", "stream", "stream", "leave", "deadline")
LOGPROB_TOLERANCE = 1e-3  # nats
THINK_S = 0.1  # of a client between two requests, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    options: dict[str, Any]
    answer: tuple[Choice, ...]  # of the lone run


@dataclass(slots=True)
class Tally:
    """What became of the requests; every client adds to it."""

    sent: int = 0
    finished: int = 0
    refused: int = 0  # RESOURCE_EXHAUSTED with a time to come back
    left: int = 0  # by the client, in the middle
    expired: int = 0  # deadlines that were meant to be short
    failed: int = 0  # any other error
    wrong: int = 0
    moved: int = 0  # finished ones that took more than one attempt
    errors: Counter[str] = field(default_factory=Counter)  # why they failed or were wrong


async def catalogue(client: AsyncClient, count: int, seed: int) -> list[Question]:
    draw = random.Random(seed)
    lengths = [draw.choice((8, 24, 60, 120, 120, 300, 700)) for _ in range(count)]

    async def tokenize(text: str) -> Sequence[int]:
        return await client.tokenize(text, special_tokens=False)

    texts = await workload.prompts(lengths, "chaos", tokenize, client.detokenize, seed)
    return [await _question(client, text, draw, i) for i, text in enumerate(texts)]


async def _question(client: AsyncClient, prompt: str, draw: random.Random, i: int) -> Question:
    options: dict[str, Any] = {"max_tokens": draw.choice((1, 2, 16, 60, 200)), "seed": draw.getrandbits(32)}
    options |= {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "top_p": 0.95}
    match i % 6:
        case 0:
            options["n"] = 3
        case 1:
            options |= {"logprobs": 3, "echo": True}
        case 2:
            options["logprobs"] = 0
        case 3:
            options |= {"max_tokens": 200, "ignore_eos": True}
            text = (await client.generate(prompt, **options)).text
            middle = len(text) // 2
            options["stop"] = [text[middle : middle + 4] or "never"]
        case 4:
            options |= {"ignore_eos": True, "repetition_penalty": 1.1}
    alone = await client.generate(prompt, **options)
    return Question(prompt=prompt, options=options, answer=tuple(alone.choices))


async def ask_on(
    client: AsyncClient, questions: Sequence[Question], draw: random.Random, over: asyncio.Event, tally: Tally
) -> None:
    """One client: asks until `over` is set, one question at a time."""
    while not over.is_set():
        question, way = draw.choice(questions), draw.choice(WAYS)
        options = {**question.options, "sla_class": draw.choice(CLASSES)}
        if draw.random() < 0.5:
            options["cache_salt"] = f"{draw.getrandbits(32):x}"  # nobody has computed its prefix
        await _ask(client, question, way, options, draw, tally)
        await asyncio.sleep(draw.expovariate(1 / THINK_S))


async def _ask(
    client: AsyncClient, question: Question, way: str, options: dict[str, Any], draw: random.Random, tally: Tally
) -> None:
    tally.sent += 1
    if way == "deadline":
        options["deadline_s"] = draw.uniform(0.05, 1.0)
    leave_after = draw.randrange(0, 40) if way == "leave" else None
    parts: dict[int, list[int]] = {}
    try:
        if way == "whole":
            answer = await client.generate(question.prompt, **options)
        else:
            async with client.stream(question.prompt, **options) as stream:
                async for chunk in stream:
                    parts.setdefault(chunk.index, []).extend(chunk.token_ids)
                    if leave_after is not None and sum(map(len, parts.values())) > leave_after:
                        tally.left += 1
                        _judge_part(question, parts, tally)
                        return
                answer = await stream.read()
    except errors.Overloaded:
        tally.refused += 1
    except errors.DeadlineExceeded as error:
        if way == "deadline":
            tally.expired += 1
        else:
            _fail(tally, error)
    except errors.TwinpoolError as error:
        _fail(tally, error)
    else:
        tally.finished += 1
        tally.moved += answer.timeline.attempts > 1
        _judge(question, answer, tally)
        return
    _judge_part(question, parts, tally)


def _fail(tally: Tally, error: errors.TwinpoolError) -> None:
    tally.failed += 1
    tally.errors[f"{type(error).__name__}: {error.message}"] += 1


def _judge(question: Question, answer: Generation, tally: Tally) -> None:
    differs = difference(question.answer, answer.choices)
    if differs:
        tally.wrong += 1
        tally.errors[f"wrong: request {answer.request_id}, {differs}, {question.options}"] += 1


def _judge_part(question: Question, parts: dict[int, list[int]], tally: Tally) -> None:
    """Tokens of an answer that was cut short: the beginning of the right one."""
    for choice in question.answer:
        got = parts.get(choice.index, [])
        if got != choice.token_ids[: len(got)]:
            tally.wrong += 1
            tally.errors[f"wrong: the beginning of choice {choice.index}, {question.options}"] += 1
            return


def difference(right: Sequence[Choice], got: Sequence[Choice]) -> str:
    """In which respect two answers differ; empty when they do not."""
    if len(right) != len(got):
        return f"{len(got)} choices rather than {len(right)}"
    for one, other in zip(right, got, strict=True):
        for name in ("index", "token_ids", "text", "finish_reason"):
            if getattr(one, name) != getattr(other, name):
                return f"{name} of choice {one.index}"
        if [each.token_id for each in one.logprobs] != [each.token_id for each in other.logprobs]:
            return f"tokens with logprobs of choice {one.index}"
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            if [top.token_id for top in ours.top] != [top.token_id for top in theirs.top]:
                return f"alternatives of choice {one.index}"
            if abs((ours.logprob or 0.0) - (theirs.logprob or 0.0)) > LOGPROB_TOLERANCE:
                return f"logprobs of choice {one.index}"
    return ""
