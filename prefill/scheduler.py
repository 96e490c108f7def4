"""Which tokens of which prompts the next step computes.

Life of a request here:

 1. `add` puts it into the queue of its input class: higher priority first, then in order of arrival.
 2. `next_batch` admits it when its class has a place left (short inputs: many, long ones: few), the step has tokens
    left, and the pools have rows for the whole prompt. Full blocks found in the prefix cache are taken over.
 3. Each step computes a chunk of it. The classes share a step's token budget evenly and pass on what they do not need:
    a short prompt is computed between the chunks of a long one, and a stream of short ones never stops the long one.
 4. `computed` publishes its full blocks to the prefix cache; after the last chunk it has left this scheduler, and its
    rows stay with it until the worker calls `free`: a transfer may still be reading them.

Where this worker generates the whole answer (the decode pool is empty), `generate` takes a computed prompt back, once
for each token: those that generate come first in a step, with a token each. When rows run out, the last in order loses
its own and waits for others as a prompt does, its answer so far with it.

Models that remember something for every sequence beside its blocks (engine/state_pool.py): a request holds a row of
those too, from admission until `free`. A prefix is then of use only where there is a snapshot at its end. So chunks end
on block boundaries where they can, and at the last one of the prompt in any case, and leave a snapshot there.

`remove` takes a request out at any point. A plain class without threads or clocks; the device thread owns it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.state_pool import StatePool
from prefill.request import Chunk, Request, Sequence
from twinpool.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """token_budget: tokens a step computes at most; prompts: how many of each input class are computed side by side."""

    token_budget: int
    prompts: Mapping[str, int]


@dataclass(slots=True)
class _Class:
    """One input class: who waits, who has rows and is being computed."""

    limit: int
    waiting: list[tuple[tuple[int, int], Sequence]] = field(default_factory=list)  # ordered by (-priority, arrival)
    running: list[Sequence] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_tokens(self) -> int:
        """Not computed yet."""
        waiting = sum(sequence.num_tokens for _, sequence in self.waiting)
        return waiting + sum(sequence.num_left for sequence in self.running)


class Scheduler:
    def __init__(self, limits: BatchLimits, blocks: BlockPool, states: StatePool) -> None:
        self._budget = limits.token_budget
        self._blocks = blocks
        self._states = states
        self._classes = {name: _Class(limit) for name, limit in limits.prompts.items()}
        self._generating: list[Sequence] = []  # whose turn it is first
        self.num_preempted = 0  # that lost their rows; only grows
        self._num_added = 0
        self._starved: tuple[tuple[int, int], Sequence] | None = (
            None  # the first in line for rows, while they are short
        )

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for a request that can never be admitted here."""
        if request.input_class not in self._classes:
            raise InvalidRequest(
                f"input class {request.input_class!r} is unknown: this worker has {', '.join(self._classes)}",
                field="input_class",
            )
        needed = self._num_blocks(len(request.token_ids))
        if needed > self._blocks.num_blocks:
            raise InvalidRequest(
                f"prompt of {len(request.token_ids)} tokens takes {needed} blocks of {self._blocks.block_size}, and "
                f"this worker's cache holds {self._blocks.num_blocks}: shorten it, or raise --memory of the worker",
                field="prompt",
            )

    def add(self, sequence: Sequence) -> None:
        self._num_added += 1
        sequence.order = (-sequence.request.priority, self._num_added)
        self._queue(sequence)

    def generate(self, sequence: Sequence) -> None:
        """Its last token was sampled and is to be computed in the next step."""
        if sequence not in self._generating:
            self._generating.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a waiting or running request; a no-op for others. Its rows stay with it until `free`."""
        own = self._classes[sequence.request.input_class]
        own.waiting = [entry for entry in own.waiting if entry[1] is not sequence]
        own.running = [other for other in own.running if other is not sequence]
        self._generating = [other for other in self._generating if other is not sequence]
        if self._starved is not None and self._starved[1] is sequence:
            self._starved = None

    def next_batch(self, now: float) -> list[Chunk]:
        """The chunks of the next step, at most the token budget together; empty when nothing can run."""
        tokens: dict[Sequence, int] = {}
        self._fill_generating(tokens)
        active = [each for each in self._classes.values() if each.is_active]
        left = budget = self._budget - len(tokens)
        for each in active:
            left -= self._fill(each, budget // len(active), tokens, now)
        for each in active:
            left -= self._fill(each, left, tokens, now)
        return [Chunk(seq, seq.num_computed, seq.num_computed + count) for seq, count in tokens.items()]

    def computed(self, chunk: Chunk) -> None:
        """The step that held `chunk` has filled its rows."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        request = sequence.request
        if not sequence.output:
            digest = self._blocks.publish(request.token_ids[: chunk.end], sequence.block_ids, request.cache_salt)
            if digest and sequence.state is not None and chunk.end % self._blocks.block_size == 0:
                goes_on = chunk.end < sequence.num_tokens - self._blocks.block_size
                self._states.publish(digest, sequence.state, on_the_way=goes_on)
        if chunk.is_last and sequence not in self._generating:
            self._classes[request.input_class].running.remove(sequence)

    def free(self, sequence: Sequence) -> None:
        """Gives its rows back. Nothing may read or write them any more. Idempotent."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        self._blocks.release(block_ids)
        if sequence.state is not None:
            self._states.release([sequence.state])
            sequence.state = None

    @property
    def num_waiting(self) -> int:
        return sum(len(each.waiting) for each in self._classes.values())

    @property
    def num_running(self) -> int:
        return sum(len(each.running) for each in self._classes.values()) + len(self._generating)

    @property
    def num_generating(self) -> int:
        return len(self._generating)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not computed."""
        return sum(each.num_tokens for each in self._classes.values())

    def num_waiting_tokens_of(self, input_class: str) -> int:
        return self._classes[input_class].num_tokens if input_class in self._classes else 0

    def _queue(self, sequence: Sequence) -> None:
        insort(self._classes[sequence.request.input_class].waiting, (sequence.order, sequence))  # orders differ: no tie

    def _fill_generating(self, tokens: dict[Sequence, int]) -> None:
        """A token each, as many as the budget allows; who had a turn comes last in the next step."""
        for sequence in self._generating[: self._budget]:
            while sequence in self._generating and not self._grow(sequence):
                victim = max(self._generating, key=lambda each: each.order)
                tokens.pop(victim, None)
                self._preempt(victim)
            if sequence in self._generating:
                tokens[sequence] = 1
        self._generating.sort(key=tokens.__contains__)

    def _grow(self, sequence: Sequence) -> bool:
        """Sees to it that the last token has a block to go to."""
        more = self._blocks.allocate(self._num_blocks(sequence.num_tokens) - len(sequence.block_ids))
        sequence.block_ids += more or []
        return more is not None

    def _preempt(self, victim: Sequence) -> None:
        self.num_preempted += 1
        self._generating.remove(victim)
        self.free(victim)
        victim.num_computed = 0
        self._queue(victim)

    def _fill(self, own: _Class, budget: int, tokens: dict[Sequence, int], now: float) -> int:
        """Adds up to `budget` tokens of one class to the step; how many it added."""
        left = budget
        for sequence in own.running:
            left -= self._take(sequence, left, tokens)
        while left > 0 and own.waiting and len(own.running) < own.limit and self._admit(own.waiting[0], now):
            _, sequence = own.waiting.pop(0)
            own.running.append(sequence)
            left -= self._take(sequence, left, tokens)
        return budget - left

    def _admit(self, entry: tuple[tuple[int, int], Sequence], now: float) -> bool:
        """Whether the waiting sequence got its rows. While one is short of them, nobody behind it takes any."""
        order, sequence = entry
        if self._starved is not None and order > self._starved[0]:
            return False
        cached: list[int] = []
        if not sequence.wants_prompt_logprobs:
            ends = self._states if self._states.exists else None
            cached = self._blocks.match_prefix(sequence.token_ids, sequence.request.cache_salt, ends)
        fresh = self._blocks.allocate(self._num_blocks(sequence.num_tokens) - len(cached))
        if fresh is not None and not self._states.has_room(1):
            self._blocks.release(fresh)
            fresh = None
        if fresh is None:
            self._blocks.release(cached)
            self._starved = entry
            return False
        if self._starved is entry:
            self._starved = None
        sequence.block_ids = cached + fresh
        sequence.state = self._begin_state(cached)
        sequence.num_cached = sequence.num_computed = len(cached) * self._blocks.block_size
        sequence.admitted_at = now
        return True

    def _begin_state(self, cached: list[int]) -> int | None:
        """The sequence's own row, as it is at the end of these blocks."""
        if not self._states.exists:
            return None
        if cached:
            return self._states.resume(self._blocks.digest_of(cached[-1]))
        rows = self._states.allocate(1) or []
        self._states.clear(rows)
        return rows[0]

    def _take(self, sequence: Sequence, budget: int, tokens: dict[Sequence, int]) -> int:
        """Adds as much of the prompt as `budget` allows to the step; how many tokens that was."""
        taken = tokens.get(sequence, 0)
        end = min(sequence.num_computed + taken + budget, sequence.num_tokens)
        if self._states.exists and not sequence.output:
            end = self._boundary(sequence, end)
        count = end - sequence.num_computed - taken
        if count > 0:
            tokens[sequence] = taken + count
        return max(count, 0)

    def _boundary(self, sequence: Sequence, end: int) -> int:
        """Where a chunk that could go up to `end` ends, so that a later prompt can begin with what is known there.

        That is the end of the last block it fills: the prompt's own last one in any case, another only if that leaves
        half of the chunk, for a step may hold little more than a block, or less.
        """
        block_size, begin = self._blocks.block_size, sequence.num_computed
        boundary = min(end, sequence.num_tokens - 1) // block_size * block_size
        is_last = boundary + block_size >= sequence.num_tokens
        return boundary if boundary > begin and (is_last or 2 * (boundary - begin) >= end - begin) else end

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._blocks.block_size)
