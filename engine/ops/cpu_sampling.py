"""The output layer and the choice of the next tokens of a whole batch, as one native call (csrc/sampling.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.ops import native
from engine.ops.cpu_tensors import check_tensor
from engine.sampling import NOT_DRAWN, Draw


class OutputLayer:
    """Of one packed matrix. Not thread safe: its logits lie in one buffer that is kept."""

    def __init__(self, head: Any) -> None:
        library = native.library()
        if library is None:
            raise ImportError("the native kernels are not built")
        self._run = library.twinpool_logits_and_tokens
        self._head = head
        self._logits = torch.empty(0, head.out_features, dtype=head.dtype)
        self._shown = self._logits
        self._choices = (native.TokenChoice * 0)()

    def tokens(
        self, hidden: torch.Tensor, draws: Sequence[Draw | None], sources: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """hidden [n, hidden]; draws[i] is from row sources[i] of it -> tokens as engine.sampling.draw_token gives them,
        NOT_DRAWN without a draw, and the logits [n, vocab] in the dtype of `hidden`, good until the next call."""
        rows = len(hidden)
        check_tensor(hidden, "hidden", (rows, self._head.in_features), self._head.dtype)
        hidden = self._head.inputs(hidden)
        if rows > len(self._logits):
            self._logits = torch.empty(rows, self._head.out_features, dtype=self._head.dtype)
        if rows != len(self._shown):
            self._shown = self._logits[:rows]
        count = self._ask(draws, sources)
        stride = hidden.stride(0) * hidden.itemsize
        self._run(self._head.args, hidden.data_ptr(), stride, rows, self._logits.data_ptr(), self._choices, count)
        return self._drawn(draws), self._shown

    def from_last_logits(self, draws: Sequence[Draw | None], sources: Sequence[int]) -> list[int]:
        """More tokens from what the last call computed: for who wants to know what drawing costs by itself."""
        count = self._ask(draws, sources)
        self._run(self._head.args, None, 0, 0, self._logits.data_ptr(), self._choices, count)
        return self._drawn(draws)

    def _ask(self, draws: Sequence[Draw | None], sources: Sequence[int]) -> int:
        if len(draws) > len(self._choices):
            self._choices = (native.TokenChoice * len(draws))()
        count = 0
        for draw, source in zip(draws, sources, strict=True):
            if draw is not None:
                choice = self._choices[count]
                choice.row, choice.temperature, count = source, draw.temperature, count + 1
                if draw.temperature:
                    choice.top_k, choice.top_p = draw.top_k, draw.top_p
                    choice.min_p, choice.point = draw.min_p, draw.point
        return count

    def _drawn(self, draws: Sequence[Draw | None]) -> list[int]:
        drawn = iter(self._choices)
        return [NOT_DRAWN if draw is None else next(drawn).token for draw in draws]
