"""Validation of sampling values: the message names the field, the value and what is allowed."""

from __future__ import annotations

import math

import pytest

from twinpool.errors import InvalidRequest
from twinpool.sampling import SamplingParams

VOCAB, CONTEXT, PROMPT = 100, 50, 10


def validate(prompt_len: int = PROMPT, **fields) -> None:
    SamplingParams(**fields).validate(VOCAB, CONTEXT, prompt_len)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "at least 0 and at most 2"),
        ("temperature", 2.1, "at least 0 and at most 2"),
        ("temperature", math.nan, "at least 0 and at most 2"),
        ("temperature", math.inf, "at least 0 and at most 2"),
        ("top_p", 0.0, "over 0 and at most 1"),
        ("top_p", 1.01, "over 0 and at most 1"),
        ("top_p", math.nan, "over 0 and at most 1"),
        ("top_k", -1, "at least 0"),
        ("min_p", -0.5, "at least 0 and at most 1"),
        ("min_p", math.nan, "at least 0 and at most 1"),
        ("repetition_penalty", 0.0, "over 0 and finite"),
        ("repetition_penalty", math.inf, "over 0 and finite"),
        ("repetition_penalty", math.nan, "over 0 and finite"),
        ("presence_penalty", 2.5, "at least -2 and at most 2"),
        ("frequency_penalty", -math.inf, "at least -2 and at most 2"),
        ("seed", -1, "at least 0"),
        ("seed", 2**64, "at most 18446744073709551615"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 41, "at most 40: the context holds 50 tokens and the prompt takes 10"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 41, "at most 40"),
        ("logprobs", 21, "at least 0 and at most 20"),
        ("logprobs", -1, "at least 0 and at most 20"),
        ("n", 0, "at least 1 and at most 16"),
        ("n", 17, "at least 1 and at most 16"),
        ("stop", ("x",) * 17, "at most 16 strings"),
        ("stop", ("x", ""), "at least one character"),
        ("stop_token_ids", (1,) * 65, "at most 64 ids"),
        ("stop_token_ids", (100,), "at most 99"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(**{name: value})
    assert caught.value.field == f"sampling.{name}"
    assert f"sampling.{name}" in caught.value.message
    assert allowed in caught.value.message
    if not isinstance(value, tuple):
        assert str(value) in caught.value.message


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens is 6: allowed is at least 0 and at most 5"):
        validate(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 1])
def test_a_prompt_must_hold_a_token_and_leave_room_for_one(length: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(prompt_len=length)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 0, "n": 1, "logprobs": 0},
        {"temperature": 2, "top_p": 1e-9, "top_k": 2**31 - 1, "min_p": 1, "seed": 2**64 - 1, "n": 16, "logprobs": 20},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-3},
        {"max_tokens": 40, "min_tokens": 40},
        {"stop": ("x",) * 16, "stop_token_ids": (0, 99), "ignore_eos": True, "echo": True},
    ],
)
def test_the_whole_range_is_allowed(fields: dict[str, object]) -> None:
    validate(**fields)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    validate(prompt_len=CONTEXT - 1, max_tokens=1)
