"""One answer to a prompt: from sampled tokens to the deltas that the client gets.

It outlives the attempts that feed it, so detokenizer, stop strings and logprobs go on over a change of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.detokenizer import Detokenizer, TokenBytes
from router.stop import StopMatcher
from router.wire import Token
from twinpool.errors import Internal
from twinpool.sampling import FinishReason, SamplingParams


class Delta(NamedTuple):
    """What is new of one choice. `tokens` are all tokens behind it, whether or not they show in `text` (yet)."""

    choice: int  # its index
    text: str
    tokens: list[Token]
    finish_reason: FinishReason


class Choice:
    def __init__(self, index: int, sampling: SamplingParams, vocabulary: TokenBytes) -> None:
        self.index = index
        self.token_ids: list[int] = []  # sampled so far, on whatever workers
        self.finish_reason = FinishReason.NONE
        self._echoes = sampling.echo
        self._min_tokens = sampling.min_tokens
        self._vocab_size = len(vocabulary.own)
        self._detokenizer = Detokenizer(vocabulary, at_start=sampling.echo)
        self._stops = StopMatcher(sampling.stop) if sampling.stop else None
        self._text: list[str] = []  # not yet taken
        self._tokens: list[Token] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not FinishReason.NONE

    @property
    def awaits_echo(self) -> bool:
        return self._echoes

    def echo(self, prompt: Sequence[Token]) -> None:
        """Puts the prompt before the answer. Stop strings do not apply to it."""
        self._echoes = False
        self._tokens.extend(prompt)
        self._text.extend(self._detokenizer.push(token.token_id) for token in prompt)

    def accept(self, tokens: Sequence[Token]) -> int:
        """Takes sampled tokens in, up to the one that ends the choice; how many were taken.

        Raises Internal at a token that is not in the vocabulary, and does not take it.
        """
        for number, token in enumerate(tokens):
            if self.finish_reason:
                return number
            self._accept(token)
        return len(tokens)

    def _accept(self, token: Token) -> None:
        token_id, _, top, finish_reason = token
        if token_id >= self._vocab_size or (top and any(each >= self._vocab_size for each, _ in top)):
            raise Internal(f"token {token_id} came from a worker; the vocabulary ends at {self._vocab_size - 1}")
        self.token_ids.append(token_id)
        self._tokens.append(token)
        if not finish_reason:
            text = self._detokenizer.push(token_id)
        else:
            self.finish_reason = finish_reason
            # the token that ends the sequence is not part of its text
            text = "" if finish_reason is FinishReason.STOP else self._detokenizer.push(token_id)
            text += self._detokenizer.finish()
        if self._stops is not None:
            text = self._before_stop(text, self._stops)
        if text:
            self._text.append(text)

    def _before_stop(self, text: str, stops: StopMatcher) -> str:
        """What may be shown of `text`, which is new; ends the choice where a stop string does."""
        if len(self.token_ids) > self._min_tokens:  # before, a stop string is text like any other
            text, stopped = stops.push(text)
            if stopped:
                self.finish_reason = FinishReason.STOP
                return text
        return text + stops.flush() if self.finished else text

    def take(self) -> Delta | None:
        """All that is new since the last call; None when nothing is."""
        if not self._tokens:
            return None
        # On the path of every token, hence past NamedTuple's own constructor.
        delta: Delta = tuple.__new__(Delta, (self.index, "".join(self._text), self._tokens, self.finish_reason))
        self._text, self._tokens = [], []
        return delta
