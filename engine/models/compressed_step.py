"""Where a step's tokens come from and go to in windows and sums: found once, and the same for every layer of a kind.

Positions only: what happens to a token depends on its own sequence alone, so neither what shares the step nor how a
prompt is cut changes what is attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch
from engine.compressed_cache import CompressedView
from engine.compressed_config import HEAVY, WINDOW, CompressedConfig
from engine.rope import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Of all layers. The keys that a step attends to beside entries are, sequence by sequence, those that the window
    holds (`read`, in order of positions) and those of its own tokens."""

    read: torch.Tensor  # int64 [P]: places in the windows, row * window + position % window
    read_to: torch.Tensor  # int64 [P]: where these keys stand among all
    own_to: torch.Tensor  # int64 [T]: where those of the tokens stand
    spans: torch.Tensor  # int64 [T, 2]: first and behind the last key that each token attends to
    kept: torch.Tensor  # int64 [K]: tokens whose keys the windows hold after the step
    kept_to: torch.Tensor  # int64 [K]: places in the windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Of all layers of one rate. N entries become whole in this step, each of `rate` tokens."""

    rate: int
    visible: list[int]  # of each token, how many entries of its sequence it may see
    slots: torch.Tensor  # int64 [N]: row * entries a row + place, where each goes
    cos: torch.Tensor  # fp32 [N, rope_dim / 2]
    sin: torch.Tensor
    read: torch.Tensor  # int64 [P, 2]: row and place of sums that were kept
    read_to: torch.Tensor  # int64 [P]: where they stand among the N * rate
    own: torch.Tensor  # int64 [Q]: tokens that become part of an entry
    own_to: torch.Tensor  # int64 [Q]
    kept: torch.Tensor  # int64 [K]: tokens that do not, yet
    kept_to: torch.Tensor  # int64 [K, 2]: row and place of their sums
    follows: torch.Tensor  # int64 [N]: what precedes each: an entry of this step, or -1 what is kept, or -2 nothing
    rows: torch.Tensor  # int64 [N]: each one's sequence's row
    last: torch.Tensor  # int64 [M]: entries that are the newest of their sequence
    all_slots: torch.Tensor  # int32 [T, most visible]: of all entries that each token may see, then -1; if HEAVY


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the attention of every layer needs to know of a batch. cos, sin: [T, rope_dim / 2], for layers without and
    with entries."""

    batch: Batch
    windows: Windows
    entries: dict[str, Entries]  # SPARSE, HEAVY
    sequence_of: torch.Tensor  # int64 [T]
    plain: tuple[torch.Tensor, torch.Tensor]
    turned: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def plan(
        cls,
        batch: Batch,
        compressed: CompressedConfig,
        views: Sequence[CompressedView],
        plain: Rotary,
        turning: Rotary,
    ) -> Step:
        """views: of every layer's cache. plain, turning: of layers without and with entries."""
        if batch.states is None:
            raise ValueError("the model remembers something for every sequence: each needs a state")
        entries = {}
        for kind in {each for each in compressed.kinds if each != WINDOW}:
            view = views[compressed.kinds.index(kind)].entries
            assert view is not None
            rate = compressed.rate(kind)
            entries[kind] = _entries(batch, rate, view.block_size, turning, lists_all=kind == HEAVY)
        counts = torch.tensor(batch.query_start).diff()
        return cls(
            batch=batch,
            windows=_windows(batch, compressed.window),
            entries=entries,
            sequence_of=torch.repeat_interleave(counts),
            plain=plain.cos_sin(batch.positions),
            turned=turning.cos_sin(batch.positions),
        )


def _windows(batch: Batch, window: int) -> Windows:
    read, read_to, own_to, spans, kept, kept_to = ([] for _ in range(6))
    behind = 0
    for s, row in enumerate(_rows(batch)):
        begin, end = batch.query_start[s], batch.query_start[s + 1]
        length = batch.context_lens[s]
        start = length - (end - begin)
        before = min(start, window - 1)
        base = row * window
        read.append(base + np.arange(start - before, start) % window)
        read_to.append(behind + np.arange(before))
        places = behind + before + np.arange(end - begin)
        own_to.append(places)
        spans.append(np.stack((np.maximum(places - window + 1, behind), places + 1), axis=1))
        first = max(start, length - window)
        kept.append(np.arange(begin + first - start, end))
        kept_to.append(base + np.arange(first, length) % window)
        behind += before + end - begin
    return Windows(
        read=_joined(read),
        read_to=_joined(read_to),
        own_to=_joined(own_to),
        spans=_joined(spans),
        kept=_joined(kept),
        kept_to=_joined(kept_to),
    )


def _entries(batch: Batch, rate: int, a_row: int, rotary: Rotary, *, lists_all: bool) -> Entries:
    """a_row: entries that a row holds; lists_all: whether every token attends to all that it may see."""
    tables = batch.block_tables.numpy()
    read, read_to, own, own_to, kept, kept_to = ([] for _ in range(6))
    slots, positions, follows, rows, last, lists = ([] for _ in range(6))
    visible: list[int] = []
    most = max(batch.context_lens) // rate
    count = 0
    for s, row in enumerate(_rows(batch)):
        begin, end = batch.query_start[s], batch.query_start[s + 1]
        length = batch.context_lens[s]
        start = length - (end - begin)
        first, behind = start // rate, length // rate  # entries that become whole
        whole = behind - first
        seen = (np.arange(start, length) + 1) // rate
        visible += seen.tolist()
        if lists_all:
            every = np.arange(most)
            places = tables[s, np.minimum(every // a_row, tables.shape[1] - 1)] * a_row + every % a_row
            lists.append(np.where(every < seen[:, None], places, -1))
        new = np.arange(first, behind)
        if whole:
            held = np.arange(first * rate, start)
            read.append(np.stack((np.full(len(held), row), held % rate), axis=1))
            read_to.append(count * rate + held - first * rate)
            taken = np.arange(start, behind * rate)
            own.append(begin + taken - start)
            own_to.append(count * rate + taken - first * rate)
            before = count + np.arange(whole) - 1
            before[0] = -1 if first else -2
            follows.append(before)
            last.append(np.array([count + whole - 1]))
            slots.append(tables[s, new // a_row].astype(np.int64) * a_row + new % a_row)
            positions.append(new * rate)
            rows.append(np.full(whole, row))
        left = np.arange(max(start, behind * rate), length)
        kept.append(begin + left - start)
        kept_to.append(np.stack((np.full(len(left), row), left % rate), axis=1))
        count += whole
    cos, sin = rotary.cos_sin(_joined(positions))
    empty = np.zeros((batch.num_tokens, 0))
    return Entries(
        rate=rate,
        visible=visible,
        slots=_joined(slots),
        cos=cos,
        sin=sin,
        read=_joined(read, 2),
        read_to=_joined(read_to),
        own=_joined(own),
        own_to=_joined(own_to),
        kept=_joined(kept),
        kept_to=_joined(kept_to, 2),
        follows=_joined(follows),
        rows=_joined(rows),
        last=_joined(last),
        all_slots=torch.from_numpy(np.concatenate(lists or [empty]).astype(np.int32)),
    )


def _rows(batch: Batch) -> list[int]:
    assert batch.states is not None
    return batch.states.tolist()


def _joined(parts: list[np.ndarray], columns: int = 0) -> torch.Tensor:
    """int64; of no parts none of [0] or [0, columns]."""
    if not parts:
        return torch.zeros((0, columns) if columns else (0,), dtype=torch.int64)
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
