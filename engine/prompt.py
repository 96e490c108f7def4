"""What a computed prompt gives: the first token of each of its choices, and the logprobs of its own tokens.

Both kinds of worker compute prompts; which parts of which prompt a step computes is for their schedulers to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.engine import Engine
from engine.sampling import Sampled, SampleRow, prompt_logprobs
from twinpool.sampling import SamplingParams

LOGPROB_ROWS = 128  # prompt positions whose logits are held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`token_ids`: the user's prompt and, on a resumption, the tokens delivered after it."""

    token_ids: Sequence[int]
    num_prompt_tokens: int  # of token_ids, how many are the user's prompt
    sampling: SamplingParams
    choices: range

    @property
    def wants_logprobs(self) -> bool:
        """Of its own tokens: then every one has to be computed, whatever a cache holds."""
        return self.sampling.echo and self.sampling.logprobs is not None

    def rows(self) -> list[SampleRow]:
        prompt, output = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        return [SampleRow(self.sampling, prompt, output, choice) for choice in self.choices]


def first_tokens(engine: Engine, prompts: Sequence[Prompt], hidden: torch.Tensor) -> list[list[Sampled]]:
    """hidden: [prompts, hidden], the last token of each. Every choice draws from its prompt's one row."""
    rows = [prompt.rows() for prompt in prompts]
    source = [i for i, own in enumerate(rows) for _ in own]
    sampled = iter(engine.next_tokens(hidden, [row for own in rows for row in own], source))
    return [[next(sampled) for _ in own] for own in rows]


def own_logprobs(engine: Engine, prompt: Prompt, start: int, end: int, hidden: torch.Tensor) -> list[Sampled]:
    """Of the prompt's tokens start + 1 .. end (from 0 on, without a value, for the first chunk).

    hidden: [end - start, hidden]; position p predicts the token at p + 1.
    """
    found = [Sampled(prompt.token_ids[0])] if start == 0 else []
    targets = prompt.token_ids[start + 1 : min(end + 1, prompt.num_prompt_tokens)]
    for begin in range(0, len(targets), LOGPROB_ROWS):
        piece = targets[begin : begin + LOGPROB_ROWS]
        logits = engine.logits(hidden[begin : begin + len(piece)])
        found += prompt_logprobs(logits, piece, prompt.sampling.logprobs or 0)
    return found
