"""How the tokens of one answer are drawn: the values of a request's `sampling` field, and their validation.

Plain data without torch: the router validates with it before anything is reserved, the workers draw with it
(engine/sampling.py). Field names, ranges and defaults are those of the Sampling message of the public API.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from twinpool.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 16


class FinishReason(IntEnum):
    """Why a choice ended; the numbers are those of the public API's enum."""

    NONE = 0  # not finished
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling. `seed` is always set here: the router draws one when the client sends none."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output tokens
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    seed: int = 0
    max_tokens: int | None = None  # None: up to the model's context length
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; else how many alternatives beside the chosen token's
    n: int = 1
    echo: bool = False

    def validate(self, vocab_size: int, max_context: int, prompt_len: int) -> None:
        """Raises InvalidRequest with the name of the first field that is out of range, its value and what is allowed.

        max_context is the most tokens of prompt and answer together, prompt_len the tokens of the prompt.
        """
        _check_prompt(prompt_len, max_context)
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("top_p", self.top_p, 0, 1, over_low=True)
        _check_range("top_k", self.top_k, 0, None)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0, None, over_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_range("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        self._check_lengths(max_context - prompt_len, max_context, prompt_len)
        self._check_stops(vocab_size)

    def _check_lengths(self, room: int, max_context: int, prompt_len: int) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, None)
            if self.max_tokens > room:
                raise _invalid(
                    "max_tokens",
                    self.max_tokens,
                    f"at most {room}: the context holds {max_context} tokens and the prompt takes {prompt_len}",
                )
        _check_range("min_tokens", self.min_tokens, 0, room if self.max_tokens is None else self.max_tokens)

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _invalid("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        if "" in self.stop:
            raise _invalid("stop", "an empty string", "strings of at least one character")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _invalid("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, vocab_size - 1)


def _check_prompt(prompt_len: int, max_context: int) -> None:
    if prompt_len < 1:
        raise InvalidRequest("prompt is empty: it must hold at least one token", field="prompt")
    if prompt_len >= max_context:
        raise InvalidRequest(
            f"prompt has {prompt_len} tokens: allowed are at most {max_context - 1}, as the model's context holds "
            f"{max_context} tokens of prompt and answer together",
            field="prompt",
        )


def _check_range(name: str, value: float, low: float, high: float | None, *, over_low: bool = False) -> None:
    """low <= value <= high (low < value with `over_low`; no upper bound with None); refuses NaN and infinity."""
    above = value > low if over_low else value >= low
    below = math.isfinite(value) if high is None else value <= high
    if not (above and below):  # also when value is NaN: it compares false with everything
        lower = f"over {low}" if over_low else f"at least {low}"
        raise _invalid(name, value, f"{lower} and {'finite' if high is None else f'at most {high}'}")


def _invalid(name: str, value: object, allowed: str) -> InvalidRequest:
    field = f"sampling.{name}"
    return InvalidRequest(f"{field} is {value}: allowed is {allowed}", field=field)
