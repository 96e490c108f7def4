"""Prompts that this worker computes itself, in chunks between the steps of the running batch.

A chunk makes every running sequence wait for it. So it holds no more tokens than take what the strictest TPOT target
leaves of a step, by what chunks took of late, and never less than LEAST_CHUNK, or a prompt would never be done.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from decode.request import Generation

LEAST_CHUNK = 16  # tokens
SAY_OF_LAST = 0.3  # weight of the newest chunk in the mean


class ChunkPace:
    """Seconds that a token of a chunk takes, small chunks' overhead included: the limit settles where it fits."""

    def __init__(self) -> None:
        self._token_s = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        token_s = seconds / num_tokens
        self._token_s = SAY_OF_LAST * token_s + (1 - SAY_OF_LAST) * self._token_s if self._token_s else token_s

    def limit(self, seconds: float, most: int) -> int:
        """Tokens, LEAST_CHUNK to `most`, that take `seconds`; the least while nothing is known."""
        fitting = seconds / self._token_s if self._token_s else 0.0
        return most if fitting >= most else min(most, max(LEAST_CHUNK, int(fitting)))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens start .. end - 1 of a request's prompt, computed in one step."""

    generation: Generation
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        return self.generation.request.token_ids[self.start : self.end]

    @property
    def is_last(self) -> bool:
        return self.end == len(self.generation.request.token_ids)


class Prompts:
    """Those that have rows and are not computed yet: higher priority first, then in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, int], Generation]] = []
        self.pace = ChunkPace()

    @property
    def num_tokens(self) -> int:
        """Not computed yet."""
        return sum(len(each.request.token_ids) - each.num_computed for _, each in self._waiting)

    def add(self, generation: Generation) -> None:
        insort(self._waiting, ((-generation.request.priority, generation.number), generation))  # numbers differ

    def remove(self, generation: Generation) -> None:
        self._waiting = [entry for entry in self._waiting if entry[1] is not generation]

    def next_chunks(self, most: int) -> list[Chunk]:
        """At most `most` tokens together: the first prompt's, and what they leave for those behind it."""
        chunks: list[Chunk] = []
        for _, generation in self._waiting:
            start = generation.num_computed
            end = min(len(generation.request.token_ids), start + most)
            if end > start:
                chunks.append(Chunk(generation, start, end))
                most -= end - start
        return chunks

    def computed(self, chunk: Chunk) -> None:
        chunk.generation.num_computed = chunk.end
        if chunk.is_last:
            self.remove(chunk.generation)
