"""A model that remembers something for every sequence beside its blocks, small enough to be checked by hand.

Its next token depends on every byte of a sequence's rows: on a running sum over all tokens and the last three of them,
which lie in the sequence's row of two layers, and on the tokens themselves, which lie in the blocks of two layers. A
row that is lost, old, shared or another sequence's gives another token, and `answer` says which is right without any
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from engine.batch import Batch
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.region_shape import RegionShape, row_bytes
from engine.sampling import NOT_DRAWN, Draw, draw_token

VOCAB = 251
_PRIME = 2_147_483_647
_REMEMBERED = 5  # numbers in a state: tokens so far, running sum, the last three tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulLayout:
    """Layer 0: tokens of blocks. Layer 1: those and a state. Layer 2: a state alone. All numbers are int64."""

    block_size: int
    num_layers: int = 3

    @property
    def regions(self) -> tuple[RegionShape, ...]:
        block, state = self.block_size * 8, _REMEMBERED * 8
        return (
            RegionShape(name="layer.0", layer=0, per="block", row_bytes=block),
            RegionShape(name="layer.1", layer=1, per="block", row_bytes=block),
            RegionShape(name="layer.1.state", layer=1, per="sequence", row_bytes=state),
            RegionShape(name="layer.2.state", layer=2, per="sequence", row_bytes=state),
        )

    @property
    def block_bytes(self) -> int:
        return row_bytes(self.regions, "block")

    @property
    def state_bytes(self) -> int:
        return row_bytes(self.regions, "sequence")

    def describe(self) -> str:
        return "stateful"

    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> StatefulView:
        views = [buffer.view(torch.int64) for buffer in buffers]
        return StatefulView(tokens=None if layer == 2 else views[0], states=None if layer == 0 else views[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulView:
    tokens: torch.Tensor | None  # [rows, block_size]
    states: torch.Tensor | None  # [rows, numbers]


def _start(layer: int) -> list[int]:
    return [0, 17 + layer, 1, 2, 3]


def _advance(state: list[int], token: int) -> list[int]:
    count, total, *last = state
    total = (total * 48271 + 7 * token + 3 * last[0] + 5 * last[1] + 11 * last[2] + 13 * count + 1) % _PRIME
    return [count + 1, total, last[1], last[2], token]


def _sum_of_blocks(tokens: Sequence[int]) -> int:
    return sum((position + 1) * token for position, token in enumerate(tokens)) % _PRIME


def _logits(hidden: torch.Tensor) -> torch.Tensor:
    """hidden int64 [n, 1] -> fp32 [n, vocab]: scattered, so that any other hidden state has another order."""
    tokens = torch.arange(VOCAB)
    scattered = (hidden * 16807 + (tokens + 3) * (hidden % 65521 + 1) * 40503) % 1_000_003
    return scattered.float() / 100_003


class StatefulModel:
    """What engine.models.decoder.Decoder is to an engine."""

    weight_bytes = 0

    def forward(self, batch: Batch, views: list[StatefulView], on_layer: Callable[[int], None] | None) -> torch.Tensor:
        assert batch.states is not None
        hidden = torch.zeros(batch.num_tokens, 1, dtype=torch.int64)
        for layer, view in enumerate(views):
            if view.tokens is not None:
                view.tokens.view(-1)[batch.slots] = batch.token_ids
            for number, row in enumerate(batch.states.tolist()):
                begin, end = batch.query_start[number], batch.query_start[number + 1]
                if view.tokens is not None:
                    known = view.tokens[batch.block_tables[number].long()].view(-1)[: batch.context_lens[number]]
                    weighted = (known * torch.arange(1, len(known) + 1)).cumsum(0) % _PRIME
                    hidden[begin:end, 0] += weighted[len(known) - (end - begin) :]
                if view.states is not None:
                    state = view.states[row].tolist()
                    if int(batch.positions[begin]) == 0:
                        state = _start(layer)
                    for place in range(begin, end):
                        state = _advance(state, int(batch.token_ids[place]))
                        hidden[place] += sum(state) % _PRIME
                    view.states[row] = torch.tensor(state)
            if on_layer is not None:
                on_layer(layer)
        return hidden % _PRIME

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _logits(hidden)

    def tokens(
        self, hidden: torch.Tensor, draws: Sequence[Draw | None], sources: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        logits = _logits(hidden)
        drawn = zip(draws, sources, strict=True)
        return [NOT_DRAWN if draw is None else draw_token(logits[i], draw) for draw, i in drawn], logits

    def decoder(self, views: list[Any]) -> None:
        return None


def load(*, rows: int = 256, states: int = 16, block_size: int = 16) -> Engine:
    cache = KvCache(StatefulLayout(block_size=block_size), rows, num_states=states)
    for buffer in cache.buffers:
        buffer.fill_(0x5A)  # what somebody left there
    config: Any = SimpleNamespace(vocab_size=VOCAB, max_context=4096, eos_token_ids=())
    model: Any = StatefulModel()
    return Engine(config, model, cache, model_name="stateful", fingerprint="stateful")


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest tokens after the prompt, one after the other, from the definition above."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        hidden = 2 * _sum_of_blocks(tokens)
        for layer in (1, 2):
            state = _start(layer)
            for token in tokens:
                state = _advance(state, token)
            hidden += sum(state) % _PRIME
        tokens.append(int(_logits(torch.tensor([[hidden % _PRIME]]))[0].argmax()))
    return tokens[len(prompt) :]
