"""Who holds which rows: the prompt's first, then a block at a time, and what happens when there are none left.

first        rows for a prompt and the first growth of its choices, all or nothing
deal         the prompt has arrived: its choices share the full blocks, each gets its own copy of the partial one
grow         a block more for a sequence, at the cost of the least senior one when there is none left: that one is
             swapped out, or evicted with its whole request when the swap area is full too
restore      the most senior swapped out sequence comes back, bit for bit, as soon as there are rows for it
drop, free   a sequence, a request, is over

Models that remember something for every sequence beside its blocks: each choice has a row of those too, from `first`
on, and the prompt's is copied to the others. It goes where the sequence's blocks go, to the swap area and back.
"""

from __future__ import annotations

from collections.abc import Callable

from decode.metrics import DecodeMetrics
from decode.request import Generation, Request, Sequence
from decode.swap import SwapArea
from engine.block_pool import BlockPool
from engine.state_pool import StatePool
from twinpool.errors import InvalidRequest


class Rows:
    """`running` sequences hold rows, `swapped` ones hold slots of the swap area. The device thread owns it."""

    def __init__(
        self,
        blocks: BlockPool,
        states: StatePool,
        swap: SwapArea,
        *,
        evict: Callable[[Generation], None],
        metrics: DecodeMetrics,
    ) -> None:
        """evict: ends a request that has lost its rows for good; it comes back here through `drop` and `free`."""
        self._blocks = blocks
        self._states = states
        self._swap = swap
        self._evict = evict
        self._metrics = metrics
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []

    @property
    def num_tokens(self) -> int:
        """What the whole cache holds."""
        return self._blocks.num_blocks * self._blocks.block_size

    def num_prompt_blocks(self, request: Request) -> int:
        return self._num_blocks(len(request.token_ids))

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for what does not even fit an empty cache."""
        needed = self.num_prompt_blocks(request) + self._first_growth(request)
        if needed > self._blocks.num_blocks:
            raise InvalidRequest(
                f"prompt of {len(request.token_ids)} tokens with {request.sampling.n} choices takes {needed} blocks of "
                f"{self._blocks.block_size}, and this worker's cache holds {self._blocks.num_blocks}: shorten it, or "
                "raise --memory of the worker",
                field="prompt",
            )
        if self._states.exists and request.sampling.n > self._states.num_rows:
            raise InvalidRequest(
                f"{request.sampling.n} choices take as many rows for their states, and this worker's cache holds "
                f"{self._states.num_rows}: ask for fewer, or raise --memory or --max-batch of the worker",
                field="sampling.n",
            )

    def first(self, generation: Generation) -> bool:
        """Gives the request blocks for the prompt, in order, and for the first growth of its choices, and their states.

        False when they are not free. A block for each running sequence is left, or the newcomer would soon push
        somebody out.
        """
        request = generation.request
        needed = self.num_prompt_blocks(request) + self._first_growth(request)
        if needed + len(self.running) > self._blocks.num_free or not self._states.has_room(request.sampling.n):
            return False
        generation.block_ids = self._blocks.allocate(needed) or []
        generation.state_ids = self._states.allocate(request.sampling.n) or []
        if request.local_prefill:  # else all of it arrives
            self._states.clear(generation.state_ids[:1])
        return True

    def deal(self, generation: Generation) -> None:
        """Gives the request's blocks to its sequences, which run from now on; frees what is left over."""
        num_full, rest = divmod(len(generation.request.token_ids), self._blocks.block_size)
        num_prompt = num_full + (1 if rest else 0)
        full, partial = generation.block_ids[:num_full], generation.block_ids[num_full:num_prompt]
        growth = generation.block_ids[num_prompt:]
        states, generation.block_ids, generation.state_ids = generation.state_ids, [], []
        for i, sequence in enumerate(generation.sequences):
            sequence.state_ids = states[i : i + 1]
            if i > 0:
                self._blocks.retain(full)
            if partial and i == 0:
                own = partial
            else:
                own = [growth.pop()]
                for block_id in partial:
                    self._swap.fork(block_id, own[0])
            sequence.block_ids = full + own
            if i > 0 and states:
                self._states.copy(states[0], to=states[i])
        self._blocks.release(growth if generation.sequences else full + partial + growth)
        self._states.release(states[len(generation.sequences) :])
        self.running += generation.sequences

    def grow(self, sequence: Sequence) -> bool:
        """Sees to it that the last token has a block to go to. False when the sequence lost its own instead."""
        while len(sequence.block_ids) < self._num_blocks(sequence.num_tokens):
            block_ids = self._blocks.allocate(1)
            if block_ids is not None:
                sequence.block_ids += block_ids
                continue
            self._preempt(max(self.running, key=lambda each: each.seniority))
            if not sequence.block_ids:
                return False
        return True

    def restore(self) -> None:
        """Brings swapped out sequences back, the most senior first, as far as rows go."""
        for sequence in sorted(self.swapped, key=lambda each: each.seniority):
            needed = self._num_blocks(sequence.num_tokens)
            # With fewer blocks it would soon have to leave again.
            if needed + len(self.running) > self._blocks.num_free or not self._states.has_room(1):
                return
            sequence.block_ids = self._blocks.allocate(needed) or []
            sequence.state_ids = self._states.allocate(1) or []
            self._swap.restore(sequence.slots, sequence.block_ids, sequence.state_ids)
            sequence.slots = []
            self.swapped.remove(sequence)
            self.running.append(sequence)
            self._metrics.restores.inc()

    def drop(self, sequence: Sequence) -> None:
        """One choice is over."""
        sequence.generation.sequences.remove(sequence)
        if sequence.slots:
            self.swapped.remove(sequence)
            self._swap.free(sequence.slots)
            sequence.slots = []
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def free(self, generation: Generation) -> None:
        """The request is over; no byte may land in its rows any more."""
        for sequence in list(generation.sequences):
            self.drop(sequence)
        self._release(generation)

    def _preempt(self, victim: Sequence) -> None:
        self._metrics.preemptions.inc()
        stored = self._num_blocks(victim.num_tokens - 1)  # the block of the last token may be there, still empty
        slots = self._swap.save(victim.block_ids[:stored], victim.state_ids)
        if slots is None:
            self._evict(victim.generation)
            return
        self.running.remove(victim)
        self._release(victim)
        victim.slots = slots
        self.swapped.append(victim)

    def _release(self, holder: Generation | Sequence) -> None:
        block_ids, holder.block_ids = holder.block_ids, []
        state_ids, holder.state_ids = holder.state_ids, []
        self._blocks.release(block_ids)
        self._states.release(state_ids)

    def _first_growth(self, request: Request) -> int:
        """Blocks beside the prompt's that its choices need for their second token."""
        shares_partial = len(request.token_ids) % self._blocks.block_size != 0
        return request.sampling.n - 1 if shares_partial else request.sampling.n

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._blocks.block_size)
